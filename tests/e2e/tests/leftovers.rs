//! After `thaw run` ends, however it ends, nothing of it remains.
//!
//! One test in a file of its own: it counts what the whole host has, so nothing else may run beside it.

#![allow(clippy::unwrap_used)]

use rustix::process::Signal;
use thaw_e2e::leftovers::Leftovers;
use thaw_e2e::{image, pid_of, run, thaw, wait_for_line};

#[test]
fn nothing_remains_after_any_end() {
    let busybox = image("busybox");
    // The first run fills the store and makes what lives as long as the installation.
    run(&mut thaw(&["run", "--rm", &busybox, "true"])).ok();
    let before = Leftovers::now();

    run(&mut thaw(&["run", "--rm", &busybox, "true"])).ok();
    assert_eq!(Leftovers::now(), before, "after success");

    assert_eq!(
        run(&mut thaw(&["run", "--rm", &busybox, "no-such-command"])).code(),
        127
    );
    assert_eq!(Leftovers::now(), before, "after a command not found");

    let mut child = thaw(&["run", "--rm", &busybox, "sh", "-c", "echo up; exec sleep 1000"])
        .spawn()
        .unwrap();
    let rest = wait_for_line(&mut child, "up");
    let running = Leftovers::now();
    assert_ne!(
        running, before,
        "a running sandbox is visible, or this test sees nothing"
    );
    child.kill().unwrap();
    child.wait().unwrap();
    drop(rest);
    // The next start cleans what the kill left. Its VMM is an orphan, which the host's init reaps.
    run(&mut thaw(&["run", "--rm", &busybox, "true"])).ok();
    Leftovers::settle(&before);

    let mut child = thaw(&["run", "--rm", &busybox, "sh", "-c", "echo up; exec sleep 1000"])
        .spawn()
        .unwrap();
    let rest = wait_for_line(&mut child, "up");
    for process in Leftovers::now().processes.difference(&before.processes) {
        if let Some((pid, "thaw-vmm")) = process.split_once(' ') {
            rustix::process::kill_process(pid_of(pid.parse().unwrap()), Signal::KILL).unwrap();
        }
    }
    assert!(!child.wait().unwrap().success());
    drop(rest);
    assert_eq!(Leftovers::now(), before, "after kill -9 of the VMM");
}
