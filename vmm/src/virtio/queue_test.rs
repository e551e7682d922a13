use std::collections::VecDeque;

use proptest::prelude::*;
use virtio_queue::QueueState;
use virtio_queue::desc::split::Descriptor;
use vm_memory::Bytes;

use super::*;
use crate::virtio::device::{DeviceError, VirtioDevice};
use crate::virtio::rng::Rng;
use crate::virtio::testing::{Buf, Layout, NOWHERE, Rig, eventfd, memory};

fn rig() -> Rig<Rng> {
    Rig::new(Rng::default(), 0)
}

fn fails(mut rig: Rig<Rng>) -> QueueError {
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
fn available_index_more_than_the_queue_ahead_is_an_error() {
    let mut rig = rig();
    rig.set_available(0, 65);
    assert!(matches!(fails(rig), QueueError::Ring { .. }));
}

#[test]
fn driver_is_asked_for_kicks_after_the_last_turn() {
    let mut rig = rig();
    for _ in 0..64 {
        let buffer = rig.writable(8);
        rig.submit(0, &[buffer]);
    }
    rig.device.queue_ready(0).unwrap();
    assert_eq!(rig.used(0).len(), 64);
    assert!(!rig.device.save().queues.unwrap()[0].has_work);
    assert!(rig.asks_for_kicks(0));
}

#[test]
fn indirect_table_outside_memory_or_empty_is_malformed() {
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
    // The driver wants an interrupt for the third chain.
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
    /// Whatever the driver writes to its rings and tables, nothing panics, and no chain is longer than its table.
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
                    prop_assert!(chain.readable_buffers().len() + chain.writable_buffers().len() <= 16);
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

/// An action of the driver or the device on a queue.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// The driver makes this many chains available, if it has them.
    Offer(u16),
    Pop,
    /// The last popped chain is made available again, unless a chain was returned since.
    Unpop,
    /// One of the popped chains is returned, with this many bytes.
    GiveBack(u16, u32),
    Signal,
    /// The driver wants an interrupt when this many more chains are used.
    UsedEvent(u16),
    EnableKicks,
    Freeze,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (1..9u16).prop_map(Step::Offer),
        6 => Just(Step::Pop),
        1 => Just(Step::Unpop),
        6 => (any::<u16>(), any::<u32>()).prop_map(|(which, written)| Step::GiveBack(which, written)),
        2 => Just(Step::Signal),
        1 => any::<u16>().prop_map(|ahead| Step::UsedEvent(ahead % 12)),
        1 => Just(Step::EnableKicks),
        1 => Just(Step::Freeze),
    ];
    prop::collection::vec(step, 1..300)
}

/// A queue, and its expected state.
struct Model {
    layout: Layout,
    queue: DeviceQueue,
    interrupt: Arc<Interrupt>,
    event_idx: bool,
    /// Heads that the driver may use; those made available; those popped and not returned.
    free: VecDeque<u16>,
    available: VecDeque<u16>,
    popped: Vec<u16>,
    can_unpop: bool,
    available_index: u16,
    used_index: u16,
    used_event: u16,
    /// Chains returned since the driver was last interrupted or could have been; and whether any was, perhaps before a freeze.
    unsignalled: u16,
    owes: bool,
}

impl Model {
    /// Both indices start at `start`, as after that many chains.
    fn new(size: u16, start: u16, event_idx: bool) -> Model {
        let memory = memory();
        let layout = Layout::new(memory, 0x1000, size);
        for head in 0..size {
            layout.describe(head, Descriptor::new(0x10_0000, 8, 0, 0));
        }
        layout.set_available_index(start);
        memory.write_obj(start, GuestAddress(layout.used + 2)).unwrap();
        let state = QueueState {
            next_avail: start,
            next_used: start,
            event_idx_enabled: event_idx,
            ..layout.queue().state()
        };
        let interrupt = Arc::new(Interrupt::new(eventfd()));
        let queue = DeviceQueue::new(
            0,
            Queue::try_from(state).unwrap(),
            memory.clone(),
            interrupt.clone(),
            Arc::new(eventfd()),
        );
        Model {
            layout,
            queue,
            interrupt,
            event_idx,
            free: (0..size).collect(),
            available: VecDeque::new(),
            popped: Vec::new(),
            can_unpop: false,
            available_index: start,
            used_index: start,
            used_event: 0,
            unsignalled: 0,
            owes: true,
        }
    }

    fn step(&mut self, step: Step) -> Result<(), TestCaseError> {
        match step {
            Step::Offer(number) => self.offer(number),
            Step::Pop => self.pop()?,
            Step::Unpop if self.can_unpop => {
                self.queue.unpop();
                self.available.push_front(self.popped.pop().unwrap());
                self.can_unpop = false;
            }
            Step::Unpop => {}
            Step::GiveBack(which, written) => self.give_back(which, written)?,
            Step::Signal => self.signal()?,
            Step::UsedEvent(ahead) => {
                self.used_event = self.used_index.wrapping_add(ahead);
                self.layout.set_used_event(self.used_event);
            }
            Step::EnableKicks => self.enable_kicks()?,
            Step::Freeze => self.freeze()?,
        }
        // The driver has as many chains as the queue has entries, and each is in one place.
        let all = self.free.len() + self.available.len() + self.popped.len();
        prop_assert_eq!(all, usize::from(self.layout.size));
        Ok(())
    }

