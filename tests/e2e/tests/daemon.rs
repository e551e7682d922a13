//! thawd may be killed and started again under a running sandbox, which notices nothing.

#![allow(clippy::unwrap_used)]

use std::io::BufRead;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::process::Signal;
use thaw_e2e::{binary, image, pid_of, run, thaw, wait_for_line};

/// `thaw` against the thawd of this run directory.
fn in_directory(directory: &Path, args: &[&str]) -> Command {
    let mut command = thaw(args);
    command.env("THAW_RUN", directory);
    command
}

/// A thawd that listens.
fn daemon(directory: &Path) -> Child {
    let mut child = Command::new(binary("thawd"))
        .arg("--json")
        .env("THAW_RUN", directory)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = std::io::BufReader::new(child.stderr.take().unwrap()).lines();
    let listening = lines
        .by_ref()
        .find(|l| l.as_ref().is_ok_and(|l| l.contains("listening")));
    assert!(listening.is_some(), "thawd ended before it listened");
    // Drained, so that it never waits for us.
    std::thread::spawn(move || lines.for_each(drop));
    child
}

#[test]
fn a_sandbox_outlives_its_thawd_and_is_taken_over_by_the_next() {
    let directory = tempfile::tempdir().unwrap();
    let mut first = daemon(directory.path());
    let busybox = image("busybox");
    let script =
        "echo up; while [ ! -e /tmp/done ]; do sleep 0.2; done; cat /etc/passwd >/dev/null && echo finished";
    let mut sandbox = in_directory(
        directory.path(),
        &["run", "--name", "survivor", &busybox, "sh", "-c", script],
    )
    .spawn()
    .unwrap();
    let mut output = wait_for_line(&mut sandbox, "up");

    first.kill().unwrap();
    first.wait().unwrap();
    let without = run(&mut in_directory(
        directory.path(),
        &["exec", "survivor", "ls", "/bin/sh"],
    ));
    assert!(without.status.success(), "exec needs no thawd: {without:?}");

    let mut second = daemon(directory.path());
    let listed = run(&mut in_directory(directory.path(), &["--json", "ps"])).ok();
    assert!(
        listed.contains("survivor") && listed.contains("running"),
        "{listed}"
    );
    run(&mut in_directory(
        directory.path(),
        &["exec", "survivor", "touch", "/tmp/done"],
    ))
    .ok();
    let mut rest = String::new();
    std::io::Read::read_to_string(&mut output, &mut rest).unwrap();
    assert_eq!(rest, "finished\n");
    assert!(sandbox.wait().unwrap().success());

    let listed = run(&mut in_directory(directory.path(), &["--json", "ps"])).ok();
    assert!(!listed.contains("survivor"), "{listed}");
    rustix::process::kill_process(pid_of(second.id() as i32), Signal::TERM).unwrap();
    assert!(second.wait().unwrap().success());
    assert_eq!(
        std::fs::read_dir(directory.path()).unwrap().count(),
        0,
        "nothing of either thawd remains"
    );
}
