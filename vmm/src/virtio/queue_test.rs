use proptest::prelude::*;

use super::*;
use crate::virtio::device::DeviceError;
use crate::virtio::looped::Looped;
use crate::virtio::rng::Rng;
use crate::virtio::testing::{Buf, Layout, NOWHERE, Rig, eventfd, memory};

fn rig() -> Rig<Looped<Rng>> {
    Rig::new(Rng::new(), 0)
}

fn fails(mut rig: Rig<Looped<Rng>>) -> QueueError {
    match rig.kick(0).unwrap_err() {
        DeviceError::Queue(error) => error,
        other => panic!("{other}"),
    }
}

#[test]
fn a_loop_is_malformed() {
    let mut rig = rig();
    rig.submit_loop(0);
    assert!(matches!(fails(rig), QueueError::Chain { head: 0, .. }));
}

#[test]
fn a_head_outside_the_table_is_malformed() {
    let mut rig = rig();
    rig.offer(0, 64);
    assert!(matches!(fails(rig), QueueError::Chain { head: 64, .. }));
}

#[test]
fn readable_after_writable_is_malformed() {
    let mut rig = rig();
    let (w, r) = (rig.writable(8), rig.readable(&[1; 8]));
    rig.submit(0, &[w, r]);
    assert!(matches!(fails(rig), QueueError::Chain { .. }));
}

#[test]
fn an_available_index_more_than_the_queue_ahead_is_a_broken_ring() {
    let mut rig = rig();
    rig.set_available(0, 65);
    assert!(matches!(fails(rig), QueueError::Ring { .. }));
}

#[test]
fn an_indirect_table_outside_memory_or_of_odd_length_is_malformed() {
    let mut rig = rig();
    let buffer = rig.writable(8);
    rig.submit_indirect(
        0,
        &[
            buffer,
            Buf {
                address: NOWHERE,
                ..buffer
            },
        ],
    );
    rig.kick(0).unwrap();
    assert_eq!(
        rig.used(0)[0].1,
        0,
        "a buffer outside memory is the device's to answer"
    );

    let mut rig = self::rig();
    rig.submit_indirect(0, &[]);
    assert!(matches!(fails(rig), QueueError::Chain { .. }));
}

#[test]
fn chains_through_indirect_tables_are_served() {
    let mut rig = rig();
    let (a, b) = (rig.writable(8), rig.writable(8));
    let head = rig.submit_indirect(0, &[a, b]);
    rig.kick(0).unwrap();
    assert_eq!(rig.used(0), [(head, 16)]);
}

#[test]
fn indirect_chain_of_the_queue_size_is_served() {
    let mut rig = rig();
    let buffer = rig.writable(1);
    let head = rig.submit_indirect(0, &[buffer; 64]);
    rig.kick(0).unwrap();
    assert_eq!(rig.used(0), [(head, 64)]);
}

#[test]
fn indirect_chain_longer_than_the_queue_is_malformed() {
    let mut rig = rig();
    let buffer = rig.writable(1);
    rig.submit_indirect(0, &[buffer; 65]);
    assert!(matches!(fails(rig), QueueError::Chain { .. }));
}

#[test]
fn a_queue_the_driver_left_disabled_is_empty() {
    let interrupt = Arc::new(Interrupt::new(eventfd()));
    let queue = Queue::new(16).unwrap();
    let mut queue = DeviceQueue::new(0, queue, memory().clone(), interrupt.clone(), Arc::new(eventfd()));
    assert!(queue.pop().unwrap().is_none());
    assert!(!queue.enable_kicks().unwrap());
    queue.signal().unwrap();
    assert_eq!(interrupt.reasons(), 0);
}

#[test]
fn without_event_idx_a_burst_interrupts_once() {
    let mut rig = rig();
    for _ in 0..10 {
        let buffer = rig.writable(8);
        rig.submit(0, &[buffer]);
    }
    rig.kick(0).unwrap();
    assert_eq!(rig.used(0).len(), 10);
    assert_eq!(rig.interrupt.line().read().unwrap(), 1);
}

