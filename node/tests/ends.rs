//! However `thaw run` ends, nothing remains: counted after a refusal, a crash of the guest, signals, and a `kill -9`.
//!
//! The guests are a few instructions long, so these run wherever /dev/kvm opens. One test at a time: cgroups are shared.

#![allow(clippy::unwrap_used)]

mod support;

use std::process::Stdio;
use std::sync::{Mutex, PoisonError};

use support::{CRASH, HALT, Leftovers, Place, eventually, lives, one_line, records, text};

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn kill(pid: u32, signal: rustix::process::Signal) {
    rustix::process::kill_process(rustix::process::Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}

#[test]
fn a_kernel_that_is_not_pvh_is_refused() {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(place) = Place::new(HALT) else { return };
    std::fs::write(place.path("kernel"), b"\x7fELF but not much of one").unwrap();
    let output = place.run().output().unwrap();
    assert_eq!(output.status.code(), Some(68), "{}", text(&output.stderr));
    one_line(&output);
    assert_eq!(place.leftovers(), Leftovers::none());
}

#[test]
fn a_guest_that_crashes_before_it_is_ready_is_told() {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(place) = Place::new(CRASH) else { return };
    let output = place.run().output().unwrap();
    assert_eq!(output.status.code(), Some(71), "{}", text(&output.stderr));
    one_line(&output);
    assert_eq!(place.leftovers(), Leftovers::none());
}

#[test]
fn machine_that_dies_before_ready_is_retried_once_and_logged() {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(place) = Place::new(CRASH) else { return };
    let fault = "the guest's CPU could not go on";
    for (first, cause) in [
        (":", fault),
        ("echo last words; exit 1", "closed its control connection"),
        // The first process of a PID namespace cannot be killed from within.
        ("exit 137", "closed its control connection"),
    ] {
        let _ = std::fs::remove_file(place.path("starts"));
        let output = place
            .run()
            .env("THAW_VMM", place.counted_vmm(first))
            .output()
            .unwrap();
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(71), "{stderr}");
        assert!(
            one_line(&output).contains(fault),
            "the second failure is the failure: {stderr}"
        );
        let warning = stderr.lines().find(|l| l.contains("WARN")).unwrap();
        assert!(
            warning.contains("the first machine died before it was ready"),
            "{stderr}"
        );
        assert!(warning.contains(cause), "{stderr}");
        assert_eq!(
            stderr.contains("last words"),
            first.contains("last words"),
            "{stderr}"
        );
        assert_eq!(place.starts(), 2);
        assert_eq!(place.leftovers(), Leftovers::none());
    }
}

#[test]
fn a_template_whose_machine_dies_is_begun_anew_once() {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(place) = Place::new(CRASH) else { return };
    let output = place
        .command("thaw")
        .args(["template", "build"])
        .env("THAW_VMM", place.counted_vmm(":"))
        .output()
        .unwrap();
    let stderr = text(&output.stderr);
    assert_eq!((output.status.code(), place.starts()), (Some(71), 2), "{stderr}");
    assert!(
        stderr.contains("the first machine died before it was ready"),
        "{stderr}"
    );
    assert_eq!(place.leftovers(), Leftovers::none());
}

#[test]
fn what_is_refused_is_not_tried_again() {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(place) = Place::new(HALT) else { return };
    std::fs::write(place.path("kernel"), b"\x7fELF but not much of one").unwrap();
    let output = place
        .run()
        .env("THAW_VMM", place.counted_vmm(":"))
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(68), "{}", text(&output.stderr));
    assert_eq!(place.starts(), 1);
}

#[test]
fn a_signal_during_the_start_ends_it_cleanly() {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(place) = Place::new(HALT) else { return };
    let mut thaw = place.run().stderr(Stdio::piped()).spawn().unwrap();
    eventually("the guest runs", || !place.leftovers().processes.is_empty());
    assert_eq!(place.leftovers().sandboxes.len(), 1);
    kill(thaw.id(), rustix::process::Signal::TERM);
    assert_eq!(thaw.wait().unwrap().code(), Some(128 + 15));
    assert_eq!(place.leftovers(), Leftovers::none());
}

