//! Stored snapshots of a server that became warm: its clones on other nodes go on where it was, and so does the server itself after a
//! pause that released its memory.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::process::Child;
use std::thread;

use serde_json::json;
use thaw_e2e::api::ask;
use thaw_e2e::home::{Home, stop};
use thaw_e2e::node::until;
use thaw_e2e::upstream::Upstream;
use thaw_e2e::warmed::{self, Answer, PORT};
use thaw_e2e::{image, run};

/// What the server fills of its memory.
const FILLED_MIB: u32 = 8;
/// Longer than Python takes to start on an emulated machine, seconds.
const READY_S: u32 = 240;
/// Clones of one snapshot.
const CLONES: usize = 10;

/// A node of its own: nothing that another has on this host is in its directories.
struct Node {
    home: Home,
    thawd: Child,
}

impl Node {
    fn start() -> Node {
        let home = Home::new();
        let thawd = home.thawd(&[]);
        Node { home, thawd }
    }

    /// What a command prints here.
    fn done(&self, arguments: &[&str]) -> String {
        let printed = run(&mut self.home.thaw(arguments)).ok();
        printed.trim_end().to_owned()
    }

    /// Where the host forwards to a sandbox's server.
    fn published(&self, sandbox: &str) -> SocketAddr {
        let port = self.done(&["port", sandbox, &PORT.to_string()]);
        let port = port.rsplit_once(':').unwrap().1.parse().unwrap();
        (Ipv4Addr::LOCALHOST, port).into()
    }

    fn answer(&self, sandbox: &str) -> Answer {
        warmed::ask(self.published(sandbox))
    }

    /// Thaws the snapshot `web-ready` and asks the clone for its page.
    fn thawed(&self, sandbox: &str) -> Answer {
        let publish = format!("0:{PORT}");
        self.done(&["thaw", "-d", "--name", sandbox, "-p", &publish, "web-ready"]);
        self.answer(sandbox)
    }

    /// Pulls the snapshot `web-ready`, and does the same.
    fn pulled(&self, reference: &str) -> Answer {
        let id = self.done(&["snapshot", "pull", reference, "--name", "web-ready"]);
        assert_eq!(self.done(&["-q", "snapshot", "ls"]), id);
        self.thawed("web")
    }

    /// Stops thawd and starts it again.
    fn restarted(self) -> Node {
        stop(self.thawd);
        let thawd = self.home.thawd(&[]);
        Node { thawd, ..self }
    }

    fn remove(&self, sandboxes: &[&str]) {
        self.done(&[&["rm"], sandboxes].concat());
    }

    /// Stops thawd and removes all that the node has.
    fn end(self) {
        assert_eq!(self.done(&["ps", "-q"]), "");
        stop(self.thawd);
    }
}

/// Fails unless these go on from the same server, each for the first time, and none has what another has.
fn assert_clones(of: &Answer, clones: &[Answer]) {
    let all = clones.iter().chain([of]);
    let (mut random, mut hosts) = (BTreeSet::new(), BTreeSet::new());
    for answer in all {
        assert_eq!(answer.warm, of.warm, "{clones:?}");
        assert!(random.insert(&answer.random), "{clones:?}");
        assert!(hosts.insert(&answer.host), "{clones:?}");
    }
    for clone in clones {
        assert_eq!(clone.served, of.served + 1, "{of:?}: {clones:?}");
    }
}

