//! The driver of a disk, as a guest's kernel would be, in this process: it writes requests into a split queue (virtio 1.2 §2.7), kicks the
//! device, and waits for its interrupts. It kicks and is interrupted only as far as `EVENT_IDX` asks for it, as Linux does.

use std::os::fd::AsRawFd;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex};

use thaw_protocol::control::DeviceId;
use thaw_vmm::memory::GuestMemory;
use thaw_vmm::virtio::blk::Blk;
use thaw_vmm::virtio::mmio::{ACKNOWLEDGE, DRIVER, DRIVER_OK, FEATURES_OK, MmioDevice, register};
use thaw_vmm::virtio::{Interrupt, Loops, VirtioDevice};
use virtio_bindings::virtio_blk::{VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT};
use virtio_bindings::virtio_ring::{VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

/// Most requests in flight.
pub const SLOTS: usize = 32;
/// Most bytes of a request.
pub const LONGEST: usize = 1 << 20;

const QUEUE: u16 = 256;
/// Where the parts of the queue and of the requests are in guest memory.
const DESCRIPTORS: u64 = 0;
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;
const HEADERS: u64 = 0x4000;
const STATUSES: u64 = 0x5000;
const DATA: u64 = 0x10_0000;
const MEMORY: usize = DATA as usize + SLOTS * LONGEST;
/// Descriptors of a request: header, data, status.
const EACH: u16 = 3;

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Read,
    Write,
    Flush,
}

/// The driver of one disk.
pub struct Driver {
    memory: GuestMemory,
    transport: MmioDevice,
    kick: Arc<EventFd>,
    interrupt: Arc<Interrupt>,
    interrupted: Epoll,
    /// Indices of the available and the used ring: of the next entry.
    available: u16,
    published: u16,
    used: u16,
}

