//! Sandboxes that are paused with their memory released: they have no process, outlive thawd, and are the same when they are resumed.

#![allow(clippy::unwrap_used)]

use std::path::Path;

use serde_json::{Value, json};
use thaw_pools::process::ProcessRecord;
use thaw_tiny_guest::Guest;
use thaw_tiny_guest::bare::{checking, lasting};
use thaw_tiny_node::daemon::{eventually, log};
use thaw_tiny_node::{Place, Thawd, asked};

/// The sandbox's path.
const WEB: &str = "/v1/sandboxes/web";

struct Node {
    place: Place,
    thawd: Thawd,
}

impl Node {
    fn new() -> Option<Node> {
        Node::of(&lasting())
    }

    fn of(guest: &Guest) -> Option<Node> {
        let binaries = Path::new(env!("CARGO_BIN_EXE_thawd")).parent()?;
        let place = Place::new(binaries, guest)?;
        let thawd = Thawd::start(&place);
        Some(Node { place, thawd })
    }

    /// The status and the body of an answer.
    fn ask(&self, request: &str, body: &Value) -> (String, Value) {
        let stream = asked::ask(&self.place, request, None, body).unwrap();
        let (status, body) = asked::answer(stream).unwrap();
        (status, serde_json::from_str(&body).unwrap_or_default())
    }

    fn done(&self, request: &str, body: &Value) -> Value {
        let (status, body) = self.ask(request, body);
        assert!(
            status.contains(" 20"),
            "{request}: {status} {body}; {}",
            log(&self.place)
        );
        body
    }

    /// Creates the sandbox.
    fn make(&self) -> Value {
        let mut request = self.place.request();
        request["name"] = "web".into();
        request["labels"] = json!({"app": "web"});
        request["timeout_s"] = 3600.into();
        let made = self.done("POST /v1/sandboxes", &request);
        made["sandbox"].clone()
    }

    fn release(&self) {
        self.done(&format!("POST {WEB}/pause"), &json!({"memory": "release"}));
    }

    fn resume(&self) {
        self.done(&format!("POST {WEB}/resume"), &json!({}));
    }

    fn shown(&self) -> Value {
        self.done(&format!("GET {WEB}"), &json!(null))
    }

    fn delete(&self) {
        self.done(&format!("DELETE {WEB}"), &json!({}));
    }

    fn on_disk(&self) -> usize {
        std::fs::read_dir(self.place.path("data/paused")).map_or(0, Iterator::count)
    }

    /// How many machines were taken out of the pool of those without a snapshot.
    fn shells_taken(&self) -> f64 {
        asked::metric(&self.place, "thaw_pool_hits_total{pool=\"shell\"}").unwrap()
    }

    /// The manifest of its snapshot, while its memory is released.
    fn manifest(&self) -> Value {
        let id = self.shown()["id"].as_str().unwrap().to_owned();
        let path = self
            .place
            .path("data/paused")
            .join(id)
            .join("snapshot/manifest.json");
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
    }

    fn running(&self) -> usize {
        std::fs::read_dir(self.place.path("run/sandboxes")).map_or(0, Iterator::count)
    }

    fn restart(self) -> Node {
        Node {
            thawd: self.thawd.restart(&self.place),
            ..self
        }
    }

    fn end(self) {
        assert_eq!((self.on_disk(), self.running()), (0, 0));
        assert!(self.thawd.stop().success(), "{}", log(&self.place));
    }
}

fn vmm_of(sandbox: &Value) -> ProcessRecord {
    let pid = sandbox["vmm_pid"].as_i64().unwrap();
    ProcessRecord::of(i32::try_from(pid).unwrap()).unwrap()
}

/// What must be the same before and after.
fn identity(sandbox: &Value) -> Value {
    let fields = [
        "id",
        "name",
        "labels",
        "created",
        "image",
        "cpus",
        "memory_mib",
        "timeout_s",
    ];
    fields.iter().map(|field| sandbox[field].clone()).collect()
}

