//! Tiny guests that drive virtio-mem, friendly and hostile: what they reach, and what becomes of them.

#![allow(clippy::unwrap_used)]

mod support;

use std::fs::File;
use std::io::Read;

use support::{Connection, Vmm, readable, spec};
use thaw_protocol::control::{Command, ExitReason, Request, Response};
use thaw_protocol::packet;
use thaw_tiny_guest::hotplug::{BLOCK, Steps};

const BOOT_MIB: u32 = 64;
const MIB: u32 = 1 << 20;

/// A machine of 64 MiB that runs `steps`, and is asked to have `blocks` more.
fn run(vmm: &Vmm, steps: Steps, blocks: u32) -> (Connection, File) {
    let (mut control, console) = boot(vmm, steps);
    request(&mut control, blocks);
    (control, console)
}

/// The same, before it is asked.
fn boot(vmm: &Vmm, steps: Steps) -> (Connection, File) {
    let mut control = vmm.connect();
    control.create(spec(1, BOOT_MIB)).unwrap();
    let console = control.console();
    control.boot(&steps.guest().kernel()).unwrap();
    (control, console)
}

fn more(blocks: u32) -> Command {
    let memory_mib = BOOT_MIB + blocks * (BLOCK / MIB);
    Command::Resize { memory_mib }
}

fn request(control: &mut Connection, blocks: u32) {
    assert_eq!(control.request(more(blocks), &[]), Ok(Response::Done));
}

fn fault(control: &mut Connection) -> String {
    match control.exit() {
        ExitReason::Fault(text) => text,
        other => panic!("{other:?}"),
    }
}

/// A field of /proc/PID/status, in bytes.
fn bytes(vmm: &Vmm, field: &str) -> u64 {
    let value = vmm.status(field);
    value.strip_suffix(" kB").unwrap().parse::<u64>().unwrap() * 1024
}

#[test]
fn guest_that_moves_its_plugged_memory_stays_within_its_limit() {
    // All it was offered, at one place after the other, with all of boot memory.
    let mut steps = Steps::new().wait_for(16).write_boot_memory(BOOT_MIB);
    for place in 0..8 {
        let first = place * 16;
        steps = steps.plug(first, 16).check_zero(first, 16).write(first, 16);
        steps = steps.check(first, 16).unplug(first, 16);
    }
    let vmm = Vmm::spawn();
    let mut control = vmm.connect();
    control.create(spec(1, BOOT_MIB)).unwrap();
    let before = bytes(&vmm, "VmHWM");
    control.boot(&steps.guest().kernel()).unwrap();
    request(&mut control, 16);
    assert_eq!(control.exit(), ExitReason::PowerOff);
    let limit = u64::from(BOOT_MIB * MIB + 16 * BLOCK);
    let most = bytes(&vmm, "VmHWM");
    assert!(
        most - before <= limit + u64::from(MIB),
        "{most} after {before}, limit {limit}"
    );
    assert!(
        bytes(&vmm, "RssAnon") < u64::from((BOOT_MIB + 8) * MIB),
        "unplugged memory is given back"
    );
}

#[test]
fn guest_that_unplugs_a_block_keeps_the_others() {
    let steps = Steps::new().wait_for(4).plug(0, 4).write(0, 4).unplug(1, 1);
    let steps = steps
        .check(0, 1)
        .check(2, 2)
        .check_zero(1, 1)
        .plug(1, 1)
        .check_zero(1, 1);
    let vmm = Vmm::spawn();
    let (mut control, _console) = run(&vmm, steps.write(1, 1).check(0, 4), 4);
    assert_eq!(control.exit(), ExitReason::PowerOff);
}

#[test]
fn guest_that_writes_to_unplugged_memory_ends_with_a_reason() {
    let unplugged = [
        (Steps::new().wait_for(4).plug(0, 1), 1),
        (Steps::new().wait_for(4).plug(0, 4).write(0, 4).unplug(2, 1), 2),
        (Steps::new().wait_for(4).plug(0, 4).write(0, 4).unplug_all(), 3),
    ];
    // Emulated, and by the processor.
    let both = unplugged.map(|(steps, block)| [(steps.clone(), block), (steps.long_mode(), block)]);
    for (steps, block) in both.into_iter().flatten() {
        let vmm = Vmm::spawn();
        let steps = steps.print("written\n").write(block, 1).print("alive\n");
        let (mut control, mut console) = run(&vmm, steps, 4);
        let why = fault(&mut control);
        assert!(why.contains("not plugged"), "{why}");
        let mut printed = vec![0; 64];
        assert!(readable(&console, support::PATIENCE));
        let count = console.read(&mut printed).unwrap();
        assert_eq!(&printed[..count], b"written\n");
    }
}

#[test]
fn guest_that_reads_all_unplugged_memory_costs_nothing() {
    let steps = Steps::new().wait_for(2).plug(0, 1);
    for steps in [steps.clone(), steps.long_mode()] {
        let vmm = Vmm::spawn();
        let (mut control, _console) = run(&vmm, steps.print("reading\n").check_zero(1, 511), 2);
        assert_eq!(control.exit(), ExitReason::PowerOff);
        assert!(bytes(&vmm, "RssAnon") < u64::from(16 * MIB));
    }
}

#[test]
fn device_told_to_write_to_unplugged_memory_ends_with_a_reason() {
    let mut vmm = Vmm::spawn_logging();
    let (control, _console) = boot(&vmm, Steps::new().wait_for(2).plug(0, 1).answered_at(1));
    // Not with its answer: the guest sees what it is offered before that, and what it does ends the process.
    let command = more(2);
    packet::send(&control.socket, &Request { id: 0, command }, &[]).unwrap();
    assert_eq!(vmm.wait(), -1, "a signal ended it");
    let mut log = String::new();
    vmm.child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    let said = "the guest had a devices thread write to memory at 0x4000200000, which it has not plugged";
    assert!(log.contains(said), "{log}");
}
