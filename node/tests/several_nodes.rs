//! Three nodes answer E2B's API as one, and outlive the death of one of them.

#![allow(clippy::unwrap_used)]

use std::path::Path;

use serde_json::{Value, json};
use thaw_test_registry::memory::Registry;
use thaw_tiny_guest::bare::checking;
use thaw_tiny_node::daemon::{eventually, log};
use thaw_tiny_node::e2b::{self, Named};
use thaw_tiny_node::{Place, Thawd, asked};

/// MiB that the guest has filled. It reads them after each thaw, and crashes if a page is wrong.
const FILLED: u32 = 16;

/// One node.
struct Node {
    named: Named,
    place: Place,
    thawd: Thawd,
}

impl Node {
    /// Asks E2B's API.
    fn ask(&self, request: &str, body: &Value) -> (u16, Value) {
        self.ask_with(request, "", body)
    }

    fn ask_with(&self, request: &str, head: &str, body: &Value) -> (u16, Value) {
        let answer = e2b::ask(self.named, request, head, body);
        answer.unwrap_or_else(|| panic!("{request} to {}: {}", self.named.0, log(&self.place)))
    }

    fn answers(&self, request: &str, status: u16) -> Value {
        let (given, body) = self.ask(request, &json!({}));
        let (name, log) = (self.named.0, log(&self.place));
        assert_eq!(given, status, "{request} to {name}: {body}\n{log}");
        body
    }

    /// Asks thawd's own API.
    fn done(&self, request: &str, body: &Value) -> Value {
        let stream = asked::ask(&self.place, request, None, body).unwrap();
        let (status, body) = asked::answer(stream).unwrap();
        let log = log(&self.place);
        assert!(status.contains(" 20"), "{request}: {status} {body}\n{log}");
        serde_json::from_str(&body).unwrap_or_default()
    }

    /// Makes a sandbox, so that the node has its image, and deletes it. Stores a snapshot of it before, if that gets a name.
    fn has_image(&self, snapshot: Option<&str>) {
        let made = self.done("POST /v1/sandboxes", &self.place.request());
        let id = made["sandbox"]["id"].as_str().unwrap();
        if let Some(name) = snapshot {
            self.done(&format!("POST /v1/sandboxes/{id}/freeze"), &json!({"name": name}));
        }
        self.done(&format!("DELETE /v1/sandboxes/{id}"), &json!({}));
    }

    /// The state of a sandbox, if this node itself has it.
    fn state(&self, id: &str) -> Option<String> {
        let listed = self.done("GET /v1/sandboxes", &Value::Null);
        let mut all = listed["items"].as_array().unwrap().iter();
        let found = all.find(|it| it["id"] == e2b::short(id))?;
        found["state"].as_str().map(str::to_owned)
    }

    /// The ids of the sandboxes of all nodes.
    fn listed(&self) -> Vec<String> {
        let listed = self.answers("GET /v2/sandboxes", 200);
        let all = listed.as_array().unwrap().iter();
        all.map(|it| it["sandboxID"].as_str().unwrap().to_owned())
            .collect()
    }
}

/// The nodes `a`, `b` and `c`. Only `b` has the template `base`.
fn nodes(registry: &Registry) -> Option<[Node; 3]> {
    let binaries = Path::new(env!("CARGO_BIN_EXE_thawd")).parent()?;
    let all = e2b::named(["a", "b", "c"]);
    let mut nodes = Vec::new();
    for named in all {
        let place = Place::new(binaries, &checking(FILLED))?;
        e2b::configure(&place, named, &all, &registry.host());
        let thawd = Thawd::start(&place);
        nodes.push(Node { named, place, thawd });
    }
    for node in &nodes {
        node.has_image((node.named.0 == "b").then_some("base"));
    }
    nodes.try_into().ok()
}

/// Makes a sandbox through a node. Returns its id.
fn make(through: &Node) -> String {
    let (status, made) = through.ask(
        "POST /v2/sandboxes",
        &json!({"templateID": "base", "timeout": 600}),
    );
    assert_eq!(status, 201, "{made}\n{}", log(&through.place));
    made["sandboxID"].as_str().unwrap().to_owned()
}

