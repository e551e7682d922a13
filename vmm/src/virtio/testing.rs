//! A driver for tests: real rings in guest memory, in front of one active device.

mod rings;
mod shared;

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use virtio_bindings::virtio_ring::{VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_USED_F_NO_NOTIFY};
use virtio_queue::desc::RawDescriptor;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

use self::rings::Ring;
pub use self::rings::{Buf, Layout};
pub use self::shared::Shared;
use super::device::{Activation, DeviceError, VirtioDevice};
use super::gate::Gate;
use super::interrupt::Interrupt;
use super::queue::DeviceQueue;
use super::state::{DeviceState, QueueRecord};
use crate::memory::GuestMemory;

/// Bytes of guest memory, all of it at address 0.
pub const MEMORY: u64 = 32 << 20;
/// An address where there is no memory.
pub const NOWHERE: u64 = 1 << 40;
const BUFFERS: u64 = 1 << 20;
const PAGE: usize = 4096;

/// A driver and its device.
pub struct Rig<D> {
    pub memory: &'static GuestMemory,
    pub device: D,
    pub interrupt: Arc<Interrupt>,
    features: u64,
    rings: Vec<Ring>,
    next_buffer: u64,
}

/// A frozen device, and its driver's view: guest memory, rings.
pub struct Frozen {
    pub state: DeviceState,
    pub queues: Vec<QueueRecord>,
    memory: &'static GuestMemory,
    features: u64,
    reasons: u32,
    rings: Vec<Ring>,
    next_buffer: u64,
}

/// An open gate.
pub fn open_gate() -> Arc<Gate> {
    let gate = Arc::new(Gate::new());
    gate.open();
    gate
}

pub fn eventfd() -> EventFd {
    EventFd::new(libc::EFD_NONBLOCK).unwrap()
}

/// Sends bytes with at most two descriptors over a stream.
pub fn send_with(stream: &UnixStream, bytes: &[u8], files: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(files));
    let bytes = [IoSlice::new(bytes)];
    sendmsg(stream, &bytes, &mut ancillary, SendFlags::empty()).unwrap();
}

pub fn memory() -> &'static GuestMemory {
    Box::leak(Box::new(
        GuestMemory::from_ranges(&[(GuestAddress(0), MEMORY as usize)]).unwrap(),
    ))
}

impl<D: VirtioDevice> Rig<D> {
    /// The device, activated with `features`.
    pub fn new(device: D, features: u64) -> Rig<D> {
        let mut rig = Rig::idle(device);
        rig.activate(features);
        rig
    }

    /// The device without a driver.
    pub fn idle(device: D) -> Rig<D> {
        let memory = memory();
        let rings = device
            .spec()
            .queue_sizes
            .iter()
            .enumerate()
            .map(|(i, size)| Ring {
                layout: Layout::new(memory, 0x4000 * (i as u64 + 1), *size),
                kick: Arc::new(eventfd()),
                next_descriptor: 0,
                seen: 0,
            });
        Rig {
            memory,
            rings: rings.collect(),
            device,
            interrupt: Arc::new(Interrupt::new(eventfd())),
            features: 0,
            next_buffer: BUFFERS,
        }
    }

    /// Freezes device and memory. This rig may be used further.
    pub fn freeze(&mut self) -> Frozen {
        let saved = self.device.save();
        let copy = memory();
        for page in (0..MEMORY).step_by(PAGE) {
            let mut bytes = [0; PAGE];
            self.memory.read_slice(&mut bytes, GuestAddress(page)).unwrap();
            if bytes != [0; PAGE] {
                copy.write_slice(&bytes, GuestAddress(page)).unwrap();
            }
        }
        Frozen {
            state: saved.state,
            queues: saved.queues.expect("the device is active"),
            memory: copy,
            features: self.features,
            reasons: self.interrupt.reasons(),
            rings: self.rings.clone(),
            next_buffer: self.next_buffer,
        }
    }

