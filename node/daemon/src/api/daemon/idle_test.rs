use serde_json::json;
use thaw_protocol::api::{ChangeSandbox, CreateSandbox};
use thaw_sandbox::state::Behalf;

use super::*;
use crate::api::fake::{Fake, request};
use crate::api::test_client::until;

/// A daemon with a sandbox that has an idle timeout of a second.
async fn with_idle(on_timeout: &str) -> (Arc<Fake>, Arc<Daemon>, String) {
    let (fake, daemon) = Fake::daemon(true);
    let made = daemon.create(request("x"), Behalf::default()).await.unwrap();
    let id = made.sandbox.id;
    let change = json!({"idle_timeout_s": 1, "on_timeout": on_timeout});
    let change: ChangeSandbox = serde_json::from_value(change).unwrap();
    let changed = daemon.set_timeout(&Wanted::on_node(&id), &change).await.unwrap();
    assert_eq!(changed.idle_timeout_s, Some(1));
    (fake, daemon, id)
}

impl Daemon {
    /// Whether a caller is connected to a process or a port of the sandbox.
    pub(crate) fn is_in_use(&self, id: &str) -> bool {
        self.table()[id].requests.sessions.load(Ordering::Relaxed) > 0
    }
}

#[test]
fn sandbox_is_idle_below_every_threshold() {
    let second = 1_000_000_000;
    let before = Seen {
        requests: 1,
        output: 10,
        received: Some(7),
        cpu_ns: Some(5),
        at_ns: second,
        ..Seen::default()
    };
    let calm = Seen {
        cpu_ns: Some(5 + IDLE_CPU_MILLIS * 1_000_000),
        received: Some(7 + IDLE_PACKETS),
        at_ns: 2 * second,
        ..before
    };
    assert!(calm.is_idle_since(&before));
    let unmeasured = Seen { cpu_ns: None, ..calm };
    let without_network = Seen {
        received: None,
        ..calm
    };
    for idle in [unmeasured, without_network] {
        assert!(idle.is_idle_since(&before), "{idle:?}");
    }
    let busy = Seen {
        cpu_ns: calm.cpu_ns.map(|ns| ns + 1),
        ..calm
    };
    let asked = Seen { requests: 2, ..calm };
    let wrote = Seen { output: 11, ..calm };
    let in_use = Seen {
        is_in_use: true,
        ..calm
    };
    let reached = Seen {
        received: calm.received.map(|packets| packets + 1),
        ..calm
    };
    for active in [busy, asked, wrote, in_use, reached] {
        assert!(!active.is_idle_since(&before), "{active:?}");
    }
}

#[tokio::test]
async fn idle_sandbox_is_deleted() {
    let (fake, daemon, id) = with_idle("delete").await;
    until(|| daemon.cache.get(&id).is_none() && fake.living() == 0).await;
}

#[tokio::test]
async fn idle_sandbox_is_paused_and_again_after_its_resume() {
    let (fake, daemon, id) = with_idle("pause").await;
    let is_paused = || daemon.cache.get(&id).unwrap().memory_released && fake.living() == 0;
    until(is_paused).await;
    daemon.resume(&Wanted::on_node(&id)).await.unwrap();
    until(is_paused).await;
}

#[tokio::test]
async fn connected_sandbox_is_not_idle() {
    let (_fake, daemon, id) = with_idle("pause").await;
    let connected = daemon.connect(&Wanted::on_node(&id)).unwrap();
    tokio::time::sleep(Duration::from_millis(1800)).await;
    assert_eq!(daemon.cache.get(&id).unwrap().state, "running");
    drop(connected);
    until(|| daemon.cache.get(&id).unwrap().memory_released).await;
}

#[tokio::test]
async fn request_for_a_port_keeps_its_sandbox_in_use() {
    let (_fake, daemon, id) = with_idle("pause").await;
    let begun = daemon.requests(&id).unwrap();
    let used = daemon.use_port(&id).unwrap();
    assert_eq!(daemon.requests(&id), Some(begun + 1));
    tokio::time::sleep(Duration::from_millis(1800)).await;
    assert_eq!(daemon.cache.get(&id).unwrap().state, "running");
    drop(used);
    until(|| daemon.cache.get(&id).unwrap().memory_released).await;
    assert!(daemon.use_port("0123456789ab").is_none());
}

#[tokio::test]
async fn requests_keep_a_sandbox_from_being_idle() {
    let (_fake, daemon, id) = with_idle("pause").await;
    let wanted = Wanted::on_node(&id);
    for _ in 0..6 {
        tokio::time::sleep(Duration::from_millis(300)).await;
        daemon.running(&wanted).unwrap();
    }
    assert_eq!(daemon.cache.get(&id).unwrap().state, "running");
    // Looking at it does not.
    until(|| {
        daemon.described(&wanted).unwrap();
        let _ = daemon.usage(&wanted);
        daemon.cache.get(&id).unwrap().memory_released
    })
    .await;
}

#[tokio::test]
async fn creation_has_an_idle_timeout() {
    let (_fake, daemon) = Fake::daemon(true);
    let asked = CreateSandbox {
        idle_timeout_s: Some(60),
        ..request("x")
    };
    let made = daemon.create(asked, Behalf::default()).await.unwrap().sandbox;
    assert_eq!(made.idle_timeout_s, Some(60));
    assert_eq!(daemon.requests(&made.id), Some(0));
}
