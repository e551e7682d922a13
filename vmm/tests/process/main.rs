//! The process: its jail, its log, and its answers to requests, valid or not.

#![allow(clippy::unwrap_used)]

mod jail;
mod log;
mod namespaces;
#[path = "../support/mod.rs"]
mod support;

use std::fs::File;
use std::os::fd::AsFd;

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
fn vmm_ends_on_sigterm() {
    let mut vmm = Vmm::spawn();
    let mut control = vmm.connect();
    control.create(spec(1, 64)).unwrap();
    let pid = rustix::process::Pid::from_raw(vmm.pid() as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(vmm.wait(), 128 + libc::SIGTERM);
}

#[test]
fn requests_in_the_wrong_state_change_nothing() {
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
fn machine_out_of_range_or_without_kvm_is_refused() {
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
fn backend_of_another_device_is_refused() {
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
fn garbage_ends_the_connection_but_not_the_machine() {
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
fn second_connection_waits_for_the_first_to_end() {
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
fn tethered_machine_ends_with_its_connection() {
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
fn process_without_a_machine_ends_with_its_connection() {
    let mut vmm = Vmm::spawn();
    let mut control = vmm.connect();
    assert_eq!(control.state(), MachineState::NoMachine);
    drop(control);
    assert_eq!(vmm.wait(), 0);
}

#[test]
fn shutdown_is_answered_before_the_exit() {
    let (mut vmm, mut control, _console) = started(spec(4, 1024), &spinning());
    assert_eq!(control.request(Command::Shutdown, &[]), Ok(Response::Done));
    assert_eq!(vmm.wait(), 0);
    assert!(matches!(
        control.receive(),
        Err(packet::PacketError::Closed | packet::PacketError::Io(_))
    ));
}

#[test]
fn times_of_a_start_are_in_order() {
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
fn vmm_started_by_hand_explains_itself() {
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
