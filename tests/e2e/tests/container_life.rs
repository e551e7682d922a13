//! The life of a detached container as a docker user expects it: it is stopped by its stop signal, started again by hand and by its restart
//! policy, with the same layer, and its restarts are counted. Each with thawd and without.

#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use serde_json::Value;
use thaw_e2e::home::{Home, with_and_without_thawd};
use thaw_e2e::{Outcome, image, run};

const LIMIT: Duration = Duration::from_secs(90);

fn done(home: &Home, arguments: &[&str]) -> Outcome {
    run(&mut home.thaw(arguments))
}

fn detached(home: &Home, name: &str, flags: &[&str], script: &str) {
    let mut line = vec!["run", "-d", "--name", name];
    line.extend(flags);
    let busybox = image("busybox");
    line.extend([&busybox, "sh", "-c", script]);
    done(home, &line).ok();
}

fn until(what: &str, so: impl Fn() -> bool) {
    let since = Instant::now();
    while !so() {
        assert!(since.elapsed() < LIMIT, "{what}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn logged(home: &Home, name: &str, lines: &[&str]) {
    until(&format!("{name} logs {lines:?}"), || {
        let logs = done(home, &["logs", name]);
        logs.stdout.lines().eq(lines.iter().copied())
    });
}

/// The description of a running sandbox.
fn inspected(home: &Home, name: &str) -> Option<Value> {
    let shown = done(home, &["inspect", "--format", "json", name]);
    serde_json::from_str(&shown.stdout).ok()
}

/// The kept record of an ended sandbox.
fn ended(home: &Home, name: &str) -> Option<Value> {
    inspected(home, name).filter(|shown| !shown["ended"].is_null())
}

/// Writes a line for each start, with how many there were, and waits for a signal.
const COUNTS: &str = "trap 'echo usr1; exit 5' USR1; trap 'echo term; exit 6' TERM; echo x >>/starts; \
                      echo start $(wc -l </starts) $(cat /tmp/t 2>/dev/null); echo t >/tmp/t; while :; do sleep 0.1; done";

#[test]
fn restart_keeps_layer_and_machine_and_stop_uses_the_signal() {
    with_and_without_thawd(|home| {
        let flags = [
            &["--stop-signal", "USR1", "--tmpfs", "/tmp", "-v", "/etc:/host:ro"][..],
            &["--mount", "type=volume,target=/kept"],
        ]
        .concat();
        detached(home, "svc", &flags, COUNTS);
        logged(home, "svc", &["start 1"]);
        done(home, &["exec", "svc", "touch", "/kept/file"]).ok();
        let pid = inspected(home, "svc").unwrap()["vmm_pid"].clone();
        assert_eq!(done(home, &["restart", "-t", "60", "svc"]).ok(), "svc\n");
        logged(home, "svc", &["start 1", "usr1", "start 2"]);
        let there = ["exec", "svc", "ls", "/host/hostname", "/kept/file"];
        assert_eq!(done(home, &there).code(), 0);
        done(home, &["restart", "-s", "TERM", "-t", "30", "svc"]).ok();
        let lines = ["start 1", "usr1", "start 2", "term", "start 3"];
        logged(home, "svc", &lines);
        let shown = inspected(home, "svc").unwrap();
        assert_eq!((&shown["vmm_pid"], &shown["state"]), (&pid, &"running".into()));
        assert_eq!(done(home, &["stop", "-t", "60", "svc"]).ok(), "svc\n");
        assert_eq!(ended(home, "svc").unwrap()["exit_code"], 5);
        let again = done(home, &["restart", "svc"]);
        assert!(
            !again.status.success() && again.stderr.contains("svc"),
            "{again:?}"
        );
        done(home, &["rm", "svc"]).ok();

        let deaf = "trap '' TERM; echo deaf; while :; do sleep 0.1; done";
        detached(home, "deaf", &["--stop-timeout", "1"], deaf);
        logged(home, "deaf", &["deaf"]);
        let since = Instant::now();
        done(home, &["stop", "deaf"]).ok();
        assert!(since.elapsed() >= Duration::from_secs(1), "{:?}", since.elapsed());
        assert_eq!(ended(home, "deaf").unwrap()["exit_code"], 137);
        done(home, &["rm", "deaf"]).ok();
    });
}

#[test]
fn restart_policy_starts_again_until_it_is_stopped() {
    with_and_without_thawd(|home| {
        let fails = "echo x >>/starts; echo start $(wc -l </starts); exit 3";
        detached(home, "twice", &["--restart", "on-failure:2"], fails);
        until("the last end", || ended(home, "twice").is_some());
        assert_eq!(ended(home, "twice").unwrap()["exit_code"], 3);
        logged(home, "twice", &["start 1", "start 2", "start 3"]);
        done(home, &["rm", "twice"]).ok();

        let succeeds = "echo x >>/starts; echo start $(wc -l </starts); [ $(wc -l </starts) -ge 2 ] && sleep 1000; exit 0";
        detached(home, "always", &["--restart", "always"], succeeds);
        logged(home, "always", &["start 1", "start 2"]);
        until("one restart", || {
            inspected(home, "always").unwrap()["restarts"] == 1
        });
        let listed = done(home, &["--json", "ps"]).ok();
        let listed: Vec<Value> = serde_json::from_str(&listed).unwrap();
        assert_eq!(listed[0]["restarts"], 1, "{listed:?}");
        done(home, &["kill", "-s", "KILL", "always"]).ok();
        until("the end", || ended(home, "always").is_some());
        done(home, &["rm", "always"]).ok();

        detached(home, "loop", &["--restart", "unless-stopped"], "exit 1");
        until("a delay", || {
            inspected(home, "loop").is_some_and(|shown| shown["state"] == "restarting")
        });
        assert_eq!(done(home, &["stop", "loop"]).ok(), "loop\n");
        assert!(ended(home, "loop").is_some());
        done(home, &["rm", "loop"]).ok();
    });
}

#[test]
fn restart_policy_goes_on_with_the_next_thawd() {
    let home = Home::new();
    let mut thawd = home.thawd(&[]);
    let script =
        "echo x >>/starts; echo start $(wc -l </starts); while [ ! -e /end ]; do sleep 0.1; done; rm /end";
    detached(&home, "svc", &["--restart", "always"], script);
    logged(&home, "svc", &["start 1"]);
    done(&home, &["exec", "svc", "touch", "/end"]).ok();
    logged(&home, "svc", &["start 1", "start 2"]);
    thawd.kill().unwrap();
    thawd.wait().unwrap();
    let mut thawd = home.thawd(&[]);
    done(&home, &["exec", "svc", "touch", "/end"]).ok();
    logged(&home, "svc", &["start 1", "start 2", "start 3"]);
    until("the count goes on", || {
        inspected(&home, "svc").unwrap()["restarts"] == 2
    });
    done(&home, &["stop", "-t", "1", "svc"]).ok();
    assert!(ended(&home, "svc").is_some());
    thawd.kill().unwrap();
    thawd.wait().unwrap();
}

#[test]
fn flags_that_exclude_each_other_are_refused_at_once() {
    let home = Home::new();
    let busybox = image("busybox");
    for flags in [
        &["--restart", "always"][..],
        &["-d", "--rm", "--restart", "always"],
        &["-d", "--restart", "sometimes"],
        &["-d", "--restart", "always:2"],
        &["-d", "--stop-signal", "NOPE"],
        &["-d", "--stop-timeout", "-2"],
    ] {
        let line = [&["run"], flags, &[&busybox, "true"]].concat();
        let refused = done(&home, &line);
        assert_eq!(refused.code(), 125, "{flags:?}: {refused:?}");
        assert!(
            refused.stdout.is_empty() && !refused.stderr.is_empty(),
            "{refused:?}"
        );
    }
}

#[test]
fn events_show_a_containers_life_and_end_cleanly() {
    let home = Home::new();
    let mut thawd = home.thawd(&[]);
    let format = "{{.Action}} {{.Actor.Attributes.name}}";
    let mut live = home.thaw(&["events", "--filter", "container=seen", "--format", format]);
    let mut live = live.spawn().unwrap();
    let script = "trap 'exit 3' TERM; echo ready; while :; do sleep 0.1; done";
    // Begun before the container, but perhaps not listening yet: the first event may be missed.
    detached(&home, "seen", &["--label", "tier=front"], script);
    logged(&home, "seen", &["ready"]);
    done(&home, &["pause", "seen"]).ok();
    done(&home, &["resume", "seen"]).ok();
    done(&home, &["kill", "-s", "WINCH", "seen"]).ok();
    done(&home, &["restart", "seen"]).ok();
    done(&home, &["stop", "seen"]).ok();
    done(&home, &["rm", "seen"]).ok();
    let kept = done(
        &home,
        &[
            "events",
            "--since",
            "5m",
            "--until",
            "0s",
            "--format",
            "{{.Action}}",
        ],
    )
    .ok();
    let mut actions: Vec<&str> = kept.lines().collect();
    let restart = actions.iter().position(|action| *action == "restart").unwrap();
    assert_eq!(actions.remove(restart), "restart");
    actions.retain(|action| *action != "stop");
    let expected = [
        "create", "start", "pause", "unpause", "kill", "die", "start", "die", "destroy",
    ];
    assert_eq!(actions[..expected.len()], expected, "{kept}");
    let died = [
        "events",
        "--since",
        "5m",
        "--until",
        "0s",
        "--filter",
        "event=die",
    ];
    let died = done(&home, &died).ok();
    let line = died.lines().next().unwrap();
    assert!(
        line.contains(" container die ") && line.contains("exitCode=3, image="),
        "{line}"
    );
    assert!(line.ends_with("name=seen, tier=front)"), "{line}");
    assert_eq!(died.lines().count(), 2, "{died}");

    // It ends with the signal, whatever it has not shown yet.
    let mut shown = thaw_e2e::wait_for_line(&mut live, "destroy seen");
    rustix::process::kill_process(thaw_e2e::pid_of(live.id() as i32), rustix::process::Signal::INT).unwrap();
    let mut rest = String::new();
    std::io::Read::read_to_string(&mut shown, &mut rest).unwrap();
    assert_eq!((live.wait().unwrap().code(), rest.as_str()), (Some(130), ""));
    let mut piped = home.thaw(&["events", "--since", "5m"]).spawn().unwrap();
    drop(piped.stdout.take());
    assert_eq!(piped.wait().unwrap().code(), Some(141), "a closed pipe");
    let refused = done(&home, &["events", "--format", "table {{.Action}}"]);
    assert!(
        !refused.status.success() && refused.stderr.contains("table"),
        "{refused:?}"
    );
    thawd.kill().unwrap();
    thawd.wait().unwrap();
    let alone = done(&home, &["events"]);
    assert!(alone.stderr.contains("no thawd answers"), "{alone:?}");
}

#[test]
fn health_checks_show_in_ps_inspect_and_filters() {
    with_and_without_thawd(|home| {
        let flags = [
            "--health-cmd",
            "echo checked; test -e /well",
            "--health-interval",
            "300ms",
            "--health-retries",
            "2",
        ];
        detached(home, "sick", &flags, "sleep 1000");
        let names = |health: &str| {
            let filter = format!("health={health}");
            done(
                home,
                &["ps", "--filter", &filter, "--format", "{{.Name}} {{.Status}}"],
            )
            .ok()
        };
        until("unhealthy", || names("unhealthy") == "sick running (unhealthy)\n");
        let shown = inspected(home, "sick").unwrap();
        let last = shown["health"]["log"].as_array().unwrap().last().unwrap().clone();
        assert_eq!(
            (&last["exit_code"], &last["output"]),
            (&1.into(), &"checked\n".into())
        );
        done(home, &["exec", "sick", "touch", "/well"]).ok();
        until("healthy", || names("healthy") == "sick running (healthy)\n");
        until("five results", || {
            inspected(home, "sick").unwrap()["health"]["log"]
                .as_array()
                .unwrap()
                .len()
                == 5
        });
        assert_eq!(names("none"), "");
        done(home, &["rm", "sick"]).ok();

        let slow = [
            "--health-cmd",
            "sleep 60",
            "--health-interval",
            "1ms",
            "--health-timeout",
            "200ms",
        ];
        detached(home, "slow", &slow, "sleep 1000");
        until("a late check", || {
            let shown = inspected(home, "slow").unwrap();
            shown["health"]["status"] == "unhealthy" && shown["health"]["log"][0]["exit_code"] == -1
        });
        done(home, &["rm", "slow"]).ok();
        detached(home, "plain", &["--no-healthcheck"], "sleep 1000");
        assert_eq!(names("none"), "plain running\n");
        done(home, &["rm", "plain"]).ok();
    });
}
