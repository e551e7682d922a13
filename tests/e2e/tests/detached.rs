//! Detached containers as a docker user expects them: their output and exit status are kept, `wait` and `attach` see them end, and a closed
//! pipe ends the command that writes to it. Each with thawd and without. With thawd they also go on after their memory was released.

#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Read, Write};
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use thaw_e2e::home::{Home, with_and_without_thawd, with_thawd};
use thaw_e2e::{Outcome, image, pid_of, run, wait_for_line};

/// The exit status of a command whose pipe was closed: 128 + SIGPIPE.
const CLOSED_PIPE: i32 = 141;
/// The exit status of a command that needs the machine of a sandbox whose memory is released.
const MEMORY_RELEASED: i32 = 115;
/// The exit status of a pause that cannot release the memory.
const MEMORY_KEPT: i32 = 117;

fn detached(home: &Home, name: &str, flags: &[&str], script: &str) {
    let busybox = image("busybox");
    let line = [
        &["run", "-d", "--name", name],
        flags,
        &[&busybox, "sh", "-c", script],
    ]
    .concat();
    let id = run(&mut home.thaw(&line)).ok();
    assert_eq!(id.trim().len(), 12, "only the id: {id:?}");
}

fn done(home: &Home, arguments: &[&str]) -> Outcome {
    run(&mut home.thaw(arguments))
}

/// In a container's script: waits for [`tell`], and for the end of the process that told. If the container ended first, `exec` would
/// lose its guest.
const UNTIL_TOLD: &str = "until [ -s /tmp/told ]; do sleep 0.1; done; \
                          while [ -d /proc/$(cat /tmp/told) ]; do sleep 0.1; done";

/// Tells a container that its script may go on.
fn tell(home: &Home, name: &str) {
    done(home, &["exec", name, "sh", "-c", "echo $$ > /tmp/told"]).ok();
}

