//! A user's snapshot thaws as a template does: held since its freeze, read once after a restart, in a machine parked with it.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use thaw_protocol::shim::MessageField;
use thaw_protocol::shim::pods::pod_network::Mode;
use thaw_protocol::shim::pods::{PodNetwork, ThawPodRequest};
use thaw_tiny_guest::bare::lasting;
use thaw_tiny_node::daemon::{eventually, log};
use thaw_tiny_node::{Place, Thawd, asked};
use ttrpc::context::Context;

#[path = "support/pods.rs"]
mod pods;

/// A node with a snapshot of a sandbox that still runs.
struct Node {
    place: Place,
    thawd: Thawd,
    /// The sandbox.
    original: String,
    directory: String,
    /// The answer to its freeze.
    frozen: Value,
}

impl Node {
    fn new() -> Option<Node> {
        Node::of_network("private")
    }

    /// The sandbox has this network.
    fn of_network(network: &str) -> Option<Node> {
        let binaries = Path::new(env!("CARGO_BIN_EXE_thawd")).parent()?;
        let place = Place::new(binaries, &lasting())?;
        place.fill_pools_to(2..=4, 2..=4);
        let thawd = Thawd::start(&place);
        let directory = place.path("frozen").display().to_string();
        let mut node = Node {
            place,
            thawd,
            original: String::new(),
            directory,
            frozen: Value::Null,
        };
        let mut request = node.place.request();
        request["network"] = json!(network);
        let made = node.ask("POST /v1/sandboxes", &request);
        node.original = made["sandbox"]["id"].as_str().unwrap().to_owned();
        node.frozen = node.ask(
            &format!("POST /v1/sandboxes/{}/freeze", node.original),
            &json!({"directory": node.directory}),
        );
        Some(node)
    }

    fn ask(&self, request: &str, body: &Value) -> Value {
        let stream = asked::ask(&self.place, request, None, body).unwrap();
        let (status, body) = asked::answer(stream).unwrap();
        assert!(status.contains(" 20"), "{request}: {status} {body}");
        serde_json::from_str(&body).unwrap_or_default()
    }

    /// Thaws a sandbox. Returns its id, and the reasons why that was slower than it could be.
    fn begin_thaw(&self) -> (String, BTreeSet<String>) {
        let made = self.ask("POST /v1/thaws", &json!({"directory": self.directory}));
        let id = made["sandbox"]["id"].as_str().unwrap().to_owned();
        let reasons = made["account"]["reasons"].as_array().unwrap();
        let codes = reasons
            .iter()
            .map(|reason| reason["code"].as_str().unwrap().to_owned());
        (id, codes.collect())
    }

    fn delete(&self, id: &str) {
        self.ask(&format!("DELETE /v1/sandboxes/{id}"), &json!({}));
    }

    /// Thaws a sandbox and ends it. Returns the reasons why that was slower than it could be.
    fn thaw(&self) -> BTreeSet<String> {
        let (id, reasons) = self.begin_thaw();
        self.delete(&id);
        reasons
    }

    fn metric(&self, name: &str) -> f64 {
        asked::metric(&self.place, name).unwrap()
    }

    fn until_held(&self) {
        eventually("the new snapshot is held", || {
            self.metric("thaw_snapshots_held") == 1.0
        });
    }

    fn restart(self) -> Node {
        Node {
            thawd: self.thawd.restart(&self.place),
            ..self
        }
    }

    fn end(self) {
        self.delete(&self.original);
        assert!(self.thawd.stop().success(), "{}", log(&self.place));
    }
}

#[test]
fn sandbox_runs_while_its_memory_is_frozen() {
    let Some(node) = Node::new() else { return };
    let [written, paused, stopped] =
        ["memory_bytes", "paused_ns", "stopped_ns"].map(|field| node.frozen[field].as_u64().unwrap());
    assert!(
        written > 0 && paused > 0 && stopped >= paused,
        "{:?}",
        node.frozen
    );
    // thawd holds the template in memory, so that only the kernel may be why.
    let log = log(&node.place);
    assert!(
        !log.contains("it is paused while its memory is written") || log.contains("needs Linux 6.4"),
        "{log}"
    );
    // Again, as often as one likes, and a fork.
    let original = &node.original;
    for _ in 0..2 {
        node.ask(&format!("POST /v1/sandboxes/{original}/freeze"), &json!({}));
    }
    let forked = node.ask(
        &format!("POST /v1/sandboxes/{original}/fork"),
        &json!({"count": 1}),
    );
    assert!(forked["frozen"]["stopped_ns"].as_u64().unwrap() > 0);
    node.delete(forked["items"][0]["sandbox"]["id"].as_str().unwrap());
    node.thaw();
    node.end();
}

