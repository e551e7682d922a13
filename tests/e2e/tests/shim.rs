//! containerd with Thaw as its runtime: `ctr`, images of Thaw's snapshotter, a microVM a container.
//!
//! Minutes in a lab, so most are not in every run: `tests/e2e/run --all yes --only shim`.

#![allow(clippy::unwrap_used)]

use thaw_e2e::node::{Node, kill, shims, until};

/// Largest a shim may be, bytes of memory it has.
const MOST_OF_A_SHIM: u64 = 8 << 20;

fn resident(pid: i32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

fn only_shim() -> i32 {
    let [shim] = shims()[..] else {
        panic!("one shim: {:?}", shims())
    };
    shim
}

/// In every run.
#[test]
fn ctr_runs_a_program_and_a_killed_shim_ends_its_microvm() {
    let node = Node::new();
    let ctr = &node.containerd;
    let code = ctr.run_ctr(&node.run(&["--rm"], "one", &["sh", "-c", "echo out; echo err >&2; exit 3"]));
    assert_eq!(
        (code.code(), code.stdout.as_str(), code.stderr.contains("err\n")),
        (3, "out\n", true),
        "{code:?}"
    );
    node.is_empty_soon();
    ctr.ctr(&node.run(&["-d"], "two", &["sleep", "1000"]));
    kill(only_shim());
    node.is_empty_soon();
    until("containerd has no task", || {
        !ctr.ctr(&["task", "ls"]).contains("two")
    });
}

#[test]
#[ignore = "long"]
fn ctr_executes_pauses_measures_and_kills() {
    let node = Node::new();
    let ctr = &node.containerd;
    let missing = ctr.run_ctr(&node.run(&["--rm"], "one", &["no-such-program"]));
    assert!(missing.stderr.contains("no-such-program"), "{missing:?}");
    // What a microVM cannot have is refused, and says so.
    let refused = ctr.run_ctr(&node.run(&["--rm", "--net-host"], "one", &["true"]));
    assert!(refused.stderr.contains("host's network"), "{refused:?}");
    node.is_empty_soon();

    ctr.ctr(&node.run(&["-d"], "two", &["sleep", "1000"]));
    let script = "cat /proc/1/cmdline; exit 4";
    let executed = ctr.run_ctr(&["task", "exec", "--exec-id", "e", "two", "sh", "-c", script]);
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
    let resident = resident(only_shim());
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
}

/// A counter whose only memory is its process's.
const COUNTER: &str = "n=0; while read line; do n=$((n+1)); echo $n > /n; done < /fifo";

#[test]
#[ignore = "long"]
fn a_container_goes_on_out_of_its_checkpoint() {
    let node = Node::new();
    let ctr = &node.containerd;
    let script = format!("mkfifo /fifo; exec 3<> /fifo; touch /made; {COUNTER}");
    let small = ["-d", "--memory-limit", "33554432"];
    ctr.ctr(&node.run(&small, "old", &["sh", "-c", &script]));
    let exec = |id: &str, exec: &str, script: &str| {
        ctr.run_ctr(&["task", "exec", "--exec-id", exec, id, "sh", "-c", script])
    };
    until("it counts", || exec("old", "a", "test -e /made").code() == 0);
    let count = |id: &str, name: &str, wanted: &str| {
        let script = format!("echo > /fifo; until [ \"$(cat /n)\" = {wanted} ]; do sleep 0.1; done; cat /n");
        let said = exec(id, name, &script);
        assert_eq!(said.stdout.trim(), wanted, "{said:?}");
    };
    count("old", "b", "1");
    ctr.ctr(&[
        "container",
        "checkpoint",
        "--image",
        "--task",
        "old",
        "checkpoint/of:old",
    ]);
    count("old", "c", "2");
    let restore = ctr.run_ctr(&["container", "restore", "--live", "new", "checkpoint/of:old"]);
    assert_eq!(restore.code(), 0, "{restore:?}");
    // From where it was frozen.
    count("new", "b", "2");
    assert_eq!(node.sandboxes().len(), 2);
    for id in ["old", "new"] {
        ctr.ctr(&["task", "kill", "--signal", "SIGKILL", id]);
        until("the task has ended", || {
            let listed = ctr.ctr(&["task", "ls"]);
            listed
                .lines()
                .any(|line| line.contains(id) && line.contains("STOPPED"))
        });
        ctr.run_ctr(&["task", "delete", id]);
    }
    node.is_empty_soon();
}