#[test]
fn kill_ends_the_vmm_at_once_and_the_next_start_cleans_up() {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(place) = Place::new(HALT) else { return };
    let mut thaw = place.run().stderr(Stdio::null()).spawn().unwrap();
    // A partial template of a disk stays until the next sandbox needs one.
    eventually("the guest runs and has a disk", || {
        let left = place.leftovers();
        !left.processes.is_empty()
            && left.disks.is_empty()
            && records(&place).values().any(|r| r["vmm"].is_object())
    });
    let vmm = records(&place).values().next().unwrap()["vmm"]["pid"]
        .as_i64()
        .unwrap() as i32;
    assert!(lives(vmm));
    kill(thaw.id(), rustix::process::Signal::KILL);
    thaw.wait().unwrap();
    eventually("a tethered VMM ends with its owner", || !lives(vmm));
    assert_eq!(place.leftovers().processes, Vec::<String>::new());

    let next = place.command("thaw").arg("ps").output().unwrap();
    assert!(next.status.success());
    assert_eq!(place.leftovers(), Leftovers::none());
}

#[test]
fn a_name_is_taken_while_its_sandbox_runs() {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(place) = Place::new(HALT) else { return };
    let named = || {
        let mut command = place.command("thaw");
        command.args([
            "run",
            "--cold",
            "--name",
            "solo",
            "--memory",
            "64m",
            "--network",
            "none",
            &place.image(),
        ]);
        command
    };
    let mut first = named().stderr(Stdio::null()).spawn().unwrap();
    eventually("the guest runs", || {
        records(&place).values().any(|r| r["vmm"].is_object())
    });
    let second = named().output().unwrap();
    assert_eq!(second.status.code(), Some(94), "{}", text(&second.stderr));
    let shown = text(&place.command("thaw").args(["ps"]).output().unwrap().stdout);
    assert!(shown.contains("solo"), "{shown}");
    kill(first.id(), rustix::process::Signal::INT);
    assert_eq!(first.wait().unwrap().code(), Some(130));
    assert_eq!(place.leftovers(), Leftovers::none());
}

#[test]
fn what_is_wrong_before_a_machine_exists_has_its_own_code() {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(place) = Place::new(HALT) else { return };
    for (variable, code) in [("THAW_KERNEL", 67), ("THAW_GUEST_IMAGE", 69), ("THAW_VMM", 86)] {
        let output = place.run().env(variable, "/nowhere/at/all").output().unwrap();
        one_line(&output);
        assert_eq!(output.status.code(), Some(code), "{variable}");
    }
    assert_eq!(place.leftovers(), Leftovers::none());
    let small = place
        .command("thaw")
        .args(["run", "-m", "1m", &place.image()])
        .output()
        .unwrap();
    assert_eq!(
        (small.status.code(), one_line(&small).contains("--memory")),
        (Some(70), true)
    );
    let usage = place
        .command("thaw")
        .args(["run", "--cpus", "99", &place.image()])
        .output()
        .unwrap();
    assert_eq!(usage.status.code(), Some(125));
}

#[test]
fn errors_are_objects_with_json() {
    // It makes cgroups too.
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(place) = Place::new(HALT) else { return };
    let output = place
        .command("thaw")
        .args(["--json", "run", "oci:/nowhere/at/all"])
        .output()
        .unwrap();
    let line = text(&output.stderr);
    let value: serde_json::Value = serde_json::from_str(line.lines().last().unwrap()).unwrap();
    assert_eq!(value["error"]["code"], "image-not-found");
    assert_eq!(
        value["error"]["exit"].as_i64(),
        output.status.code().map(i64::from)
    );
}
