use std::fs;
use std::process::Child;

use proptest::prelude::*;
use rustix::net::SocketType;
use thaw_pools::cgroup::Hierarchy;
use thaw_pools::vmm;
use thaw_protocol::control::{Command, Request};
use thaw_protocol::packet;

use super::super::record::{RECORD, Record};
use super::super::tests::{abandoned, record, sleeper};
use super::super::{CONTROL_SOCKET, Living, RunDirectory};

/// A running sandbox whose owner is gone.
struct Orphan {
    _root: tempfile::TempDir,
    run: RunDirectory,
    vmm: Child,
}

impl Orphan {
    fn new() -> Orphan {
        let root = tempfile::tempdir().unwrap();
        let run = RunDirectory::open(root.path()).unwrap();
        let vmm = sleeper();
        abandoned(&run, &record("orphan", Some(&vmm), false));
        Orphan {
            _root: root,
            run,
            vmm,
        }
    }

    fn record(&self) -> Vec<u8> {
        fs::read(self.run.directory("orphan").join(RECORD)).unwrap()
    }

    /// Cleans up with these bytes as the record. Returns whether the VMM and its directory still exist.
    fn survives(&mut self, record: &[u8]) -> bool {
        fs::write(self.run.directory("orphan").join(RECORD), record).unwrap();
        self.run.clean(&Hierarchy::None);
        self.vmm.try_wait().unwrap().is_none() && self.run.directory("orphan").is_dir()
    }
}

impl Drop for Orphan {
    fn drop(&mut self) {
        let _ = self.vmm.kill();
        let _ = self.vmm.wait();
    }
}

#[test]
fn record_cut_at_any_byte_leaves_the_live_vmm_running() {
    let mut orphan = Orphan::new();
    let whole = orphan.record();
    for length in 0..whole.len() {
        assert!(orphan.survives(&whole[..length]), "cut to {length} bytes");
        assert!(
            orphan.run.adopt(&Hierarchy::None).is_empty(),
            "cut to {length} bytes"
        );
        let [unreadable] = &orphan.run.unreadable()[..] else {
            panic!("cut to {length} bytes, it is not listed");
        };
        assert_eq!(unreadable.id, "orphan");
        assert!(matches!(unreadable.living, Living::Vmm(vmm) if vmm.pid == orphan.vmm.id() as i32));
    }
    assert!(orphan.survives(&whole));
    assert!(orphan.run.unreadable().is_empty());
    assert_eq!(orphan.run.adopt(&Hierarchy::None).len(), 1);
}

#[test]
fn record_of_a_newer_release_leaves_its_vmm_running() {
    let mut orphan = Orphan::new();
    let newer = String::from_utf8(orphan.record()).unwrap();
    let newer = newer.replace("\"version\": 2", "\"version\": 3");
    assert!(orphan.survives(newer.as_bytes()));
    let why = orphan.run.unreadable().remove(0).why.to_string();
    assert!(why.contains("version 3"), "{why}");
}

#[test]
fn unreadable_sandbox_is_ended_on_demand_and_removed_once_dead() {
    let mut orphan = Orphan::new();
    assert!(orphan.survives(b"{torn"));
    assert_eq!(orphan.run.find_unowned("orp").as_deref(), Some("orphan"));
    for other in ["", "x", ".", "..", "../sandboxes/orphan"] {
        assert_eq!(orphan.run.find_unowned(other), None, "{other}");
        assert!(!orphan.run.end(other, &Hierarchy::None), "{other}");
    }
    assert!(orphan.run.end("orphan", &Hierarchy::None));
    assert!(orphan.vmm.try_wait().unwrap().is_some());
    assert!(!orphan.run.directory("orphan").exists());

    let mut dead = Orphan::new();
    assert!(dead.survives(b"{torn"));
    dead.vmm.kill().unwrap();
    dead.vmm.wait().unwrap();
    assert_eq!(dead.run.clean(&Hierarchy::None), 1);
    assert!(!dead.run.directory("orphan").exists());
}

