//! Requests of a disk in flight: a guest offers descriptors while calls are held back, and the calls end in any order, or never.
//!
//! Checked: no more calls are handed out than may be in flight; each request that was taken is answered once, unless its call was dropped;
//! the file keeps its length; a frozen disk asks for kicks. There are no flushes, because one waits for the calls that this thread holds back.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use thaw_protocol::control::{Backend, DeviceId};
use thaw_vmm::memory::GuestMemory;
use thaw_vmm::virtio::blk::Blk;
use thaw_vmm::virtio::flight::IN_FLIGHT;
use thaw_vmm::virtio::device::Call;
use thaw_vmm::virtio::event_loop::EventLoop;
use thaw_vmm::virtio::{Activation, DeviceQueue, Interrupt, VirtioDevice};
use virtio_bindings::virtio_ring::{VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
use virtio_queue::desc::{RawDescriptor, split::Descriptor};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

use crate::guest::memory_file;
use crate::script::Script;

const SECTORS: u64 = 64;
const ENTRIES: u16 = 16;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const HEADERS: u64 = 0x3000;
const STATUSES: u64 = 0x4000;
const DATA: u64 = 0x10000;
const MEMORY: usize = 0x40000;
/// Bytes of data for each descriptor.
const ROOM: u64 = 0x2000;
/// Steps of one script: fewer than make a ring's index wrap.
const STEPS: usize = 300;
/// Reads, writes, the serial, discards, zeroes, and what no disk knows.
const KINDS: [u32; 6] = [0, 1, 8, 11, 13, 77];

struct Guest {
    memory: GuestMemory,
    disk: Blk,
    file: OwnedFd,
    calls: Vec<Box<dyn Call>>,
    offered: u16,
    /// Requests of this driver that will not be answered.
    dropped: u16,
    _event_loop: EventLoop,
}

impl Guest {
    fn new() -> Guest {
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), MEMORY)]).expect("memory");
        let event_loop = EventLoop::new().expect("an epoll");
        let mut guest = Guest {
            memory,
            disk: Blk::new("blk1", event_loop.registrar(DeviceId::Blk1)),
            file: memory_file(SECTORS * 512),
            calls: Vec::new(),
            offered: 0,
            dropped: 0,
            _event_loop: event_loop,
        };
        guest.attach();
        guest.activate();
        guest
    }

    fn attach(&mut self) {
        let file = self.file.try_clone().expect("a descriptor");
        let attached = self.disk.attach(Backend::Disk { read_only: false }, vec![file]);
        attached.expect("a file is a disk");
    }

    /// A driver with an empty ring.
    fn activate(&mut self) {
        let eventfd = || EventFd::new(libc::EFD_NONBLOCK).expect("an eventfd");
        let (interrupt, kick) = (Arc::new(Interrupt::new(eventfd())), Arc::new(eventfd()));
        let rings = vec![0; HEADERS as usize];
        self.memory.write_slice(&rings, GuestAddress(0)).expect("it fits");
        (self.offered, self.dropped) = (0, 0);
        let mut queue = Queue::new(ENTRIES).expect("a power of two");
        queue.set_desc_table_address(Some(0), Some(0));
        queue.set_avail_ring_address(Some(AVAILABLE as u32), Some(0));
        queue.set_used_ring_address(Some(USED as u32), Some(0));
        queue.set_ready(true);
        let memory = self.memory.clone();
        let queues = vec![DeviceQueue::new(0, queue, memory.clone(), interrupt, kick)];
        let activation = Activation {
            memory,
            features: 0,
            queues,
        };
        self.disk.activate(activation).expect("it does nothing yet");
    }

    fn step(&mut self, script: &mut Script<'_>) {
        match script.byte() % 8 {
            0 | 1 => self.describe(script),
            2 => self.offer(script.word()),
            3 | 4 => self.take(),
            5 => {
                if let Some(call) = self.held(script) {
                    call.make();
                }
            }
            6 => {
                if let Some(call) = self.held(script) {
                    self.dropped += 1;
                    drop(call);
                }
            }
            _ => self.interrupt(script),
        }
    }

    /// A request from some descriptor on, and makes it available.
    fn describe(&mut self, script: &mut Script<'_>) {
        let head = u16::from(script.byte()) % ENTRIES;
        let kind = KINDS[usize::from(script.byte()) % KINDS.len()];
        let (sector, length) = (u64::from(script.byte()), u32::from(script.byte() % 16) * 256);
        let header = HEADERS + 16 * u64::from(head);
        let bytes = [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
        self.memory
            .write_slice(&bytes, GuestAddress(header))
            .expect("it fits");
        let of_data = match kind {
            0 | 8 => VRING_DESC_F_WRITE as u16,
            _ => 0,
        };
        let parts = [
            (header, 16, 0),
            (DATA + ROOM * u64::from(head), length, of_data),
            (STATUSES + u64::from(head), 1, VRING_DESC_F_WRITE as u16),
        ];
        for (index, (address, length, flags)) in (head..).zip(parts) {
            let next = match index == head + 2 {
                true => 0,
                false => VRING_DESC_F_NEXT as u16,
            };
            let descriptor = Descriptor::new(address, length, flags | next, (index + 1) % ENTRIES);
            let at = GuestAddress(16 * u64::from(index % ENTRIES));
            let described = self.memory.write_obj(RawDescriptor::from(descriptor), at);
            described.expect("it fits");
        }
        self.offer(head);
    }

    /// Puts a head in the available ring, whatever it is.
    fn offer(&mut self, head: u16) {
        let place = AVAILABLE + 4 + 2 * u64::from(self.offered % ENTRIES);
        self.offered += 1;
        for (word, at) in [(head, place), (self.offered, AVAILABLE + 2)] {
            self.memory.write_obj(word, GuestAddress(at)).expect("it fits");
        }
    }

    /// A thread looks for a call.
    fn take(&mut self) {
        match self.disk.next_call() {
            Ok(call) => self.calls.extend(call),
            // As the event loop does it.
            Err(_) => self.reset(),
        }
        assert!(self.calls.len() <= IN_FLIGHT);
    }

    fn held(&mut self, script: &mut Script<'_>) -> Option<Box<dyn Call>> {
        let which = usize::from(script.byte());
        let held = self.calls.len();
        (held > 0).then(|| self.calls.swap_remove(which % held))
    }

    fn reset(&mut self) {
        self.end_calls();
        self.disk.reset();
        assert!(self.disk.next_call().is_ok_and(|call| call.is_none()));
        self.activate();
    }

    fn end_calls(&mut self) {
        self.calls.drain(..).for_each(|call| call.make());
    }

    /// What waits for the calls that are held back, so that they end first.
    fn interrupt(&mut self, script: &mut Script<'_>) {
        match script.byte() % 3 {
            0 => self.reset(),
            1 => {
                self.end_calls();
                self.disk.detach().expect("a disk can be taken away");
                self.attach();
            }
            _ => self.check(),
        }
    }

    fn check(&mut self) {
        self.end_calls();
        let saved = self.disk.save();
        let taken = saved.queues.as_ref().and_then(|queues| queues.first());
        let taken = taken.expect("its driver is up");
        assert_eq!(taken.next_used + self.dropped, taken.next_available);
        let flags: u16 = self.memory.read_obj(GuestAddress(USED)).expect("it is there");
        assert_eq!(flags, 0, "a restored device gets the driver's kicks");
        let length = rustix::fs::fstat(&self.file).expect("a file").st_size as u64;
        assert_eq!(length, SECTORS * 512);
        self.disk
            .check(&saved.state, saved.queues.as_deref())
            .expect("what it saves it would take");
    }
}

pub fn run(input: &[u8]) {
    let (mut guest, mut script) = (Guest::new(), Script::new(input));
    for _ in 0..STEPS {
        if script.is_empty() {
            break;
        }
        guest.step(&mut script);
    }
    guest.check();
}
