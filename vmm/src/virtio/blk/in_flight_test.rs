//! Several requests of a disk in flight. A call that a test holds is a system call that takes long.

use std::os::unix::fs::FileExt;
use std::thread;
use std::time::Duration;

use super::*;
use crate::jail::threads::Thread;
use crate::virtio::event_loop::EventLoop;
use crate::virtio::flight::IN_FLIGHT;
use crate::virtio::shared_threads::SHARED;
use crate::virtio::testing::{Shared, open_gate};

/// A request that was made available: its head, its status, and its data if it is a read.
struct Sent {
    head: u16,
    status: Buf,
    data: Option<Buf>,
}

/// Submits a request of one sector, without a kick.
fn submit<D: VirtioDevice>(rig: &mut Rig<D>, kind: u32, sector: u64) -> Sent {
    let mut chain = vec![rig.readable(&header(kind, sector))];
    let mut data = None;
    match kind {
        b::VIRTIO_BLK_T_IN => data = Some(rig.writable(SECTOR as u32)),
        b::VIRTIO_BLK_T_OUT => chain.push(rig.readable(&[0xAB; SECTOR as usize])),
        _ => {}
    }
    chain.extend(data);
    let status = rig.writable(1);
    chain.push(status);
    let head = rig.submit(0, &chain);
    Sent { head, status, data }
}

fn read<D: VirtioDevice>(rig: &mut Rig<D>, sector: u64) -> Sent {
    submit(rig, b::VIRTIO_BLK_T_IN, sector)
}

fn write(rig: &mut Rig<Blk>, sector: u64) -> Sent {
    submit(rig, b::VIRTIO_BLK_T_OUT, sector)
}

/// The next call, as a thread of the disk gets it.
fn call(rig: &mut Rig<Blk>) -> Box<dyn Call> {
    rig.device.next_call().unwrap().expect("a request needs a call")
}

/// The heads of the requests that were answered since the last time.
fn answered<D: VirtioDevice>(rig: &mut Rig<D>) -> Vec<u16> {
    rig.used(0).into_iter().map(|(head, _)| head).collect()
}

/// Does something while a call is made that takes long.
fn during<T>(call: Box<dyn Call>, act: impl FnOnce() -> T) -> T {
    thread::scope(|scope| {
        scope.spawn(move || {
            thread::sleep(Duration::from_millis(20));
            call.make();
        });
        act()
    })
}

#[test]
fn each_answer_is_signalled_when_it_is_there() {
    let mut rig = rig(&disk(), false);
    let reads = [1, 2, 3].map(|sector| read(&mut rig, sector));
    let (slow, fast) = (call(&mut rig), call(&mut rig));
    // A queue's first interrupt may be for what was used before a freeze.
    let _ = rig.interrupt.line().read();
    fast.make();
    let last = call(&mut rig);
    assert_eq!(answered(&mut rig), [reads[1].head]);
    assert_eq!(rig.interrupt.line().read().unwrap(), 1);
    last.make();
    assert!(rig.device.next_call().unwrap().is_none());
    assert_eq!(answered(&mut rig), [reads[2].head]);
    assert_eq!(rig.interrupt.line().read().unwrap(), 1);
    assert!(rig.device.next_call().unwrap().is_none());
    assert!(rig.interrupt.line().read().is_err(), "nothing new");
    slow.make();
    rig.make_calls().unwrap();
    assert_eq!(answered(&mut rig), [reads[0].head]);
}

#[test]
fn requests_in_flight_are_bounded() {
    let mut rig = rig(&disk(), false);
    for sector in 0..2 * IN_FLIGHT as u64 {
        read(&mut rig, sector);
    }
    let mut calls: Vec<_> = std::iter::from_fn(|| rig.device.next_call().unwrap()).collect();
    assert_eq!(calls.len(), IN_FLIGHT);
    calls.swap_remove(0).make();
    let another = call(&mut rig);
    assert!(rig.device.next_call().unwrap().is_none());
    calls.push(another);
    calls.into_iter().for_each(|call| call.make());
    rig.make_calls().unwrap();
    assert_eq!(rig.used(0).len(), 2 * IN_FLIGHT);
}

#[test]
fn thread_with_a_call_wakes_another_for_the_rest() {
    let mut rig = rig(&disk(), false);
    for sector in 1..=3 {
        read(&mut rig, sector);
    }
    let first = call(&mut rig);
    assert!(rig.kicked(0), "there are other requests");
    // The first thread returns before the woken one has begun. It takes the next request, and wakes no thread.
    first.make();
    let second = call(&mut rig);
    assert!(!rig.kicked(0));
    rig.device.queue_ready(0).unwrap();
    let third = call(&mut rig);
    assert!(!rig.kicked(0), "the next request causes a kick");
    second.make();
    rig.device.calls_ended().unwrap();
    assert_eq!(rig.used(0).len(), 2);
    assert!(rig.kicked(0), "its thread leaves, and something may have come");
    third.make();
}