    /// A driver that continues where it was frozen, with `device` restored and parked.
    pub fn thaw(frozen: Frozen, mut device: D) -> Rig<D> {
        let interrupt = Arc::new(Interrupt::new(eventfd()));
        interrupt.restore(frozen.reasons, true, false);
        let rings: Vec<Ring> = frozen
            .rings
            .into_iter()
            .map(|ring| Ring {
                layout: Layout {
                    memory: frozen.memory,
                    ..ring.layout
                },
                kick: Arc::new(eventfd()),
                ..ring
            })
            .collect();
        device.check(&frozen.state, Some(&frozen.queues)).unwrap();
        let queues = frozen.queues.iter().zip(&rings).enumerate();
        let queues = queues.map(|(index, (record, ring))| {
            let queue = record.queue(ring.layout.size, false).unwrap();
            DeviceQueue::new(
                index,
                queue,
                frozen.memory.clone(),
                interrupt.clone(),
                ring.kick.clone(),
            )
        });
        let activation = Activation {
            memory: frozen.memory.clone(),
            features: frozen.features,
            queues: queues.collect(),
        };
        device.restore(Some(activation), &frozen.state).unwrap();
        for (record, ring) in frozen.queues.iter().zip(&rings) {
            if record.has_work {
                ring.kick.write(1).unwrap();
            }
        }
        Rig {
            memory: frozen.memory,
            device,
            interrupt,
            features: frozen.features,
            rings,
            next_buffer: frozen.next_buffer,
        }
    }

    /// Starts a thawed device: raises the pending interrupts and serves the kicked queues.
    pub fn start_work(&mut self) {
        self.interrupt.release();
        for queue in 0..self.rings.len() {
            while self.kicked(queue) {
                self.device.queue_ready(queue).unwrap();
                self.make_calls().unwrap();
            }
        }
    }

    pub fn activate(&mut self, features: u64) {
        self.features = features;
        let queues = self.rings.iter().enumerate().map(|(index, ring)| {
            let queue = ring.layout.queue();
            DeviceQueue::new(
                index,
                queue,
                self.memory.clone(),
                self.interrupt.clone(),
                ring.kick.clone(),
            )
        });
        let activation = Activation {
            memory: self.memory.clone(),
            features,
            queues: queues.collect(),
        };
        self.interrupt.set_driver_ok(true);
        self.device.activate(activation).unwrap();
    }

    /// A buffer for the device to read.
    pub fn readable(&mut self, bytes: &[u8]) -> Buf {
        let address = self.allocate(bytes.len() as u64);
        self.memory.write_slice(bytes, GuestAddress(address)).unwrap();
        Buf {
            address,
            length: bytes.len() as u32,
            write: false,
        }
    }

    /// A buffer for the device to write to, filled with 0xEE.
    pub fn writable(&mut self, length: u32) -> Buf {
        let address = self.allocate(u64::from(length));
        self.memory
            .write_slice(&vec![0xEE; length as usize], GuestAddress(address))
            .unwrap();
        Buf {
            address,
            length,
            write: true,
        }
    }

    /// Overwrites the beginning of a buffer.
    pub fn rewrite(&self, buffer: Buf, bytes: &[u8]) {
        assert!(bytes.len() <= buffer.length as usize);
        self.memory
            .write_slice(bytes, GuestAddress(buffer.address))
            .unwrap();
    }

    fn allocate(&mut self, length: u64) -> u64 {
        let address = self.next_buffer;
        self.next_buffer = (address + length).next_multiple_of(64);
        assert!(self.next_buffer <= MEMORY, "the test uses too much memory");
        address
    }

    pub fn bytes(&self, buffer: Buf) -> Vec<u8> {
        let mut bytes = vec![0; buffer.length as usize];
        self.memory
            .read_slice(&mut bytes, GuestAddress(buffer.address))
            .unwrap();
        bytes
    }

    /// Makes a chain available, without a kick. Returns its head.
    pub fn submit(&mut self, queue: usize, buffers: &[Buf]) -> u16 {
        let ring = &mut self.rings[queue];
        let head = ring.next_descriptor;
        for (i, buffer) in buffers.iter().enumerate() {
            let last = i + 1 == buffers.len();
            let next = (ring.next_descriptor + 1) % ring.layout.size;
            let flags = buffer.flags() | if last { 0 } else { VRING_DESC_F_NEXT as u16 };
            let descriptor = Descriptor::new(buffer.address, buffer.length, flags, next);
            ring.layout.describe(ring.next_descriptor, descriptor);
            ring.next_descriptor = next;
        }
        self.offer(queue, head);
        head
    }

    /// Like `submit`, through an indirect table.
    pub fn submit_indirect(&mut self, queue: usize, buffers: &[Buf]) -> u16 {
        let table = self.allocate(16 * buffers.len() as u64);
        for (i, buffer) in buffers.iter().enumerate() {
            let last = i + 1 == buffers.len();
            let flags = buffer.flags() | if last { 0 } else { VRING_DESC_F_NEXT as u16 };
            let descriptor = Descriptor::new(buffer.address, buffer.length, flags, i as u16 + 1);
            self.memory
                .write_obj(
                    RawDescriptor::from(descriptor),
                    GuestAddress(table + 16 * i as u64),
                )
                .unwrap();
        }
        let flags = VRING_DESC_F_INDIRECT as u16;
        let descriptor = Descriptor::new(table, 16 * buffers.len() as u32, flags, 0);
        let ring = &mut self.rings[queue];
        let head = ring.next_descriptor;
        ring.layout.describe(head, descriptor);
        ring.next_descriptor = (head + 1) % ring.layout.size;
        self.offer(queue, head);
        head
    }

