//! The namespaces of the process: those that its starter made for all VMMs, or its own.

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::MemfdFlags;
use rustix::net::SocketType;
use thaw_pools::vmm::{self, Jail, VmmProcess};
use thaw_protocol::control::*;

use crate::support::{Connection, Vmm, spec};

const NAMES: [&str; 5] = ["mnt", "net", "ipc", "uts", "cgroup"];

/// A namespace of a process, as `/proc` names it.
fn namespace(process: impl ToString, name: &str) -> PathBuf {
    fs::read_link(format!("/proc/{}/ns/{name}", process.to_string())).unwrap()
}

/// Asserts that a process has none of our namespaces, and a root without a file in which it can make none.
pub fn assert_outside_ours(pid: u32) {
    for name in NAMES {
        assert_ne!(namespace(pid, name), namespace("self", name), "{name}");
    }
    let root = PathBuf::from(format!("/proc/{pid}/root/"));
    assert_eq!(fs::read_dir(&root).unwrap().count(), 0, "the root is not empty");
    let refused = File::create(root.join("x")).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
}

/// A VMM that is started as thawd starts it, and has a machine.
fn started_by_us(directory: &Path, name: &str) -> (VmmProcess, Connection) {
    let path = directory.join(name);
    let listener = vmm::listen(&path, SocketType::SEQPACKET).unwrap();
    let socket = vmm::connect(&path, SocketType::SEQPACKET).unwrap();
    let log: OwnedFd = rustix::fs::memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
    let program = Path::new(env!("CARGO_BIN_EXE_thaw-vmm"));
    let process = vmm::spawn(program, &listener, &log, Jail::AsHostAllows).unwrap();
    let mut control = Connection::on(socket);
    control.create(spec(1, 64)).unwrap();
    (process, control)
}

/// The lines of a table of `/proc/PID/net` below its head.
fn entries(pid: i32, table: &str) -> usize {
    let text = fs::read_to_string(format!("/proc/{pid}/net/{table}")).unwrap();
    text.lines().skip(1).count()
}

#[test]
fn vmms_of_one_starter_share_empty_namespaces() {
    if !rustix::process::geteuid().is_root() {
        return thaw_test_skip::skip("without root each VMM makes namespaces of its own");
    }
    let directory = tempfile::tempdir().unwrap();
    let vmms = ["a", "b"].map(|name| started_by_us(directory.path(), name));
    let [a, b] = vmms.each_ref().map(|(process, _)| process.record().pid);
    for name in NAMES {
        assert_eq!(namespace(a, name), namespace(b, name), "{name}");
    }
    for pid in [a, b] {
        assert_outside_ours(pid as u32);
        let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap();
        assert_eq!(mounts.lines().count(), 1, "{mounts}");
        for table in ["route", "unix"] {
            assert_eq!(entries(pid, table), 0, "{table}");
        }
        for entry in fs::read_dir(format!("/proc/{pid}/fd")).unwrap() {
            let target = fs::read_link(entry.unwrap().path()).unwrap();
            let kind = target.to_string_lossy().into_owned();
            let is_namespace = NAMES.iter().any(|name| kind.starts_with(&format!("{name}:[")));
            assert!(!is_namespace, "{kind} is still open");
        }
    }
}

#[test]
fn vmms_of_one_starter_have_users_and_pids_of_their_own() {
    if !rustix::process::geteuid().is_root() {
        return thaw_test_skip::skip("without root each VMM has its starter's user");
    }
    let directory = tempfile::tempdir().unwrap();
    let vmms = ["a", "b"].map(|name| started_by_us(directory.path(), name));
    let [a, b] = vmms.each_ref().map(|(process, _)| process.record().pid);
    assert_ne!(namespace(a, "pid"), namespace(b, "pid"));
    let user = |pid: i32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        status
            .lines()
            .find(|line| line.starts_with("Uid:"))
            .unwrap()
            .to_string()
    };
    assert_ne!(user(a), user(b));
}

#[test]
fn vmm_that_lacks_the_namespaces_it_was_promised_makes_its_own() {
    let vmm = Vmm::spawn_with_promised_namespaces();
    let mut control = vmm.connect();
    assert_eq!(control.state(), MachineState::NoMachine);
    assert_outside_ours(vmm.pid());
}