#[test]
fn flush_waits_for_earlier_writes_and_delays_nothing() {
    let mut rig = rig(&disk(), false);
    let early = write(&mut rig, 1);
    let flush = submit(&mut rig, b::VIRTIO_BLK_T_FLUSH, 0);
    let (other, late) = (read(&mut rig, 2), write(&mut rig, 3));
    let [write, syncing, reading, writing] = std::array::from_fn(|_| call(&mut rig));
    thread::scope(|scope| {
        let syncing = scope.spawn(move || syncing.make());
        reading.make();
        writing.make();
        rig.make_calls().unwrap();
        assert_eq!(answered(&mut rig), [other.head, late.head]);
        assert!(!syncing.is_finished());
        write.make();
        syncing.join().unwrap();
    });
    rig.make_calls().unwrap();
    assert_eq!(answered(&mut rig), [early.head, flush.head]);
    assert_eq!(rig.bytes(flush.status), [OK]);
}

#[test]
fn reset_waits_for_calls_and_answers_none_of_them() {
    let mut rig = rig(&disk(), false);
    let sent = read(&mut rig, 1);
    let slow = call(&mut rig);
    during(slow, || rig.device.reset());
    assert_eq!(rig.bytes(sent.status), [OK], "it was made first");
    assert!(rig.device.next_call().unwrap().is_none());
    assert!(rig.used(0).is_empty());
    // The next driver finds the same ring. Its request is answered, and only that.
    rig.activate(0);
    rig.make_calls().unwrap();
    assert_eq!(answered(&mut rig), [sent.head]);
}

#[test]
fn detach_waits_for_calls_which_are_answered_then() {
    let file = disk();
    let mut rig = rig(&file, false);
    let sent = write(&mut rig, 5);
    let slow = call(&mut rig);
    during(slow, || rig.device.detach().unwrap());
    let mut sector = [0; SECTOR as usize];
    file.read_exact_at(&mut sector, 5 * SECTOR).unwrap();
    assert_eq!(sector, [0xAB; SECTOR as usize]);
    rig.make_calls().unwrap();
    assert_eq!(
        (answered(&mut rig), rig.bytes(sent.status)),
        (vec![sent.head], vec![OK])
    );
}

#[test]
fn save_waits_for_calls_and_answers_them() {
    let mut rig = rig(&disk(), false);
    let sent = read(&mut rig, 4);
    let slow = call(&mut rig);
    let saved = during(slow, || rig.device.save());
    assert_eq!(answered(&mut rig), [sent.head]);
    assert!(saved.state.of::<BlkState>().unwrap().parked.is_empty());
    assert!(!saved.queues.unwrap()[0].has_work);
}

/// A clone does not know of a kick that was signalled before the freeze.
#[test]
fn driver_is_asked_for_kicks_when_it_is_frozen() {
    let mut rig = rig(&disk(), false);
    let _sent = [1, 2].map(|sector| read(&mut rig, sector));
    // Another thread is woken for the second request, but the first thread comes back before it, and then leaves.
    (0..2).for_each(|_| call(&mut rig).make());
    rig.device.calls_ended().unwrap();
    assert!(!rig.asks_for_kicks(0));
    let saved = rig.device.save();
    assert!(!saved.queues.unwrap()[0].has_work);
    assert!(rig.asks_for_kicks(0));
}

#[test]
fn descriptor_that_is_in_flight_must_not_come_again() {
    let reused = |rig: &mut Rig<Blk>, sent: &Sent| {
        rig.offer(0, sent.head);
        let refused = rig.device.next_call();
        matches!(refused, Err(DeviceError::Queue(QueueError::Chain { queue: 0, head })) if head == sent.head)
    };
    let mut rig = rig(&disk(), false);
    let sent = read(&mut rig, 1);
    let slow = call(&mut rig);
    assert!(reused(&mut rig, &sent));
    slow.make();
    // Nothing is answered by a device that has failed.
    rig.device.reset();
    rig.make_calls().unwrap();
    assert!(rig.used(0).is_empty());
}

