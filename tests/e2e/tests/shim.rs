//! containerd with Thaw as its runtime: `ctr` and CRI, images of Thaw's snapshotter, a microVM a pod.
//!
//! Minutes in a lab, so not in every run: `tests/e2e/run --all yes --only shim`.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use thaw_e2e::containerd::{Containerd, RUNTIME};
use thaw_e2e::cri;
use thaw_e2e::home::Home;
use thaw_e2e::run;
use thaw_e2e::upstream::Upstream;

/// Largest a shim may be, bytes of memory it has.
const MOST_OF_A_SHIM: u64 = 8 << 20;
/// How long what goes on by itself may take, in a lab.
const PATIENCE: Duration = Duration::from_secs(60);

/// A node with containerd, and one image.
struct Node {
    // Stopped in this order.
    containerd: Containerd,
    thawd: Child,
    _upstream: Upstream,
    home: Home,
    image: String,
}

impl Node {
    fn new() -> Node {
        let home = Home::new();
        let upstream = Upstream::test_images(&home.scratch("registry"), None);
        let socket = home.run().join("snapshots.sock");
        let thawd = home.thawd(&["--snapshots-socket", socket.to_str().unwrap()]);
        let image = format!("{}/python3:latest", upstream.host);
        let containerd = Containerd::start(&home, &socket, &image);
        containerd.pull(&image).unwrap();
        Node {
            containerd,
            thawd,
            _upstream: upstream,
            home,
            image,
        }
    }

