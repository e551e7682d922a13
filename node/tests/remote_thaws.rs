//! A snapshot in a registry thaws before its memory is here: the guest gets each part when it touches it, also after thawd was killed.
//!
//! The guest reads all of its memory after its thaw, and crashes if a page is wrong.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use thaw_test_registry::memory::Registry;
use thaw_tiny_guest::bare::checking;
use thaw_tiny_node::daemon::{eventually, log, until_idle};
use thaw_tiny_node::{Place, Thawd, asked};

/// MiB that the guest has filled: 47 parts of 2 MiB.
const FILLED: u32 = 96;
/// How long the registry takes for each part.
const SLOW: Duration = Duration::from_millis(200);

/// Three times as long as thawd tries to read a part.
const LONGEST: Duration = Duration::from_secs(60);

/// The registry's delays are short for what a busy host does meanwhile.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// A node without sandboxes and snapshots, and a registry that has a snapshot of one.
struct Node {
    place: Place,
    registry: Registry,
    thawd: Thawd,
    one: MutexGuard<'static, ()>,
}

impl Node {
    fn new() -> Option<Node> {
        if !Path::new("/dev/userfaultfd").exists() {
            thaw_test_skip::skip("this host has no /dev/userfaultfd");
            return None;
        }
        let binaries = Path::new(env!("CARGO_BIN_EXE_thawd")).parent()?;
        let place = Place::new(binaries, &checking(FILLED))?;
        let none = "{ low = 0, high = 0 }";
        place.configure(&format!(
            "[fetch]\nbudget_ms = 20000\nprefetch_requests = 1\n[pools]\ndisks = {none}\nnetworks = {none}\ncgroups = {none}\n\
             [pools.shells]\nshapes = 0\n[pools.parked]\ntemplates = 0\n"
        ));
        let node = Node {
            one: ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner),
            thawd: Thawd::start(&place),
            place,
            registry: Registry::start().unwrap(),
        };
        let made = node.ask("POST /v1/sandboxes", &node.place.request());
        let original = made["sandbox"]["id"].as_str().unwrap().to_owned();
        // Or each clone first went on reading, before it answers.
        until_idle(made["sandbox"]["vmm_pid"].as_i64().unwrap() as i32);
        let freeze = format!("POST /v1/sandboxes/{original}/freeze");
        node.ask(&freeze, &json!({"name": "web"}));
        node.ask(
            "POST /v1/snapshots/web/push",
            &json!({"reference": node.reference()}),
        );
        node.delete(&original);
        node.ask("DELETE /v1/snapshots/web", &json!({}));
        node.registry.take_asked();
        node.registry.set_delay(SLOW);
        Some(node)
    }

    fn reference(&self) -> String {
        format!("{}/web:ready", self.registry.host())
    }

    fn ask(&self, request: &str, body: &Value) -> Value {
        let (status, body) = self.answer(request, body);
        assert!(
            status.contains(" 20"),
            "{request}: {status} {body}\n{}",
            log(&self.place)
        );
        serde_json::from_str(&body).unwrap_or_default()
    }

    fn answer(&self, request: &str, body: &Value) -> (String, String) {
        asked::answer(asked::ask(&self.place, request, None, body).unwrap()).unwrap()
    }

    fn delete(&self, id: &str) {
        self.ask(&format!("DELETE /v1/sandboxes/{id}"), &json!({}));
    }

    fn thaw(&self) -> String {
        let made = self.ask("POST /v1/thaws", &json!({"snapshot": self.reference()}));
        made["sandbox"]["id"].as_str().unwrap().to_owned()
    }

    fn shown(&self, id: &str) -> Value {
        self.ask(&format!("GET /v1/sandboxes/{id}"), &json!(null))
    }

    /// The ids of the stored snapshots.
    fn stored(&self) -> Vec<String> {
        let listed = self.ask("GET /v1/snapshots", &json!(null));
        let items = listed["items"].as_array().unwrap().iter();
        items.map(|it| it["id"].as_str().unwrap().to_owned()).collect()
    }

    fn until_stored(&self) -> String {
        eventually("the snapshot is stored", || self.stored().len() == 1);
        self.stored().remove(0)
    }

    /// Asserts that the sandbox runs, and has read all of its memory: it answers a freeze, which reads all of it again.
    fn is_whole(&self, id: &str) {
        let directory = self.place.path(&format!("frozen-{id}")).display().to_string();
        let freeze = format!("POST /v1/sandboxes/{id}/freeze");
        let frozen = self.ask(&freeze, &json!({"directory": directory}));
        let bytes = frozen["memory_bytes"].as_u64().unwrap();
        assert!(bytes >= u64::from(FILLED - 2) << 20, "{bytes}");
        let made = self.ask("POST /v1/thaws", &json!({"directory": directory}));
        self.delete(made["sandbox"]["id"].as_str().unwrap());
        assert_eq!(self.shown(id)["state"], "running", "{}", log(&self.place));
    }

    /// The same with another thawd.
    fn killed_and_started(self) -> Node {
        let Node {
            place,
            registry,
            thawd,
            one,
        } = self;
        thawd.kill();
        Node {
            thawd: Thawd::start(&place),
            place,
            registry,
            one,
        }
    }

    fn end(self) {
        assert!(self.thawd.stop().success(), "{}", log(&self.place));
    }
}

