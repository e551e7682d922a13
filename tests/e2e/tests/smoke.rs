//! The six real images each do their own job in a microVM.

#![allow(clippy::unwrap_used)]

use std::process::{Command, Stdio};
use thaw_e2e::{binary, image, run, thaw, wait_for_line};

#[test]
fn busybox_prints() {
    let out = run(&mut thaw(&[
        "run",
        "--rm",
        &image("busybox"),
        "echo",
        "hello from a microVM",
    ]))
    .ok();
    assert_eq!(out, "hello from a microVM\n");
}

#[test]
fn python_prints_and_computes() {
    let program =
        "import sys, hashlib; print(sys.version_info.major, hashlib.sha256(b'thaw').hexdigest()[:8])";
    let out = run(&mut thaw(&[
        "run",
        "--rm",
        &image("python3"),
        "python3",
        "-c",
        program,
    ]))
    .ok();
    assert_eq!(out, "3 8d5264f3\n");
}

#[test]
fn redis_answers_ping_over_exec() {
    let name = format!("redis-{}", std::process::id());
    let mut server = thaw(&[
        "run",
        "--rm",
        "--name",
        &name,
        &image("redis"),
        "redis-server",
        "--save",
        "",
        "--bind",
        "127.0.0.1",
    ])
    .spawn()
    .unwrap();
    let _rest = wait_for_line(&mut server, "Ready to accept connections");
    let answer = run(&mut thaw(&["exec", &name, "redis-cli", "PING"])).ok();
    assert_eq!(answer, "PONG\n");
    // The client is killed with its PID namespace if the server, PID 1 of it, is gone before it.
    run(&mut thaw(&["exec", &name, "redis-cli", "SHUTDOWN", "NOSAVE"]));
    assert!(server.wait().unwrap().success());
}

#[test]
fn nginx_serves_a_page_to_a_client_in_the_guest() {
    let name = format!("nginx-{}", std::process::id());
    let mut server = Command::new(binary("thaw"))
        .args(["run", "--rm", "--name", &name, &image("nginx"), "sh", "-c"])
        .arg("echo a page from the guest > /var/www/html/thaw.html; nginx; trap 'exit 3' TERM; echo serving; while :; do sleep 0.2; done")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let _rest = wait_for_line(&mut server, "serving");
    let client = "exec 3<>/dev/tcp/127.0.0.1/80; printf 'GET /thaw.html HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3";
    let page = run(&mut thaw(&["exec", &name, "bash", "-c", client])).ok();
    assert!(
        page.starts_with("HTTP/1.1 200 OK") && page.ends_with("a page from the guest\n"),
        "{page:?}"
    );
    rustix::process::kill_process(
        thaw_e2e::pid_of(server.id() as i32),
        rustix::process::Signal::TERM,
    )
    .unwrap();
    assert_eq!(server.wait().unwrap().code(), Some(3));
}

#[test]
fn node_prints_its_version() {
    let out = run(&mut thaw(&["run", "--rm", &image("node"), "node", "--version"])).ok();
    assert!(out.starts_with('v'), "{out:?}");
}

#[test]
fn java_prints_its_version() {
    let out = run(&mut thaw(&[
        "run",
        "--rm",
        "--memory",
        "1g",
        &image("java"),
        "java",
        "-version",
    ]));
    assert!(out.status.success() && out.stderr.contains("OpenJDK"), "{out:?}");
}
