use std::time::Duration;

use thaw_protocol::api::{CreateSandbox, EXITED, FAILED, StartContainer, WatchEvent};
use thaw_sandbox::agent_client::Output;
use thaw_sandbox::error::ErrorKind;
use thaw_sandbox::journal::Journal;
use thaw_sandbox::state::Behalf;

use super::*;
use crate::api::factory::Factory;
use crate::api::fake::{Fake, request};
use crate::api::scope::Scope;
use crate::api::watch::{Selector, Versions, Watcher};

/// A daemon with fake machines that records failures on disk.
fn daemon(run: &RunDirectory, retention: Retention) -> (Arc<Fake>, Arc<Daemon>) {
    let (fake, _) = Fake::daemon(true);
    let kept = Kept {
        run: Some(run.clone()),
        retention,
        more: Notify::new(),
    };
    let factory: Arc<dyn Factory> = fake.clone();
    let daemon = Daemon::keeping(kept, Some(factory), Versions::of_clock(), Versions::of_clock());
    (fake, daemon)
}

const LONG: Retention = Retention {
    seconds: 1000,
    most: 10,
};

fn place() -> (tempfile::TempDir, RunDirectory) {
    let root = tempfile::tempdir().unwrap();
    let run = RunDirectory::open(root.path()).unwrap();
    (root, run)
}

fn on_node(wanted: impl Into<String>) -> Wanted {
    Wanted::on_node(wanted)
}

fn named(name: &str) -> CreateSandbox {
    CreateSandbox {
        name: Some(name.into()),
        ..request("x")
    }
}

async fn made(daemon: &Arc<Daemon>, name: &str) -> String {
    daemon
        .create(named(name), Behalf::default())
        .await
        .unwrap()
        .sandbox
        .id
}

/// Ends a sandbox's machine, as if its VMM had died.
fn kill(daemon: &Daemon, id: &str) {
    daemon.find(id).unwrap().kill();
}

/// Waits until the description of a sandbox, by name or id, satisfies `so`.
async fn until(daemon: &Daemon, id: &str, so: impl Fn(Option<&Described>) -> bool) {
    let shown = async {
        while !so(daemon.cache.find(&on_node(id)).as_deref()) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), shown)
        .await
        .unwrap();
}

async fn until_failed(daemon: &Daemon, id: &str) {
    until(daemon, id, |shown| shown.is_some_and(|s| s.state == FAILED)).await;
}

#[tokio::test]
async fn a_dead_sandbox_is_listed_as_failed_until_deleted() {
    let (root, run) = place();
    let (fake, daemon) = daemon(&run, LONG);
    let selector = Selector::parse(Scope::node(), "", "state=failed").unwrap();
    let mut watcher = Watcher::start(daemon.cache.clone(), None, selector).unwrap();
    let id = made(&daemon, "web").await;
    kill(&daemon, &id);
    until_failed(&daemon, "web").await;
    let event = async |watcher: &mut Watcher| {
        let line = watcher.next().await.unwrap().unwrap();
        serde_json::from_slice::<WatchEvent>(&line).unwrap()
    };
    let WatchEvent::Added(shown) = event(&mut watcher).await else {
        panic!("not told")
    };
    let failure = shown.failure.as_ref().unwrap();
    assert_eq!((failure.reason.as_str(), failure.signal), ("signal", Some(9)));
    assert_eq!(failure.console, ["last words"]);
    assert_eq!(fake.living(), 0, "its resources went back");
    assert_eq!(run.ended()[0].id, id);
    let text = {
        let mut families = crate::metrics::Families::default();
        daemon.count(&mut families);
        families.text()
    };
    assert!(
        text.contains("thaw_sandbox_failures_total{reason=\"signal\"} 1"),
        "{text}"
    );

    // A request for a failed sandbox gets the reason why it is impossible.
    let refused = daemon.pause(&on_node("web")).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::SandboxNotFound);
    assert!(refused.what.contains("has failed"), "{refused}");
    assert!(
        daemon
            .running(&on_node("web"))
            .unwrap_err()
            .to_string()
            .contains("SIGKILL")
    );
    assert!(daemon.end_of(&on_node(&id)).await.unwrap().contains("SIGKILL"));

    daemon.delete(&on_node("web")).await.unwrap();
    assert!(matches!(event(&mut watcher).await, WatchEvent::Deleted(_)));
    assert!(!root.path().join("failed").exists());
    assert_eq!(
        daemon.delete(&on_node(&id)).await.unwrap_err().kind,
        ErrorKind::SandboxNotFound
    );
}

#[tokio::test]
async fn a_failed_sandbox_gives_its_name_to_the_next() {
    let (_root, run) = place();
    let (_fake, daemon) = daemon(&run, LONG);
    let first = made(&daemon, "web").await;
    kill(&daemon, &first);
    until_failed(&daemon, &first).await;
    let second = made(&daemon, "web").await;
    assert_eq!(daemon.cache.find(&on_node("web")).unwrap().id, second);
    assert_eq!(daemon.cache.get(&first).unwrap().name.as_deref(), Some("web"));
    daemon.delete(&on_node(&second)).await.unwrap();
    assert_eq!(
        daemon.cache.find(&on_node("web")).unwrap().id,
        first,
        "it is found again by its name"
    );
    let third = made(&daemon, "web").await;
    daemon.delete(&on_node(&first)).await.unwrap();
    assert_eq!(daemon.cache.find(&on_node("web")).unwrap().id, third);
}

