//! What the process logs.

use std::fs::File;
use std::io::Read;
use std::time::Instant;

use thaw_protocol::control::*;

use crate::spinning;
use crate::support::{Vmm, spec};

#[test]
fn guest_that_never_rang_is_logged_with_its_last_position() {
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
fn guest_that_misuses_its_devices_leaves_a_short_log() {
    let began = Instant::now();
    let mut vmm = Vmm::spawn_logging();
    let mut control = vmm.connect();
    control.create(spec(1, 64)).unwrap();
    control
        .boot(&thaw_tiny_guest::misuse::misuse(13_000).kernel())
        .unwrap();
    assert_eq!(control.exit(), ExitReason::PowerOff);
    control.request(Command::Shutdown, &[]).unwrap();
    let mut log = String::new();
    vmm.child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    let told = log.matches("set up a queue outside memory").count();
    // A burst of each device, and as much again for each 10 seconds that a busy host took.
    let bursts = 2 + began.elapsed().as_secs() as usize / 10;
    assert!((13 * 10..13 * 10 * bursts).contains(&told), "{told} lines");
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
