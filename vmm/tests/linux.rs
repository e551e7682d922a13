//! A Linux guest, cold-booted as far as the search for its root file system. These need a KVM that runs Linux at speed
//! (`tests/lab/run` has one) and a guest kernel: `THAW_KERNEL`, or the one guest-kernel-config/build leaves in the cache.

#![allow(clippy::unwrap_used)]

mod support;

use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd;
use std::path::PathBuf;

use support::{Vmm, spec};
use thaw_protocol::control::{Command, ExitReason, MachineSpec, MachineState, Response};

fn kernel() -> File {
    let path = std::env::var_os("THAW_KERNEL")
        .map(PathBuf::from)
        .unwrap_or_else(|| {
            PathBuf::from(std::env::var_os("HOME").unwrap()).join(".cache/thaw/kernel/vmlinux-6.1")
        });
    File::open(&path).unwrap_or_else(|e| panic!("{}: {e}; run guest-kernel-config/build", path.display()))
}

/// Boots Linux without a root file system until it panics and resets; what it said.
fn boot(machine: MachineSpec) -> String {
    let vmm = Vmm::spawn();
    let mut control = vmm.connect();
    control.create(machine).unwrap();
    let mut console = control.console();
    let reader = std::thread::spawn(move || {
        let mut log = String::new();
        console.read_to_string(&mut log).unwrap();
        log
    });
    let cmdline = "console=ttyS0 ignore_loglevel reboot=k panic=-1".to_string();
    control
        .request(Command::Boot { cmdline }, &[kernel().as_fd()])
        .unwrap();
    let ended = control.exit();
    let Response::Status { times, state, .. } = control.request(Command::Status, &[]).unwrap() else {
        panic!()
    };
    // Closes the console.
    drop(vmm);
    let log = reader.join().unwrap();
    println!("{log}\n{ended:?} {times:?}");
    assert_eq!(ended, ExitReason::Reset);
    assert_eq!(state, MachineState::Exited(ExitReason::Reset));
    assert!(
        log.contains("VFS: Unable to mount root fs"),
        "it did not get to its root"
    );
    assert!(!log.contains("dropped]"), "console output was lost");
    log
}

/// Memory Linux says it has, in KiB: `Memory: 123K/456K available`.
fn memory_kib(log: &str) -> u64 {
    let line = log.split("Memory: ").nth(1).expect("a line about memory");
    line.split('/')
        .nth(1)
        .unwrap()
        .split('K')
        .next()
        .unwrap()
        .parse()
        .unwrap()
}

#[test]
#[ignore = "boots Linux: needs a KVM that can"]
fn linux_boots_on_one_vcpu() {
    let log = boot(spec(1, 128));
    assert!(log.contains("Hypervisor detected: KVM"));
    assert!(log.contains("1 CPU"));
    assert!((120 * 1024..=128 * 1024).contains(&memory_kib(&log)));
}

#[test]
#[ignore = "boots Linux: needs a KVM that can"]
fn linux_boots_on_four_vcpus() {
    assert!(boot(spec(4, 512)).contains("Brought up 1 node, 4 CPUs"));
}

#[test]
#[ignore = "boots Linux: needs a KVM that can"]
fn linux_has_the_memory_above_the_hole() {
    let log = boot(spec(2, 5 * 1024));
    assert!((5 * 1024 * 1000..=5 * 1024 * 1024).contains(&memory_kib(&log)));
    assert!(log.contains("0x0000000100000000-0x000000017fffffff"));
}
