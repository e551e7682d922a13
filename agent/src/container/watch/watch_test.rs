use super::*;
use std::fs::{self, File};
use std::future::pending;
use std::path::Path;

use crate::container::sessions::IDLE;
use thaw_protocol::agent::files::file_event::Kind;

fn begin(
    watches: &Watches,
    directory: &Path,
    name: &str,
    end: impl Future<Output = ()> + Send + 'static,
) -> Result<()> {
    let request = WatchRequest {
        path: "/".into(),
        watch: name.into(),
        ..Default::default()
    };
    watches.begin(OwnedFd::from(File::open(directory).unwrap()), &request, end)
}

#[tokio::test]
async fn events_come_as_they_happen_and_then_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let watches = Watches::default();
    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    begin(&watches, dir.path(), "w", async { drop(ended.await) }).unwrap();
    let (next, ()) = tokio::join!(watches.next_events("w"), async {
        tokio::task::yield_now().await;
        fs::write(dir.path().join("f"), "").unwrap();
    });
    let events = next.unwrap().events;
    assert_eq!(
        (events[0].kind, events[0].name.as_slice()),
        (Kind::CREATE.into(), &b"f"[..])
    );
    fs::remove_file(dir.path().join("f")).unwrap();
    drop(end);
    // What happened before the end comes first.
    let mut last = watches.next_events("w").await.unwrap();
    if last.ended.is_empty() {
        assert_eq!(last.events.last().unwrap().kind, Kind::REMOVE.into());
        last = watches.next_events("w").await.unwrap();
    }
    assert_eq!(last.ended, "the container has ended");
    assert!(last.events.is_empty() && watches.0.is_empty());
    assert!(watches.next_events("w").await.is_err());
}

#[tokio::test(start_paused = true)]
async fn watches_are_few_and_end_when_they_are_forgotten() {
    let dir = tempfile::tempdir().unwrap();
    let watches = Watches::default();
    for n in 0..MAX_WATCHES {
        begin(&watches, dir.path(), &format!("w{n}"), pending()).unwrap();
    }
    let more = begin(&watches, dir.path(), "more", pending());
    assert!(matches!(more, Err(Error::State(_))));
    watches.abandon("w0");
    begin(&watches, dir.path(), "more", pending()).unwrap();
    let idle = watches.next_events("more").await.unwrap();
    assert!(idle.events.is_empty() && idle.ended.is_empty());
    tokio::time::sleep(2 * IDLE + Duration::from_secs(1)).await;
    assert!(watches.0.is_empty());
}

#[tokio::test]
async fn wrong_watches_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("f"), "").unwrap();
    let watches = Watches::default();
    for (path, name) in [("/f", "w"), ("/none", "w"), ("/..", "w"), ("x", "w"), ("/", "W")] {
        let request = WatchRequest {
            path: path.into(),
            watch: name.into(),
            recursive: true,
            ..Default::default()
        };
        let root = OwnedFd::from(File::open(dir.path()).unwrap());
        assert!(watches.begin(root, &request, pending()).is_err(), "{path} {name}");
    }
    assert!(watches.0.is_empty());
}