    /// Makes available a chain of two descriptors that point at each other.
    pub fn submit_loop(&mut self, queue: usize) {
        let next = VRING_DESC_F_NEXT as u16;
        let layout = self.rings[queue].layout;
        layout.describe(0, Descriptor::new(BUFFERS, 16, next, 1));
        layout.describe(1, Descriptor::new(BUFFERS, 16, next, 0));
        self.offer(queue, 0);
    }

    /// Puts `head` in the available ring without checks.
    pub fn offer(&mut self, queue: usize, head: u16) {
        let layout = self.rings[queue].layout;
        let index = layout.available_index();
        layout.offer_at(index, head);
        self.set_available(queue, index.wrapping_add(1));
    }

    /// Sets the available index without checks.
    pub fn set_available(&mut self, queue: usize, index: u16) {
        self.rings[queue].layout.set_available_index(index);
    }

    /// Lets the device serve a queue until it does not kick itself again.
    pub fn kick(&mut self, queue: usize) -> Result<(), DeviceError> {
        self.device.queue_ready(queue)?;
        self.make_calls()?;
        while self.kicked(queue) {
            self.device.queue_ready(queue)?;
            self.make_calls()?;
        }
        Ok(())
    }

    /// Makes the calls that the device hands out, one after the other, until it has none.
    pub fn make_calls(&mut self) -> Result<(), DeviceError> {
        while let Some(call) = self.device.next_call()? {
            call.make();
        }
        Ok(())
    }

    /// Notifies the device as a driver does, for an event loop to see.
    pub fn notify(&self, queue: usize) {
        self.rings[queue].kick.write(1).unwrap();
    }

    /// The eventfds of the queues.
    pub fn kicks(&self) -> Vec<Arc<EventFd>> {
        self.rings.iter().map(|ring| ring.kick.clone()).collect()
    }

    /// Waits for the device's interrupt.
    pub fn wait(&self) {
        let line = self.interrupt.line();
        // SAFETY: the eventfd lives as long as `self`.
        let fd = unsafe { BorrowedFd::borrow_raw(line.as_raw_fd()) };
        let patience = Timespec {
            tv_sec: 20,
            tv_nsec: 0,
        };
        let ready = poll(&mut [PollFd::new(&fd.as_fd(), PollFlags::IN)], Some(&patience)).unwrap();
        assert_eq!(ready, 1, "the device said nothing for 20 s");
        line.read().unwrap();
    }

    /// Waits for answers on `queue`. An interrupt may also come without one, as for a real driver.
    pub fn wait_used(&mut self, queue: usize) -> Vec<(u16, u32)> {
        loop {
            let used = self.used(queue);
            if !used.is_empty() {
                return used;
            }
            self.wait();
        }
    }

    /// Whether the device asked to be called again for this queue.
    pub fn kicked(&self, queue: usize) -> bool {
        self.rings[queue].kick.read().is_ok()
    }

    /// Whether the device asks the driver for kicks of this queue. Only without `VIRTIO_F_RING_EVENT_IDX`.
    pub fn asks_for_kicks(&self, queue: usize) -> bool {
        let flags = GuestAddress(self.rings[queue].layout.used);
        self.memory.read_obj::<u16>(flags).unwrap() & VRING_USED_F_NO_NOTIFY as u16 == 0
    }

    /// Chains used since the last call: head and bytes written.
    pub fn used(&mut self, queue: usize) -> Vec<(u16, u32)> {
        let ring = &mut self.rings[queue];
        let mut used = Vec::new();
        while ring.seen != ring.layout.used_index() {
            let element = ring.layout.used_at(ring.seen);
            used.push((element.id() as u16, element.len()));
            ring.seen = ring.seen.wrapping_add(1);
        }
        used
    }

    /// Submits one request and returns its used length.
    pub fn request(&mut self, queue: usize, buffers: &[Buf]) -> u32 {
        let head = self.submit(queue, buffers);
        self.kick(queue).unwrap();
        let used = self.used(queue);
        assert_eq!(used.len(), 1, "one chain in, one out");
        assert_eq!(used[0].0, head);
        used[0].1
    }
}