#[test]
fn released_sandbox_outlives_thawd_and_is_resumed_as_itself() {
    let Some(node) = Node::new() else { return };
    let made = node.make();
    let vmm = vmm_of(&made);
    node.release();
    eventually("its VMM is gone", || !vmm.lives());
    let paused = node.shown();
    assert_eq!(
        (&paused["state"], &paused["memory_released"]),
        (&json!("paused"), &json!(true))
    );
    assert_eq!(identity(&paused), identity(&made));
    assert_eq!(paused["vmm_pid"], Value::Null);
    assert_eq!((node.on_disk(), node.running()), (1, 0));
    let node = node.restart();
    assert_eq!(identity(&node.shown()), identity(&made));
    assert_eq!(node.shown()["memory_released"], json!(true));
    node.resume();
    let resumed = node.shown();
    assert_eq!(resumed["state"], "running");
    assert_eq!(identity(&resumed), identity(&made));
    assert!(vmm_of(&resumed) != vmm);
    assert_eq!((node.on_disk(), node.running()), (0, 1));
    // The next thawd knows what it was thawed from, though that is removed.
    let node = node.restart();
    node.release();
    assert_eq!((node.on_disk(), node.running()), (1, 0));
    node.resume();
    node.delete();
    node.end();
}

/// MiB of memory that the template's guest fills.
const FILLED_MIB: u32 = 16;

#[test]
fn released_memory_lies_on_the_template_however_often() {
    // It reads all of its memory after each thaw, and ends if a page is not as it was.
    let Some(node) = Node::of(&checking(FILLED_MIB)) else {
        return;
    };
    node.make();
    let templates = || node.done("GET /v1/templates", &json!(null))["items"].clone();
    let key = templates()[0]["key"].as_str().unwrap().to_owned();
    assert!(templates()[0]["memory_data_bytes"].as_u64().unwrap() > 8 << 20);
    let remove = |node: &Node| node.ask(&format!("DELETE /v1/templates/{key}"), &json!({}));
    let mut bases = Vec::new();
    let mut node = node;
    for _ in 0..3 {
        node.release();
        let manifest = node.manifest();
        let written = manifest["files"]["memory"]["data_bytes"].as_u64().unwrap();
        assert!(written < 1 << 20, "{written} bytes");
        // As one layer over the template.
        let place = manifest["base"]["place"].as_str().unwrap();
        assert!(place.ends_with(&format!("templates/{key}")), "{place}");
        bases.push(manifest["base"].clone());
        let (status, refused) = remove(&node);
        assert!(status.contains(" 409"), "{status} {refused}");
        assert_eq!(refused["code"], "snapshot-in-use");
        node = node.restart();
        node.resume();
        assert_eq!(node.shown()["state"], "running");
    }
    assert!(bases.iter().all(|base| *base == bases[0]), "{bases:?}");
    // Nothing lies on it any more. Then all memory is written.
    let (status, refused) = remove(&node);
    assert!(status.contains(" 204"), "{status} {refused}");
    node.release();
    let manifest = node.manifest();
    assert_eq!(manifest["base"], Value::Null);
    assert!(manifest["files"]["memory"]["data_bytes"].as_u64().unwrap() > 8 << 20);
    node.resume();
    node.delete();
    node.end();
}

#[test]
fn released_disk_is_a_layer_over_the_stored_snapshots() {
    let Some(node) = Node::new() else { return };
    node.make();
    node.done(&format!("POST {WEB}/freeze"), &json!({"name": "base"}));
    node.delete();
    node.done("POST /v1/thaws", &json!({"snapshot": "base", "name": "web"}));
    let (mut node, mut disks) = (node, Vec::new());
    for _ in 0..3 {
        // The next thawd finds both files of the disk.
        node = node.restart();
        node.release();
        let manifest = node.manifest();
        let disk = &manifest["files"]["disks"][0];
        // With reflinks, the disk is whole.
        let is_layer = disk["layer"] == json!(true);
        let format = if is_layer { 2 } else { 1 };
        assert_eq!(manifest["format"], json!(format));
        disks.push((is_layer, disk["bytes"].clone()));
        node.resume();
        assert_eq!(node.shown()["state"], "running");
    }
    assert!(disks.iter().all(|disk| *disk == disks[0]), "{disks:?}");
    node.delete();
    node.end();
}