impl Driver {
    /// Puts the device into the loop of its slot, and brings it up once that runs ([`Driver::bring_up`]).
    pub fn new(loops: &mut Loops, id: DeviceId, device: Arc<Mutex<Blk>>) -> Result<Driver, String> {
        let eventfd = || EventFd::new(libc::EFD_NONBLOCK).map_err(|e| format!("eventfd: {e}"));
        let interrupt = Arc::new(Interrupt::new(eventfd()?));
        let kick = Arc::new(eventfd()?);
        let device: Arc<Mutex<dyn VirtioDevice>> = device;
        loops
            .of(id)
            .serve(id, device.clone(), interrupt.clone(), vec![kick.clone()])
            .map_err(|e| format!("epoll: {e}"))?;
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), MEMORY)])
            .map_err(|e| format!("{MEMORY} bytes of memory: {e}"))?;
        let transport = MmioDevice::new(id, device, interrupt.clone(), vec![kick.clone()], memory.clone())
            .map_err(|e| format!("the queue: {e}"))?;
        let interrupted = Epoll::new().map_err(|e| format!("epoll: {e}"))?;
        let event = EpollEvent::new(EventSet::IN, 0);
        interrupted
            .ctl(ControlOperation::Add, interrupt.line().as_raw_fd(), event)
            .map_err(|e| format!("epoll: {e}"))?;
        Ok(Driver {
            memory,
            transport,
            kick,
            interrupt,
            interrupted,
            available: 0,
            published: 0,
            used: 0,
        })
    }

    /// Negotiates every feature and sets the queue up.
    pub fn bring_up(&mut self) {
        let up = ACKNOWLEDGE | DRIVER;
        self.set(register::STATUS, up);
        for half in 0..2 {
            self.set(register::DEVICE_FEATURES_SEL, half);
            let mut offered = [0; 4];
            self.transport.read(register::DEVICE_FEATURES, &mut offered);
            self.set(register::DRIVER_FEATURES_SEL, half);
            self.set(register::DRIVER_FEATURES, u32::from_le_bytes(offered));
        }
        self.set(register::STATUS, up | FEATURES_OK);
        self.set(register::QUEUE_SEL, 0);
        self.set(register::QUEUE_NUM, QUEUE.into());
        for (register, address) in [
            (register::QUEUE_DESC_LOW, DESCRIPTORS),
            (register::QUEUE_DRIVER_LOW, AVAILABLE),
            (register::QUEUE_DEVICE_LOW, USED),
        ] {
            self.set(register, address as u32);
            self.set(register + 4, 0);
        }
        self.set(register::QUEUE_READY, 1);
        self.set(register::STATUS, up | FEATURES_OK | DRIVER_OK);
    }

    /// Writes a request into `slot`, which must have none in flight. [`Self::publish`] shows it to the device.
    pub fn submit(
        &mut self,
        slot: usize,
        operation: Operation,
        offset: u64,
        length: usize,
    ) -> Result<(), String> {
        let kind = match operation {
            Operation::Read => VIRTIO_BLK_T_IN,
            Operation::Write => VIRTIO_BLK_T_OUT,
            Operation::Flush => VIRTIO_BLK_T_FLUSH,
        };
        let header = HEADERS + 16 * slot as u64;
        self.put(header, u64::from(kind))?;
        self.put(header + 8, offset / 512)?;
        let (next, write) = (VRING_DESC_F_NEXT as u16, VRING_DESC_F_WRITE as u16);
        let data = DATA + (slot * LONGEST) as u64;
        let of_data = match operation {
            Operation::Read => next | write,
            _ => next,
        };
        let mut parts = vec![(header, 16, next)];
        if operation != Operation::Flush {
            parts.push((data, length as u32, of_data));
        }
        parts.push((STATUSES + slot as u64, 1, write));
        let head = slot as u16 * EACH;
        for (index, (address, length, flags)) in (head..).zip(parts) {
            let at = DESCRIPTORS + 16 * u64::from(index);
            self.put(at, address)?;
            let rest = u64::from(length) | u64::from(flags) << 32 | u64::from(index + 1) << 48;
            self.put(at + 8, rest)?;
        }
        let place = AVAILABLE + 4 + 2 * u64::from(self.available % QUEUE);
        self.available = self.available.wrapping_add(1);
        self.store(place, head)
    }

    /// Makes the submitted requests available, and kicks the device if it wants that.
    pub fn publish(&mut self) -> Result<(), String> {
        let (old, new) = (self.published, self.available);
        self.store(AVAILABLE + 2, new)?;
        self.published = new;
        fence(Ordering::SeqCst);
        let wanted = self.load(USED + 4 + 8 * u64::from(QUEUE))?;
        if new.wrapping_sub(wanted).wrapping_sub(1) < new.wrapping_sub(old) {
            self.kick.write(1).map_err(|e| format!("kick: {e}"))?;
        }
        Ok(())
    }

    /// Waits until a request is answered. Adds the slots of all that are to `slots`.
    pub fn collect(&mut self, slots: &mut Vec<usize>) -> Result<(), String> {
        if !self.take_used(slots)? {
            loop {
                // An interrupt, please, for the next one.
                self.store(AVAILABLE + 4 + 2 * u64::from(QUEUE), self.used)?;
                fence(Ordering::SeqCst);
                if self.take_used(slots)? {
                    break;
                }
                let waited = self.interrupted.wait(-1, &mut [EpollEvent::default()]);
                waited.map_err(|e| format!("epoll: {e}"))?;
                // Fails only if there is nothing to read.
                let _ = self.interrupt.line().read();
                self.interrupt.acknowledge(self.interrupt.reasons());
            }
        }
        Ok(())
    }

    /// Sends one request, and waits for its answer.
    pub fn request(&mut self, operation: Operation, offset: u64, length: usize) -> Result<(), String> {
        self.submit(0, operation, offset, length)?;
        self.publish()?;
        self.collect(&mut Vec::new())
    }

    fn take_used(&mut self, slots: &mut Vec<usize>) -> Result<bool, String> {
        let index = self.load(USED + 2)?;
        let any = index != self.used;
        while self.used != index {
            let at = USED + 4 + 8 * u64::from(self.used % QUEUE);
            let head: u32 = self
                .memory
                .read_obj(GuestAddress(at))
                .map_err(|e| format!("the used ring: {e}"))?;
            let slot = head as usize / usize::from(EACH);
            let status: u8 = self
                .memory
                .read_obj(GuestAddress(STATUSES + slot as u64))
                .map_err(|e| format!("a status: {e}"))?;
            if status != 0 {
                return Err(format!("the disk answered {status}"));
            }
            slots.push(slot);
            self.used = self.used.wrapping_add(1);
        }
        Ok(any)
    }

    fn set(&self, register: u64, value: u32) {
        self.transport.write(register, &value.to_le_bytes());
    }

    fn put(&self, address: u64, value: u64) -> Result<(), String> {
        let written = self.memory.write_obj(value, GuestAddress(address));
        written.map_err(|e| format!("guest memory: {e}"))
    }

    fn store(&self, address: u64, value: u16) -> Result<(), String> {
        let stored = self.memory.store(value, GuestAddress(address), Ordering::Release);
        stored.map_err(|e| format!("guest memory: {e}"))
    }

    fn load(&self, address: u64) -> Result<u16, String> {
        let loaded = self.memory.load(GuestAddress(address), Ordering::Acquire);
        loaded.map_err(|e| format!("guest memory: {e}"))
    }
}
