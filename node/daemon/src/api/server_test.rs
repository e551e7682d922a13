use std::io::{Read, Write};
use std::os::unix::net::UnixStream as Blocking;

use thaw_protocol::api::{FreezeSandbox, ThawSandbox};
use thaw_sandbox::Tenants;
use thaw_sandbox::paths::Paths;

use super::*;
use crate::api::client::Client;
use crate::api::fake::{Fake, request};

/// Serves until the sender is dropped.
fn start(
    daemon: Arc<Daemon>,
    socket: &Path,
) -> (
    tokio::sync::oneshot::Sender<()>,
    tokio::task::JoinHandle<Result<(), Error>>,
) {
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let at = socket.to_owned();
    let end = async { drop(stopped.await) };
    let served =
        tokio::spawn(
            async move { serve(daemon, &at, Access::default(), OverTcp::default(), || {}, end).await },
        );
    (stop, served)
}

async fn connected(socket: &Path) -> Client {
    loop {
        match Client::connect(socket) {
            Some(client) => break client,
            None => tokio::task::yield_now().await,
        }
    }
}

#[tokio::test]
async fn both_ends_agree_over_a_socket() {
    let root = tempfile::tempdir().unwrap();
    let path = |name: &str| root.path().join(name);
    let paths = Paths {
        data: path("d"),
        run: path("r"),
        kernel: path("k"),
        guest_image: path("g"),
    };
    let socket = paths.daemon_socket();
    let daemon = Daemon::start(Tenants::open(Node::open(paths).unwrap()))
        .await
        .unwrap();
    let (stop, served) = start(daemon, &socket);
    let client = connected(&socket).await;
    let health = client.health().await.unwrap();
    assert_eq!(
        (health.pid, health.version.as_str()),
        (std::process::id(), env!("CARGO_PKG_VERSION"))
    );
    assert!(client.list().await.unwrap().is_empty());
    let freeze = FreezeSandbox {
        directory: Some(path("s")),
        ..FreezeSandbox::default()
    };
    for not_found in [
        client.get("nobody").await.map(drop),
        client.delete("nobody").await,
        client.pause("nobody").await,
        client.resume("nobody").await,
        client.freeze("nobody", &freeze).await.map(drop),
        client
            .set_network_policy("nobody", &Default::default())
            .await
            .map(drop),
    ] {
        assert_eq!(not_found.unwrap_err().kind, ErrorKind::SandboxNotFound);
    }
    let nowhere = ThawSandbox {
        directory: Some(path("s")),
        snapshot: None,
        hostname: None,
        name: None,
        client: None,
        memory_mode: Default::default(),
        publish: Vec::new(),
        network_policy: None,
        rate_limits: Default::default(),
        labels: Default::default(),
        timeout_s: None,
        idle_timeout_s: None,
        on_timeout: Default::default(),
        require_hook: false,
        timings: false,
    };
    assert_eq!(
        client.thaw(&nowhere).await.unwrap_err().kind,
        ErrorKind::SnapshotNotFound
    );
    let mut tiny = request("x");
    tiny.memory_mib = 1;
    assert_eq!(
        client.create(&tiny).await.unwrap_err().kind,
        ErrorKind::MemoryTooSmall
    );
    let mut odd = request("x");
    odd.pull = "perhaps".into();
    assert_eq!(client.create(&odd).await.unwrap_err().kind, ErrorKind::Runtime);
    stop.send(()).unwrap();
    served.await.unwrap().unwrap();
    assert!(!socket.exists());
    assert!(Client::connect(&socket).is_none());
}

#[tokio::test]
async fn the_client_lists_more_than_one_answer_holds() {
    let root = tempfile::tempdir().unwrap();
    let socket = root.path().join("s");
    let (_fake, daemon) = Fake::daemon(true);
    let (_stop, _served) = start(daemon, &socket);
    let client = connected(&socket).await;
    for _ in 0..40 {
        client.create(&request("x")).await.unwrap();
    }
    assert_eq!(client.list().await.unwrap().len(), 40);
}

