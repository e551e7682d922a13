//! The hooks of a container, with thawd and without: one before a freeze refuses it, one after a thaw runs in each clone, and both are kept in
//! snapshots. The generation file differs in each clone.

#![allow(clippy::unwrap_used)]

use serde_json::Value;
use thaw_e2e::home::{Home, with_and_without_thawd};
use thaw_e2e::{Outcome, image, run};

const HOOK_MISSING: i32 = 62;
const HOOK_FAILED: i32 = 63;

fn done(home: &Home, arguments: &[&str]) -> Outcome {
    run(&mut home.thaw(arguments))
}

/// Runs this line in a sandbox, and returns what it writes.
fn shell(home: &Home, sandbox: &str, line: &str) -> String {
    done(home, &["exec", sandbox, "sh", "-c", line]).ok()
}

fn sleeper(home: &Home, name: &str, hooks: &[&str]) {
    let busybox = image("busybox");
    let mut line = vec!["run", "-d", "--name", name];
    line.extend(hooks);
    line.extend([&*busybox, "sleep", "100000"]);
    done(home, &line).ok();
}

#[test]
fn hooks_refuse_a_freeze_and_run_in_each_clone() {
    with_and_without_thawd(|home| {
        let before = "echo asked >>/log; test ! -e /busy || { echo it is busy; exit 3; }";
        let after = "cat /run/thaw/generation >>/renewed";
        sleeper(home, "web", &["--before-freeze", before, "--after-thaw", after]);
        let own = shell(home, "web", "touch /busy; cat /run/thaw/generation");
        assert_eq!(own.len(), 33, "{own:?}");
        let refused = done(home, &["freeze", "web", "--name", "never"]);
        assert_eq!(refused.code(), HOOK_FAILED);
        assert!(refused.stderr.contains("it exited with 3"), "{}", refused.stderr);
        assert!(refused.stderr.contains("it is busy"), "{}", refused.stderr);
        assert_eq!(shell(home, "web", "cat /log; rm /busy"), "asked\n", "it goes on");

        let clones = done(home, &["fork", "--require-hook", "-n", "2", "web"]).ok();
        done(home, &["freeze", "web", "--name", "ready"]).ok();
        let thawed = done(home, &["thaw", "-d", "--require-hook", "ready"]).ok();
        let mut seen = vec![own];
        for clone in clones.lines().chain(thawed.lines()) {
            let generation = shell(home, clone, "cat /run/thaw/generation");
            assert_eq!(shell(home, clone, "cat /renewed"), generation);
            assert!(!seen.contains(&generation), "{generation}");
            seen.push(generation);
            done(home, &["rm", clone]).ok();
        }
        assert_eq!(seen.len(), 4);
        assert_eq!(shell(home, "web", "test ! -e /renewed && wc -l </log"), "3\n");
        done(home, &["rm", "web"]).ok();
        done(home, &["snapshot", "rm", "-f", "ready"]).ok();
    });
}

#[test]
fn failed_or_missing_hook_after_a_thaw_is_told() {
    with_and_without_thawd(|home| {
        sleeper(home, "none", &[]);
        assert_eq!(
            done(home, &["fork", "--require-hook", "none"]).code(),
            HOOK_MISSING
        );
        done(home, &["freeze", "none", "--name", "hookless", "--stop"]).ok();
        let refused = done(home, &["thaw", "-d", "--require-hook", "hookless"]);
        assert_eq!(refused.code(), HOOK_MISSING);

        // It hangs, with a child, and is killed.
        let hangs = [
            "--after-thaw",
            "echo begun; sleep 7777 & wait",
            "--hook-timeout",
            "10s",
        ];
        sleeper(home, "slow", &hangs);
        done(home, &["freeze", "slow", "--name", "hangs", "--stop"]).ok();
        let refused = done(home, &["thaw", "-d", "--require-hook", "hangs"]);
        assert_eq!(refused.code(), HOOK_FAILED, "{}", refused.stderr);
        let thawed = done(home, &["thaw", "-d", "hangs"]).ok();
        let thawed = thawed.trim();
        let shown = done(home, &["inspect", "--format", "json", thawed]).ok();
        let shown: Value = serde_json::from_str(&shown).unwrap();
        let failure = shown["after_thaw"]["failure"].as_str().unwrap();
        assert!(failure.contains("did not end within 10000 ms"), "{failure}");
        assert_eq!(shown["after_thaw"]["output"], "begun\n");
        assert_eq!(
            shell(home, thawed, "ps -o args | grep -c '[s]leep 7777'; true"),
            "0\n"
        );
        done(home, &["rm", thawed]).ok();
        done(home, &["snapshot", "rm", "-f", "hookless", "hangs"]).ok();
    });
}
