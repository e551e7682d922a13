use super::*;
use crate::api::fake::{Counts, FakeProcess};

struct Attended {
    session: Session,
    counts: Arc<Counts>,
    close: watch::Sender<bool>,
    /// Signalled when the session no longer attends the process.
    over: tokio::sync::oneshot::Receiver<()>,
}

fn start(program: &str) -> Attended {
    let counts = Arc::<Counts>::default();
    let process = Arc::new(FakeProcess::start(program, counts.clone()));
    let close = watch::Sender::new(false);
    let (held, over) = tokio::sync::oneshot::channel::<()>();
    Attended {
        session: Session::start(process, false, close.subscribe(), held),
        counts,
        close,
        over,
    }
}

#[tokio::test]
async fn what_goes_in_comes_out_and_then_the_end_is_told() {
    let mut cat = start("cat");
    let input = cat.session.input().unwrap();
    assert!(cat.session.input().is_none());
    for word in ["a", "b"] {
        input.send(word.into()).await.unwrap();
        let Some(Said::Wrote(Output::Stdout, data)) = cat.session.next().await else {
            panic!("nothing came")
        };
        assert_eq!(data, word.as_bytes());
    }
    drop(input);
    assert!(matches!(cat.session.next().await, Some(Said::Ended(Ok(0)))));
    assert!(cat.over.await.is_err());
    assert!(cat.counts.heard.borrow().is_empty());
}

#[tokio::test(start_paused = true)]
async fn who_lets_go_ends_the_process_by_force_if_need_be() {
    for (program, heard) in [
        ("cat", &["signal 1"][..]),
        ("yes", &["signal 1"]),
        ("stubborn", &["signal 1", "signal 9"]),
    ] {
        let attended = start(program);
        drop(attended.session);
        assert!(attended.over.await.is_err());
        assert_eq!(*attended.counts.heard.borrow(), heard, "{program}");
    }
}

#[tokio::test(start_paused = true)]
async fn when_thawd_ends_processes_do() {
    let mut stubborn = start("stubborn");
    stubborn.close.send_replace(true);
    assert!(stubborn.over.await.is_err());
    assert!(stubborn.session.next().await.is_none());
    assert_eq!(*stubborn.counts.heard.borrow(), ["signal 1", "signal 9"]);
}

#[tokio::test(start_paused = true)]
async fn what_nobody_reads_is_not_held() {
    let mut yes = start("yes");
    // The buffer is full, and nothing more is read until the caller takes a piece.
    while yes.session.said.len() < PIECES {
        tokio::task::yield_now().await;
    }
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
    assert_eq!(yes.session.said.len(), PIECES);
    assert!(yes.session.next().await.is_some());
    drop(yes.session);
    assert!(yes.over.await.is_err());
}

#[tokio::test]
async fn what_the_process_does_not_read_is_not_held() {
    let mut stubborn = start("stubborn");
    let input = stubborn.session.input().unwrap();
    let mut sent = 0;
    while tokio::time::timeout(Duration::from_millis(20), input.reserve())
        .await
        .is_ok_and(|slot| {
            slot.unwrap().send(vec![0]);
            true
        })
    {
        sent += 1;
    }
    assert!(sent <= PIECES + 1, "{sent}");
    stubborn.session.process().signal(libc::SIGKILL as u8).await;
    assert!(matches!(
        stubborn.session.next().await,
        Some(Said::Ended(Ok(137)))
    ));
}