#[test]
fn base_that_is_another_snapshot_now_is_refused_by_name() {
    let Some(node) = Node::new() else { return };
    node.make();
    node.release();
    let base = node.manifest()["base"]["manifest"].as_str().unwrap().to_owned();
    let templates = node.place.path("data/templates");
    let template = std::fs::read_dir(&templates)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| path.join("manifest.json").exists())
        .unwrap();
    let aside = node.place.path("aside");
    std::fs::rename(&template, &aside).unwrap();
    let refused = |code: &str| {
        let (status, refused) = node.ask(&format!("POST {WEB}/resume"), &json!({}));
        assert!(status.contains(" 4") || status.contains(" 5"), "{status}");
        assert_eq!(refused["code"], code, "{refused}");
        assert_eq!(node.shown()["memory_released"], json!(true));
        refused["detail"].as_str().unwrap().to_owned()
    };
    refused("snapshot-not-found");
    // The snapshot of the sandbox itself is no template, and another one.
    let id = node.shown()["id"].as_str().unwrap().to_owned();
    let own = node.place.path("data/paused").join(id).join("snapshot");
    std::os::unix::fs::symlink(&own, &template).unwrap();
    let detail = refused("snapshot-incompatible");
    assert!(detail.contains(&base), "{detail}");
    std::fs::remove_file(&template).unwrap();
    std::fs::rename(&aside, &template).unwrap();
    node.resume();
    node.delete();
    node.end();
}

#[test]
fn resume_takes_a_machine_made_ahead_under_the_same_id() {
    let Some(node) = Node::new() else { return };
    node.place.fill_pools_to(1..=1, 0..=0);
    let node = node.restart();
    let made = node.make();
    let before = node.shells_taken();
    eventually("a resume takes a machine out of its pool", || {
        node.release();
        node.resume();
        node.shells_taken() > before
    });
    let resumed = node.shown();
    assert_eq!(resumed["state"], "running");
    assert_eq!(identity(&resumed), identity(&made));
    assert_eq!((node.on_disk(), node.running()), (0, 1));
    // The next thawd finds it by its id.
    let node = node.restart();
    assert_eq!(identity(&node.shown()), identity(&made));
    node.delete();
    node.end();
}

#[test]
fn sandbox_with_an_attached_client_keeps_its_memory() {
    let Some(node) = Node::new() else { return };
    let client = ProcessRecord::myself().unwrap();
    let mut request = node.place.request();
    request["name"] = "web".into();
    request["client"] = json!({"pid": client.pid, "start_time": client.start_time});
    node.done("POST /v1/sandboxes", &request);
    let refused = |request: String, body: Value, status: &str, code: &str| {
        let (answered, problem) = node.ask(&request, &body);
        assert!(answered.contains(status), "{request}: {answered} {problem}");
        assert_eq!(problem["code"], code, "{problem}");
        assert_eq!(node.shown()["state"], "running");
    };
    let release = json!({"memory": "release"});
    refused(format!("POST {WEB}/pause"), release, " 409", "memory-kept");
    // thawd monitors no container in it.
    let leave = json!({"on_exit": "end"});
    refused(format!("PATCH {WEB}"), leave, " 404", "output-not-kept");
    assert_eq!((node.on_disk(), node.running()), (0, 1));
    node.delete();
    node.end();
}

#[test]
fn deleted_released_sandbox_leaves_nothing() {
    let Some(node) = Node::new() else { return };
    node.make();
    node.release();
    let (status, refused) = node.ask("POST /v1/sandboxes", &{
        let mut request = node.place.request();
        request["name"] = "web".into();
        request
    });
    assert!(status.contains(" 409"), "{status} {refused}");
    assert_eq!(refused["code"], "name-in-use");
    let (status, refused) = node.ask(&format!("POST {WEB}/freeze"), &json!({}));
    assert!(status.contains(" 409"), "{status} {refused}");
    assert_eq!(refused["code"], "memory-released");
    node.delete();
    let (status, _) = node.ask(&format!("GET {WEB}"), &json!(null));
    assert!(status.contains(" 404"), "{status}");
    node.make();
    node.delete();
    node.end();
}