/// Runs a command until it ends so.
fn until(home: &Home, arguments: &[&str], so: impl Fn(&Outcome) -> bool) -> Outcome {
    let since = Instant::now();
    loop {
        let outcome = done(home, arguments);
        if so(&outcome) {
            return outcome;
        }
        assert!(
            since.elapsed() < Duration::from_secs(60),
            "{arguments:?}: {outcome:?}"
        );
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// The entry of `ps -a` with this name.
fn listed(home: &Home, name: &str) -> Option<Value> {
    let all = done(home, &["--json", "ps", "-a"]).ok();
    let all: Vec<Value> = serde_json::from_str(&all).unwrap();
    all.into_iter().find(|s| s["name"] == name)
}

/// The same once it is listed as exited, and its machine has ended.
fn until_exited(home: &Home, name: &str) -> Value {
    let since = Instant::now();
    loop {
        match listed(home, name) {
            Some(kept) if kept["state"] == "exited" && !kept["ended"].is_null() => break kept,
            other => assert!(since.elapsed() < Duration::from_secs(60), "{other:?}"),
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Waits until nothing is listed or kept of a sandbox. While its owner removes it, its output is refused, and it is still listed.
fn until_gone(home: &Home, name: &str) {
    let since = Instant::now();
    while let Some(still) = listed(home, name) {
        assert!(since.elapsed() < Duration::from_secs(60), "{still}");
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(!done(home, &["logs", name]).status.success());
}

#[test]
fn output_and_exit_status_are_kept_until_removed() {
    with_and_without_thawd(|home| {
        let script = format!("echo one; echo two; echo bad >&2; {UNTIL_TOLD}; echo three; exit 7");
        detached(home, "job", &[], &script);
        until(home, &["logs", "job"], |logs| logs.stderr == "bad\n");
        let mut follower = home.thaw(&["logs", "-f", "--tail", "2", "job"]).spawn().unwrap();
        let mut followed = wait_for_line(&mut follower, "two");
        let waiter = home.thaw(&["wait", "job"]).spawn().unwrap();
        tell(home, "job");
        let mut rest = String::new();
        followed.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "three\n");
        assert!(follower.wait().unwrap().success());
        assert_eq!(thaw_e2e::finish(waiter, "").ok(), "7\n");

        // It has ended, or is about to; either way both are known.
        assert_eq!(done(home, &["wait", "job"]).ok(), "7\n");
        let kept = until_exited(home, "job");
        assert_eq!(kept["exit_code"], 7, "{kept}");
        assert_eq!(done(home, &["wait", "job"]).ok(), "7\n");
        let logs = done(home, &["logs", "-t", "job"]);
        let lines: Vec<_> = logs.stdout.lines().map(|line| line.split_at(31)).collect();
        let texts: Vec<_> = lines.iter().map(|(_, text)| *text).collect();
        assert_eq!(texts, ["one", "two", "three"], "{logs:?}");
        assert!(lines.iter().all(|(time, _)| time.ends_with("Z ")), "{logs:?}");
        assert!(logs.stderr.ends_with("bad\n"), "{logs:?}");
        let last = done(home, &["logs", "--since", lines[2].0.trim(), "job"]);
        assert_eq!(last.ok(), "three\n");
        assert_eq!(
            done(home, &["logs", "--since", "2100-01-01T00:00:00Z", "job"]).ok(),
            ""
        );
        done(home, &["rm", "job"]).ok();
        for command in ["logs", "wait"] {
            let gone = done(home, &[command, "job"]);
            assert_eq!(gone.stderr.lines().count(), 1, "one clear line: {gone:?}");
            assert!(!gone.status.success() && gone.stderr.contains("job"), "{gone:?}");
        }
    });
}

#[test]
fn detached_container_with_rm_leaves_nothing() {
    with_and_without_thawd(|home| {
        let script = format!("echo out; {UNTIL_TOLD}; exit 3");
        detached(home, "brief", &["--rm"], &script);
        until(home, &["logs", "brief"], |logs| logs.stdout == "out\n");
        let waiter = home.thaw(&["wait", "brief"]).spawn().unwrap();
        tell(home, "brief");
        assert_eq!(thaw_e2e::finish(waiter, "").ok(), "3\n");
        until_gone(home, "brief");
    });
}

/// Writes a line when it starts and one when it ends, each with how often it was started. Ends when it is let go.
const COUNTS: &str = "echo x >>/starts; n=$(wc -l </starts); echo start $n; until [ -e /go$n ]; do sleep 0.1; done; \
                      echo end $n; exit 7";

/// Releases the memory of a sandbox. Commands that need its machine say so, and its output so far is shown.
fn release(home: &Home, name: &str, output: &str) {
    done(home, &["pause", "--release-memory", name]).ok();
    assert!(done(home, &["ps"]).ok().contains("paused (memory released)"));
    for logs in [&["logs", name][..], &["logs", "-f", name]] {
        assert_eq!(done(home, logs).ok(), output, "{logs:?}");
    }
    for command in ["attach", "wait"] {
        let refused = done(home, &[command, name]);
        assert_eq!(refused.code(), MEMORY_RELEASED, "{refused:?}");
    }
}

#[test]
fn detached_container_goes_on_after_its_memory_was_released() {
    with_thawd(|home| {
        detached(home, "job", &["--restart", "on-failure:1"], COUNTS);
        until(home, &["logs", "job"], |logs| logs.stdout == "start 1\n");
        let mut follower = home.thaw(&["logs", "-f", "job"]).spawn().unwrap();
        let mut followed = wait_for_line(&mut follower, "start 1");
        release(home, "job", "start 1\n");
        // The follower ended with the machine.
        let mut rest = String::new();
        followed.read_to_string(&mut rest).unwrap();
        assert_eq!((rest.as_str(), follower.wait().unwrap().code()), ("", Some(0)));

        done(home, &["resume", "job"]).ok();
        assert_eq!(listed(home, "job").unwrap()["state"], "running");
        // The container may end, and with it this command, before the guest tells of the command's own end.
        done(home, &["exec", "job", "touch", "/go1"]);
        let restarted = "start 1\nend 1\nstart 2\n";
        until(home, &["logs", "job"], |logs| logs.stdout == restarted);
        release(home, "job", restarted);
        done(home, &["resume", "job"]).ok();
        done(home, &["exec", "job", "touch", "/go2"]);
        let kept = until_exited(home, "job");
        assert_eq!(kept["exit_code"], 7, "{kept}");
        assert_eq!(done(home, &["wait", "job"]).ok(), "7\n");
        assert_eq!(done(home, &["logs", "job"]).ok(), format!("{restarted}end 2\n"));
        done(home, &["rm", "job"]).ok();

        detached(home, "brief", &["--rm"], COUNTS);
        until(home, &["logs", "brief"], |logs| logs.stdout == "start 1\n");
        release(home, "brief", "start 1\n");
        done(home, &["resume", "brief"]).ok();
        done(home, &["exec", "brief", "touch", "/go1"]);
        until_gone(home, "brief");
    });
}

#[test]
fn attached_run_keeps_the_memory_of_its_sandbox() {
    with_thawd(|home| {
        let busybox = image("busybox");
        let line = ["run", "--name", "attended", &busybox, "sh", "-c", COUNTS];
        let mut attended = home.thaw(&line).spawn().unwrap();
        let mut output = wait_for_line(&mut attended, "start 1");
        let refused = done(home, &["pause", "--release-memory", "attended"]);
        assert_eq!(refused.code(), MEMORY_KEPT, "{refused:?}");
        done(home, &["exec", "attended", "touch", "/go1"]);
        let mut rest = String::new();
        output.read_to_string(&mut rest).unwrap();
        assert_eq!(
            (rest.as_str(), attended.wait().unwrap().code()),
            ("end 1\n", Some(7))
        );
    });
}

#[test]
fn attach_passes_input_and_signals_and_returns_the_status() {
    with_and_without_thawd(|home| {
        detached(home, "reads", &["-i"], "read line; echo got $line; exit 4");
        let mut attached = home.thaw(&["attach", "reads"]);
        let mut attached = attached.stdin(Stdio::piped()).spawn().unwrap();
        attached.stdin.as_mut().unwrap().write_all(b"hello\n").unwrap();
        let outcome = thaw_e2e::finish(attached, "");
        assert_eq!((outcome.code(), outcome.stdout.as_str()), (4, "got hello\n"));
        done(home, &["rm", "reads"]).ok();

        let script = "trap 'exit 5' TERM; while :; do echo up; sleep 0.1; done";
        detached(home, "hears", &[], script);
        let mut attached = home.thaw(&["attach", "hears"]).spawn().unwrap();
        let mut output = wait_for_line(&mut attached, "up");
        rustix::process::kill_process(pid_of(attached.id() as i32), Signal::TERM).unwrap();
        output.read_to_string(&mut String::new()).unwrap();
        assert_eq!(attached.wait().unwrap().code(), Some(5));
        let ended = until(home, &["attach", "hears"], |outcome| {
            outcome.stderr.contains("has ended")
        });
        assert!(ended.stderr.contains("thaw logs"), "{ended:?}");
        done(home, &["rm", "hears"]).ok();

        // Flags in one word.
        let busybox = image("busybox");
        done(home, &["run", "-dit", "--name", "typed", &busybox, "tty"]).ok();
        assert_eq!(done(home, &["wait", "typed"]).ok(), "0\n");
        until(home, &["logs", "typed"], |logs| logs.stdout.contains("/dev/pts/"));
        done(home, &["rm", "typed"]).ok();
    });
}

/// Runs `thaw ARGUMENTS | head -n 3`. Returns the lines too.
fn cut(home: &Home, arguments: &[&str]) -> (String, Outcome) {
    let mut command = home.thaw(arguments).spawn().unwrap();
    let mut lines = BufReader::new(command.stdout.take().unwrap());
    let mut seen = String::new();
    while seen.lines().count() < 3 && lines.read_line(&mut seen).unwrap() > 0 {}
    drop(lines);
    (seen, thaw_e2e::finish(command, ""))
}

#[test]
fn closed_pipe_ends_the_command_that_writes_to_it() {
    with_and_without_thawd(|home| {
        let busybox = image("busybox");
        detached(home, "writes", &[], "while :; do echo y; sleep 0.05; done");
        let lines: [&[&str]; 4] = [
            &["run", "--rm", &busybox, "yes"],
            &["exec", "writes", "yes"],
            &["logs", "-f", "writes"],
            &["attach", "writes"],
        ];
        for line in lines {
            let (lines, outcome) = cut(home, line);
            let seen = (outcome.code(), lines.as_str(), outcome.stderr.as_str());
            assert_eq!(seen, (CLOSED_PIPE, "y\ny\ny\n", ""), "{line:?}");
        }
        // The process of the exec is gone, and the container goes on.
        let processes = done(home, &["exec", "writes", "ps"]).ok();
        assert!(!processes.contains("yes"), "{processes}");
        done(home, &["rm", "writes"]).ok();
    });
}

#[test]
fn streams_carry_many_megabytes() {
    const MEBIBYTES: usize = 16;
    let home = Home::new();
    let busybox = image("busybox");
    let rate = |since: Instant| MEBIBYTES as f64 / since.elapsed().as_secs_f64();
    let script = format!(
        "sleep 1; dd if=/dev/zero bs=64k count={} 2>/dev/null; sleep 1",
        MEBIBYTES * 16
    );
    let mut writer = home
        .thaw(&["run", "--rm", &busybox, "sh", "-c", &script])
        .spawn()
        .unwrap();
    let mut output = writer.stdout.take().unwrap();
    let mut bytes = vec![0; 1 << 20];
    let mut all = output.read(&mut bytes).unwrap();
    let since = Instant::now();
    while all < MEBIBYTES << 20 {
        let more = output.read(&mut bytes).unwrap();
        assert_ne!(more, 0, "{all} bytes arrived");
        all += more;
    }
    println!("stdout: {:.1} MiB/s", rate(since));
    assert!(writer.wait().unwrap().success());

    let script = "echo up; wc -c";
    let mut reader = home.thaw(&["run", "--rm", "-i", &busybox, "sh", "-c", script]);
    let mut reader = reader.stdin(Stdio::piped()).spawn().unwrap();
    let mut input = reader.stdin.take().unwrap();
    let mut output = wait_for_line(&mut reader, "up");
    let since = Instant::now();
    for _ in 0..MEBIBYTES {
        input.write_all(&bytes).unwrap();
    }
    drop(input);
    let mut count = String::new();
    output.read_to_string(&mut count).unwrap();
    println!("stdin: {:.1} MiB/s", rate(since));
    assert_eq!(count.trim(), (MEBIBYTES << 20).to_string());
    assert!(reader.wait().unwrap().success());
}