#[tokio::test(flavor = "multi_thread")]
async fn creation_whose_caller_hangs_up_leaves_nothing() {
    let root = tempfile::tempdir().unwrap();
    let socket = root.path().join("s");
    let (fake, daemon) = Fake::daemon(false);
    let (stop, served) = start(daemon.clone(), &socket);
    drop(connected(&socket).await);
    let body = serde_json::to_string(&request("x")).unwrap();
    let mut making = fake.making.subscribe();
    for key in ["", "idempotency-key: k\r\n"] {
        let mut stream = Blocking::connect(&socket).unwrap();
        let head = "POST /v1/sandboxes HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n";
        write!(stream, "{head}{key}content-length: {}\r\n\r\n{body}", body.len()).unwrap();
        making.wait_for(|making| *making == 1).await.unwrap();
        drop(stream);
        making.wait_for(|making| *making == 0).await.unwrap();
    }
    assert_eq!((fake.made(), fake.living()), (0, 0));
    assert!(daemon.cache.get("000000000000").is_none());
    drop(stop);
    served.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_before_the_bodys_end_reaches_who_still_sends() {
    let root = tempfile::tempdir().unwrap();
    let socket = root.path().join("s");
    let (_fake, daemon) = Fake::daemon(true);
    let (_stop, _served) = start(daemon, &socket);
    connected(&socket).await;
    let mut stream = Blocking::connect(&socket).unwrap();
    // The request is refused because of its path; the connection stays open for a second one.
    for _ in 0..2 {
        write!(
            stream,
            "PUT /v1/sandboxes/x/files?path=a HTTP/1.1\r\nhost: x\r\ncontent-length: 20000\r\n\r\n"
        )
        .unwrap();
        for _ in 0..2 {
            // Delayed, so that the answer is known before the rest of the body arrives. Twice only: thawd waits a second for all of it.
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
            stream.write_all(&[0; 10_000]).unwrap();
        }
        let (mut head, mut length) = (Vec::new(), 0);
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            head.extend_from_slice(&byte);
        }
        let head = String::from_utf8(head).unwrap().to_lowercase();
        assert!(head.starts_with("http/1.1 400"), "{head}");
        for line in head.lines() {
            length = line
                .strip_prefix("content-length: ")
                .map_or(length, |l| l.parse().unwrap());
        }
        stream.read_exact(&mut vec![0; length]).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn watches_end_when_serving_does() {
    let root = tempfile::tempdir().unwrap();
    let socket = root.path().join("s");
    let (_fake, daemon) = Fake::daemon(true);
    let (stop, served) = start(daemon, &socket);
    let client = connected(&socket).await;
    let mut stream = Blocking::connect(&socket).unwrap();
    write!(stream, "GET /v1/sandboxes?watch=1 HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
    let mut head = [0; 12];
    stream.read_exact(&mut head).unwrap();
    assert_eq!(&head, b"HTTP/1.1 200");
    client.create(&request("x")).await.unwrap();
    // The next watch returns the changes that were not read by then.
    let mut told = Vec::new();
    while !String::from_utf8_lossy(&told).contains(r#""type":"ADDED""#) {
        let mut piece = [0; 512];
        let length = stream.read(&mut piece).unwrap();
        assert_ne!(length, 0, "{}", String::from_utf8_lossy(&told));
        told.extend_from_slice(&piece[..length]);
    }
    drop(stop);
    served.await.unwrap().unwrap();
    stream.read_to_end(&mut told).unwrap();
    assert!(told.ends_with(b"0\r\n\r\n"), "{}", String::from_utf8_lossy(&told));
}

#[tokio::test(flavor = "multi_thread")]
async fn heads_beyond_their_bounds_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let socket = root.path().join("s");
    let (_fake, daemon) = Fake::daemon(true);
    let (_stop, _served) = start(daemon, &socket);
    connected(&socket).await;
    let large = format!("x: {}\r\n", "y".repeat(2 * connection::MAX_HEAD));
    let many = "a: b\r\n".repeat(2 * connection::MAX_FIELDS);
    let twice = "content-length: 1\r\ncontent-length: 2\r\n".to_owned();
    let both = "content-length: 4\r\ntransfer-encoding: chunked, identity\r\n".to_owned();
    for fields in [large, many, twice, both] {
        let mut stream = Blocking::connect(&socket).unwrap();
        // The server may refuse before everything is written.
        let _ = write!(stream, "GET / HTTP/1.1\r\nhost: x\r\n{fields}\r\n");
        let mut answer = [0; 10];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"HTTP/1.1 4");
    }
}