#[test]
fn stopping_freeze_whose_name_is_taken_meanwhile_runs_on() {
    let Some(node) = Node::new() else { return };
    let sandboxes = ["one", "two"].map(|name| {
        let mut request = node.place.request();
        request["name"] = name.into();
        node.done("POST /v1/sandboxes", &request);
        format!("/v1/sandboxes/{name}")
    });
    let freeze = json!({"name": "same", "stop": true});
    let asked = sandboxes.each_ref().map(|sandbox| {
        let request = format!("POST {sandbox}/freeze");
        asked::ask(&node.place, &request, None, &freeze).unwrap()
    });
    let answers = asked.map(|asked| asked::answer(asked).unwrap());
    let is_refused = |status: &str| status.contains(" 409");
    let refused = answers.iter().filter(|(status, _)| is_refused(status)).count();
    assert_eq!(refused, 1, "{answers:?}");
    for (sandbox, (status, body)) in sandboxes.iter().zip(&answers) {
        let state = if is_refused(status) { "running" } else { "paused" };
        let shown = node.done(&format!("GET {sandbox}"), &json!(null));
        assert_eq!(shown["state"], state, "{body}");
        node.done(&format!("DELETE {sandbox}"), &json!({}));
    }
    node.end();
}

#[test]
fn published_port_that_is_taken_meanwhile_fails_the_resume() {
    let Some(node) = Node::new() else { return };
    if !rustix::process::geteuid().is_root() {
        return thaw_test_skip::skip("without root no ports are published");
    }
    let mut request = node.place.request();
    request["name"] = "web".into();
    request["publish"] = json!([{"host": 0, "guest": 80}]);
    let made = node.done("POST /v1/sandboxes", &request)["sandbox"].clone();
    let port = made["network"]["published"][0]["host"].as_u64().unwrap();
    // Its own port is free at once.
    node.release();
    node.resume();
    node.release();
    let mut taken = None;
    eventually("the port is given back", || {
        taken = std::net::TcpListener::bind(("0.0.0.0", u16::try_from(port).unwrap())).ok();
        taken.is_some()
    });
    let (status, refused) = node.ask(&format!("POST {WEB}/resume"), &json!({}));
    assert!(status.contains(" 409"), "{status} {refused}");
    assert_eq!(refused["code"], "port-unavailable");
    let paused = node.shown();
    assert_eq!(paused["memory_released"], json!(true));
    assert!(
        paused["reason"].as_str().unwrap().contains(&port.to_string()),
        "{paused}"
    );
    drop(taken);
    node.resume();
    let resumed = node.shown();
    assert_eq!(resumed["network"]["published"], made["network"]["published"]);
    node.delete();
    node.end();
}

#[test]
fn command_line_pauses_lists_and_resumes() {
    let Some(node) = Node::new() else { return };
    let made = node.make();
    let thaw = |arguments: &[&str]| {
        let output = node.place.command("thaw").args(arguments).output().unwrap();
        let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        assert!(output.status.success(), "{arguments:?}: {said}");
        said
    };
    thaw(&["pause", "--release-memory", "web"]);
    let listed = thaw(&["ps"]);
    assert!(listed.contains("paused (memory released)"), "{listed}");
    let filtered = thaw(&["ps", "-q", "--filter", "status=paused"]);
    assert_eq!(filtered.trim(), made["id"].as_str().unwrap());
    thaw(&["timeout", "web", "2h", "--on-timeout", "pause"]);
    assert_eq!(node.shown()["timeout_s"], 7200);
    assert_eq!(node.shown()["on_timeout"], "pause");
    thaw(&["resume", "web"]);
    assert_eq!(node.shown()["state"], "running");
    thaw(&["rm", "web"]);
    node.end();
}
