//! thawd as a service: what it tells systemd, what a stop and a start leave of its sandboxes, and what it says of its
//! configuration.

#![allow(clippy::unwrap_used)]

mod support;

use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use support::{HALT, Leftovers, Place, eventually, lives, records, text};
use thaw_node::api::server::LINGERS;

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Killed when dropped.
struct Killed(Child);

impl Killed {
    fn spawn(command: &mut Command) -> Killed {
        Killed(command.stderr(Stdio::null()).spawn().unwrap())
    }

    fn end(mut self) {
        let pid = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        assert!(self.0.wait().unwrap().success());
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A service manager's socket.
struct Told(UnixDatagram);

impl Told {
    fn bind(path: &Path) -> Told {
        Told(UnixDatagram::bind(path).unwrap())
    }

    /// Waits for a message that has this line.
    fn wait_for(&self, line: &str) -> String {
        loop {
            let mut buffer = [0; 4096];
            let length = self.0.recv(&mut buffer).unwrap();
            let told = text(&buffer[..length]);
            if told.lines().any(|l| l == line) {
                return told;
            }
        }
    }
}

fn serves(place: &Place) {
    let socket = place.path("run/thawd.sock");
    eventually("thawd serves", || {
        std::os::unix::net::UnixStream::connect(&socket).is_ok()
    });
}

fn run(command: &mut Command) -> (Option<i32>, String) {
    let output = command.output().unwrap();
    (output.status.code(), text(&output.stdout) + &text(&output.stderr))
}

#[test]
fn systemd_is_told_that_it_is_ready_that_it_lives_and_that_it_ends() {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(place) = Place::new(HALT) else { return };
    let notify = place.path("notify");
    let told = Told::bind(&notify);
    let mut thawd = place.command("thawd");
    // The watchdog of another process is none of ours.
    thawd.env("NOTIFY_SOCKET", &notify).env("WATCHDOG_USEC", "20000");
    let thawd = Killed::spawn(thawd.env_remove("WATCHDOG_PID"));
    let ready = told.wait_for("READY=1");
    assert!(ready.contains("STATUS=0 sandboxes"), "{ready}");
    assert!(
        std::os::unix::net::UnixStream::connect(place.path("run/thawd.sock")).is_ok(),
        "ready means that callers can connect"
    );
    told.wait_for("WATCHDOG=1");
    told.wait_for("WATCHDOG=1");
    thawd.end();
    told.wait_for("STOPPING=1");
}

#[test]
fn a_drained_thawd_makes_no_sandboxes_until_it_is_told_to() {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(place) = Place::new(HALT) else { return };
    let drain = |undo: &[&str]| run(place.command("thawd").arg("drain").args(undo));
    let (code, said) = drain(&[]);
    assert_eq!(code, Some(93), "{said}");
    let thawd = Killed::spawn(&mut place.command("thawd"));
    serves(&place);
    let (code, said) = drain(&[]);
    assert_eq!((code, said.trim()), (Some(0), "it makes no more; 0 run on"));
    let (code, said) = run(&mut place.run());
    assert_eq!(code, Some(125));
    assert!(said.contains("being drained"), "{said}");
    let (code, said) = drain(&["--undo"]);
    assert_eq!(
        (code, said.trim()),
        (Some(0), "it makes sandboxes again; 0 run on")
    );
    // It is made now; this guest's agent never comes, so the run is ended.
    let run = Killed::spawn(&mut place.run());
    eventually("a sandbox is made", || {
        records(&place).values().any(|r| r["vmm"].is_object())
    });
    drop(run);
    eventually("it goes with its run", || records(&place).is_empty());
    thawd.end();
    assert_eq!(place.leftovers(), Leftovers::none());
}

#[test]
fn sandboxes_run_on_while_thawd_is_stopped_and_started_again() {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(place) = Place::new(HALT) else { return };
    let mut thawd = Killed::spawn(&mut place.command("thawd"));
    serves(&place);
    let mut thaw = Killed::spawn(&mut place.run());
    eventually("the guest runs", || {
        records(&place).values().any(|r| r["vmm"].is_object())
    });
    let (id, record) = records(&place).into_iter().next().unwrap();
    let directory = place.path("run/sandboxes").join(&id);
    eventually("it has a machine", || directory.join("vsock.sock").exists());
    // This guest has no agent to become ready: it is said to be, as of one that is, when nobody owns it.
    thawd.0.kill().unwrap();
    thawd.0.wait().unwrap();
    thaw.0.wait().unwrap();
    let vmm = i32::try_from(record["vmm"]["pid"].as_i64().unwrap()).unwrap();
    let mut ready = record;
    (ready["ready"], ready["client"]) = (true.into(), serde_json::Value::Null);
    std::fs::write(directory.join("record.json"), ready.to_string()).unwrap();

    let listed = || {
        let output = place.command("thaw").args(["--json", "ps"]).output().unwrap();
        let all: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout).unwrap();
        let ids: Vec<_> = all.iter().map(|s| s["id"].as_str().unwrap().to_owned()).collect();
        ids
    };
    for _ in 0..2 {
        let thawd = Killed::spawn(&mut place.command("thawd"));
        serves(&place);
        assert!(lives(vmm));
        assert_eq!(listed(), [id.clone()]);
        // thawd has it: it answers for it.
        let (code, said) = run(place.command("thaw").args(["pause", &id]));
        assert_eq!(code, Some(0), "{said}");
        let (code, said) = run(place.command("thaw").args(["resume", &id]));
        assert_eq!(code, Some(0), "{said}");
        thawd.end();
        assert!(lives(vmm), "a stopped thawd leaves it running");
        assert_eq!(listed(), [id.clone()]);
    }
    let thawd = Killed::spawn(&mut place.command("thawd"));
    serves(&place);
    let (code, said) = run(place.command("thaw").args(["rm", &id]));
    assert_eq!(code, Some(0), "{said}");
    eventually("its VMM has ended", || !lives(vmm));
    assert!(listed().is_empty());
    thawd.end();
    assert_eq!(place.leftovers(), Leftovers::none());
}

#[test]
fn a_configuration_is_checked_before_it_is_used() {
    let directory = tempfile::tempdir().unwrap();
    let thawd = || Command::new(Path::new(env!("CARGO_BIN_EXE_thaw")).with_file_name("thawd"));
    let (code, default) = run(thawd().args(["config", "default"]));
    assert_eq!(code, Some(0));
    let file = directory.path().join("thawd.toml");
    std::fs::write(&file, &default).unwrap();
    let (code, said) = run(thawd().args(["config", "check"]).arg(&file));
    assert_eq!((code, said), (Some(0), format!("{} is good\n", file.display())));
    std::fs::write(&file, "[pools]\nmakers = 0\n").unwrap();
    let (code, said) = run(thawd().args(["config", "check"]).env("THAW_CONFIG", &file));
    assert_eq!(code, Some(100));
    assert!(
        said.contains("thawd.toml: line 2") && said.contains("makers"),
        "{said}"
    );
}

/// What of the unit thawd's promises rest on.
#[test]
fn the_unit_is_what_thawd_needs() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../packaging/systemd/thawd.service");
    let unit = std::fs::read_to_string(path).unwrap();
    let value = |key: &str| {
        let mut values = unit
            .lines()
            .filter_map(|l| l.strip_prefix(key)?.strip_prefix('='));
        let value = values.next().unwrap_or_else(|| panic!("no {key}")).to_owned();
        assert!(values.next().is_none(), "{key} twice");
        value
    };
    assert_eq!(value("Type"), "notify");
    assert_eq!(value("KillMode"), "process", "sandboxes outlive thawd");
    assert_eq!(
        value("RuntimeDirectoryPreserve"),
        "yes",
        "the next thawd finds them there"
    );
    let stop: u64 = value("TimeoutStopSec").parse().unwrap();
    assert!(stop > LINGERS.as_secs(), "it may finish what it answers");
    assert!(value("WatchdogSec").parse::<u64>().unwrap() >= 10);
    for device in ["/dev/kvm", "/dev/net/tun", "/dev/userfaultfd"] {
        assert!(unit.contains(&format!("\nDeviceAllow={device} rw\n")), "{device}");
    }
}
