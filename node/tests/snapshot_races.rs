//! A freeze, a fork, a pause or a resume of a sandbox that begins while another of them is under way. Each succeeds or is refused by name, the
//! sandbox works afterwards, and nothing is left.

#![allow(clippy::unwrap_used)]

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use thaw_pools::process::ProcessRecord;
use thaw_tiny_guest::bare::lasting;
use thaw_tiny_node::daemon::{eventually, log};
use thaw_tiny_node::{Counts, Place, Thawd, asked};

/// The sandbox's path.
const WEB: &str = "/v1/sandboxes/web";

/// How long a request takes to reach thawd's turn of the sandbox. If it takes longer, the test shows less.
const ARRIVES: Duration = Duration::from_millis(100);

/// A request that changes the sandbox.
#[derive(Clone, Copy, Debug)]
enum Change {
    Freeze,
    Fork,
    Pause,
    Resume,
}

use Change::{Fork, Freeze, Pause, Resume};

/// A node, and the thawds that it has had.
struct Node {
    place: Place,
    thawds: Vec<ProcessRecord>,
}

impl Node {
    fn new() -> Option<Node> {
        let binaries = Path::new(env!("CARGO_BIN_EXE_thawd")).parent()?;
        let place = Place::new(binaries, &lasting())?;
        place.fill_pools_to(0..=0, 0..=0);
        for directory in ["data/forks", "data/frozen", "data/paused"] {
            std::fs::create_dir_all(place.path(directory)).unwrap();
        }
        Some(Node {
            place,
            thawds: Vec::new(),
        })
    }

    /// Starts a thawd that waits at a failpoint as long as the file `held` exists.
    fn start_held(&mut self, point: &str) -> Thawd {
        let mut command = self.place.thawd();
        let held = self.place.path("held").display().to_string();
        command.args(["--failpoint", &format!("{point}={held}")]);
        let mut thawd = Thawd::begin(&self.place, command);
        self.thawds.push(thawd.record());
        assert!(thawd.serves(&self.place), "{}", log(&self.place));
        thawd
    }

    fn send(&self, request: &str, body: &Value) -> UnixStream {
        asked::ask(&self.place, request, None, body).unwrap()
    }

    fn change(&self, change: Change) -> UnixStream {
        let (action, body) = match change {
            Freeze => ("freeze", json!({})),
            Fork => ("fork", json!({"count": 1})),
            Pause => ("pause", json!({"memory": "release"})),
            Resume => ("resume", json!({})),
        };
        self.send(&format!("POST {WEB}/{action}"), &body)
    }

    /// The code of a refusal; `None` for a success.
    fn outcome(&self, stream: UnixStream) -> Option<String> {
        let (status, body) = asked::answer(stream).unwrap();
        let body: Value = serde_json::from_str(&body).unwrap_or_default();
        let is_done = status.contains(" 20");
        (!is_done).then(|| body["code"].as_str().unwrap_or(&status).to_owned())
    }

    /// The ids in a list.
    fn listed(&self, path: &str) -> Vec<String> {
        let listed = asked::done(&self.place, &format!("GET {path}"), &json!(null));
        let items = listed["items"].as_array().unwrap().iter();
        items.map(|it| it["id"].as_str().unwrap().to_owned()).collect()
    }

    /// Checks that the sandbox can be frozen, and that every snapshot is whole. Removes all.
    fn works(&self) {
        let shown = asked::done(&self.place, &format!("GET {WEB}"), &json!(null));
        if shown["memory_released"] == json!(true) {
            asked::done(&self.place, &format!("POST {WEB}/resume"), &json!({}));
        }
        asked::done(&self.place, &format!("POST {WEB}/freeze"), &json!({}));
        for id in self.listed("/v1/sandboxes") {
            asked::done(&self.place, &format!("DELETE /v1/sandboxes/{id}"), &json!({}));
        }
        for id in self.listed("/v1/snapshots") {
            let verified = asked::done(
                &self.place,
                &format!("POST /v1/snapshots/{id}/verify"),
                &json!({}),
            );
            assert_eq!(verified["damaged"], json!([]));
            asked::done(&self.place, &format!("DELETE /v1/snapshots/{id}"), &json!({}));
        }
    }
}

#[test]
fn operations_that_meet_succeed_or_are_refused_by_name() {
    let Some(mut node) = Node::new() else { return };
    let mut web = node.place.request();
    web["name"] = "web".into();
    let released = Some("memory-released");
    let mut empty = None;
    // Where the first one is held, the two, and how the second one is refused.
    for (point, first, second, refused) in [
        ("freeze.paused", Freeze, Freeze, None),
        ("freeze.paused", Freeze, Fork, None),
        ("freeze.paused", Freeze, Pause, None),
        ("freeze.paused", Pause, Freeze, released),
        ("freeze.paused", Pause, Fork, released),
        ("freeze.paused", Pause, Pause, released),
        ("paused.written", Pause, Resume, None),
        ("fork.frozen", Fork, Freeze, None),
        ("fork.frozen", Fork, Pause, None),
        ("fork.frozen", Fork, Fork, None),
    ] {
        let what = format!("{second:?} during {first:?} at {point}");
        let thawd = node.start_held(point);
        asked::done(&node.place, "POST /v1/sandboxes", &web);
        let held = node.place.path("held");
        let one = node.change(first);
        eventually(&format!("{what}: it is held"), || held.exists());
        let other = node.change(second);
        std::thread::sleep(ARRIVES);
        std::fs::remove_file(&held).unwrap();
        assert_eq!(node.outcome(one), None, "{what}: {}", log(&node.place));
        let other = node.outcome(other);
        assert_eq!(other.as_deref(), refused, "{what}: {}", log(&node.place));
        node.works();
        assert!(thawd.stop().success(), "{what}: {}", log(&node.place));
        let count = || Counts::of(&node.place, &node.thawds);
        eventually(&format!("{what}: no process is left"), || {
            count().processes.is_empty()
        });
        // The first case makes what the others reuse.
        let empty = empty.get_or_insert_with(count);
        eventually(&format!("{what}: nothing is left"), || count() == *empty);
    }
}
