use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::poll;
use sd_notify::NotifyState;
use thaw_protocol::api::{CreateSandbox, WatchEvent};
use thaw_sandbox::state::{Behalf, Terms, Timeout};

use super::*;
use crate::api::fake::{Fake, FakeMachine, UNOWNED, request};
use crate::api::scope::Scope;
use crate::api::watch::{Selector, Watcher};
use crate::service;

fn on_node(wanted: impl Into<String>) -> Wanted {
    Wanted::on_node(wanted)
}

/// A watch, and its received events that were not read yet.
struct Changes(Watcher, VecDeque<WatchEvent>);

async fn event(changes: &mut Changes) -> WatchEvent {
    while changes.1.is_empty() {
        let lines = changes.0.next().await.unwrap().unwrap();
        let lines = lines.split(|b| *b == b'\n').filter(|line| !line.is_empty());
        changes
            .1
            .extend(lines.map(|line| serde_json::from_slice::<WatchEvent>(line).unwrap()));
    }
    changes.1.pop_front().unwrap()
}

fn watch(daemon: &Daemon) -> Changes {
    let watcher = Watcher::start(
        daemon.cache.clone(),
        None,
        Selector::parse(Scope::node(), "", "").unwrap(),
    )
    .unwrap();
    Changes(watcher, VecDeque::new())
}

#[tokio::test]
async fn the_cache_follows_what_happens_to_a_sandbox() {
    let (fake, daemon) = Fake::daemon(true);
    let mut changes = watch(&daemon);
    let asked = CreateSandbox {
        name: Some("web".into()),
        labels: [("app".into(), "web".into())].into(),
        timeout_s: Some(3600),
        ..request("x")
    };
    let made = daemon.create(asked, Behalf::default()).await.unwrap().sandbox;
    assert_eq!((made.labels["app"].as_str(), made.timeout_s), ("web", Some(3600)));
    let WatchEvent::Added(added) = event(&mut changes).await else {
        panic!("not added")
    };
    assert_eq!(added, made);
    daemon.pause(&on_node("web")).await.unwrap();
    let WatchEvent::Modified(paused) = event(&mut changes).await else {
        panic!("not modified")
    };
    assert_eq!(paused.state, "paused");
    daemon.resume(&on_node(&made.id)).await.unwrap();
    let WatchEvent::Modified(resumed) = event(&mut changes).await else {
        panic!("not modified")
    };
    assert_eq!(resumed.state, "running");
    daemon.find(&made.id).unwrap().kill();
    let WatchEvent::Modified(ended) = event(&mut changes).await else {
        panic!("not modified")
    };
    assert_eq!(
        (ended.state.as_str(), ended.reason.as_deref()),
        ("ended", Some("it was killed"))
    );
    let WatchEvent::Modified(failed) = event(&mut changes).await else {
        panic!("not modified")
    };
    assert_eq!(
        (failed.state.as_str(), failed.failure.unwrap().reason.as_str()),
        ("failed", "signal")
    );
    daemon.delete(&on_node("web")).await.unwrap();
    let WatchEvent::Deleted(_) = event(&mut changes).await else {
        panic!("not deleted")
    };
    assert_eq!(fake.living(), 0);
    assert_eq!(
        daemon.delete(&on_node("web")).await.unwrap_err().kind,
        ErrorKind::SandboxNotFound
    );
}

#[tokio::test]
async fn a_making_that_is_given_up_leaves_nothing() {
    let (fake, daemon) = Fake::daemon(false);
    let mut making = Box::pin(daemon.create(request("x"), Behalf::default()));
    assert!(poll!(&mut making).is_pending());
    assert_eq!(*fake.making.borrow(), 1);
    drop(making);
    assert_eq!((*fake.making.borrow(), fake.living()), (0, 0));
    assert!(daemon.table().is_empty());
}

