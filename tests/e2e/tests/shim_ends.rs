//! Whatever ends of a pod and what it stands on, its containers are told to have ended as killed, each once, or go on; and
//! nothing of it is left.
//!
//! Minutes in a lab, so not in every run: `tests/e2e/run --all yes --only shim_ends`.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::io::BufRead;
use std::path::Path;
use std::process::Child;
use std::sync::{Arc, Mutex};

use thaw_e2e::containerd::Containerd;
use thaw_e2e::cri;
use thaw_e2e::leftovers::{mounts, walk};
use thaw_e2e::node::{Node, Pod, kill, serving, shims, until};

const KILLED: i32 = 137;
/// containerd's word, for whatever runtime, for a container whose shim went while CRI waited on it.
const UNKNOWN: i32 = 255;

/// What pods leave on a host, but for the spare machines of thawd's pools, which come and go.
#[derive(Debug, PartialEq, Eq)]
struct Traces {
    mounts: BTreeSet<String>,
    cgroups: BTreeSet<String>,
    /// Network namespaces, shims' sockets and clients' fifos.
    files: BTreeSet<String>,
    bundles: usize,
    shims: usize,
    machines: usize,
}

impl Traces {
    fn of(node: &Node) -> Traces {
        let of_thawd = |path: &String| path.contains("/thaw");
        let cgroups = walk(Path::new("/sys/fs/cgroup")).into_iter();
        let files = ["/run/netns", "/run/containerd"].map(|directory| walk(Path::new(directory)));
        Traces {
            mounts: mounts(),
            cgroups: cgroups
                .filter(|path| Path::new(path).is_dir() && !of_thawd(path))
                .collect(),
            files: files.into_iter().flatten().collect(),
            bundles: node.containerd.bundles().len(),
            shims: shims().len(),
            machines: node.sandboxes().len(),
        }
    }

    /// Waits until all is as it was then.
    fn settle(&self, node: &Node) {
        until(&format!("as it was: {self:#?}"), || {
            let now = Traces::of(node);
            if now != *self {
                eprintln!("not yet as it was: {now:?}");
            }
            now == *self
        });
    }
}

/// What containerd tells of tasks, line by line.
struct Events {
    told: Arc<Mutex<Vec<String>>>,
    listening: Child,
}

impl Events {
    fn of(containerd: &Containerd) -> Events {
        let mut listening = containerd.ctr_command(&["events"]).spawn().unwrap();
        let lines = std::io::BufReader::new(listening.stdout.take().unwrap()).lines();
        let told = Arc::new(Mutex::new(Vec::new()));
        let telling = told.clone();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                telling.lock().unwrap().push(line);
            }
        });
        Events { told, listening }
    }

    /// Waits for the end of a container's own process: how often it was told, each with its code. Those executed beside it end too.
    fn exits(&self, id: &str) -> Vec<String> {
        let own = format!("\"id\":\"{id}\"");
        let exits = || {
            let told = self.told.lock().unwrap();
            let exits = told
                .iter()
                .filter(|line| line.contains("/tasks/exit") && line.contains(&own));
            exits.cloned().collect::<Vec<_>>()
        };
        until("the end is told", || !exits().is_empty());
        exits()
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        let _ = self.listening.kill();
        let _ = self.listening.wait();
    }
}

/// The VMM of a pod, by what containerd has for its process.
fn vmm(node: &Node, id: &str) -> i32 {
    let listed = node.containerd.ctr(&["task", "ls"]);
    let line = listed.lines().find(|line| line.starts_with(id)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// A pod that may do to its guest what it likes, and sees all of it: the host's processes stand for the guest's.
fn mighty<'a>(node: &'a Node, name: &str) -> Pod<'a> {
    let pod = node.pod_with(name, |config| {
        config
            .annotations
            .insert("run.thaw.host-namespaces".into(), "guest".into());
        let security = config.linux.as_mut().unwrap().security_context.as_mut().unwrap();
        security.privileged = true;
        security.namespace_options.as_mut().unwrap().pid = 2;
    });
    pod.unwrap()
}

