//! Input and output of processes.

use super::*;

#[test]
fn stdin_of_any_size_reaches_the_process_to_its_end() {
    with_guest(|g| async move {
        g.create("c", spec(&g, &["wc", "-c"])).await.unwrap();
        g.start("c").await.unwrap();
        let chunk = vec![b'x'; 100_000];
        for _ in 0..30 {
            assert_eq!(g.write("c", "c", &chunk).await.unwrap(), 100_000);
        }
        g.close_stdin("c", "c").await.unwrap();
        assert_eq!(g.read_all("c", "c", false).await, b"3000000\n");
        assert_eq!(g.wait("c", "c").await, 0);
        assert!(g.write("c", "c", b"late").await.is_err());
        g.remove("c").await.unwrap();
    });
}

#[test]
fn container_before_its_start_holds_no_other_pipes() {
    with_guest(|g| async move {
        g.create("reader", spec(&g, &["cat"])).await.unwrap();
        g.start("reader").await.unwrap();
        g.create("waiting", spec(&g, &["true"])).await.unwrap();
        g.write("reader", "reader", b"x").await.unwrap();
        g.close_stdin("reader", "reader").await.unwrap();
        let end = tokio::time::timeout(Duration::from_secs(10), g.wait("reader", "reader")).await;
        assert_eq!(end.expect("stdin never ended"), 0);
        for id in ["reader", "waiting"] {
            g.remove(id).await.unwrap();
        }
        g.assert_clean().await;
    });
}

#[test]
fn unread_output_blocks_the_process_and_is_kept() {
    with_guest(|g| async move {
        g.create(
            "c",
            spec(&g, &["sh", "-c", "head -c 2000000 /dev/zero; echo -n done >&2"]),
        )
        .await
        .unwrap();
        g.start("c").await.unwrap();
        // The write waits, because the pipe is full.
        let early = tokio::time::timeout(Duration::from_millis(300), g.wait("c", "c")).await;
        assert!(early.is_err());
        assert_eq!(g.read_all("c", "c", false).await.len(), 2_000_000);
        assert_eq!(g.wait("c", "c").await, 0);
        assert_eq!(g.read_all("c", "c", true).await, b"done");
        g.remove("c").await.unwrap();
    });
}

#[test]
fn terminal_is_controlling_sized_and_takes_control_c() {
    with_guest(|g| async move {
        let mut s = spec(
            &g,
            &[
                "sh",
                "-c",
                "stty size; trap 'stty size; exit 5' WINCH; echo ready; read line; echo got $line; sleep 1000",
            ],
        );
        let p = s.Process.as_mut().unwrap();
        p.Terminal = true;
        p.ConsoleSize = MessageField::some(oci::Box {
            Height: 40,
            Width: 100,
            ..Default::default()
        });
        g.create("c", s).await.unwrap();
        g.start("c").await.unwrap();
        g.read_until("c", "c", "40 100\r\nready\r\n").await;
        g.write("c", "c", b"hello\n").await.unwrap();
        g.read_until("c", "c", "got hello\r\n").await;
        // An interrupt ends sleep and the shell, which only a controlling terminal does.
        g.write("c", "c", &[3]).await.unwrap();
        assert_eq!(g.wait("c", "c").await, 130);
        g.read_all("c", "c", false).await;
        g.remove("c").await.unwrap();

        let mut s = spec(
            &g,
            &[
                "sh",
                "-c",
                "trap 'stty size; exit 5' WINCH; echo ready; while :; do sleep 0.05; done",
            ],
        );
        s.Process.as_mut().unwrap().Terminal = true;
        g.create("d", s).await.unwrap();
        g.start("d").await.unwrap();
        g.read_until("d", "d", "ready\r\n").await;
        g.resize("d", "d", 24, 80).await.unwrap();
        g.read_until("d", "d", "24 80\r\n").await;
        assert_eq!(g.wait("d", "d").await, 5);
        g.exec_refused_without_terminal("d").await;
        g.remove("d").await.unwrap();
        g.assert_clean().await;
    });
}

#[test]
fn output_survives_the_connection_it_was_sent_on() {
    with_guest(|mut g| async move {
        g.create("c", spec(&g, &["sh", "-c", "echo 1234; cat; echo end"]))
            .await
            .unwrap();
        g.start("c").await.unwrap();
        g.read_until("c", "c", "1234\n").await;
        // It may not have arrived, so it is sent again.
        g.reconnect().await;
        assert_eq!(g.read("c", "c", 2).await.unwrap(), b"12");
        g.reconnect().await;
        assert_eq!(g.read("c", "c", 100).await.unwrap(), b"1234\n");
        // A read that waits on a lost connection takes no output.
        let waiting = tokio::time::timeout(Duration::from_millis(100), g.read("c", "c", 100)).await;
        assert!(waiting.is_err());
        g.reconnect().await;
        let (read, written) = tokio::join!(g.read("c", "c", 100), async {
            let writer = g.connect_again().await;
            let request = support::write_request("c", b"typed\n");
            writer.write_stdin(support::context(), &request).await
        });
        assert_eq!((read.unwrap(), written.unwrap().len), (b"typed\n".to_vec(), 6));
        g.close_stdin("c", "c").await.unwrap();
        assert_eq!(g.wait("c", "c").await, 0);
        assert_eq!(g.read("c", "c", 100).await.unwrap(), b"end\n");
        g.reconnect().await;
        assert_eq!(g.read_all("c", "c", false).await, b"end\n");
        g.reconnect().await;
        assert_eq!(
            g.read_all("c", "c", false).await,
            b"",
            "it was asked for more: it had arrived"
        );
        g.remove("c").await.unwrap();
    });
}
