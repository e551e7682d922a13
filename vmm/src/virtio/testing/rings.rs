//! Split queues in guest memory, written as by a driver.
//!
//! They are laid out here, because those of virtio-queue's mock overlap when more than a few entries are used.

use std::sync::Arc;

use virtio_bindings::virtio_ring::VRING_DESC_F_WRITE;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::desc::{RawDescriptor, split::VirtqUsedElem};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

use crate::memory::GuestMemory;

/// A buffer of a request.
#[derive(Clone, Copy, Debug)]
pub struct Buf {
    pub address: u64,
    pub length: u32,
    pub write: bool,
}

impl Buf {
    pub fn flags(self) -> u16 {
        if self.write { VRING_DESC_F_WRITE as u16 } else { 0 }
    }
}

/// A queue, and its driver's state.
#[derive(Clone)]
pub(super) struct Ring {
    pub layout: Layout,
    pub kick: Arc<EventFd>,
    pub next_descriptor: u16,
    pub seen: u16,
}

/// The three parts of a split queue in guest memory (virtio 1.2 §2.7).
#[derive(Clone, Copy)]
pub struct Layout {
    pub memory: &'static GuestMemory,
    pub size: u16,
    pub descriptors: u64,
    pub available: u64,
    pub used: u64,
}

impl Layout {
    /// An empty queue of `size` at `start`.
    pub fn new(memory: &'static GuestMemory, start: u64, size: u16) -> Layout {
        let layout = Layout::at(memory, start, size);
        let end = layout.used + 6 + 8 * u64::from(size);
        memory
            .write_slice(&vec![0; (end - start) as usize], GuestAddress(start))
            .unwrap();
        layout
    }

    /// The queue of `size` that is already at `start`.
    pub fn at(memory: &'static GuestMemory, start: u64, size: u16) -> Layout {
        let available = start + 16 * u64::from(size);
        let used = (available + 6 + 2 * u64::from(size)).next_multiple_of(4);
        Layout {
            memory,
            size,
            descriptors: start,
            available,
            used,
        }
    }

    pub fn queue(&self) -> Queue {
        let mut queue = Queue::new(self.size).unwrap();
        let halves = |address: u64| (Some(address as u32), Some((address >> 32) as u32));
        let (low, high) = halves(self.descriptors);
        queue.set_desc_table_address(low, high);
        let (low, high) = halves(self.available);
        queue.set_avail_ring_address(low, high);
        let (low, high) = halves(self.used);
        queue.set_used_ring_address(low, high);
        queue.set_ready(true);
        queue
    }

    pub fn describe(&self, index: u16, descriptor: Descriptor) {
        let at = self.descriptors + 16 * u64::from(index);
        self.memory
            .write_obj(RawDescriptor::from(descriptor), GuestAddress(at))
            .unwrap();
    }

    /// Puts `head` at index `place` of the available ring.
    pub fn offer_at(&self, place: u16, head: u16) {
        self.write(self.available + 4 + 2 * u64::from(place % self.size), head);
    }

    pub fn available_index(&self) -> u16 {
        self.read(self.available + 2)
    }

    pub fn set_available_index(&self, index: u16) {
        self.write(self.available + 2, index);
    }

    /// The used index at which the driver wants an interrupt.
    pub fn set_used_event(&self, index: u16) {
        self.write(self.available + 4 + 2 * u64::from(self.size), index);
    }

    pub fn used_index(&self) -> u16 {
        self.read(self.used + 2)
    }

    pub fn used_at(&self, place: u16) -> VirtqUsedElem {
        self.memory
            .read_obj(GuestAddress(self.used + 4 + 8 * u64::from(place % self.size)))
            .unwrap()
    }

    fn read(&self, at: u64) -> u16 {
        self.memory.read_obj(GuestAddress(at)).unwrap()
    }

    fn write(&self, at: u64, value: u16) {
        self.memory.write_obj(value, GuestAddress(at)).unwrap();
    }
}
