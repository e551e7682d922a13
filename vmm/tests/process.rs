//! The process: its jail, and how it answers requests that are right, wrong or no requests at all.

#![allow(clippy::unwrap_used)]

mod support;

use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd;

use support::snapshot::{empty, freeze};
use support::{Connection, Vmm, spec, started};
use thaw_protocol::control::*;
use thaw_protocol::packet;
use thaw_protocol::versions::CONTROL;
use thaw_tiny_guest::{Code, ENTRY, Guest, memfd};

fn code(result: Result<Response, ControlError>) -> ErrorCode {
    match result {
        Err(e) => {
            assert!(!e.message.is_empty());
            e.code
        }
        Ok(response) => panic!("{response:?}"),
    }
}

fn spinning() -> File {
    Code::default().repeat_from(0).kernel()
}

#[test]
fn the_jail_is_closed_before_the_first_request_is_answered() {
    let vmm = Vmm::spawn();
    let mut control = vmm.connect();
    assert_eq!(control.state(), MachineState::NoMachine);
    let pid = vmm.pid();
    assert_eq!(
        std::fs::read_dir(format!("/proc/{pid}/root/")).unwrap().count(),
        0,
        "the root is not empty"
    );
    assert_eq!(
        File::create(format!("/proc/{pid}/root/x"))
            .unwrap_err()
            .raw_os_error(),
        Some(libc::EROFS)
    );
    assert_eq!(vmm.status("NoNewPrivs"), "1");
    for set in ["CapBnd", "CapInh", "CapAmb"] {
        assert_eq!(vmm.status(set), "0000000000000000", "{set}");
    }
    // At most CAP_SYS_BOOT, until the VM is made.
    let kept = u64::from_str_radix(&vmm.status("CapPrm"), 16).unwrap();
    assert_eq!(kept & !(1 << 22), 0);
    for namespace in ["mnt", "net", "ipc", "uts", "cgroup"] {
        let of = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/{namespace}")).unwrap();
        assert_ne!(of(&pid.to_string()), of("self"), "{namespace}");
    }
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
    assert_eq!(names, ["devices", "fs-shared", "fs-thaw", "thaw-vmm", "vcpu0"]);
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
        assert_eq!(filtered_threads(vmm.pid(), 1).len(), 4 + vcpus as usize);
    }
}

/// The hard limit of a resource.
fn limit(limits: &str, resource: &str) -> String {
    let line = limits.lines().find_map(|line| line.strip_prefix(resource));
    let mut columns = line.unwrap().split_whitespace();
    columns.nth(1).unwrap().to_string()
}

