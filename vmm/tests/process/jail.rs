//! The jail of the process.

use thaw_protocol::control::*;
use thaw_tiny_guest::memfd;
use thaw_vmm::virtio::inventory::DISK_THREADS;

use crate::namespaces::assert_outside_ours;
use crate::support::snapshot::{empty, freeze};
use crate::support::{Vmm, spec};
use crate::{code, spinning};

#[test]
fn jail_is_closed_before_the_first_reply() {
    let vmm = Vmm::spawn();
    let mut control = vmm.connect();
    assert_eq!(control.state(), MachineState::NoMachine);
    let pid = vmm.pid();
    assert_outside_ours(pid);
    assert_eq!(vmm.status("NoNewPrivs"), "1");
    for set in ["CapBnd", "CapInh", "CapAmb"] {
        assert_eq!(vmm.status(set), "0000000000000000", "{set}");
    }
    // At most CAP_SYS_BOOT, until the VM is made.
    let kept = u64::from_str_radix(&vmm.status("CapPrm"), 16).unwrap();
    assert_eq!(kept & !(1 << 22), 0);
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    for none in ["Max core file size", "Max locked memory", "Max msgqueue size"] {
        assert_eq!(limit(&limits, none), "0", "{none}");
    }

    control.create(spec(1, 64)).unwrap();
    for set in ["CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb"] {
        assert_eq!(vmm.status(set), "0000000000000000", "{set} of a machine");
    }
    let mut names = filtered_threads(pid, 1);
    names.sort();
    let all = names.len();
    names.retain(|name| name != "disk");
    assert_eq!(all - names.len(), DISK_THREADS);
    assert_eq!(
        names,
        [
            "devices",
            "fs-shared",
            "fs-thaw",
            "protection",
            "thaw-vmm",
            "vcpu0"
        ]
    );
    if rustix::process::geteuid().is_root() {
        let own = (0x7400_0000 + pid).to_string();
        for ids in ["Uid", "Gid"] {
            assert!(vmm.status(ids).split_whitespace().all(|id| id == own), "{ids}");
        }
        assert_eq!(vmm.status("Groups"), "");
        assert_eq!(limit(&limits, "Max processes"), "64");
    }
}

/// The names of a process's threads, each of which has that many seccomp programs.
fn filtered_threads(pid: u32, programs: usize) -> Vec<String> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let threads =
        threads.map(|thread| std::fs::read_to_string(thread.unwrap().path().join("status")).unwrap());
    threads
        .map(|status| {
            let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            (
                field("Name:\t").to_string(),
                field("Seccomp_filters:\t").to_string(),
            )
        })
        // One of the kernel's, in this process's name: it never runs our code.
        .filter(|(name, _)| !name.starts_with("kvm-"))
        .map(|(name, filters)| {
            assert_eq!(filters, programs.to_string(), "{name}");
            name
        })
        .collect()
}

#[test]
fn seccomp_programs_do_not_grow_with_vcpus() {
    for vcpus in [1, 4] {
        let vmm = Vmm::spawn();
        let mut control = vmm.connect();
        control.create(spec(vcpus, 64)).unwrap();
        let threads = 5 + DISK_THREADS + vcpus as usize;
        assert_eq!(filtered_threads(vmm.pid(), 1).len(), threads);
    }
}

/// The hard limit of a resource.
fn limit(limits: &str, resource: &str) -> String {
    let line = limits.lines().find_map(|line| line.strip_prefix(resource));
    let mut columns = line.unwrap().split_whitespace();
    columns.nth(1).unwrap().to_string()
}

#[test]
fn inherited_descriptors_but_the_control_socket_are_closed() {
    // Many descriptors without close-on-exec in a child of ours.
    let leaked: Vec<_> = (0..20).map(|_| memfd(b"secret")).collect();
    for file in &leaked {
        rustix::io::fcntl_setfd(file, rustix::io::FdFlags::empty()).unwrap();
    }
    let vmm = Vmm::spawn();
    let mut control = vmm.connect();
    assert_eq!(control.state(), MachineState::NoMachine);
    for entry in std::fs::read_dir(format!("/proc/{}/fd", vmm.pid())).unwrap() {
        let target = std::fs::read_link(entry.unwrap().path()).unwrap();
        assert!(
            !target.to_string_lossy().contains("memfd:kernel"),
            "{target:?} leaked"
        );
    }
}

