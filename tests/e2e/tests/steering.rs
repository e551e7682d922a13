//! The commands that list, show and steer detached sandboxes, as a docker user types them. Each with thawd and without.

#![allow(clippy::unwrap_used)]

use rustix::process::Signal;
use serde_json::Value;
use thaw_e2e::home::Home;
use thaw_e2e::{image, pid_of, run};

fn done(home: &Home, arguments: &[&str]) -> String {
    run(&mut home.thaw(arguments)).ok()
}

fn start(home: &Home, name: &str, script: &str) {
    let busybox = image("busybox");
    done(
        home,
        &[
            "run", "-d", "--name", name, "-p", "0:80", &busybox, "sh", "-c", script,
        ],
    );
}

/// What `docker ps -a --format` would print of an ended container.
fn ended(home: &Home, name: &str) -> String {
    let filter = format!("name={name}");
    let format = "{{.Names}} {{.State}}";
    done(home, &["ps", "-a", "--filter", &filter, "--format", format])
}

fn steered(home: &Home) {
    let script = "trap 'echo hup' HUP; trap 'exit 3' TERM; echo ready; while :; do sleep 0.1; done";
    start(home, "web", script);
    start(home, "deaf", "trap '' TERM; while :; do sleep 1; done");

    let listed = done(
        home,
        &[
            "ps",
            "-f",
            "name=web",
            "--format",
            "{{.Name}} {{.State}} {{.Ports}}",
        ],
    );
    assert!(listed.starts_with("web running 0.0.0.0:"), "{listed}");
    let inspected: Vec<Value> = serde_json::from_str(&done(home, &["inspect", "web"])).unwrap();
    let host = &inspected[0]["network"]["published"][0]["host"];
    assert_eq!(done(home, &["port", "web", "80"]), format!("0.0.0.0:{host}\n"));
    assert_eq!(done(home, &["inspect", "-f", "{{.state}}", "web"]), "running\n");
    let usage = done(
        home,
        &[
            "stats",
            "--no-stream",
            "--format",
            "{{.Name}} {{.MemUsage}}",
            "web",
        ],
    );
    assert!(usage.starts_with("web ") && usage.contains("512"), "{usage}");

    done(home, &["kill", "-s", "HUP", "web"]);
    assert_eq!(done(home, &["stop", "-t", "60", "web"]), "web\n");
    assert_eq!(ended(home, "web"), "web exited\n");
    assert_eq!(done(home, &["wait", "web"]), "3\n");
    assert!(done(home, &["logs", "web"]).contains("hup"));

    assert_eq!(done(home, &["stop", "-t", "1", "deaf"]), "deaf\n");
    assert_eq!(done(home, &["wait", "deaf"]), "137\n");
    assert_eq!(done(home, &["ps", "-q"]), "");
    done(home, &["rm", "-f", "web", "deaf"]);
}

#[test]
fn detached_sandboxes_are_listed_shown_and_stopped() {
    let home = Home::new();
    steered(&home);
    let mut thawd = home.thawd(&[]);
    steered(&home);
    rustix::process::kill_process(pid_of(thawd.id() as i32), Signal::TERM).unwrap();
    assert!(thawd.wait().unwrap().success());
}

#[test]
fn a_wrong_template_lists_the_fields() {
    let home = Home::new();
    let outcome = run(&mut home.thaw(&["ps", "--format", "{{.Nmae}}"]));
    assert_eq!(outcome.code(), 125, "{outcome:?}");
    assert!(outcome.stderr.contains(".Name"), "{outcome:?}");
}