fn mighty_container(pod: &Pod<'_>, name: &str, script: &str) -> cri::Container {
    pod.container_with(name, script, |config, security| {
        // Something of the host, for which there is a thaw-share.
        config.mounts = vec![cri::Mount {
            container_path: "/of-the-host".into(),
            host_path: "/usr".into(),
        }];
        security.privileged = true;
        security.namespace_options.as_mut().unwrap().pid = 2;
    })
}

/// Starts a script in a container and does not care for its end: the guest's comes first.
fn inflict(node: &Node, container: &cri::Container, script: &str) {
    let request = cri::ExecSyncRequest {
        container_id: container.container_id.clone(),
        cmd: ["sh", "-c", script].map(str::to_owned).to_vec(),
        timeout: 120,
    };
    let _: Result<cri::ExecSyncResponse, _> = node.try_call("ExecSync", request);
}

/// A program that overwrites the agent's own where it runs, from its end: what runs meanwhile comes upon what is overwritten already.
const OVERWRITE_AGENT: &str = "python3 -c '
for line in open(\"/proc/1/maps\"):
    span, mode = line.split()[:2]
    if mode == \"r-xp\" and \"[\" not in line:
        begin, end = (int(n, 16) for n in span.split(\"-\"))
        size = end - begin
        code = CODE
        memory = open(\"/proc/1/mem\", \"r+b\", 0)
        for at in range(size - 4096, -1, -4096):
            memory.seek(begin + at)
            memory.write(code[at:at + 4096])
'";
/// Code that is none: the agent is killed.
const NO_CODE: &str = "bytes(size)";
/// Wherever the agent is, it comes to a jump to itself (nop, ..., nop, jmp -2). Its connection stays, and no call is answered.
const ENDLESS: &str = "bytes([0x90]) * (size - 2) + bytes([0xeb, 0xfe])";

fn overwrite_agent(node: &Node, container: &cri::Container, code: &str) {
    inflict(node, container, &OVERWRITE_AGENT.replace("CODE", code));
}

#[test]
#[ignore = "long"]
fn every_end_of_a_pod_reports_containers_killed_once() {
    let node = Node::new();
    // What a first pod leaves for others, as the parent of their cgroups, is no trace of it.
    node.pod("first").remove();
    node.is_empty_soon();
    let before = Traces::of(&node);
    let events = Events::of(&node.containerd);
    type End = fn(&Node, &Pod<'_>, &cri::Container);
    let ends: [(&str, i32, End); 5] = [
        ("vmm", KILLED, |node, pod, _| kill(vmm(node, &pod.id))),
        ("shim", UNKNOWN, |_, _, _| {
            let [shim] = shims()[..] else {
                panic!("one shim: {:?}", shims())
            };
            kill(shim);
        }),
        ("panic", KILLED, |node, _, container| {
            inflict(node, container, "echo c > /proc/sysrq-trigger")
        }),
        ("agent", KILLED, |node, _, container| {
            overwrite_agent(node, container, NO_CODE)
        }),
        ("silent", KILLED, |node, _, container| {
            overwrite_agent(node, container, ENDLESS);
            node.stop(container, 0);
        }),
    ];
    for (name, told, end) in ends {
        eprintln!("== {name}");
        let pod = mighty(&node, name);
        let containers = ["a", "b"].map(|name| mighty_container(&pod, name, "sleep 1000"));
        if name == "agent" || name == "silent" {
            // All of the guest is seen: the agent too, which is its init.
            assert_eq!(node.said(&containers[0], "cat /proc/1/comm"), "init\n");
        }
        end(&node, &pod, &containers[0]);
        for container in &containers {
            assert_eq!(node.ends_soon(container), told, "{name}");
            let exits = events.exits(&container.container_id);
            assert_eq!(exits.len(), 1, "{name}: {exits:?}");
            assert!(exits[0].contains("\"exit_status\":137"), "{name}: {exits:?}");
        }
        let status = || -> cri::PodSandboxStatusResponse {
            let id = pod.id.clone();
            node.call(
                "PodSandboxStatus",
                cri::PodSandboxStatusRequest { pod_sandbox_id: id },
            )
        };
        until("the pod is not ready", || status().status.unwrap().state == 1);
        pod.remove();
        before.settle(&node);
        let reason = match name {
            "vmm" => "signal",
            "panic" => "guest-panic",
            "agent" => "agent-died",
            _ => continue,
        };
        until(&format!("thawd lists that it failed: {reason}"), || {
            node.failures().iter().any(|failure| failure == reason)
        });
    }
}

#[test]
#[ignore = "long"]
fn a_pod_outlives_its_thaw_share() {
    let node = Node::new();
    node.pod("first").remove();
    node.is_empty_soon();
    let before = Traces::of(&node);
    let pod = mighty(&node, "shared");
    let container = mighty_container(&pod, "a", "sleep 1000");
    node.said(&container, "ls /of-the-host/bin && test -r /proc/self/status");
    for _ in 0..2 {
        let [share] = serving()[..] else {
            panic!("one thaw-share: {:?}", serving())
        };
        kill(share);
        until(
            "another serves",
            || matches!(serving()[..], [other] if other != share),
        );
        // What the host shares is there, and what is mounted in the container still is.
        node.said(
            &container,
            "ls /of-the-host/bin && test -r /proc/self/status && test -c /dev/null",
        );
        assert_eq!(node.state(&container).0, 1);
    }
    // More is shared with the pod, as before.
    let another = mighty_container(&pod, "b", "sleep 1000");
    node.said(&another, "ls /of-the-host/bin");
    pod.remove();
    before.settle(&node);
}

#[test]
#[ignore = "long"]
fn pod_outlives_containerd_and_thawd_that_learn_of_its_end() {
    let mut node = Node::new();
    {
        let pod = node.pod("first");
        let container = pod.container("a", "sleep 1000");
        node.said(&container, "true");
        pod.remove();
    }
    node.is_empty_soon();
    let before = Traces::of(&node);
    let names = {
        let stays = node.pod("stays");
        let ends = node.pod("ends");
        let staying = stays.container("a", "touch /file; sleep 1000");
        let ending = ends.container("b", "sleep 1000");
        let stopped = node.pod("stopped");
        stopped.container("c", "sleep 1000");
        (stays.id, ends.id, stopped.id, staying, ending)
    };
    let (stays, ends, stopped, staying, ending) = names;

    let dying = vmm(&node, &ends);
    node.containerd.kill();
    kill(dying);
    node.start_containerd();
    assert_eq!(node.ends_soon(&ending), KILLED);
    assert_eq!(node.state(&staying).0, 1);
    node.said(&staying, "test -e /file");

    // Its thawd is gone, and another is there: the shim finds it, and has told no end.
    let gone: [fn(&mut Node); 2] = [Node::stop_thawd, Node::kill_thawd];
    for gone in gone {
        gone(&mut node);
        node.start_thawd();
        assert_eq!(node.sandboxes().len(), 2);
        node.said(&staying, "test -e /file");
        assert_eq!(node.state(&staying).0, 1);
    }
    node.remove_pod(&stopped);
    // A kubelet would try again: containerd's connection to its snapshotter is anew, but not at once.
    until("containerd has found its snapshotter", || {
        let listed = node
            .containerd
            .try_ctr(&["snapshots", "--snapshotter", "thaw", "ls"]);
        listed.is_ok()
    });
    let later = node.pod("later");
    let fresh = later.container("c", "sleep 1000");
    node.said(&fresh, "true");
    later.remove();
    kill(vmm(&node, &stays));
    assert_eq!(node.ends_soon(&staying), KILLED);
    for id in [stays, ends] {
        node.remove_pod(&id);
    }
    before.settle(&node);
}
