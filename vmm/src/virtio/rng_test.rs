use thaw_protocol::control::Backend;

use super::*;
use crate::virtio::testing::{Buf, NOWHERE, Rig};
use crate::virtio::{AttachError, VirtioDevice};

#[test]
fn buffers_are_filled_and_differ() {
    let mut rig = Rig::new(Rng::default(), 0);
    let (a, b) = (rig.writable(64), rig.writable(64));
    assert_eq!(rig.request(0, &[a, b]), 128);
    assert_ne!(rig.bytes(a), rig.bytes(b));
    assert_ne!(rig.bytes(a), [0xEE; 64]);
}

#[test]
fn a_large_request_is_answered_in_part() {
    let mut rig = Rig::new(Rng::default(), 0);
    let buffer = rig.writable(10_000);
    assert_eq!(rig.request(0, &[buffer]), MAX_REQUEST as u32);
    assert!(rig.bytes(buffer)[MAX_REQUEST..].iter().all(|byte| *byte == 0xEE));
}

#[test]
fn useless_buffers_come_back_empty() {
    let mut rig = Rig::new(Rng::default(), 0);
    let readable = rig.readable(&[1; 8]);
    assert_eq!(rig.request(0, &[readable]), 0);
    assert_eq!(
        rig.request(
            0,
            &[Buf {
                address: NOWHERE,
                length: 8,
                write: true
            }]
        ),
        0
    );
    let empty = rig.writable(0);
    assert_eq!(rig.request(0, &[empty]), 0);
}

#[test]
fn a_full_queue_is_served_and_more_than_one_turn_kicks_itself() {
    let mut rig = Rig::new(Rng::default(), 0);
    for _ in 0..64 {
        let buffer = rig.writable(8);
        rig.submit(0, &[buffer]);
    }
    rig.device.queue_ready(0).unwrap();
    assert_eq!(rig.used(0).len(), 64);
    assert!(
        rig.kicked(0),
        "a whole queue's worth is a turn; it asks for another"
    );
}

#[test]
fn after_a_reset_kicks_do_nothing() {
    let mut rig = Rig::new(Rng::default(), 0);
    let buffer = rig.writable(8);
    rig.submit(0, &[buffer]);
    rig.device.reset();
    rig.kick(0).unwrap();
    assert!(rig.used(0).is_empty());
}

#[test]
fn no_backend_is_taken() {
    assert!(matches!(
        Rng::default().attach(Backend::Vsock, Vec::new()),
        Err(AttachError::WrongKind(_))
    ));
}

#[test]
fn request_in_flight_at_the_freeze_is_answered_once() {
    let mut rig = Rig::new(Rng::default(), 0);
    let buffer = rig.writable(64);
    rig.request(0, &[buffer]);
    assert_ne!(rig.interrupt.reasons(), 0, "not acknowledged");
    let head = rig.submit(0, &[buffer]);
    let mut thawed = Rig::thaw(rig.freeze(), Rng::default());
    assert!(thawed.used(0).is_empty());
    assert!(
        thawed.interrupt.line().read().is_err(),
        "nothing is raised while parked"
    );
    thawed.start_work();
    assert_eq!(thawed.used(0), [(head, 64)]);
    assert_eq!(
        thawed.interrupt.line().read().unwrap(),
        2,
        "raised again, and for the answer"
    );
    // Both continue.
    assert_eq!(thawed.request(0, &[buffer]), 64);
    rig.kick(0).unwrap();
    assert_eq!(rig.used(0), [(head, 64)]);
}

#[test]
fn a_queue_without_work_is_not_kicked_by_a_thaw() {
    let mut rig = Rig::new(Rng::default(), 0);
    let buffer = rig.writable(64);
    rig.request(0, &[buffer]);
    let thawed = Rig::thaw(rig.freeze(), Rng::default());
    assert!(!thawed.kicked(0));
}