#[test]
fn unprivileged_vmm_jails_itself() {
    if !rustix::process::geteuid().is_root() {
        return thaw_test_skip::skip("without root every other test of this file shows it");
    }
    let (_directory, copy) = copy_for_everybody();
    let mut vmm = Vmm::spawn_binary(&copy, Some(12345));
    let mut control = vmm.connect();
    control.create(spec(1, 64)).unwrap();
    assert_eq!(vmm.status("CapEff"), "0000000000000000");
    assert_eq!(vmm.status("Uid").split_whitespace().next(), Some("12345"));
    assert_eq!(
        std::fs::read_dir(format!("/proc/{}/root/", vmm.pid()))
            .unwrap()
            .count(),
        0
    );
    control.request(Command::Shutdown, &[]).unwrap();
    assert_eq!(vmm.wait(), 0);
}

#[test]
fn vmm_without_namespaces_starts_and_logs_the_lack() {
    if !rustix::process::geteuid().is_root() {
        return thaw_test_skip::skip("it takes root to make a binary that an other user can run");
    }
    let (_directory, copy) = copy_for_everybody();
    let mut vmm = Vmm::spawn_without_namespaces(&copy, 12345);
    let mut control = vmm.connect();
    control.create(spec(1, 64)).unwrap();
    assert_eq!(vmm.status("CapEff"), "0000000000000000");
    assert_eq!(vmm.status("NoNewPrivs"), "1");
    // One is this test's, one is its own.
    assert_eq!(vmm.status("Seccomp_filters"), "2");
    control.request(Command::Shutdown, &[]).unwrap();
    assert_eq!(vmm.wait(), 0);
    let mut log = String::new();
    std::io::Read::read_to_string(vmm.child.stderr.as_mut().unwrap(), &mut log).unwrap();
    let lines: Vec<_> = log
        .lines()
        .filter(|line| line.contains("the jail lacks"))
        .collect();
    assert_eq!(lines.len(), 1, "{log}");
    assert!(lines[0].contains("namespaces and an empty root"), "{log}");
}

#[test]
fn required_whole_jail_that_lacks_a_part_ends_the_process() {
    // Nobody made a PID namespace for it here.
    let mut vmm = Vmm::spawn_whole();
    assert_eq!(vmm.wait(), JAIL_LACKS_CODE);
    let mut log = String::new();
    std::io::Read::read_to_string(vmm.child.stderr.as_mut().unwrap(), &mut log).unwrap();
    assert!(log.contains("the jail would lack a PID namespace"), "{log}");
}

#[test]
fn write_beyond_the_file_limit_fails_without_ending_the_vmm() {
    for (most, fits) in [(4096, false), (128 << 20, true)] {
        let vmm = Vmm::spawn_with_file_limit(most);
        let mut control = vmm.connect();
        control.create(spec(1, 64)).unwrap();
        control.boot(&spinning()).unwrap();
        let ignored = u64::from_str_radix(&vmm.status("SigIgn"), 16).unwrap();
        assert_ne!(ignored & 1 << (libc::SIGXFSZ - 1), 0, "SIGXFSZ would end it");
        control.request(Command::Pause, &[]).unwrap();
        let frozen = freeze(&vmm, &mut control, FreezeKind::Full, &empty(), &empty());
        match fits {
            true => drop(frozen.unwrap()),
            false => assert_eq!(code(frozen), ErrorCode::System),
        }
        assert_eq!(control.state(), MachineState::Paused);
        control.request(Command::Resume, &[]).unwrap();
        assert_eq!(control.state(), MachineState::Running);
    }
}

/// A copy of the binary that any user may run: the directory it is in may be closed to others.
fn copy_for_everybody() -> (tempfile::TempDir, std::path::PathBuf) {
    let directory = tempfile::tempdir_in("/tmp").unwrap();
    std::fs::set_permissions(
        directory.path(),
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )
    .unwrap();
    let copy = directory.path().join("thaw-vmm");
    // By another process: a child that some other test is just starting would have it open for writing.
    let copied = std::process::Command::new("cp")
        .arg(env!("CARGO_BIN_EXE_thaw-vmm"))
        .arg(&copy)
        .status();
    assert!(copied.unwrap().success());
    (directory, copy)
}