#[test]
fn snapshot_is_read_once_by_each_thawd() {
    let Some(node) = Node::new() else { return };
    node.until_held();
    assert!(node.metric("thaw_snapshots_held_bytes") > 0.0);
    assert!(
        !node.thaw().contains("snapshot-verified"),
        "held since the freeze"
    );
    let node = node.restart();
    assert!(
        node.thaw().contains("snapshot-verified"),
        "read by the next thawd"
    );
    assert!(!node.thaw().contains("snapshot-verified"), "once");
    node.end();
}

#[test]
fn machines_are_parked_with_a_snapshot_that_is_thawed_often() {
    let Some(node) = Node::new() else { return };
    node.until_held();
    let (first, reasons) = node.begin_thaw();
    assert!(
        reasons.contains("no-parked-vm") && reasons.contains("no-working-set"),
        "{reasons:?}"
    );
    let recorded =
        || std::fs::read_dir(node.place.path("data/working-sets")).is_ok_and(|sets| sets.count() == 1);
    eventually("what the first touched is recorded", recorded);
    // thawd uses the file some time after it is there.
    eventually("it is read ahead", || !node.thaw().contains("no-working-set"));
    eventually("a parked machine is thawed", || {
        !node.thaw().contains("no-parked-vm")
    });
    node.delete(&first);
    node.end();
}

#[tokio::test]
async fn pods_are_thawed_in_machines_parked_with_their_snapshot() {
    let Some(node) = Node::of_network("none") else {
        return;
    };
    node.until_held();
    let hits = || node.metric("thaw_pool_hits_total{pool=\"parked\"}");
    let (before, since) = (hits(), Instant::now());
    let request = ThawPodRequest {
        directory: node.directory.clone(),
        network: MessageField::some(PodNetwork {
            mode: Mode::NONE.into(),
            ..Default::default()
        }),
        client_pid: std::process::id() as i32,
        ..Default::default()
    };
    while hits() == before {
        assert!(since.elapsed() < Duration::from_secs(30), "{}", log(&node.place));
        let client = pods::connect(&node.place).await;
        let thawed = client.thaw(Context::default(), &request).await;
        let pod = thawed.unwrap_or_else(|e| panic!("{e}: {}", log(&node.place)));
        pods::end(&node.place, &pod.sandbox_id).await;
    }
    node.end();
}

#[test]
fn parked_machines_end_with_the_held_snapshot() {
    let Some(node) = Node::new() else { return };
    node.place.fill_pools_to(0..=0, 2..=4);
    let node = node.restart();
    eventually("a parked machine is thawed", || {
        !node.thaw().contains("no-parked-vm")
    });
    // That one may have been the only one so far. The pool refills to its low mark at least.
    eventually("others are parked", || node.place.spares() >= 2);
    let parked = node.place.spares();
    std::fs::remove_dir_all(&node.directory).unwrap();
    let stream = asked::ask(
        &node.place,
        "POST /v1/thaws",
        None,
        &json!({"directory": node.directory}),
    );
    let (status, body) = asked::answer(stream.unwrap()).unwrap();
    assert!(
        status.contains(" 404") || status.contains(" 409"),
        "{status} {body}"
    );
    eventually("the machines parked with it are gone", || {
        node.metric("thaw_snapshots_held") == 0.0 && node.place.spares() < parked
    });
    node.end();
}

#[test]
fn delta_over_as_many_as_can_be_lies_on_the_lowest() {
    let Some(node) = Node::new() else { return };
    let (mut sandbox, mut hashes, mut bases) = (node.original.clone(), Vec::new(), Vec::new());
    for number in 0..9 {
        let name = format!("delta-{number}");
        let freeze = json!({"name": name, "delta": true});
        node.ask(&format!("POST /v1/sandboxes/{sandbox}/freeze"), &freeze);
        let manifest = node.ask(&format!("GET /v1/snapshots/{name}"), &json!(null))["manifest"].clone();
        hashes.push(manifest["hash"].clone());
        bases.push(manifest["base"]["hash"].clone());
        let thawed = node.ask("POST /v1/thaws", &json!({"snapshot": name}));
        if sandbox != node.original {
            node.delete(&sandbox);
        }
        sandbox = thawed["sandbox"]["id"].as_str().unwrap().to_owned();
    }
    node.delete(&sandbox);
    // The template and seven deltas are as many layers as can be.
    assert_eq!(bases[1..7], hashes[..6]);
    assert_eq!((&bases[7], &bases[8]), (&bases[0], &hashes[7]));
    node.end();
}
