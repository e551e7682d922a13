//! A disk under a rate limit.

use std::num::NonZeroU64;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use thaw_protocol::device_limits::{Bucket, DeviceLimit};

use super::*;
use crate::jail::threads::Thread;
use crate::virtio::event_loop::EventLoop;
use crate::virtio::testing::{Shared, open_gate};
use crate::virtio::throttle::test_clock::{self, SECOND};

fn bucket(per_second: u64, burst: u64) -> Option<Bucket> {
    Some(Bucket {
        per_second: NonZeroU64::new(per_second).unwrap(),
        burst: NonZeroU64::new(burst).unwrap(),
        once: 0,
    })
}

fn bytes(per_second: u64, burst: u64) -> DeviceLimit {
    DeviceLimit {
        bytes: bucket(per_second, burst),
        operations: None,
    }
}

fn operations(per_second: u64, burst: u64) -> DeviceLimit {
    DeviceLimit {
        bytes: None,
        operations: bucket(per_second, burst),
    }
}

/// A disk whose limit uses the tests' clock.
fn limited(limit: DeviceLimit) -> Rig<Blk> {
    let mut rig = rig(&disk(), false);
    rig.device.server.throttle.go_by(test_clock::now, limit);
    rig
}

/// Submits a read of a sector, without a kick. Returns its head and its status.
fn read(rig: &mut Rig<Blk>, sector: u64) -> (u16, Buf) {
    let header = rig.readable(&header(b::VIRTIO_BLK_T_IN, sector));
    let chain = [header, rig.writable(512), rig.writable(1)];
    (rig.submit(0, &chain), chain[2])
}

fn woken(rig: &mut Rig<Blk>) -> usize {
    rig.device.woken().unwrap();
    rig.make_calls().unwrap();
    while rig.kicked(0) {
        rig.kick(0).unwrap();
    }
    rig.used(0).len()
}

#[test]
fn requests_over_the_limit_wait_in_the_queue() {
    let mut rig = limited(bytes(512, 1024));
    let reads: Vec<_> = (0..5).map(|sector| read(&mut rig, sector)).collect();
    rig.kick(0).unwrap();
    assert_eq!(rig.used(0).len(), 2, "a burst");
    // However often the queue is kicked.
    for _ in 0..100 {
        rig.kick(0).unwrap();
    }
    assert!(rig.used(0).is_empty());
    assert_eq!(
        rig.device.server.throttle.until(),
        Some(test_clock::now() + SECOND)
    );
    test_clock::pass(SECOND - 1);
    assert_eq!(woken(&mut rig), 0, "a nanosecond early");
    for _ in 2..5 {
        test_clock::pass(SECOND);
        assert_eq!(woken(&mut rig), 1);
    }
    for (_, status) in reads {
        assert_eq!(rig.bytes(status), [OK]);
    }
}

#[test]
fn operations_are_limited_whatever_their_size() {
    let mut rig = limited(operations(1, 2));
    assert_eq!(ask(&mut rig, b::VIRTIO_BLK_T_FLUSH, 0, &[], &[]).0, OK);
    let two = [range(0, 1, 0), range(1, 1, 0)].concat();
    let header = rig.readable(&header(b::VIRTIO_BLK_T_DISCARD, 0));
    let chain = [header, rig.readable(&two), rig.writable(1)];
    rig.submit(0, &chain);
    rig.kick(0).unwrap();
    assert!(rig.used(0).is_empty(), "each of two ranges is an operation");
    test_clock::pass(SECOND);
    assert_eq!(woken(&mut rig), 1);
}

#[test]
fn request_larger_than_the_burst_is_served_and_paid_for() {
    let mut rig = limited(bytes(512, 512));
    assert_eq!(ask(&mut rig, b::VIRTIO_BLK_T_OUT, 0, &[1; 5120], &[]).0, OK);
    read(&mut rig, 3);
    rig.kick(0).unwrap();
    assert!(rig.used(0).is_empty());
    test_clock::pass(9 * SECOND);
    assert_eq!(woken(&mut rig), 0);
    test_clock::pass(SECOND);
    assert_eq!(woken(&mut rig), 1);
}

#[test]
fn limit_changed_while_requests_wait_serves_them() {
    let mut rig = limited(bytes(1, 512));
    for sector in 0..4 {
        read(&mut rig, sector);
    }
    rig.kick(0).unwrap();
    assert_eq!(rig.used(0).len(), 1);
    rig.device.limit(DeviceLimits::Disk(bytes(1, 1024))).unwrap();
    assert!(rig.kicked(0), "it asks to be looked at");
    rig.kick(0).unwrap();
    assert_eq!(rig.used(0).len(), 2, "the new bucket is full");
    rig.device
        .limit(DeviceLimits::Disk(DeviceLimit::default()))
        .unwrap();
    rig.kick(0).unwrap();
    assert_eq!(rig.used(0).len(), 1);
    let network = DeviceLimits::Network {
        send: DeviceLimit::default(),
        receive: DeviceLimit::default(),
    };
    assert!(matches!(
        rig.device.limit(network),
        Err(AttachError::WrongKind(_))
    ));
}