#[test]
fn guest_that_changes_a_header_in_flight_changes_nothing() {
    let file = disk();
    let mut rig = rig(&file, false);
    let header_of_write = rig.readable(&header(b::VIRTIO_BLK_T_OUT, 1));
    let chain = [
        header_of_write,
        rig.readable(&[0xAB; SECTOR as usize]),
        rig.writable(1),
    ];
    rig.submit(0, &chain);
    let slow = call(&mut rig);
    rig.rewrite(header_of_write, &header(b::VIRTIO_BLK_T_OUT, 2));
    slow.make();
    let mut sectors = [0; 2 * SECTOR as usize];
    file.read_exact_at(&mut sectors, SECTOR).unwrap();
    let (first, second) = sectors.split_at(SECTOR as usize);
    assert_eq!((first, second), (&[0xAB; 512][..], &[2; 512][..]));
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(64))]

    /// In whatever order calls end, each request is answered once, with its own data.
    #[test]
    fn requests_whose_calls_end_in_any_order_are_answered_once(
        steps in proptest::collection::vec(
            proptest::option::of(proptest::arbitrary::any::<proptest::sample::Index>()),
            1..60,
        ),
    ) {
        let mut rig = rig(&disk(), false);
        let (mut calls, mut sent, mut heads): (Vec<Box<dyn Call>>, Vec<Sent>, Vec<u16>) = Default::default();
        for step in steps {
            match step {
                None => sent.push(read(&mut rig, sent.len() as u64)),
                Some(which) if !calls.is_empty() => calls.swap_remove(which.index(calls.len())).make(),
                Some(_) => {}
            }
            calls.extend(rig.device.next_call().unwrap());
            assert!(calls.len() <= IN_FLIGHT);
            heads.extend(answered(&mut rig));
        }
        calls.into_iter().for_each(|call| call.make());
        rig.make_calls().unwrap();
        heads.extend(answered(&mut rig));
        heads.sort_unstable();
        assert_eq!(heads, sent.iter().map(|sent| sent.head).collect::<Vec<_>>());
        for (sector, sent) in sent.iter().enumerate() {
            assert_eq!(rig.bytes(sent.status), [OK]);
            assert_eq!(rig.bytes(sent.data.unwrap()), [sector as u8; SECTOR as usize]);
        }
    }
}

/// A disk that waits for a thread which another has looks at its queue when it gets one.
#[test]
fn disk_without_a_free_thread_is_kicked_when_one_is_free() {
    let event_loop = EventLoop::new().unwrap();
    let [mut busy, mut other] = [DeviceId::Blk0, DeviceId::Blk1].map(|id| {
        let mut device = Blk::new("blk", event_loop.registrar(id));
        attach(&mut device, &disk(), false).unwrap();
        let mut rig = Rig::new(device, 0);
        for sector in 1..=2 * IN_FLIGHT as u64 {
            read(&mut rig, sector);
        }
        rig
    });
    let mut calls: Vec<_> = std::iter::from_fn(|| busy.device.next_call().unwrap()).collect();
    assert_eq!(calls.len(), IN_FLIGHT);
    busy.kicked(0);
    // Its first request always has a thread, and no thread is woken in vain for the next.
    let first = call(&mut other);
    assert!(!other.kicked(0));
    calls.pop().unwrap().make();
    assert!(other.kicked(0));
    other.device.queue_ready(0).unwrap();
    let second = call(&mut other);
    assert!(!other.kicked(0));
    // Now the busy disk wants one too, and both are kicked.
    assert!(busy.device.next_call().unwrap().is_none());
    assert!(!busy.kicked(0));
    second.make();
    assert!(busy.kicked(0) && other.kicked(0));
    calls.push(first);
    calls.into_iter().for_each(|call| call.make());
    for rig in [&mut busy, &mut other] {
        rig.make_calls().unwrap();
        assert_eq!(rig.used(0).len(), 2 * IN_FLIGHT);
    }
}

#[test]
fn threads_answer_each_request_once_and_leave_for_a_freeze() {
    let mut event_loop = EventLoop::new().unwrap();
    let mut rigs = [DeviceId::Blk0, DeviceId::Blk1, DeviceId::Blk2].map(|id| {
        let mut device = Blk::new("blk", event_loop.registrar(id));
        attach(&mut device, &disk(), false).unwrap();
        let rig = Rig::new(Shared::new(device), 0);
        let shared = rig.device.device.clone();
        event_loop
            .serve(id, shared, rig.interrupt.clone(), rig.kicks())
            .unwrap();
        rig
    });
    let gate = open_gate();
    let threads = event_loop
        .start_several(rigs.len() + SHARED, "disk", Thread::Disk, &gate)
        .unwrap();
    for round in 0..100 {
        let mut sent = Vec::new();
        for rig in &mut rigs {
            let flush = submit(rig, b::VIRTIO_BLK_T_FLUSH, 0).head;
            let reads = (0..16).map(|sector| read(rig, sector).head);
            sent.push(reads.chain([flush]).collect::<Vec<_>>());
            rig.notify(0);
        }
        if round % 2 == 0 {
            gate.close();
            for (rig, heads) in rigs.iter().zip(&sent) {
                let device = rig.device.device.lock().unwrap();
                assert!(!heads.iter().any(|head| device.server.flight.has(*head)));
            }
            gate.open();
        }
        for (rig, mut heads) in rigs.iter_mut().zip(sent) {
            let mut seen = Vec::new();
            while seen.len() < heads.len() {
                seen.extend(rig.wait_used(0).into_iter().map(|(head, _)| head));
            }
            seen.sort_unstable();
            heads.sort_unstable();
            assert_eq!(seen, heads);
        }
    }
    drop(threads);
    assert!(rigs.iter_mut().all(|rig| rig.used(0).is_empty()));
}