#[test]
fn spare_with_an_unreadable_record_is_ended() {
    let root = tempfile::tempdir().unwrap();
    let run = RunDirectory::open(root.path()).unwrap();
    let mut vmm = sleeper();
    abandoned(&run.spares(), &record("spare", Some(&vmm), false));
    fs::write(run.spares().directory("spare").join(RECORD), b"").unwrap();
    run.clean(&Hierarchy::None);
    assert!(vmm.try_wait().unwrap().is_some());
    assert!(!run.spares().directory("spare").exists());
}

/// The release before this one left no mark: its VMMs are found by their sockets.
#[test]
fn unmarked_vmm_is_found_by_its_socket_and_asked_to_end() {
    let root = tempfile::tempdir().unwrap();
    let run = RunDirectory::open(root.path()).unwrap();
    abandoned(&run, &record("old", None, false));
    let directory = run.directory("old");
    fs::write(directory.join(RECORD), b"garbage").unwrap();
    let listener = vmm::listen(&directory.join(CONTROL_SOCKET), SocketType::SEQPACKET).unwrap();
    // More connections than its queue holds, none of which it answers.
    for _ in 0..200 {
        assert_eq!(run.clean(&Hierarchy::None), 0);
    }
    assert_eq!(Living::of(&directory), Living::Listening);
    let served = std::thread::spawn(move || {
        loop {
            let connection = rustix::net::accept(&listener).unwrap();
            // Connections that only probed the socket are closed.
            if let Ok((request, _)) = packet::receive::<Request>(&connection) {
                return request.command;
            }
        }
    });
    assert!(run.end("old", &Hierarchy::None));
    assert_eq!(served.join().unwrap(), Command::Shutdown);
    assert!(!directory.exists());

    abandoned(&run, &record("gone", None, false));
    fs::write(run.directory("gone").join(RECORD), b"garbage").unwrap();
    let socket = run.directory("gone").join(CONTROL_SOCKET);
    drop(vmm::listen(&socket, SocketType::SEQPACKET).unwrap());
    // A process that another test is starting may hold a copy of the listener for a moment.
    while vmm::may_listen(&socket) {
        std::thread::yield_now();
    }
    assert_eq!(run.clean(&Hierarchy::None), 1, "nobody listens any more");
}

#[test]
fn record_ignores_fields_of_volumes_it_does_not_know() {
    let with_volume = |volume: &str| {
        let mut written = serde_json::to_value(record("a", None, false)).unwrap();
        written["volumes"] = serde_json::from_str(&format!("[{volume}]")).unwrap();
        written["network"] = serde_json::json!({
            "address": "10.0.0.1",
            "published": [{"host": 80, "guest": 8080, "later": true}],
        });
        thaw_records::decode::<Record>(&serde_json::to_vec(&written).unwrap())
    };
    let read = with_volume(r#"{"host": "/a", "guest": "/b", "read_only": true, "later": {}}"#).unwrap();
    assert_eq!(read.volumes.len(), 1);
    assert!(read.volumes[0].read_only);
    let network = read.network.unwrap();
    assert_eq!(
        (network.published[0].host, network.published[0].protocol.as_str()),
        (80, "tcp")
    );
    with_volume(r#"{"guest": "/b"}"#).unwrap_err();
}

#[test]
fn record_without_a_control_version_speaks_the_first() {
    let mut written = serde_json::to_value(record("a", None, false)).unwrap();
    written.as_object_mut().unwrap().remove("control").unwrap();
    let read: Record = serde_json::from_value(written.clone()).unwrap();
    assert_eq!(read.control, 4);
    written["control"] = 1_000.into();
    let read: Record = serde_json::from_value(written).unwrap();
    assert_eq!(read.control, 1_000);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]
    #[test]
    fn record_of_any_bytes_leaves_the_live_vmm_running(
        bytes in prop::collection::vec(any::<u8>(), 0..300),
        at in any::<prop::sample::Index>(),
        flipped in 1u8..,
    ) {
        let mut orphan = Orphan::new();
        let mut whole = orphan.record();
        prop_assert!(orphan.survives(&bytes));
        // A damaged record may still read as one of a sandbox that should not outlive its owner.
        let at = at.index(whole.len());
        whole[at] ^= flipped;
        let still_a_record = thaw_records::decode::<Record>(&whole).is_ok();
        prop_assert!(still_a_record || orphan.survives(&whole));
    }
}