    /// `ctr run` with words before the image.
    fn run<'a>(&'a self, options: &[&'a str], id: &'a str, command: &[&'a str]) -> Vec<&'a str> {
        let fixed = ["run", "--runtime", RUNTIME, "--snapshotter", "thaw"];
        [&fixed, options, &[&self.image, id], command].concat()
    }

    fn sandboxes(&self) -> Vec<serde_json::Value> {
        let listed = run(&mut self.home.thaw(&["--json", "ps"])).ok();
        serde_json::from_str(&listed).unwrap()
    }

    /// Waits until no microVM is there, and no shim.
    fn is_empty_soon(&self) {
        until("microVMs and shims are gone", || {
            self.sandboxes().is_empty() && shims().is_empty()
        });
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.thawd.kill();
        let _ = self.thawd.wait();
    }
}

fn until(what: &str, holds: impl Fn() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < PATIENCE, "not so after {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// The processes that are shims.
fn shims() -> Vec<i32> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = processes.filter_map(|p| p.file_name().to_str()?.parse().ok());
    let is_shim = |pid: &i32| {
        let program = std::fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
        program
            .file_name()
            .is_some_and(|name| name == "containerd-shim-thaw-v2")
    };
    pids.filter(is_shim).collect()
}

fn resident(pid: i32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

#[test]
#[ignore = "long"]
fn ctr_runs_executes_pauses_measures_and_kills() {
    let node = Node::new();
    let ctr = &node.containerd;
    let hi = ctr.ctr(&node.run(&["--rm"], "one", &["echo", "hi"]));
    assert_eq!(hi, "hi\n");
    let code = ctr.run_ctr(&node.run(&["--rm"], "one", &["sh", "-c", "echo to-stderr >&2; exit 3"]));
    assert_eq!(
        (code.code(), code.stderr.contains("to-stderr")),
        (3, true),
        "{code:?}"
    );
    let missing = ctr.run_ctr(&node.run(&["--rm"], "one", &["no-such-program"]));
    assert!(missing.stderr.contains("no-such-program"), "{missing:?}");
    // What a microVM cannot have is refused, and says so.
    let refused = ctr.run_ctr(&node.run(&["--rm", "--net-host"], "one", &["true"]));
    assert!(refused.stderr.contains("host's network"), "{refused:?}");
    node.is_empty_soon();

    ctr.ctr(&node.run(&["-d"], "two", &["sleep", "1000"]));
    let executed = ctr.run_ctr(&[
        "task",
        "exec",
        "--exec-id",
        "e",
        "two",
        "sh",
        "-c",
        "cat /proc/1/cmdline; exit 4",
    ]);
    assert_eq!(executed.code(), 4, "{executed:?}");
    assert!(executed.stdout.contains("sleep"), "{executed:?}");
    let status = || ctr.ctr(&["task", "ls"]);
    ctr.ctr(&["task", "pause", "two"]);
    assert!(status().contains("PAUSED"), "{}", status());
    ctr.ctr(&["task", "resume", "two"]);
    assert!(status().contains("RUNNING"), "{}", status());
    let metrics = ctr.ctr(&["task", "metrics", "two"]);
    assert!(
        metrics.contains("memory.usage_in_bytes") || metrics.contains("memory.usage"),
        "{metrics}"
    );
    let [shim] = shims()[..] else {
        panic!("one shim: {:?}", shims())
    };
    let resident = resident(shim);
    eprintln!("the shim has {} KiB", resident / 1024);
    assert!(resident <= MOST_OF_A_SHIM, "the shim has {resident} bytes");
    ctr.ctr(&["task", "kill", "--signal", "SIGKILL", "two"]);
    until("the task has ended", || status().contains("STOPPED"));
    assert!(
        ctr.run_ctr(&["task", "kill", "--signal", "SIGKILL", "two"])
            .code()
            != 0
    );
    // Some versions of it end with the task's code.
    let deleted = ctr.run_ctr(&["task", "delete", "two"]);
    assert!([0, 137].contains(&deleted.code()), "{deleted:?}");
    ctr.ctr(&["container", "delete", "two"]);
    node.is_empty_soon();

    // A shim that is killed takes its microVM along, and containerd hears of the end.
    ctr.ctr(&node.run(&["-d"], "three", &["sleep", "1000"]));
    let [shim] = shims()[..] else {
        panic!("one shim: {:?}", shims())
    };
    rustix::process::kill_process(thaw_e2e::pid_of(shim), rustix::process::Signal::KILL).unwrap();
    node.is_empty_soon();
    until("containerd has no task", || !status().contains("three"));
    ctr.ctr(&["container", "delete", "three"]);
}

#[test]
#[ignore = "long"]
fn a_pod_of_two_containers_shares_a_microvm() {
    let node = Node::new();
    let ctr = &node.containerd;
    let logs = node.home.scratch("logs");
    let config = pod_config(&logs);
    let pod: cri::Pod = call(
        ctr,
        "RunPodSandbox",
        cri::RunPodSandboxRequest {
            config: Some(config.clone()),
            runtime_handler: "thaw".into(),
        },
    );
    let start = |name: &str, script: &str| {
        let made: cri::Container = call(
            ctr,
            "CreateContainer",
            cri::CreateContainerRequest {
                pod_sandbox_id: pod.pod_sandbox_id.clone(),
                config: Some(cri::ContainerConfig {
                    metadata: Some(cri::ContainerMetadata { name: name.into() }),
                    image: Some(cri::ImageSpec {
                        image: node.image.clone(),
                    }),
                    command: ["sh", "-c", script].map(str::to_owned).to_vec(),
                    log_path: format!("{name}.log"),
                }),
                sandbox_config: Some(config.clone()),
            },
        );
        let _: cri::Empty = call(ctr, "StartContainer", made.clone());
        made
    };
    let first = start("first", "hostname; cat /etc/hostname; sleep 1000");
    let second = start("second", "exit 5");
    let state = |container: &cri::Container| {
        let status: cri::ContainerStatusResponse = call(ctr, "ContainerStatus", container.clone());
        let status = status.status.unwrap();
        (status.state, status.exit_code)
    };
    until("the second has exited", || state(&second) == (2, 5));
    assert_eq!(state(&first), (1, 0));
    assert_eq!(
        (node.sandboxes().len(), shims().len()),
        (1, 1),
        "one microVM, one shim"
    );
    let executed: cri::ExecSyncResponse = call(
        ctr,
        "ExecSync",
        cri::ExecSyncRequest {
            container_id: first.container_id.clone(),
            cmd: ["sh", "-c", "echo out; echo err >&2; exit 6"]
                .map(str::to_owned)
                .to_vec(),
            timeout: 60,
        },
    );
    let (out, err) = (executed.stdout.as_slice(), executed.stderr.as_slice());
    assert_eq!((out, err, executed.exit_code), (&b"out\n"[..], &b"err\n"[..], 6));
    until("the log is written", || {
        let log = std::fs::read_to_string(logs.join("first.log")).unwrap_or_default();
        log.matches("the-pod").count() == 2
    });
    let _: cri::Empty = call(
        ctr,
        "StopContainer",
        cri::StopContainerRequest {
            container_id: first.container_id.clone(),
            timeout: 0,
        },
    );
    assert_eq!(state(&first), (2, 137));
    for container in [first, second] {
        let _: cri::Empty = call(ctr, "RemoveContainer", container);
    }
    let _: cri::Empty = call(ctr, "StopPodSandbox", pod.clone());
    let _: cri::Empty = call(ctr, "RemovePodSandbox", pod);
    node.is_empty_soon();
}

fn pod_config(logs: &Path) -> cri::PodSandboxConfig {
    cri::PodSandboxConfig {
        metadata: Some(cri::PodSandboxMetadata {
            name: "pod".into(),
            uid: "1".into(),
            namespace: "default".into(),
        }),
        hostname: "the-pod".into(),
        log_directory: logs.display().to_string(),
        ..Default::default()
    }
}

fn call<Q, A>(containerd: &Containerd, method: &str, request: Q) -> A
where
    Q: prost::Message + Clone + Send + Sync + 'static,
    A: prost::Message + Default + Send + Sync + 'static,
{
    containerd
        .cri("RuntimeService", method, request)
        .unwrap_or_else(|e| panic!("{method}: {e}"))
}
