//! thawd as a process: `thaw` uses it, failures keep their codes, and incomplete work of a killed thawd is removed.

#![allow(clippy::unwrap_used)]

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::process::{Child, Stdio};
use std::sync::{Mutex, PoisonError};

use support::{HALT, Leftovers, Place, eventually, lives, one_line, records, records_in, text};

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// A thawd that serves. Dropping it ends it.
struct Daemon(Child);

impl Daemon {
    fn start(place: &Place) -> Daemon {
        let child = place.command("thawd").stderr(Stdio::null()).spawn().unwrap();
        let socket = place.path("run/thawd.sock");
        eventually("thawd serves", || {
            std::os::unix::net::UnixStream::connect(&socket).is_ok()
        });
        Daemon(child)
    }

    /// Ends it as an operator does.
    fn stop(mut self) {
        let pid = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        assert!(self.0.wait().unwrap().success());
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn failures_keep_their_codes_through_the_daemon() {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(place) = Place::new(HALT) else { return };
    std::fs::write(place.path("kernel"), b"\x7fELF but not much of one").unwrap();
    let daemon = Daemon::start(&place);
    let output = place.run().output().unwrap();
    assert_eq!(output.status.code(), Some(68), "{}", text(&output.stderr));
    one_line(&output);
    let again = place.command("thawd").output().unwrap();
    assert_eq!(again.status.code(), Some(125), "one thawd per socket");
    daemon.stop();
    assert_eq!(place.leftovers(), Leftovers::none());
}

#[test]
fn a_killed_daemon_leaves_nothing_half_made() {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(place) = Place::new(HALT) else { return };
    let mut daemon = Daemon::start(&place);
    let mut thaw = place.run().stderr(Stdio::null()).spawn().unwrap();
    eventually("the guest runs", || {
        records(&place).values().any(|r| r["vmm"].is_object())
    });
    let record = records(&place).into_values().next().unwrap();
    assert_eq!(
        (&record["tethered"], &record["ready"]),
        (&false.into(), &false.into())
    );
    let vmm = record["vmm"]["pid"].as_i64().unwrap() as i32;
    // Until the VMM has a machine, it ends with thawd's connection. The vsock is made after that.
    let vsock = place
        .path("run/sandboxes")
        .join(record["id"].as_str().unwrap())
        .join("vsock.sock");
    eventually("it has a machine", || vsock.exists());
    // The cgroups made ahead, and the sandbox's.
    eventually("its pools are full", || place.leftovers().cgroups.len() != 1);
    daemon.0.kill().unwrap();
    daemon.0.wait().unwrap();
    assert_eq!(thaw.wait().unwrap().code(), Some(93), "thawd went away");
    assert!(lives(vmm), "an untethered VMM outlives its thawd");

    // The next thawd removes it, because its agent never took an identity.
    let next = Daemon::start(&place);
    assert!(!lives(vmm));
    assert!(place.leftovers().sandboxes.is_empty());
    // It removed the resources that the first thawd had made ahead when it started, and removes its own when it stops.
    next.stop();
    assert_eq!(place.leftovers(), Leftovers::none());
}

#[test]
fn what_a_child_of_a_killed_daemon_still_locks_is_waited_for() {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(place) = Place::new(HALT) else { return };
    Daemon::start(&place).stop();
    // A machine made ahead, without a living owner.
    let spare = place.path("run/spares/0123456789ab");
    std::fs::create_dir_all(&spare).unwrap();
    // The child shares the locks of the run directory and of all below it.
    let locked = [place.path("run"), spare.clone()].map(|path| {
        let directory = std::fs::File::open(path).unwrap();
        rustix::fs::flock(&directory, rustix::fs::FlockOperation::LockExclusive).unwrap();
        directory
    });
    let child = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(300));
        drop(locked);
    });
    let next = Daemon::start(&place);
    child.join().unwrap();
    assert!(!spare.exists(), "it is removed by the start");
    next.stop();
    assert_eq!(place.leftovers(), Leftovers::none());
}

/// The VMMs that the records name.
fn vmms(records: BTreeMap<String, serde_json::Value>) -> BTreeSet<i64> {
    records
        .values()
        .filter_map(|r| r["vmm"]["pid"].as_i64())
        .collect()
}

#[test]
fn parked_machines_are_made_taken_and_removed_after_a_kill() {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(place) = Place::new(HALT) else { return };
    let mut daemon = Daemon::start(&place);
    let spares = || vmms(records_in(&place.path("run/spares")));
    let mut runs = Vec::new();
    let mut run = |wanted: usize| {
        runs.push(place.run().stderr(Stdio::null()).spawn().unwrap());
        eventually("its VMM is known", || vmms(records(&place)).len() == wanted);
        vmms(records(&place))
    };
    let first = run(1);
    assert!(spares().is_empty(), "one use is no demand");
    run(2);
    eventually("shells wait", || spares().len() == 4);
    // Two are made at once, so the others are ready.
    let waiting = spares();
    assert!(waiting.is_disjoint(&first));
    let all = run(3);
    assert_eq!(all.intersection(&waiting).count(), 1, "{all:?}, {waiting:?}");
    eventually("it has a directory of its own only", || {
        spares().is_disjoint(&all)
    });
    // A later thawd finds each machine in its sandbox's record.
    for id in records(&place).keys() {
        let control = place.path("run/sandboxes").join(id).join("control.sock");
        thaw_pools::vmm::connect(&control, rustix::net::SocketType::SEQPACKET).unwrap();
    }
    let listed = place.command("thaw").args(["--json", "ps"]).output().unwrap();
    let listed: Vec<serde_json::Value> = serde_json::from_slice(&listed.stdout).unwrap();
    assert_eq!(listed.len(), 3, "shells are no sandboxes: {listed:?}");

    daemon.0.kill().unwrap();
    daemon.0.wait().unwrap();
    for mut run in runs {
        assert_eq!(run.wait().unwrap().code(), Some(93), "thawd went away");
    }
    Daemon::start(&place).stop();
    assert_eq!(place.leftovers(), Leftovers::none());
    assert!(!place.path("run/spares").exists());
}
