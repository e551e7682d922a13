//! A paused sandbox of a node that answers E2B's API with others: copied to a registry, and taken over by another node when its own is gone.
//! Whichever process dies, the sandbox is resumed under its id.
//!
//! Both nodes have the same place, one after the other. The first one's files of the sandbox are moved away in between.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use serde_json::{Value, json};
use thaw_failpoint::Failpoint;
use thaw_protocol::api::FreezeSandbox;
use thaw_test_registry::memory::Registry;
use thaw_tiny_node::daemon::{eventually, log};
use thaw_tiny_node::e2b::{self, Named};
use thaw_tiny_node::{Place, Thawd};

use crate::node::{Node, request};

/// Kills a thawd at a failpoint, the `nth` time it reaches it: the first node's while it pauses and copies a sandbox, or the second one's while it
/// takes the sandbox over. Returns whether it died.
pub async fn killed_at(node: &Node, point: Failpoint, nth: usize, what: &str) -> bool {
    let up = Command::new("ip").args(["link", "set", "lo", "up"]).output();
    assert!(up.as_ref().is_ok_and(|up| up.status.success()), "{up:?}");
    let registry = Registry::start().unwrap().host();
    let [first, second] = e2b::named(["first", "second"]);
    let mut node = node.anew();
    e2b::configure(&node.place, first, &[first], &registry);
    node.learn_what_stays().await;
    let id = make(&mut node, first).await;

    let mut doomed = node.start_doomed(point, nth);
    if doomed.serves(&node.place) && pauses(first, &id) {
        eventually("the sandbox is copied, or thawd has ended", || {
            e2b::is_copied(&node.place, &id) || doomed.has_ended()
        });
    }
    let mut died = ends(doomed, &node.place, what);
    let next = node.start();
    let is_paused = e2b::is_copied(&node.place, &id) || pauses(first, &id);
    assert!(is_paused, "{what}: {}", log(&node.place));
    eventually("the sandbox is copied", || e2b::is_copied(&node.place, &id));
    assert!(!ends(next, &node.place, what));

    let files = node.place.path("data/paused").join(e2b::short(&id));
    let moved = node.place.path("moved");
    std::fs::rename(files, &moved).unwrap();
    e2b::configure(&node.place, second, &[second], &registry);
    let mut doomed = match died {
        true => node.start(),
        false => node.start_doomed(point, nth),
    };
    if doomed.serves(&node.place) {
        connects(second, &id);
    }
    died |= ends(doomed, &node.place, what);
    let next = node.start();
    assert!(connects(second, &id), "{what}: {}", log(&node.place));
    let of_it = format!("/sandboxes/{id}");
    let shown = ask(second, &format!("GET {of_it}"));
    assert_eq!(
        shown.map(|(status, shown)| (status, shown["state"].clone())),
        Some((200, json!("running"))),
        "{what}"
    );
    let deleted = ask(second, &format!("DELETE {of_it}")).map(|(status, _)| status);
    assert_eq!(deleted, Some(204), "{what}");
    node.client().remove_snapshot("base", true).await.unwrap();
    assert!(!ends(next, &node.place, what));
    std::fs::remove_dir_all(moved).unwrap();
    node.is_empty_again(what);
    died
}

/// Makes a sandbox of E2B's API, and leaves it running without a thawd. Returns its id.
async fn make(node: &mut Node, at: Named) -> String {
    let thawd = node.start();
    let client = node.client();
    let original = client.create(&request(&node.place)).await.unwrap().sandbox;
    let freeze: FreezeSandbox = serde_json::from_value(json!({"name": "base"})).unwrap();
    client.freeze(&original.id, &freeze).await.unwrap();
    client.delete(&original.id).await.unwrap();
    let (status, made) = e2b::ask(at, "POST /v2/sandboxes", "", &json!({"templateID": "base"})).unwrap();
    assert_eq!(status, 201, "{made}; {}", log(&node.place));
    thawd.kill();
    made["sandboxID"].as_str().unwrap().to_owned()
}

fn ask(at: Named, request: &str) -> Option<(u16, Value)> {
    e2b::ask(at, request, "", &json!({}))
}

/// Whether a node pauses the sandbox, or has done so already.
fn pauses(at: Named, id: &str) -> bool {
    let paused = ask(at, &format!("POST /sandboxes/{id}/pause"));
    paused.is_some_and(|(status, _)| matches!(status, 204 | 409))
}

/// Whether a node has resumed the sandbox.
fn connects(at: Named, id: &str) -> bool {
    let connected = ask(at, &format!("POST /sandboxes/{id}/connect"));
    connected.is_some_and(|(status, connected)| {
        matches!(status, 200 | 201) && connected["sandboxID"].as_str() == Some(id)
    })
}

/// Ends a thawd, which may have died at a failpoint. Returns whether it has.
fn ends(thawd: Thawd, place: &Place, what: &str) -> bool {
    let status = thawd.stop();
    let died = status.signal() == Some(9);
    assert!(died || status.success(), "{what}: {status:?}: {}", log(place));
    died
}
