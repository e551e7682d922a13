//! The runbook's "Hung guest": a guest whose only vCPU never runs the agent again is removed in bounded time, and nothing of it stays.
//!
//! One test in a file of its own: it counts what the whole host has, so nothing else may run beside it.

#![allow(clippy::unwrap_used)]

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use thaw_e2e::home::Home;
use thaw_e2e::leftovers::Leftovers;
use thaw_e2e::{image, pid_of, run};

/// The longest removal. Leftovers settle within a limit of their own.
const LIMIT: Duration = Duration::from_secs(60);

/// So long an exec in a guest that runs never takes.
const SILENCE: Duration = Duration::from_secs(30);

/// A process of the highest realtime priority that computes for ever: the kernel then runs no other on this vCPU.
const HANG: &str = "import os
open('/proc/sys/kernel/sched_rt_runtime_us', 'w').write('-1')
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(99))
while True: pass";

/// An exec of which nothing is known yet.
fn exec(home: &Home, command: &[&str]) -> Child {
    let line = [&["exec", "hung"], command].concat();
    let mut exec = home.thaw(&line);
    exec.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

fn ended(mut exec: Child) {
    let _ = exec.kill();
    exec.wait().unwrap();
}

fn hung_sandbox_is_removed(home: &Home, before: &Leftovers, vmm_hangs: bool) {
    let python = image("python3");
    let flags = [
        "run",
        "-d",
        "--name",
        "hung",
        "--privileged",
        &python,
        "sleep",
        "10000",
    ];
    run(&mut home.thaw(&flags)).ok();
    run(&mut home.thaw(&["exec", "hung", "true"])).ok();
    let hanging = exec(home, &["python3", "-c", HANG]);
    std::thread::sleep(SILENCE);
    let mut asked = exec(home, &["true"]);
    std::thread::sleep(SILENCE);
    assert!(asked.try_wait().unwrap().is_none(), "the guest still answers");
    if vmm_hangs {
        for process in Leftovers::now().processes.difference(&before.processes) {
            if let Some((pid, "thaw-vmm")) = process.split_once(' ') {
                rustix::process::kill_process(pid_of(pid.parse().unwrap()), Signal::STOP).unwrap();
            }
        }
    }
    let began = Instant::now();
    run(&mut home.thaw(&["rm", "hung"])).ok();
    assert!(began.elapsed() < LIMIT, "removed after {:?}", began.elapsed());
    ended(asked);
    ended(hanging);
}

/// Waits until nothing came or went but networks and cgroups, which thawd's pools make ahead.
fn settled_beside_pools(before: &Leftovers) {
    let since = Instant::now();
    loop {
        let mut changes = Leftovers::now().changes(before);
        changes.retain(|change| !change.contains(" thaw-n") && !change.contains("/sys/fs/cgroup/"));
        if changes.is_empty() {
            return;
        }
        assert!(since.elapsed() < LIMIT, "it is not as it was: {changes:#?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn hung_guest_is_removed_and_leaves_nothing() {
    let home = Home::new();
    // Fills the store.
    run(&mut home.thaw(&["run", "--rm", &image("python3"), "true"])).ok();
    let before = Leftovers::now();
    hung_sandbox_is_removed(&home, &before, false);
    Leftovers::settle(&before);
    let mut thawd = home.thawd(&[]);
    let before = Leftovers::now();
    hung_sandbox_is_removed(&home, &before, true);
    settled_beside_pools(&before);
    rustix::process::kill_process(pid_of(thawd.id() as i32), Signal::TERM).unwrap();
    assert!(thawd.wait().unwrap().success());
}