    fn offer(&mut self, number: u16) {
        for _ in 0..number {
            let Some(head) = self.free.pop_front() else { return };
            self.layout.offer_at(self.available_index, head);
            self.available_index = self.available_index.wrapping_add(1);
            self.layout.set_available_index(self.available_index);
            self.available.push_back(head);
        }
    }

    fn pop(&mut self) -> Result<(), TestCaseError> {
        let head = self.queue.pop().unwrap().map(|chain| chain.head());
        prop_assert_eq!(
            head,
            self.available.pop_front(),
            "chains come in the order they were offered"
        );
        self.popped.extend(head);
        self.can_unpop |= head.is_some();
        Ok(())
    }

    fn give_back(&mut self, which: u16, written: u32) -> Result<(), TestCaseError> {
        if self.popped.is_empty() {
            return Ok(());
        }
        let head = self.popped.remove(usize::from(which) % self.popped.len());
        self.queue.add_used(head, written).unwrap();
        let place = self.layout.used + 4 + 8 * u64::from(self.used_index % self.layout.size);
        let element: [u32; 2] = self.queue.memory().read_obj(GuestAddress(place)).unwrap();
        prop_assert_eq!(element, [head.into(), written]);
        self.used_index = self.used_index.wrapping_add(1);
        prop_assert_eq!(self.layout.used_index(), self.used_index);
        self.free.push_back(head);
        self.unsignalled += 1;
        self.owes = true;
        self.can_unpop = false;
        Ok(())
    }

    /// The driver is interrupted if a chain was returned, and, with event indices, if its event was among those.
    fn signal(&mut self) -> Result<(), TestCaseError> {
        self.queue.signal().unwrap();
        let first = self.used_index.wrapping_sub(self.unsignalled);
        let passed = self.used_event.wrapping_sub(first) < self.unsignalled;
        let expected = self.owes && (!self.event_idx || passed);
        prop_assert_eq!(self.interrupt.line().read().is_ok(), expected);
        (self.unsignalled, self.owes) = (0, false);
        Ok(())
    }

    /// The device is kicked for the next chain, or enabling kicks reports that there is one.
    fn enable_kicks(&mut self) -> Result<(), TestCaseError> {
        prop_assert_eq!(self.queue.enable_kicks().unwrap(), !self.available.is_empty());
        if self.event_idx {
            let place = self.layout.used + 4 + 8 * u64::from(self.layout.size);
            let event: u16 = self.queue.memory().read_obj(GuestAddress(place)).unwrap();
            prop_assert_eq!(
                event,
                self.available_index.wrapping_sub(self.available.len() as u16)
            );
        }
        Ok(())
    }

    /// A device that is frozen has signalled. Another device continues from its state.
    fn freeze(&mut self) -> Result<(), TestCaseError> {
        self.signal()?;
        let record = self.queue.save();
        prop_assert_eq!(record.has_work, !self.available.is_empty());
        let memory = self.queue.memory().clone();
        let restored = record.queue(self.layout.size, self.event_idx).unwrap();
        self.queue = DeviceQueue::new(0, restored, memory, self.interrupt.clone(), Arc::new(eventfd()));
        self.owes = true;
        self.can_unpop = false;
        Ok(())
    }
}

proptest! {
    /// Wherever the indices begin and wrap: chains are popped once each, in the order they were offered; no more are outstanding than the
    /// queue has entries; each is used once, in the order of return; and no interrupt is missed or superfluous.
    #[test]
    fn chains_go_round_in_order_wherever_indices_wrap(
        size in (0..8u32).prop_map(|bits| 1u16 << bits),
        start in prop_oneof![any::<u16>(), (0..300u16).prop_map(|before| 0u16.wrapping_sub(before))],
        event_idx: bool,
        steps in steps(),
    ) {
        let mut model = Model::new(size, start, event_idx);
        for step in steps {
            model.step(step)?;
        }
    }

    /// If a driver claims more available chains than the queue has entries, none is popped, wherever its index is.
    #[test]
    fn an_index_too_far_ahead_yields_no_chain(
        size in (0..8u32).prop_map(|bits| 1u16 << bits),
        start: u16,
        ahead: u16,
    ) {
        let mut model = Model::new(size, start, false);
        model.layout.set_available_index(start.wrapping_add(ahead));
        let mut popped = 0;
        let end = loop {
            match model.queue.pop() {
                Ok(Some(_)) => popped += 1,
                end => break end,
            }
        };
        if ahead > size {
            let is_broken = matches!(end, Err(QueueError::Ring { .. }));
            prop_assert!(is_broken);
            prop_assert_eq!(popped, 0);
        } else {
            prop_assert!(matches!(end, Ok(None)));
            prop_assert_eq!(popped, ahead);
        }
    }
}
