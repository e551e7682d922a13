use thaw_protocol::api::{RestartMode, RestartPolicy};

use super::*;

struct Rig {
    directory: tempfile::TempDir,
    wishes: watch::Sender<Wishes>,
    shown: watch::Receiver<ContainerLife>,
    noted: Arc<NotedLife>,
    restarting: Restarting,
}

impl Rig {
    fn new() -> Rig {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("container.request"), "").unwrap();
        let noted = Arc::new(NotedLife::open(directory.path().to_owned()));
        let (wishes, wished) = watch::channel(Wishes::default());
        let (shows, shown) = watch::channel(ContainerLife::default());
        let restarting = Restarting::new(noted.clone(), wished, shows);
        Rig {
            directory,
            wishes,
            shown,
            noted,
            restarting,
        }
    }

    async fn ended(&mut self, mode: RestartMode, status: i32) -> bool {
        let life = Life {
            restart: RestartPolicy {
                mode,
                max_restarts: None,
            },
            ..Life::default()
        };
        self.restarting.wait(&life, status, Duration::ZERO).await
    }
}

#[tokio::test(start_paused = true)]
async fn policy_restarts_after_its_delay_and_counts() {
    let mut rig = Rig::new();
    for (restarts, delay) in [(1, 100), (2, 200), (3, 400)] {
        let since = tokio::time::Instant::now();
        assert!(rig.ended(RestartMode::Always, 0).await);
        assert_eq!(since.elapsed().as_millis() / 10, delay / 10);
        assert_eq!(rig.restarting.begun(), Some(0), "known to a later owner");
        rig.restarting.started();
        let shown = *rig.shown.borrow();
        assert_eq!((shown.restarts, shown.restarting), (restarts, None));
        assert_eq!(LifeNote::read(rig.directory.path()).restarts, restarts);
    }
    assert!(!rig.ended(RestartMode::OnFailure, 0).await);
    assert!(!rig.ended(RestartMode::No, 1).await);
}

#[tokio::test(start_paused = true)]
async fn stop_ends_the_policy_and_a_delay() {
    let mut rig = Rig::new();
    let (wishes, mut shown) = (rig.wishes.clone(), rig.shown.clone());
    let stops = async {
        let _ = shown.wait_for(|shown| shown.restarting == Some(7)).await;
        wishes.send_modify(|wishes| wishes.stopped = true);
    };
    let since = tokio::time::Instant::now();
    let (again, ()) = tokio::join!(rig.ended(RestartMode::Always, 7), stops);
    assert!(!again && since.elapsed() < Duration::from_millis(50));
    assert_eq!(rig.restarting.begun(), None);
    let mut rig = Rig::new();
    rig.noted.change(|note| note.stopped = true);
    assert!(
        !rig.ended(RestartMode::Always, 0).await,
        "an earlier owner stopped it"
    );
}

#[tokio::test(start_paused = true)]
async fn user_restarts_at_once_and_resets_the_count() {
    let mut rig = Rig::new();
    rig.noted.change(|note| (note.restarts, note.stopped) = (5, true));
    rig.wishes.send_modify(|wishes| wishes.restarts += 1);
    let since = tokio::time::Instant::now();
    assert!(rig.ended(RestartMode::No, 0).await);
    assert!(since.elapsed() < Duration::from_millis(50));
    rig.restarting.started();
    let note = rig.noted.note();
    assert_eq!((note.restarts, note.stopped), (0, false));
    assert!(!rig.ended(RestartMode::No, 0).await, "one wish, one restart");
}

#[tokio::test]
async fn container_of_a_snapshot_is_not_started_again() {
    let mut rig = Rig::new();
    std::fs::remove_file(rig.directory.path().join("container.request")).unwrap();
    assert!(!rig.ended(RestartMode::Always, 1).await);
}