/// Makes these the only nodes, and waits until they know it: they do not find this sandbox of another node any more.
fn leave(nodes: [&Node; 2], registry: &Registry, of_it: &str) {
    let left = nodes.map(|node| node.named);
    for node in nodes {
        e2b::configure(&node.place, node.named, &left, &registry.host());
        node.thawd.reload();
        eventually("its node is no member", || {
            node.ask(&format!("GET {of_it}"), &json!({})).0 == 404
        });
    }
}

#[test]
fn sandbox_outlives_its_node_under_the_same_id() {
    let registry = Registry::start().unwrap();
    let Some([a, b, c]) = nodes(&registry) else { return };
    let id = make(&a);
    let of_it = format!("/sandboxes/{id}");
    assert_eq!(
        b.state(&id).as_deref(),
        Some("running"),
        "only b has the template"
    );
    for node in [&a, &b, &c] {
        assert_eq!(node.listed(), [id.as_str()], "{}", node.named.0);
        let shown = node.answers(&format!("GET {of_it}"), 200);
        assert_eq!(shown["state"], "running", "{}", node.named.0);
    }
    // Nothing listens in the guest, which b alone knows.
    let head = format!("e2b-sandbox-id: {id}\r\ne2b-sandbox-port: 8080\r\n");
    let (status, answer) = c.ask_with("GET /", &head, &json!({}));
    assert_eq!((status, &answer["port"]), (502, &json!(8080)), "{answer}");
    let why = answer["message"].as_str().unwrap();
    assert!(why.contains("port is not open"), "{why}");
    c.answers(&format!("POST {of_it}/pause"), 204);
    assert_eq!(b.state(&id).as_deref(), Some("paused"));
    eventually("the registry has a copy", || e2b::is_copied(&b.place, &id));

    let Node { named, place, thawd } = b;
    thawd.kill();
    a.answers(&format!("POST {of_it}/connect"), 502);
    leave([&a, &c], &registry, &of_it);
    let connected = a.answers(&format!("POST {of_it}/connect"), 201);
    assert_eq!(connected["sandboxID"], id.as_str());
    for node in [&a, &c] {
        assert_eq!(node.listed(), [id.as_str()], "{}", node.named.0);
        let shown = node.answers(&format!("GET {of_it}"), 200);
        assert_eq!(shown["state"], "running", "{}", node.named.0);
    }
    assert_eq!(c.state(&id), None);
    // It answers a freeze, so it has read its memory.
    let frozen = json!({"directory": a.place.path("frozen").display().to_string()});
    a.done(&format!("POST /v1/sandboxes/{}/freeze", e2b::short(&id)), &frozen);
    assert_eq!(a.state(&id).as_deref(), Some("running"));

    // The node is back, and what it has is old.
    let thawd = Thawd::start(&place);
    let b = Node { named, place, thawd };
    let connected = b.answers(&format!("POST {of_it}/connect"), 200);
    assert_eq!(connected["sandboxID"], id.as_str());
    assert_eq!(b.state(&id), None);
    c.answers(&format!("DELETE {of_it}"), 204);
    for node in [&a, &b, &c] {
        node.answers(&format!("GET {of_it}"), 404);
    }
    for Node { place, thawd, .. } in [a, b, c] {
        let paused = std::fs::read_dir(place.path("data/paused"));
        assert_eq!(paused.map_or(0, Iterator::count), 0);
        assert!(thawd.stop().success(), "{}", log(&place));
    }
}

#[test]
fn paused_sandbox_of_a_dead_node_is_deleted_for_good() {
    let registry = Registry::start().unwrap();
    let Some([a, b, c]) = nodes(&registry) else { return };
    let id = make(&a);
    let of_it = format!("/sandboxes/{id}");
    a.answers(&format!("POST {of_it}/pause"), 204);
    eventually("the registry has a copy", || e2b::is_copied(&b.place, &id));
    b.thawd.kill();
    leave([&a, &c], &registry, &of_it);
    c.answers(&format!("DELETE {of_it}"), 204);
    a.answers(&format!("POST {of_it}/connect"), 404);
    let thawd = Thawd::start(&b.place);
    let b = Node { thawd, ..b };
    b.answers(&format!("POST {of_it}/connect"), 404);
    assert_eq!(b.state(&id), None);
    for Node { place, thawd, .. } in [a, b, c] {
        assert!(thawd.stop().success(), "{}", log(&place));
    }
}
