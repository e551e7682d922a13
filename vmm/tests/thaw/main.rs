//! Freezing a machine and thawing clones of it: tiny guests, real processes, whatever KVM this host has.

#![allow(clippy::unwrap_used)]

mod deltas;
mod live;
mod memory;
mod processors;
mod refusals;
#[path = "../support/mod.rs"]
mod support;

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use support::snapshot::*;
use support::{Vmm, readable, spec, started};
use thaw_protocol::control::*;
use thaw_tiny_guest::bare::{self, ACKNOWLEDGEMENT, GENERATION_ID, READY, acknowledged};
use thaw_tiny_guest::{Code, DATA, Guest};

const MIB: u64 = 1 << 20;
/// What guests print that wait for a generation.
const STEPS_READY: &str = "ready\n";

fn generation(console: &mut File) -> [u8; 16] {
    acknowledged(&read_exactly(console, ACKNOWLEDGEMENT)).expect("a whole acknowledgement")
}

#[test]
fn clones_continue_each_with_its_own_generation() {
    let (vmm, mut source, mut source_console) = paused_at(spec(1, 64), &bare::bare(0).kernel(), READY);
    let snapshot = Snapshot::full(&vmm, &mut source);
    let frozen = &contents(&snapshot.layers[0])[GENERATION_ID as usize..][..16];
    let mut generations = vec![<[u8; 16]>::try_from(frozen).unwrap()];
    for _ in 0..3 {
        let (clone, mut control, mut console) = snapshot.thawed(spec(1, 64));
        let printed = generation(&mut console);
        control.request(Command::Pause, &[]).unwrap();
        let memory = Snapshot::full(&clone, &mut control).layers.remove(0);
        let mut written = [0; 16];
        memory.read_exact_at(&mut written, GENERATION_ID.into()).unwrap();
        assert_eq!(printed, written);
        generations.push(printed);
    }
    for (index, generation) in generations.iter().enumerate() {
        assert!(!generations[..index].contains(generation), "{generations:x?}");
    }
    // The source is the machine it was: it goes on, and sees no other generation.
    assert_eq!(source.state(), MachineState::Paused);
    source.request(Command::Resume, &[]).unwrap();
    assert_eq!(source.state(), MachineState::Running);
    source.request(Command::Pause, &[]).unwrap();
    let again = contents(&Snapshot::full(&vmm, &mut source).layers[0]);
    assert_eq!(again[GENERATION_ID as usize..][..16], generations[0]);
    assert!(!readable(&source_console, std::time::Duration::ZERO));
    drop((vmm, source));
    assert_eq!(std::io::Read::read(&mut source_console, &mut [0; 1]).unwrap(), 0);
}

#[test]
fn a_guest_that_sleeps_is_woken_by_each_new_generation() {
    let snapshot = frozen_at(&bare::lasting().kernel(), READY);
    let (clone, mut control, mut console) = snapshot.thawed(spec(1, 64));
    let first = generation(&mut console);
    assert_eq!(read_exactly(&mut console, READY.len()), READY.as_bytes());
    control.request(Command::Pause, &[]).unwrap();
    let again = Snapshot::full(&clone, &mut control);
    let (_vmm, _control, mut console) = again.thawed(spec(1, 64));
    assert_ne!(generation(&mut console), first);
}

#[test]
fn a_source_and_its_clone_both_go_on_after_the_freeze() {
    let tick = Code::default().print("tick\n").repeat_from(0).kernel();
    let (vmm, mut source, mut source_console) = paused_at(spec(2, 64), &tick, "tick\n");
    let snapshot = Snapshot::full(&vmm, &mut source);
    while readable(&source_console, std::time::Duration::ZERO) {
        std::io::Read::read(&mut source_console, &mut [0; 65536]).unwrap();
    }
    source.request(Command::Resume, &[]).unwrap();
    let (_clone, _control, mut console) = snapshot.thawed(spec(2, 64));
    for console in [&mut source_console, &mut console] {
        let text = String::from_utf8(read_exactly(console, 1000)).unwrap();
        // The freeze wrote out what was gathered of a line; what follows goes on inside it.
        let (_, whole) = text.split_once('\n').unwrap();
        assert!(whole.starts_with("tick\ntick\n"), "{text}");
    }
}

#[test]
fn the_moments_of_a_thaw_are_in_order() {
    let snapshot = frozen_at(&bare::bare(0).kernel(), READY);
    let (_vmm, mut control, mut console) = snapshot.parked(spec(1, 64));
    let (_, times, faults) = control.status();
    assert!(
        times.created < times.restored && times.thawed == 0 && times.entered == 0,
        "{times:?}"
    );
    assert_eq!(faults, 0);
    thaw(&mut control).unwrap();
    generation(&mut console);
    let (state, times, _) = control.status();
    assert_eq!(state, MachineState::Running);
    assert!(
        times.restored < times.thawed && times.thawed <= times.entered,
        "{times:?}"
    );
    assert!(control.faults_when_stopped() > 0);
}