#[test]
fn a_kick_that_brings_nothing_does_not_interrupt() {
    let mut rig = rig();
    let buffer = rig.writable(8);
    rig.submit(0, &[buffer]);
    rig.kick(0).unwrap();
    assert_eq!(rig.interrupt.line().read().unwrap(), 1);
    rig.kick(0).unwrap();
    assert!(rig.interrupt.line().read().is_err());
}

#[test]
fn a_chain_taken_back_comes_again() {
    let memory = memory();
    let layout = Layout::new(memory, 0x1000, 16);
    let descriptor = Descriptor::new(0x10_0000, 8, 0, 0);
    layout.describe(3, descriptor);
    layout.offer_at(0, 3);
    layout.set_available_index(1);
    let interrupt = Arc::new(Interrupt::new(eventfd()));
    let mut queue = DeviceQueue::new(0, layout.queue(), memory.clone(), interrupt, Arc::new(eventfd()));
    assert_eq!(queue.pop().unwrap().unwrap().head(), 3);
    assert!(queue.pop().unwrap().is_none());
    queue.unpop();
    assert_eq!(queue.pop().unwrap().unwrap().head(), 3);
}

#[test]
fn with_event_idx_the_driver_is_interrupted_where_it_asked() {
    let memory = memory();
    let layout = Layout::new(memory, 0x1000, 16);
    for i in 0..4u16 {
        let descriptor = Descriptor::new(0x10_0000, 8, 0, 0);
        layout.describe(i, descriptor);
        layout.offer_at(i, i);
    }
    layout.set_available_index(4);
    // The third chain is the one to be told of.
    layout.set_used_event(2);
    let mut queue = layout.queue();
    queue.set_event_idx(true);
    let interrupt = Arc::new(Interrupt::new(eventfd()));
    let mut queue = DeviceQueue::new(0, queue, memory.clone(), interrupt.clone(), Arc::new(eventfd()));
    let mut told = Vec::new();
    while let Some(chain) = queue.pop().unwrap() {
        queue.add_used(chain.head(), 0).unwrap();
        queue.signal().unwrap();
        told.push(interrupt.line().read().is_ok());
    }
    assert_eq!(told, [false, false, true, false]);
}

proptest! {
    /// Whatever the driver writes in its rings and tables, nothing panics, and no chain is longer than its table.
    #[test]
    fn any_ring_is_survived(
        descriptors in prop::collection::vec((any::<u64>(), any::<u32>(), 0u16..8, 0u16..20), 16),
        heads in prop::collection::vec(0u16..20, 16),
        available in 0u16..20,
    ) {
        let memory = memory();
        let layout = Layout::new(memory, 0x1000, 16);
        for (i, (address, length, flags, next)) in descriptors.iter().enumerate() {
            let address = if address % 3 == 0 { *address } else { address % crate::virtio::testing::MEMORY };
            let descriptor = Descriptor::new(address, *length, *flags, *next);
            layout.describe(i as u16, descriptor);
        }
        for (i, head) in heads.iter().enumerate() {
            layout.offer_at(i as u16, *head);
        }
        layout.set_available_index(available);
        let interrupt = Arc::new(Interrupt::new(eventfd()));
        let mut queue =
            DeviceQueue::new(0, layout.queue(), memory.clone(), interrupt, Arc::new(eventfd()));
        for _ in 0..20 {
            match queue.pop() {
                Ok(Some(chain)) => {
                    prop_assert!(chain.buffers.len() <= 16);
                    let _ = (chain.readable(memory), chain.writable(memory), chain.last_writable_byte(memory));
                    prop_assert!(queue.add_used(chain.head(), 0).is_ok());
                }
                Ok(None) => break,
                Err(QueueError::Chain { .. }) => {}
                Err(QueueError::Ring { .. }) => break,
            }
        }
    }
}
