//! Ten clones whose memory is in a registry fault while thawd is killed at a step of their thaws, of a push or of a pull. Each clone goes on
//! with the next thawd, which serves its faults, or ends with the reason that its memory is lost. Nothing else is left.
//!
//! The guest reads all of its memory after its thaw, and crashes if a page is wrong.

use std::fs;
use std::process::Command;
use std::time::Duration;

use serde_json::json;
use thaw_daemon::api::client::Client;
use thaw_protocol::api::{FreezeSandbox, PullSnapshot, PushSnapshot};
use thaw_sandbox::error::Error;
use thaw_test_registry::memory::Registry;
use thaw_tiny_guest::bare::checking;
use thaw_tiny_node::asked;
use thaw_tiny_node::daemon::{eventually, log, until_idle};

use crate::node::{Node, Pushed, gone, request};

/// Clones at once.
const CLONES: usize = 10;
/// MiB that the guest has filled: 5 parts of 2 MiB.
const FILLED: u32 = 12;
/// How long the registry takes for each part of a blob: clones wait when thawd is killed.
const SLOW: Duration = Duration::from_millis(30);
/// The stored snapshot, which is pushed and pulled.
const OTHER: &str = "other";
/// The record of a stored snapshot.
const RECORD: &str = "object.json";

/// A node without sandboxes that has one stored snapshot, and another in a registry.
pub async fn prepare() -> Node {
    // The lane's network namespace is new.
    let up = Command::new("ip")
        .args(["link", "set", "lo", "up"])
        .status()
        .unwrap();
    assert!(up.success());
    let mut node = Node::of(&checking(FILLED)).unwrap();
    let none = "{ low = 0, high = 0 }";
    node.place.configure(&format!(
        "[fetch]\nbudget_ms = 20000\nprefetch_requests = 1\n[pools]\ndisks = {none}\nnetworks = {none}\ncgroups = {none}\n\
         [pools.shells]\nshapes = 0\n[pools.parked]\ntemplates = 0\nsnapshots = 0\n"
    ));
    let registry = Registry::start().unwrap();
    let thawd = node.start();
    let client = node.client();
    // Two equal snapshots would be one: the clones would be thawed from the stored one.
    for (name, network) in [("web", "private"), (OTHER, "none")] {
        let mut request = request(&node.place);
        request.network = network.to_owned();
        let original = client.create(&request).await.unwrap().sandbox;
        // Or each clone first went on reading, before it answers.
        until_idle(original.vmm_pid.unwrap());
        let freeze: FreezeSandbox = serde_json::from_value(json!({"name": name})).unwrap();
        client.freeze(&original.id, &freeze).await.unwrap();
        client.delete(&original.id).await.unwrap();
    }
    let pushed = Pushed {
        other: client.snapshot(OTHER).await.unwrap().id,
        registry,
    };
    let push: PushSnapshot = serde_json::from_value(json!({"reference": pushed.reference("web")})).unwrap();
    client.push_snapshot("web", &push).await.unwrap();
    client.remove_snapshot("web", false).await.unwrap();
    pushed.registry.set_delay(SLOW);
    node.pushed = Some(pushed);
    // Once without a kill: what later runs reuse is made.
    course(&node, &client, &mut || false).await.unwrap();
    assert!(thawd.stop().success(), "{}", log(&node.place));
    settles(&mut node, "without a kill").await;
    node.empty = node.counts();
    node
}

/// Thaws the clones, all at once.
pub fn thaw_clones(node: &Node) -> Result<(), Error> {
    let pushed = node.pushed.as_ref().unwrap();
    let body = json!({"snapshot": pushed.reference("web")});
    let ask = |_| asked::ask(&node.place, "POST /v1/thaws", None, &body);
    let all: Option<Vec<_>> = (0..CLONES).map(ask).collect();
    for clone in all.ok_or_else(gone)? {
        let (status, body) = asked::answer(clone).ok_or_else(gone)?;
        assert!(status.contains("201"), "{status} {body}; {}", log(&node.place));
    }
    Ok(())
}

/// Thaws the clones, pushes and pulls the other snapshot while they fault, and waits until the first one is stored. Ends at the first
/// failure, such as thawd's death.
pub async fn course(node: &Node, client: &Client, ended: &mut impl FnMut() -> bool) -> Result<(), Error> {
    thaw_clones(node)?;
    let other = json!({"reference": node.pushed.as_ref().unwrap().reference(OTHER)});
    let push: PushSnapshot = serde_json::from_value(other.clone()).unwrap();
    client.push_snapshot(OTHER, &push).await?;
    let pull: PullSnapshot = serde_json::from_value(other).unwrap();
    client.pull_snapshot(&pull).await?;
    // The rest is fetched only after the clones have not waited for a while. The stored one, its copy, and that of the clones.
    eventually("the snapshot is stored, or thawd has ended", || {
        ended() || stored(node).len() == 3
    });
    Ok(())
}

/// Checks that the next thawd serves the faults of all clones that there are, and that nothing else is left.
pub async fn recovers(node: &mut Node, what: &str) {
    settles(node, what).await;
    node.is_empty_again(what);
}

/// Checks the clones with the next thawd, and removes them.
async fn settles(node: &mut Node, what: &str) {
    let next = node.start();
    let client = node.client();
    let listed = client.list().await.unwrap();
    assert!(listed.len() <= 2 * CLONES, "{what}: {listed:?}");
    let (failed, living): (Vec<_>, Vec<_>) = listed.iter().partition(|s| s.state == "failed");
    for sandbox in failed {
        let reason = sandbox.failure.as_ref().map(|failure| failure.reason.as_str());
        assert_eq!(reason, Some("memory-lost"), "{what}: {}", log(&node.place));
    }
    let as_many = format!(
        "{what}: as many VMMs as sandboxes: {listed:?}; {}",
        log(&node.place)
    );
    eventually(&as_many, || node.counts().vmms() == living.len());
    for sandbox in living {
        // Reads all of its memory.
        let directory = node.place.path("frozen").join(&sandbox.id);
        let freeze: FreezeSandbox = serde_json::from_value(json!({"directory": directory})).unwrap();
        let frozen = client.freeze(&sandbox.id, &freeze).await;
        frozen.unwrap_or_else(|e| panic!("{what}: {e}; {}", log(&node.place)));
        let shown = client.get(&sandbox.id).await.unwrap();
        assert_eq!(shown.state, "running", "{what}: {}", log(&node.place));
        fs::remove_dir_all(directory).unwrap();
    }
    for sandbox in &listed {
        client.delete(&sandbox.id).await.unwrap();
    }
    assert!(next.stop().success(), "{what}: {}", log(&node.place));
    let _ = fs::remove_dir_all(node.place.path("frozen"));
    let entries = |node: &Node| fs::read_dir(node.place.path("data/frozen")).unwrap().count();
    if entries(node) > stored(node).len() {
        // A thread that was storing a snapshot when thawd ended is as one that was killed.
        assert!(node.start().stop().success(), "{what}: {}", log(&node.place));
    }
    assert_eq!(entries(node), stored(node).len(), "{what}: {}", log(&node.place));
    let other = &node.pushed.as_ref().unwrap().other;
    for id in stored(node).iter().filter(|id| *id != other) {
        fs::remove_dir_all(node.place.path("data/frozen").join(id)).unwrap();
    }
}

/// The ids of the stored snapshots: those with a record.
fn stored(node: &Node) -> Vec<String> {
    let entries = fs::read_dir(node.place.path("data/frozen")).unwrap().flatten();
    let whole = entries.filter(|entry| entry.path().join(RECORD).exists());
    whole
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect()
}