#[tokio::test]
async fn timeout_deletes_a_sandbox_also_after_its_adoption() {
    let (fake, daemon) = Fake::daemon(true);
    let mut changes = watch(&daemon);
    // As an earlier thawd recorded it: the time passed while no thawd ran.
    let terms = Terms {
        timeout: Some(Timeout { seconds: 1, at: 0 }),
        ..Terms::default()
    };
    let adopted = Arc::new(FakeMachine::new(7, None, terms, fake.counts.clone()));
    daemon.insert(adopted, Condition::Running, None);
    let mut seen = vec![event(&mut changes).await];
    while !matches!(seen.last(), Some(WatchEvent::Deleted(_))) {
        seen.push(event(&mut changes).await);
    }
    assert!(daemon.table().is_empty());
}

#[tokio::test]
async fn sandboxes_outlive_a_daemon_that_lets_go_of_them() {
    let (fake, daemon) = Fake::daemon(true);
    daemon.create(request("x"), Behalf::default()).await.unwrap();
    daemon.create(request("y"), Behalf::default()).await.unwrap();
    daemon.release().await;
    drop(daemon);
    assert_eq!(fake.living(), 2);
}

#[tokio::test]
async fn sandbox_without_an_owner_is_ended_by_its_id() {
    let (_fake, daemon) = Fake::daemon(true);
    daemon.delete(&on_node(UNOWNED)).await.unwrap();
    let unknown = daemon.delete(&on_node("unknown")).await.unwrap_err();
    assert_eq!(unknown.kind, ErrorKind::SandboxNotFound);
}

/// The watchdog's period in tests.
const PERIOD: Duration = Duration::from_millis(20);

/// Counts the watchdog notifications that a task of this runtime sends.
fn told_alive(runtime: &tokio::runtime::Handle, daemon: Arc<Daemon>) -> Arc<AtomicUsize> {
    let told = Arc::new(AtomicUsize::new(0));
    let counted = told.clone();
    let tell = move |what: &[NotifyState<'_>]| {
        let alive = what.iter().filter(|it| matches!(it, NotifyState::Watchdog));
        counted.fetch_add(alive.count(), Ordering::SeqCst);
    };
    runtime.spawn(service::notify_while_alive(daemon, PERIOD, tell));
    told
}

/// Waits for this many more notifications.
fn told_more(told: &AtomicUsize, more: usize) {
    let (before, began) = (told.load(Ordering::SeqCst), Instant::now());
    while told.load(Ordering::SeqCst) < before + more {
        assert!(began.elapsed() < Duration::from_secs(60), "never told");
        std::thread::sleep(PERIOD / 4);
    }
}

/// Fails if notifications go on for many periods. Allows one that had already begun.
fn is_silent(told: &AtomicUsize) {
    let before = told.load(Ordering::SeqCst);
    std::thread::sleep(PERIOD * 10);
    assert!(told.load(Ordering::SeqCst) <= before + 1);
}

fn runtime(threads: usize) -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(threads).enable_all().build().unwrap()
}

#[test]
fn watchdog_is_not_notified_while_a_shared_lock_is_stuck() {
    let (_fake, daemon) = Fake::daemon(true);
    let runtime = runtime(2);
    let told = told_alive(runtime.handle(), daemon.clone());
    told_more(&told, 3);
    let held = daemon.table();
    is_silent(&told);
    drop(held);
    told_more(&told, 3);
}

#[test]
fn the_watchdog_is_not_told_while_the_runtime_is_stuck() {
    let (_fake, daemon) = Fake::daemon(true);
    let runtime = runtime(1);
    let told = told_alive(runtime.handle(), daemon);
    told_more(&told, 3);
    let (stuck, is_stuck) = std::sync::mpsc::channel();
    let (release, released) = std::sync::mpsc::channel::<()>();
    runtime.spawn(async move {
        stuck.send(()).unwrap();
        let _ = released.recv();
    });
    is_stuck.recv().unwrap();
    is_silent(&told);
    drop(release);
    told_more(&told, 3);
}