#[test]
fn it_ends_when_asked_by_a_signal() {
    let mut vmm = Vmm::spawn();
    let mut control = vmm.connect();
    control.create(spec(1, 64)).unwrap();
    let pid = rustix::process::Pid::from_raw(vmm.pid() as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(vmm.wait(), 128 + libc::SIGTERM);
}

#[test]
fn nothing_inherited_but_the_control_socket_stays_open() {
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
fn it_jails_itself_without_privileges_too() {
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
fn it_starts_without_namespaces_and_says_that_it_lacks_them() {
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
fn a_jail_that_has_to_be_whole_and_cannot_ends_the_process() {
    // Nobody made a PID namespace for it here.
    let mut vmm = Vmm::spawn_whole();
    assert_eq!(vmm.wait(), JAIL_LACKS_CODE);
    let mut log = String::new();
    std::io::Read::read_to_string(vmm.child.stderr.as_mut().unwrap(), &mut log).unwrap();
    assert!(log.contains("the jail would lack a PID namespace"), "{log}");
}

#[test]
fn a_write_beyond_the_file_limit_fails_and_ends_nothing() {
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

#[test]
fn requests_that_do_not_fit_the_state_change_nothing() {
    let vmm = Vmm::spawn();
    let mut control = vmm.connect();
    let kernel = spinning();
    let boot = |cmdline: &str| Command::Boot {
        cmdline: cmdline.into(),
    };
    for command in [
        Command::Pause,
        Command::Resume,
        boot(""),
        Command::RemoveImage { slot: 1 },
    ] {
        assert_eq!(
            code(control.request(command, &[kernel.as_fd()])),
            ErrorCode::WrongState
        );
        assert_eq!(control.state(), MachineState::NoMachine);
    }
    control.create(spec(1, 64)).unwrap();
    assert_eq!(code(control.create(spec(1, 64))), ErrorCode::WrongState);
    for command in [Command::Pause, Command::Resume] {
        assert_eq!(code(control.request(command, &[])), ErrorCode::WrongState);
        assert_eq!(control.state(), MachineState::Created);
    }
    control.boot(&kernel).unwrap();
    assert_eq!(code(control.boot(&kernel)), ErrorCode::WrongState);
    assert_eq!(code(control.request(Command::Resume, &[])), ErrorCode::WrongState);
    assert_eq!(control.state(), MachineState::Running);
    control.request(Command::Pause, &[]).unwrap();
    assert_eq!(code(control.request(Command::Pause, &[])), ErrorCode::WrongState);
    assert_eq!(control.state(), MachineState::Paused);
}

#[test]
fn a_machine_out_of_range_or_without_kvm_is_refused() {
    let vmm = Vmm::spawn();
    let mut control = vmm.connect();
    for (vcpus, mib) in [(0, 64), (17, 64), (1, 63), (1, 65537), (255, u32::MAX)] {
        assert_eq!(
            code(control.create(spec(vcpus, mib))),
            ErrorCode::Invalid,
            "{vcpus} {mib}"
        );
    }
    let create = |version| Command::Create {
        version,
        machine: spec(1, 64),
    };
    let null = File::open("/dev/null").unwrap();
    let plain = memfd(b"");
    let kvm = File::open("/dev/kvm").unwrap();
    let fds = [null.as_fd(), plain.as_fd(), kvm.as_fd()];
    for version in [CONTROL.oldest - 1, CONTROL_VERSION + 1] {
        let refused = control.request(create(version), &[kvm.as_fd()]).unwrap_err();
        assert_eq!(refused.code, ErrorCode::Invalid);
        assert!(
            refused.message.contains(&format!("version {version}")),
            "{refused}"
        );
    }
    for wrong in [&fds[..0], &fds[..1], &fds[1..2], &fds[1..]] {
        assert_eq!(
            code(control.request(create(CONTROL_VERSION), wrong)),
            ErrorCode::Invalid
        );
    }
    assert_eq!(control.state(), MachineState::NoMachine);
    control.create(spec(1, 64)).unwrap();
}

#[test]
fn wrong_kernel_is_refused_and_a_right_one_still_boots() {
    let vmm = Vmm::spawn();
    let mut control = vmm.connect();
    control.create(spec(1, 64)).unwrap();
    let guest = Guest {
        code: Code::default().power_off().0,
        data: vec![],
    };
    let whole = guest.elf(0x1000, true);
    let damaged = |at: usize, bytes: &[u8]| {
        let mut elf = whole.clone();
        elf[at..at + bytes.len()].copy_from_slice(bytes);
        elf
    };
    let no_kernels = [
        ("empty", vec![]),
        ("text", b"#!/bin/sh\n".repeat(100)),
        ("32-bit", damaged(4, &[1])),
        ("ARM", damaged(18, &[183, 0])),
        ("no note", guest.elf(0x1000, false)),
        ("cut short", whole[..whole.len() - 1].to_vec()),
        ("headers only", whole[..64].to_vec()),
        ("headers elsewhere", damaged(32, &u64::MAX.to_le_bytes())),
        ("65535 headers", damaged(56, &[0xff, 0xff])),
        ("segment offset", damaged(64 + 8, &u64::MAX.to_le_bytes())),
        ("segment below 1 MiB", damaged(64 + 24, &0x6000u64.to_le_bytes())),
        ("segment wraps", damaged(64 + 24, &(u64::MAX - 10).to_le_bytes())),
        ("file larger than memory", damaged(64 + 40, &1u64.to_le_bytes())),
    ];
    for (what, bytes) in no_kernels {
        assert_eq!(code(control.boot(&memfd(&bytes))), ErrorCode::NotPvh, "{what}");
        assert_eq!(control.state(), MachineState::Created, "{what}");
    }
    for size in [64 << 20, 1 << 40] {
        let large = memfd(&guest.elf(size - u64::from(ENTRY), true));
        let refused = control.boot(&large).unwrap_err();
        assert_eq!(refused.code, ErrorCode::MemoryTooSmall);
        assert!(refused.message.contains("64 MiB"), "{refused}");
    }
    let long = Command::Boot {
        cmdline: "x".repeat(2048),
    };
    assert_eq!(
        code(control.request(long, &[memfd(&whole).as_fd()])),
        ErrorCode::Invalid
    );
    assert_eq!(
        code(control.request(
            Command::Boot {
                cmdline: String::new()
            },
            &[]
        )),
        ErrorCode::Invalid
    );
    control.boot(&memfd(&whole)).unwrap();
    assert_eq!(control.exit(), ExitReason::PowerOff);
    assert_eq!(code(control.boot(&memfd(&whole))), ErrorCode::WrongState);
    assert_eq!(code(control.request(Command::Pause, &[])), ErrorCode::WrongState);
}

#[test]
fn the_console_takes_a_console_and_nothing_else_takes_one() {
    let vmm = Vmm::spawn();
    let mut control = vmm.connect();
    control.create(spec(1, 64)).unwrap();
    let fd = memfd(b"");
    let attach = |device, backend| Command::Attach { device, backend };
    let wrong = [
        attach(DeviceId::Console, Backend::Vsock),
        attach(DeviceId::Blk0, Backend::Console),
        attach(DeviceId::Rng, Backend::Disk { read_only: true }),
    ];
    for command in wrong {
        assert_eq!(code(control.request(command, &[fd.as_fd()])), ErrorCode::Invalid);
    }
    assert_eq!(
        code(control.request(attach(DeviceId::Console, Backend::Console), &[])),
        ErrorCode::Invalid
    );
}

#[test]
fn garbage_ends_the_connection_and_not_the_machine() {
    let (vmm, mut control, _console) = started(spec(1, 64), &spinning());
    let packets: [&[u8]; 3] = [&[0xff; 100], &[1], &[0; 60_000]];
    for bytes in packets {
        rustix::net::send(&control.socket, bytes, rustix::net::SendFlags::empty()).unwrap();
        assert!(matches!(
            control.receive(),
            Err(packet::PacketError::Closed | packet::PacketError::Io(_))
        ));
        control = vmm.connect();
        assert_eq!(control.state(), MachineState::Running);
    }
}

#[test]
fn untethered_machine_outlives_its_connections() {
    let (vmm, control, _console) = started(spec(1, 64), &Code::default().power_off().kernel());
    drop(control);
    for _ in 0..3 {
        let mut control = vmm.connect();
        assert_eq!(control.exit(), ExitReason::PowerOff);
        assert_eq!(control.state(), MachineState::Exited(ExitReason::PowerOff));
    }
}

#[test]
fn hello_is_answered_with_the_newest_common_version() {
    let vmm = Vmm::spawn();
    let mut control = vmm.connect();
    let hello = |control: &mut Connection, version| control.request(Command::Hello { version }, &[]);
    let answer = |version| Response::Hello {
        version,
        release: env!("CARGO_PKG_VERSION").into(),
    };
    for (theirs, agreed) in [(4, 4), (5, 5), (u32::MAX, CONTROL_VERSION)] {
        assert_eq!(hello(&mut control, theirs), Ok(answer(agreed)));
    }
    let refused = hello(&mut control, 3).unwrap_err();
    assert_eq!(refused.code, ErrorCode::Version);
    assert!(refused.message.contains("control version 3"), "{refused}");
    // A thawd of the previous release makes its machines with this VMM, once it is installed.
    let create = Command::Create {
        version: 4,
        machine: spec(1, 64),
    };
    let kvm = File::open("/dev/kvm").unwrap();
    assert_eq!(control.request(create, &[kvm.as_fd()]), Ok(Response::Done));
    assert_eq!(hello(&mut control, 5), Ok(answer(5)));
}

#[test]
fn request_of_a_later_version_is_refused_and_the_next_served() {
    let vmm = Vmm::spawn();
    let mut control = vmm.connect();
    // A number, then tags that this release does not have: of a command, and of a device.
    for (later, what) in [
        (&[77, 99, 1][..], "Command tag 99"),
        (&[77, 14, 50], "DeviceId tag 50"),
    ] {
        rustix::net::send(&control.socket, later, rustix::net::SendFlags::NOSIGNAL).unwrap();
        let Ok(FromVmm::Reply {
            id: 77,
            result: Err(refused),
        }) = control.receive()
        else {
            panic!("another answer");
        };
        assert_eq!(refused.code, ErrorCode::Version);
        assert!(refused.message.contains(what), "{refused}");
        assert_eq!(control.state(), MachineState::NoMachine);
    }
}

#[test]
fn a_second_connection_waits_for_the_first_to_end() {
    let (vmm, mut first, _console) = started(spec(1, 64), &spinning());
    let mut second = vmm.connect();
    packet::send(
        &second.socket,
        &Request {
            id: 1,
            command: Command::Status,
        },
        &[],
    )
    .unwrap();
    assert_eq!(first.state(), MachineState::Running);
    assert!(!support::readable(
        &second.socket,
        std::time::Duration::from_millis(50)
    ));
    drop(first);
    assert!(matches!(
        second.receive(),
        Ok(FromVmm::Reply { id: 1, result: Ok(_) })
    ));
    assert_eq!(second.state(), MachineState::Running);
}

#[test]
fn a_tethered_machine_ends_with_its_connection() {
    let (mut vmm, control, _console) = started(
        MachineSpec {
            tethered: true,
            ..spec(2, 64)
        },
        &spinning(),
    );
    drop(control);
    assert_eq!(vmm.wait(), 0);
}

#[test]
fn a_process_without_a_machine_ends_with_its_connection() {
    let mut vmm = Vmm::spawn();
    let mut control = vmm.connect();
    assert_eq!(control.state(), MachineState::NoMachine);
    drop(control);
    assert_eq!(vmm.wait(), 0);
}

#[test]
fn shutdown_is_answered_and_then_done() {
    let (mut vmm, mut control, _console) = started(spec(4, 1024), &spinning());
    assert_eq!(control.request(Command::Shutdown, &[]), Ok(Response::Done));
    assert_eq!(vmm.wait(), 0);
    assert!(matches!(
        control.receive(),
        Err(packet::PacketError::Closed | packet::PacketError::Io(_))
    ));
}

#[test]
fn a_guest_that_never_rang_is_seen_where_it_was_last() {
    let mut vmm = Vmm::spawn_logging();
    let mut control = vmm.connect();
    control.create(spec(2, 64)).unwrap();
    control.boot(&spinning()).unwrap();
    control.request(Command::Shutdown, &[]).unwrap();
    assert_eq!(vmm.wait(), 0);
    let mut log = String::new();
    std::io::Read::read_to_string(vmm.child.stderr.as_mut().unwrap(), &mut log).unwrap();
    for vcpu in ["vCPU 0 at 0x100000, rflags", "vCPU 1 at"] {
        assert!(
            log.contains(&format!("before the guest was ready: {vcpu}")),
            "{log}"
        );
    }
}

#[test]
fn the_moments_of_a_start_are_in_order() {
    let (_vmm, mut control, mut console) = started(
        spec(1, 64),
        &Code::default().print("up\n").repeat_from(0).kernel(),
    );
    std::io::Read::read_exact(&mut console, &mut [0; 3]).unwrap();
    let Response::Status { times, .. } = control.request(Command::Status, &[]).unwrap() else {
        panic!()
    };
    assert!(0 < times.process && times.process < times.jailed, "{times:?}");
    assert!(
        times.jailed < times.created && times.created < times.entered,
        "{times:?}"
    );
}

#[test]
fn started_by_hand_it_explains_itself() {
    let run = |argument: &[&str]| {
        std::process::Command::new(env!("CARGO_BIN_EXE_thaw-vmm"))
            .args(argument)
            .output()
            .unwrap()
    };
    let help = run(&["--help"]);
    assert!(help.status.success() && String::from_utf8_lossy(&help.stdout).contains("thaw run"));
    assert!(run(&["--version"]).status.success());
    for wrong in [run(&[]), run(&["--frobnicate"])] {
        assert_eq!(wrong.status.code(), Some(2));
        assert_eq!(String::from_utf8_lossy(&wrong.stderr).lines().count(), 1);
    }
}

#[test]
fn guest_that_misuses_its_devices_endlessly_leaves_a_short_log() {
    let mut vmm = Vmm::spawn_logging();
    let mut control = vmm.connect();
    control.create(support::spec(1, 64)).unwrap();
    control
        .boot(&thaw_tiny_guest::misuse::misuse(13_000).kernel())
        .unwrap();
    assert_eq!(control.exit(), ExitReason::PowerOff);
    control.request(Command::Shutdown, &[]).unwrap();
    let mut log = String::new();
    vmm.child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    let told = log.matches("set up a queue outside memory").count();
    // A burst of each device, and what the seconds that it took allow.
    assert!((13 * 10..13 * 20).contains(&told), "{told} lines");
}

#[test]
fn full_log_of_a_jailed_vmm_keeps_its_newest_lines() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vmm.log");
    // It is full once the guest runs: the calls that make room are made in the sealed jail.
    let line = [&[b'x'; 1023][..], b"\n"].concat();
    std::fs::write(&path, line.repeat(1020)).unwrap();
    let file = File::options().read(true).append(true).open(&path).unwrap();
    let mut vmm = Vmm::spawn_logging_to(file);
    let mut control = vmm.connect();
    control.create(spec(1, 64)).unwrap();
    assert!(std::fs::metadata(&path).unwrap().len() < 1 << 20);
    control
        .boot(&thaw_tiny_guest::misuse::misuse(1300).kernel())
        .unwrap();
    assert_eq!(control.exit(), ExitReason::PowerOff);
    control.request(Command::Shutdown, &[]).unwrap();
    assert_eq!(vmm.wait(), 0);
    let log = std::fs::read_to_string(&path).unwrap();
    assert!(log.len() < 1 << 19, "{}", log.len());
    assert!(
        log.lines().next().unwrap().contains("older lines were dropped"),
        "{log}"
    );
    assert!(log.matches("set up a queue outside memory").count() >= 130);
    assert!(log.contains("xxx") && log.contains("jailed"));
}
