//! thawd may be killed and started again under a running sandbox, which notices nothing.

#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use rustix::process::Signal;
use serde_json::{Value, json};
use thaw_e2e::home::Home;
use thaw_e2e::{image, pid_of, run, wait_for_line};

#[test]
fn a_sandbox_outlives_its_thawd_and_is_taken_over_by_the_next() {
    let home = Home::new();
    let mut first = home.thawd(&[]);
    let busybox = image("busybox");
    let script =
        "echo up; while [ ! -e /tmp/done ]; do sleep 0.2; done; cat /etc/passwd >/dev/null && echo finished";
    let mut sandbox = home
        .thaw(&["run", "--name", "survivor", &busybox, "sh", "-c", script])
        .spawn()
        .unwrap();
    let mut output = wait_for_line(&mut sandbox, "up");

    first.kill().unwrap();
    first.wait().unwrap();
    let without = run(&mut home.thaw(&["exec", "survivor", "ls", "/bin/sh"]));
    assert!(without.status.success(), "exec needs no thawd: {without:?}");

    let mut second = home.thawd(&[]);
    let listed = run(&mut home.thaw(&["--json", "ps"])).ok();
    assert!(
        listed.contains("survivor") && listed.contains("running"),
        "{listed}"
    );
    run(&mut home.thaw(&["exec", "survivor", "touch", "/tmp/done"])).ok();
    let mut rest = String::new();
    std::io::Read::read_to_string(&mut output, &mut rest).unwrap();
    assert_eq!(rest, "finished\n");
    assert!(sandbox.wait().unwrap().success());

    let listed = run(&mut home.thaw(&["--json", "ps"])).ok();
    assert!(!listed.contains("survivor"), "{listed}");
    rustix::process::kill_process(pid_of(second.id() as i32), Signal::TERM).unwrap();
    assert!(second.wait().unwrap().success());
    assert_eq!(
        std::fs::read_dir(home.run()).unwrap().count(),
        0,
        "nothing of either thawd remains"
    );
}

#[test]
fn machines_made_ahead_are_taken_and_one_that_nobody_took_goes_with_its_maker() {
    let home = Home::new();
    let mut first = home.thawd(&[]);
    let busybox = image("busybox");
    let start = || {
        let started = run(&mut home.thaw(&["run", "--rm", "--timings", &busybox, "true"]));
        assert_eq!(started.code(), 0, "{started:?}");
        started.stderr
    };
    // From the second use of a shape on, machines of it are made beside the starts that would need one.
    let was_waiting = |said: &String| said.contains("a thaw-vmm was waiting in its pool");
    let said: Vec<String> = std::iter::repeat_with(start).take(8).collect();
    assert!(!was_waiting(&said[0]), "{}", said[0]);
    assert!(said.iter().any(was_waiting), "{}", said[7]);

    // Killed, it leaves those that wait to its successor, which removes them.
    first.kill().unwrap();
    first.wait().unwrap();
    let mut second = home.thawd(&[]);
    assert!(!was_waiting(&start()));
    rustix::process::kill_process(pid_of(second.id() as i32), Signal::TERM).unwrap();
    assert!(second.wait().unwrap().success());
    assert_eq!(std::fs::read_dir(home.run()).unwrap().count(), 0);
}

/// Asks thawd: the answer's head, and its body.
fn ask(home: &Home, method: &str, path: &str, body: &str) -> (String, Value) {
    let mut stream = UnixStream::connect(home.run().join("thawd.sock")).unwrap();
    let length = body.len();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: thawd\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {length}\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (
        head.to_lowercase(),
        serde_json::from_str(body).unwrap_or_default(),
    )
}

#[test]
fn a_container_thawd_starts_is_answered_for_when_it_is_ready() {
    let home = Home::new();
    let mut thawd = home.thawd(&[]);
    let create = |name: &str, script: &str, probe: Value| {
        let asked = json!({"image": image("busybox"), "cpus": 1, "memory_mib": 128, "name": name,
            "container": {"command": ["sh", "-c", script], "readiness": probe}});
        ask(&home, "POST", "/v1/sandboxes", &asked.to_string())
    };
    // What it writes before is more than a pipe holds.
    let serve = "mkdir /tmp/w; seq 1 40000; echo ok >/tmp/w/up; exec httpd -f -p 8080 -h /tmp/w";
    let (head, made) = create("web", serve, json!({"http": {"port": 8080, "path": "/up"}}));
    assert!(head.starts_with("http/1.1 201"), "{head} {made}");
    assert!(head.contains("ready;dur="), "{head}");
    assert_eq!(made["sandbox"]["readiness"], "ready", "{made}");

    let probe = json!({"tcp": {"port": 8080}, "timeout_s": 300});
    let (head, problem) = create("ends", "echo broken; exit 3", probe);
    assert!(head.starts_with("http/1.1 422"), "{head} {problem}");
    assert_eq!(
        (&problem["code"], &problem["context"]),
        (&json!("not-ready"), &json!(["broken"]))
    );
    let (_, listed) = ask(&home, "GET", "/v1/sandboxes", "");
    let names: Vec<_> = listed["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|s| &s["name"])
        .collect();
    assert_eq!(names, ["web"]);

    // The next thawd knows that it is ready.
    thawd.kill().unwrap();
    thawd.wait().unwrap();
    let mut second = home.thawd(&[]);
    let (_, shown) = ask(&home, "GET", "/v1/sandboxes/web", "");
    assert_eq!(shown["readiness"], "ready", "{shown}");
    ask(&home, "DELETE", "/v1/sandboxes/web", "");
    rustix::process::kill_process(pid_of(second.id() as i32), Signal::TERM).unwrap();
    assert!(second.wait().unwrap().success());
    assert_eq!(std::fs::read_dir(home.run()).unwrap().count(), 0);
}