#[test]
#[ignore = "long"]
fn pushed_snapshot_serves_on_two_other_nodes_at_once() {
    let place = tempfile::tempdir().unwrap();
    let registry = Upstream::empty(&place.path().join("registry"));
    registry.push(&image("python3"), "python3:latest");
    let python = format!("{}/python3:latest", registry.host);
    let reference = format!("{}/web:ready", registry.host);

    let first = Node::start();
    let (publish, port, ready) = (format!("0:{PORT}"), PORT.to_string(), READY_S.to_string());
    let options = ["-d", "--name", "web", "-p", &publish, "--ready-tcp", &port];
    let patient = ["--ready-timeout", &ready, &python];
    let server = warmed::command(FILLED_MIB);
    let server: Vec<&str> = server.iter().map(String::as_str).collect();
    first.done(&[&["run"], &options[..], &patient, &server[..]].concat());
    let [.., frozen] = [(); 3].map(|()| first.answer("web"));
    assert_eq!(frozen.served, 3);
    first.done(&["freeze", "web", "--name", "web-ready"]);
    let digest = first.done(&["snapshot", "push", "web-ready", &reference]);
    assert!(digest.starts_with("sha256:"), "{digest}");
    first.remove(&["web"]);
    first.end();

    let others = [Node::start(), Node::start()];
    let answers: Vec<Answer> = thread::scope(|scope| {
        let reference = &reference;
        let pulling = others
            .each_ref()
            .map(|node| scope.spawn(move || node.pulled(reference)));
        pulling.map(|pulled| pulled.join().unwrap()).into()
    });
    assert_clones(&frozen, &answers);

    let [second, third] = others;
    let names: Vec<String> = (1..=CLONES).map(|number| format!("clone-{number}")).collect();
    let clones: Vec<Answer> = names.iter().map(|name| second.thawed(name)).collect();
    assert_clones(&frozen, &[&answers[..], &clones].concat());
    assert_eq!(second.answer("web").served, frozen.served + 2);
    let names: Vec<&str> = names.iter().map(String::as_str).chain(["web"]).collect();
    second.remove(&names);
    third.remove(&["web"]);
    second.end();
    third.end();
}

#[test]
fn released_sandbox_goes_on_counting_behind_its_port() {
    let node = Node::start();
    let request = json!({
        "image": image("python3"), "cpus": 1, "memory_mib": 256, "name": "web", "publish": [{"host": 0, "guest": PORT}],
        "container": {
            "command": warmed::command(FILLED_MIB),
            "readiness": {"tcp": {"port": PORT}, "timeout_s": READY_S},
        },
    });
    let (head, made) = ask(&node.home, "POST", "/v1/sandboxes", &request.to_string());
    assert!(head.starts_with("http/1.1 201"), "{head} {made}");
    let (at, before) = (node.published("web"), node.answer("web"));
    node.done(&["pause", "--release-memory", "web"]);
    let vmm = format!("/proc/{}", made["sandbox"]["vmm_pid"]);
    until("its VMM is gone", || !Path::new(&vmm).exists());
    assert!(node.done(&["ps"]).contains("paused (memory released)"));
    until("its port is given back", || TcpStream::connect(at).is_err());

    let node = node.restarted();
    node.done(&["resume", "web"]);
    assert_eq!(node.published("web"), at);
    let after = node.answer("web");
    assert_eq!((&after.warm, &after.host), (&before.warm, &before.host));
    assert_eq!(after.served, before.served + 1);
    assert_ne!(after.random, before.random);
    let name = node.done(&["exec", "web", "cat", "/proc/sys/kernel/hostname"]);
    assert_eq!(name, after.host);
    node.remove(&["web"]);
    node.end();
}

#[test]
fn first_thaw_alone_is_asked_whether_it_is_ready() {
    let node = Node::start();
    let python = image("python3");
    let ready = READY_S.to_string();
    let options = [
        "-d",
        "--name",
        "web",
        "--ready-http",
        "8000/",
        "--ready-timeout",
        &ready,
    ];
    // It logs each request.
    let server = "cd /srv; exec python3 -m http.server 8000 2>/log";
    node.done(&[&["run"], &options[..], &[&*python, "sh", "-c", server]].concat());
    let asked = |sandbox: &str| -> u32 {
        let count = node.done(&["exec", sandbox, "grep", "-c", "GET / ", "/log"]);
        count.parse().unwrap()
    };
    node.done(&["freeze", "web", "--name", "web-ready"]);
    // Not always 1: an attempt that takes too long is repeated. Nothing asks it any more, so the snapshot has as many.
    let before = asked("web");
    node.done(&["thaw", "-d", "--name", "first", "web-ready"]);
    until("it is asked", || asked("first") > before);
    node.done(&["thaw", "-d", "--name", "second", "web-ready"]);
    assert_eq!(asked("second"), before);
    node.remove(&["web", "first", "second"]);
    node.end();
}