#[tokio::test]
async fn a_sandbox_deleted_while_it_fails_leaves_nothing() {
    let (root, run) = place();
    let (_fake, daemon) = daemon(&run, LONG);
    for _ in 0..50 {
        let id = made(&daemon, "web").await;
        kill(&daemon, &id);
        tokio::task::yield_now().await;
        let wanted = on_node(&id);
        let (deleted, kept) = tokio::join!(daemon.delete(&wanted), daemon.delete_unless_failed(&wanted));
        assert!(deleted.is_ok() || kept.is_ok());
        // One of the two deletions may have found nothing, because the other removed it.
        let _ = daemon.delete(&on_node(&id)).await;
        assert!(daemon.cache.get(&id).is_none() && daemon.failing().is_empty());
    }
    assert!(!root.path().join("failed").exists());
}

#[tokio::test]
async fn a_deletion_that_keeps_failures_deletes_only_what_lives() {
    let (_root, run) = place();
    let (fake, daemon) = daemon(&run, LONG);
    let (lives, dies) = (made(&daemon, "a").await, made(&daemon, "b").await);
    daemon.delete_unless_failed(&on_node(&lives)).await.unwrap();
    assert!(daemon.cache.get(&lives).is_none());
    kill(&daemon, &dies);
    // Both before and after its end was noticed.
    for _ in 0..2 {
        daemon.delete_unless_failed(&on_node(&dies)).await.unwrap();
        assert_eq!(daemon.cache.get(&dies).unwrap().state, FAILED);
    }
    assert_eq!((run.ended().len(), fake.living()), (1, 0));
}

#[tokio::test]
async fn failures_expire_by_number_and_by_age() {
    let (root, run) = place();
    let retention = Retention {
        seconds: 1000,
        most: 1,
    };
    let (_fake, daemon) = daemon(&run, retention);
    daemon.keep_ended().await;
    let first = made(&daemon, "a").await;
    kill(&daemon, &first);
    until_failed(&daemon, &first).await;
    let second = made(&daemon, "b").await;
    kill(&daemon, &second);
    until_failed(&daemon, &second).await;
    until(&daemon, &first, |shown| shown.is_none()).await;
    // Its files are removed after it is no longer listed.
    let removed = async {
        while run.ended().len() != 1 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), removed)
        .await
        .unwrap();
    // Its retention is over.
    daemon.cache.update(&second, |shown| {
        if let Some(failure) = &mut shown.failure {
            failure.at -= 1000;
        }
    });
    daemon.kept.more.notify_one();
    until(&daemon, &second, |shown| shown.is_none()).await;
    until_gone(&root).await;
}

async fn until_gone(root: &tempfile::TempDir) {
    while root.path().join("failed").exists() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn without_retention_a_failure_is_counted_and_gone() {
    let (root, run) = place();
    let retention = Retention { seconds: 0, most: 10 };
    let (_fake, daemon) = daemon(&run, retention);
    let id = made(&daemon, "a").await;
    kill(&daemon, &id);
    until(&daemon, &id, |shown| shown.is_none()).await;
    until_gone(&root).await;
}

#[tokio::test]
async fn a_later_daemon_lists_what_failed_before() {
    let (_root, run) = place();
    let (_fake, first) = daemon(&run, LONG);
    let id = made(&first, "web").await;
    kill(&first, &id);
    until_failed(&first, &id).await;
    let shown = first.cache.get(&id).unwrap();
    drop(first);
    let (_fake, second) = daemon(&run, LONG);
    second.keep_ended().await;
    let again = Described {
        resource_version: shown.resource_version,
        // It happened once.
        event: shown.event,
        ..Described::clone(&second.cache.find(&on_node("web")).unwrap())
    };
    assert_eq!(again, *shown);
}

#[tokio::test]
async fn exited_sandbox_keeps_its_output_until_it_is_deleted() {
    let (root, run) = place();
    let (fake, daemon) = daemon(&run, LONG);
    let request = CreateSandbox {
        container: Some(StartContainer::default()),
        ..named("web")
    };
    let id = daemon
        .create(request, Behalf::default())
        .await
        .unwrap()
        .sandbox
        .id;
    std::fs::create_dir_all(run.directory(&id)).unwrap();
    let journal = Journal::open(&run.directory(&id)).unwrap();
    journal.append(Output::Stdout, b"last words").unwrap();
    fake.exit.send_replace(Some(7));
    let keep = Keep {
        failed: true,
        exited: true,
    };
    for _ in 0..2 {
        daemon.delete_keeping(&on_node("web"), keep).await.unwrap();
        let shown = daemon.cache.get(&id).unwrap();
        assert_eq!((shown.state.as_str(), shown.exit_code), (EXITED, Some(7)));
        assert!(shown.ended.is_some());
    }
    assert_eq!((fake.living(), run.ended().len()), (0, 1));
    let kept = daemon.journal(&on_node("web")).await.unwrap();
    assert_eq!(kept.read(0).unwrap().frames[0].data, b"last words");
    // The name is free, and means the living one.
    let living = made(&daemon, "web").await;
    assert!(daemon.journal(&on_node("web")).await.is_err());
    daemon.delete(&on_node(living)).await.unwrap();
    daemon.delete(&on_node("web")).await.unwrap();
    assert!(daemon.cache.get(&id).is_none() && !root.path().join("failed").exists());
}
