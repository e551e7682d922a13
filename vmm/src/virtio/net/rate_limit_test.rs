//! A network under rate limits.

use std::num::NonZeroU64;

use thaw_protocol::device_limits::{Bucket, DeviceLimit};

use super::*;
use crate::virtio::throttle::test_clock::{self, SECOND};

fn bytes(per_second: u64, burst: u64) -> DeviceLimit {
    DeviceLimit {
        bytes: Some(Bucket {
            per_second: NonZeroU64::new(per_second).unwrap(),
            burst: NonZeroU64::new(burst).unwrap(),
            once: 0,
        }),
        operations: None,
    }
}

/// A wire whose limits use the tests' clock.
fn limited(send: DeviceLimit, receive: DeviceLimit) -> Wire {
    let mut wire = Wire::new(0);
    let device = &mut wire.rig.device;
    device.send_throttle.go_by(test_clock::now, send);
    device.receive_throttle.go_by(test_clock::now, receive);
    wire
}

fn send(wire: &mut Wire, frames: usize) {
    for _ in 0..frames {
        let buffer = wire.rig.readable(&frame(100));
        wire.rig.submit(TX, &[buffer]);
    }
    wire.rig.kick(TX).unwrap();
}

/// Frames at the other end since the last call.
fn sent(wire: &Wire) -> usize {
    std::iter::from_fn(|| wire.received()).count()
}

fn provide(wire: &mut Wire, buffers: usize) {
    for _ in 0..buffers {
        let buffer = wire.rig.writable(2000);
        wire.rig.submit(RX, &[buffer]);
    }
    wire.rig.kick(RX).unwrap();
}

#[test]
fn frames_over_the_limit_wait_in_their_queue() {
    let mut wire = limited(bytes(100, 200), DeviceLimit::default());
    send(&mut wire, 4);
    assert_eq!((sent(&wire), wire.rig.used(TX).len()), (2, 2));
    for _ in 0..100 {
        wire.rig.kick(TX).unwrap();
    }
    assert_eq!(sent(&wire), 0);
    // Receiving does not wait for sending.
    provide(&mut wire, 1);
    wire.peer.send(&frame(50)).unwrap();
    wire.arrive();
    assert_eq!(wire.rig.used(RX).len(), 1);
    for _ in 2..4 {
        test_clock::pass(SECOND);
        wire.rig.device.woken().unwrap();
        assert_eq!((sent(&wire), wire.rig.used(TX).len()), (1, 1));
    }
}

#[test]
fn tap_over_the_limit_is_not_watched() {
    let mut wire = limited(DeviceLimit::default(), bytes(100, 100));
    provide(&mut wire, 8);
    for _ in 0..3 {
        wire.peer.send(&frame(150)).unwrap();
    }
    wire.arrive();
    assert_eq!(wire.rig.used(RX).len(), 1, "its length is known when it was read");
    assert!(!wire.watches_tap());
    provide(&mut wire, 1);
    assert!(!wire.watches_tap() && wire.rig.used(RX).is_empty());
    // 150 bytes are owed: half a second, and the nanoseconds of one byte.
    test_clock::pass(SECOND / 2);
    wire.rig.device.woken().unwrap();
    assert!(!wire.watches_tap() && wire.rig.used(RX).is_empty());
    test_clock::pass(SECOND / 100);
    wire.rig.device.woken().unwrap();
    assert_eq!(wire.rig.used(RX).len(), 1);
    // Sending does not wait for receiving.
    send(&mut wire, 2);
    assert_eq!(sent(&wire), 2);
    test_clock::pass(10 * SECOND);
    wire.rig.device.woken().unwrap();
    assert!(wire.watches_tap() || wire.rig.used(RX).len() == 1);
}

#[test]
fn limits_changed_while_frames_wait_let_them_pass() {
    let mut wire = limited(bytes(1, 100), bytes(1, 100));
    provide(&mut wire, 4);
    send(&mut wire, 3);
    wire.peer.send(&frame(150)).unwrap();
    wire.peer.send(&frame(150)).unwrap();
    wire.arrive();
    assert_eq!((sent(&wire), wire.rig.used(RX).len()), (1, 1));
    let none = DeviceLimit::default();
    let limits = DeviceLimits::Network {
        send: none,
        receive: none,
    };
    wire.rig.device.limit(limits).unwrap();
    assert!(wire.rig.kicked(TX) && wire.rig.kicked(RX), "both are looked at");
    wire.rig.kick(TX).unwrap();
    wire.rig.kick(RX).unwrap();
    assert_eq!((sent(&wire), wire.rig.used(RX).len()), (2, 1));
    assert!(wire.watches_tap());
    let disk = DeviceLimits::Disk(none);
    assert!(matches!(
        wire.rig.device.limit(disk),
        Err(AttachError::WrongKind(_))
    ));
}

#[test]
fn reset_with_frames_waiting_keeps_the_debt() {
    let mut wire = limited(bytes(1, 100), bytes(1, 100));
    send(&mut wire, 2);
    assert_eq!(sent(&wire), 1);
    wire.rig.device.reset();
    wire.rig.device.woken().unwrap();
    wire.rig.activate(0);
    wire.rig.kick(TX).unwrap();
    assert_eq!(sent(&wire), 0);
}

#[test]
fn freeze_leaves_waiting_frames_in_the_ring() {
    let mut wire = limited(bytes(1, 100), bytes(1, 100));
    send(&mut wire, 3);
    assert_eq!((sent(&wire), wire.rig.used(TX).len()), (1, 1));
    let mut clone = wire.thaw();
    clone.rig.start_work();
    assert_eq!((sent(&clone), clone.rig.used(TX).len()), (2, 2));
    // The original continues to wait.
    wire.rig.kick(TX).unwrap();
    assert_eq!(sent(&wire), 0);
}