#[test]
fn sandbox_runs_before_its_memory_is_fetched() {
    let Some(node) = Node::new() else { return };
    let first = node.thaw();
    assert!(node.stored().is_empty(), "it is not all here yet");
    let second = node.thaw();
    let stored = node.until_stored();
    node.is_whole(&first);
    node.is_whole(&second);
    let verified = node.ask(&format!("POST /v1/snapshots/{stored}/verify"), &json!({}));
    assert_eq!(verified["damaged"], json!([]));
    let fetched = node.registry.take_asked();
    let packs = fetched.iter().filter(|it| it.contains("/blobs/")).count();
    assert!(packs < 150, "shared by both: {packs}");
    let third = node.thaw();
    assert_eq!(node.stored(), [stored], "the same is thawed from the store");
    assert_eq!(node.shown(&third)["state"], "running");
    [first, second, third].iter().for_each(|id| node.delete(id));
    node.end();
}

#[test]
fn clones_outlive_a_killed_thawd_and_a_registry_that_is_down() {
    let Some(node) = Node::new() else { return };
    let clones = [node.thaw(), node.thaw()];
    node.registry.set_down(true);
    let node = node.killed_and_started();
    for clone in &clones {
        assert_eq!(node.shown(clone)["state"], "running", "{}", log(&node.place));
    }
    assert!(node.stored().is_empty());
    node.registry.set_down(false);
    node.until_stored();
    clones.iter().for_each(|id| node.is_whole(id));
    clones.iter().for_each(|id| node.delete(id));
    node.end();
}

#[test]
fn registry_that_stays_down_ends_the_sandbox_with_a_reason() {
    let Some(node) = Node::new() else { return };
    let id = node.thaw();
    node.registry.set_down(true);
    let began = Instant::now();
    while node.shown(&id)["state"] != "failed" {
        assert!(
            began.elapsed() < LONGEST,
            "{}\n{}",
            node.shown(&id),
            log(&node.place)
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    let shown = node.shown(&id);
    let failure = &shown["failure"];
    assert_eq!(failure["reason"], "memory-lost", "{failure}");
    let message = failure["message"].as_str().unwrap();
    assert!(message.contains("memory chunk"), "{message}");
    node.end();
}

#[test]
fn sandbox_is_paused_while_its_memory_is_fetched() {
    let Some(node) = Node::new() else { return };
    let id = node.thaw();
    assert!(node.stored().is_empty(), "it is not all here yet");
    let of = |action: &str| format!("POST /v1/sandboxes/{id}/{action}");
    node.ask(&of("pause"), &json!({"memory": "release"}));
    assert_eq!(node.shown(&id)["memory_released"], json!(true));
    node.ask(&of("resume"), &json!({}));
    node.is_whole(&id);
    node.delete(&id);
    node.end();
}

#[test]
fn what_is_no_snapshot_is_refused_and_leaves_nothing() {
    let Some(node) = Node::new() else { return };
    let missing = format!("{}/web:missing", node.registry.host());
    let (status, body) = node.answer("POST /v1/thaws", &json!({"snapshot": missing}));
    assert!(status.contains(" 404"), "{status} {body}");
    assert!(!node.place.path("run/sandboxes").exists() && node.stored().is_empty());
    node.end();
}