#[test]
fn reset_forgets_what_waits_and_keeps_the_debt() {
    let mut rig = limited(bytes(512, 512));
    read(&mut rig, 0);
    read(&mut rig, 1);
    rig.kick(0).unwrap();
    assert_eq!(rig.used(0).len(), 1);
    rig.device.reset();
    assert_eq!(rig.device.server.throttle.until(), None);
    assert_eq!(woken(&mut rig), 0, "a late alarm finds nothing");
    rig.activate(0);
    rig.kick(0).unwrap();
    assert!(rig.used(0).is_empty(), "a driver does not refill its bucket");
    assert!(rig.device.server.throttle.until().is_some());
}

#[test]
fn freeze_leaves_waiting_requests_in_the_ring() {
    let mut rig = limited(bytes(1, 512));
    let (_, first) = read(&mut rig, 0);
    let (waiting, status) = read(&mut rig, 1);
    rig.kick(0).unwrap();
    assert_eq!(rig.used(0).len(), 1);
    assert_eq!(rig.bytes(first), [OK]);
    let frozen = rig.freeze();
    assert!(frozen.queues[0].has_work);
    assert_eq!(
        frozen.state,
        DeviceState::Blk(BlkState {
            read_only: false,
            capacity: SECTORS,
            parked: Vec::new()
        })
    );
    // The original continues to wait.
    rig.kick(0).unwrap();
    assert!(rig.used(0).is_empty());
    // Its clone has no limit until one is set.
    let mut clone = Rig::thaw(frozen, blk(DeviceId::Blk1));
    let backend = Backend::Disk { read_only: false };
    clone.device.attach(backend, vec![disk().into()]).unwrap();
    clone.start_work();
    assert_eq!(clone.used(0), [(waiting, 513)]);
    assert_eq!(clone.bytes(status), [OK]);
}

#[test]
fn disk_taken_away_answers_what_waits() {
    let mut rig = limited(bytes(1, 512));
    read(&mut rig, 0);
    let (_, status) = read(&mut rig, 1);
    rig.kick(0).unwrap();
    assert_eq!(rig.used(0).len(), 1);
    rig.device.detach().unwrap();
    assert!(rig.kicked(0));
    rig.kick(0).unwrap();
    assert_eq!((rig.used(0).len(), rig.bytes(status)), (1, vec![IOERR]));
}

fn lock<D>(device: &Mutex<D>) -> MutexGuard<'_, D> {
    device.lock().unwrap()
}

#[test]
fn limited_disk_leaves_its_neighbour_on_the_same_loop_alone() {
    let mut event_loop = EventLoop::new().unwrap();
    let mut serve = |id| {
        let mut device = Blk::new("blk", event_loop.registrar(id));
        let backend = Backend::Disk { read_only: false };
        device.attach(backend, vec![disk().into()]).unwrap();
        let rig = Rig::new(Shared::new(device), 0);
        event_loop
            .serve(id, rig.device.device.clone(), rig.interrupt.clone(), rig.kicks())
            .unwrap();
        rig
    };
    let (mut flooded, mut other) = (serve(DeviceId::Blk1), serve(DeviceId::Blk2));
    let device = flooded.device.device.clone();
    let limit = |limit| lock(&device).limit(DeviceLimits::Disk(limit)).unwrap();
    // One request at once, and none for 512 s, however long the other takes.
    limit(bytes(1, 512));
    let running = event_loop.start("devices", Thread::Devices, open_gate()).unwrap();
    let submit = |rig: &mut Rig<Shared<Blk>>| {
        let header = rig.readable(&header(b::VIRTIO_BLK_T_IN, 1));
        let chain = [header, rig.writable(512), rig.writable(1)];
        rig.submit(0, &chain);
        rig.notify(0);
    };
    for _ in 0..5 {
        submit(&mut flooded);
    }
    for _ in 0..50 {
        submit(&mut other);
        assert_eq!(other.wait_used(0).len(), 1);
        // The driver kicks its waiting queue all the time.
        flooded.notify(0);
    }
    let mut seen = flooded.used(0).len();
    assert_eq!(seen, 1, "the other was not served behind it");
    // One at once, and each other one after 200 ms.
    let since = Instant::now();
    limit(operations(5, 1));
    while seen < 5 {
        seen += flooded.wait_used(0).len();
    }
    assert!(since.elapsed() >= Duration::from_millis(600));
    drop(running);
}
