//! A guest that does to a device what a script says: it brings it up, writes its registers, rings and memory, kicks, resets and is
//! frozen with requests in flight. The event loop has its turns in between, on the same thread, so that a run can be repeated.
//!
//! Checked: a device whose driver is not up touches no memory, and what a freeze keeps of a device can be restored.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use rustix::fs::MemfdFlags;
use thaw_protocol::control::DeviceId;
use thaw_vmm::memory::GuestMemory;
use thaw_vmm::virtio::event_loop::EventLoop;
use thaw_vmm::virtio::mmio::{ACKNOWLEDGE, DRIVER, DRIVER_OK, FEATURES_OK, MmioDevice, register};
use thaw_vmm::virtio::{Interrupt, VirtioDevice};
use virtio_bindings::virtio_ring::{VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};
use virtio_queue::desc::{RawDescriptor, split::Descriptor};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

use crate::script::Script;

/// Bytes of guest memory, all of it at address 0: rings first, then buffers.
const MEMORY: u64 = 256 << 10;
/// Bytes kept for the rings of a queue, of at most 256 entries.
const RINGS: u64 = 0x2000;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x1400;
const BUFFERS: u64 = 0x8000;
/// Bytes of a message that a script carries.
const LONGEST: usize = 2048;
/// Steps of one script.
const STEPS: usize = 200;

/// A device, and the world behind it.
pub trait World {
    const ID: DeviceId;

    /// A device without a backend. Called again for each thaw.
    fn device(&mut self, event_loop: &EventLoop) -> Arc<Mutex<dyn VirtioDevice>>;

    /// Attaches what belongs behind it.
    fn attach(&mut self) {}

    /// The world does something.
    fn act(&mut self, _script: &mut Script<'_>) {}

    /// What must hold after every step.
    fn check(&self) {}
}

/// Lets a guest do all that `input` says to the device of `world`.
pub fn run(mut world: impl World, input: &[u8]) {
    let mut script = Script::new(input);
    let memory = GuestMemory::from_ranges(&[(GuestAddress(0), MEMORY as usize)]).expect("memory");
    let mut guest = Guest::new(&mut world, memory);
    world.attach();
    for _ in 0..STEPS {
        if script.is_empty() {
            break;
        }
        guest = guest.step(&mut world, &mut script);
        world.check();
    }
}

struct Guest {
    memory: GuestMemory,
    transport: MmioDevice,
    event_loop: EventLoop,
    /// The size the driver has last given each queue.
    sizes: Vec<u16>,
    next_descriptor: u16,
    next_buffer: u64,
}

impl Guest {
    fn new<W: World>(world: &mut W, memory: GuestMemory) -> Guest {
        let id = W::ID;
        let mut event_loop = EventLoop::new().expect("an epoll");
        let device = world.device(&event_loop);
        let sizes = device
            .lock()
            .expect("nobody panicked")
            .spec()
            .queue_sizes
            .to_vec();
        let eventfd = || EventFd::new(libc::EFD_NONBLOCK).expect("an eventfd");
        let interrupt = Arc::new(Interrupt::new(eventfd()));
        let kicks: Vec<_> = sizes.iter().map(|_| Arc::new(eventfd())).collect();
        event_loop
            .serve(id, device.clone(), interrupt.clone(), kicks.clone())
            .expect("an epoll");
        let transport =
            MmioDevice::new(id, device, interrupt, kicks, memory.clone()).expect("sizes are powers of two");
        Guest {
            memory,
            transport,
            event_loop,
            sizes,
            next_descriptor: 0,
            next_buffer: BUFFERS,
        }
    }

    fn step(mut self, world: &mut impl World, script: &mut Script<'_>) -> Guest {
        match script.byte() % 12 {
            0 => self.set(u64::from(script.byte()) * 4, script.long()),
            1 => {
                let mut data = [0; 8];
                let size = 1 << (script.byte() % 4);
                self.transport.read(script.word().into(), &mut data[..size]);
            }
            2 => {
                let offset = u64::from(script.word());
                self.transport.write(offset, script.run());
            }
            3 => {
                let at = u64::from(script.long()) % MEMORY;
                let bytes = script.run();
                let _ = self.memory.write(bytes, GuestAddress(at));
            }
            4 => self.bring_up(script),
            5 => self.request(script),
            6 => self.descriptor(script),
            7 => {
                let (queue, head, ahead) = (script.byte(), script.word(), script.byte());
                self.offer(queue, head, ahead.into());
            }
            8 => self.set(register::QUEUE_NOTIFY, script.byte().into()),
            9 => self.set(register::STATUS, 0),
            10 => world.act(script),
            _ => return self.thaw(world),
        }
        self.turn();
        self
    }

    fn set(&self, register: u64, value: u32) {
        self.transport.write(register, &value.to_le_bytes());
    }

    fn get(&self, register: u64) -> u32 {
        let mut word = [0; 4];
        self.transport.read(register, &mut word);
        u32::from_le_bytes(word)
    }

    /// As a driver does it, with some of the features and queues of some size.
    fn bring_up(&mut self, script: &mut Script<'_>) {
        self.set(register::STATUS, 0);
        self.set(register::STATUS, ACKNOWLEDGE | DRIVER);
        for half in 0..2 {
            self.set(register::DEVICE_FEATURES_SEL, half);
            let offered = self.get(register::DEVICE_FEATURES);
            // The upper half has what every driver must take.
            let taken = if half == 0 {
                offered & script.long()
            } else {
                offered
            };
            self.set(register::DRIVER_FEATURES_SEL, half);
            self.set(register::DRIVER_FEATURES, taken);
        }
        self.set(register::STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK);
        for queue in 0..self.sizes.len() {
            self.set(register::QUEUE_SEL, queue as u32);
            let most = self.get(register::QUEUE_NUM_MAX).trailing_zeros();
            let size = 1 << (u32::from(script.byte()) % (most + 1));
            self.sizes[queue] = size;
            self.set(register::QUEUE_NUM, size.into());
            let start = queue as u64 * RINGS;
            let _ = self.memory.write_slice(&[0; RINGS as usize], GuestAddress(start));
            for (register, at) in [
                (register::QUEUE_DESC_LOW, start),
                (register::QUEUE_DRIVER_LOW, start + AVAILABLE),
                (register::QUEUE_DEVICE_LOW, start + USED),
            ] {
                self.set(register, at as u32);
                self.set(register + 4, 0);
            }
            self.set(register::QUEUE_READY, 1);
        }
        self.next_descriptor = 0;
        let status = ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK;
        self.set(register::STATUS, status);
    }

    /// A sound chain: bytes the device reads, cut in two, and rooms it may write.
    fn request(&mut self, script: &mut Script<'_>) {
        let (queue, cut) = (script.byte(), script.byte());
        let length = usize::from(script.word()) % LONGEST;
        let message = script.bytes(length);
        let (first, second) = message.split_at(usize::from(cut).min(message.len()));
        let mut buffers = Vec::new();
        for part in [first, second] {
            if !part.is_empty() {
                let address = self.allocate(part.len() as u32);
                let _ = self.memory.write_slice(part, GuestAddress(address));
                buffers.push((address, part.len() as u32, 0));
            }
        }
        for _ in 0..script.byte() % 4 {
            let room = u32::from(script.word());
            buffers.push((self.allocate(room), room, VRING_DESC_F_WRITE as u16));
        }
        let size = self.size(queue);
        let head = self.next_descriptor % size;
        for (number, (address, length, flags)) in buffers.iter().enumerate() {
            let index = self.next_descriptor % size;
            self.next_descriptor = self.next_descriptor.wrapping_add(1);
            let next = if number + 1 < buffers.len() {
                VRING_DESC_F_NEXT as u16
            } else {
                0
            };
            let descriptor = Descriptor::new(*address, *length, flags | next, self.next_descriptor % size);
            self.describe(queue, index, descriptor);
        }
        if !buffers.is_empty() {
            self.offer(queue, head, 1);
            self.set(register::QUEUE_NOTIFY, queue.into());
        }
    }

    /// Any descriptor, in a queue's table or elsewhere in memory, for an indirect one.
    fn descriptor(&mut self, script: &mut Script<'_>) {
        let (queue, index) = (script.byte(), script.word());
        let address = match script.byte() % 4 {
            0 => script.quad(),
            _ => u64::from(script.long()) % MEMORY,
        };
        let (length, flags, next) = (script.long(), script.byte(), script.word());
        self.describe(queue, index, Descriptor::new(address, length, flags.into(), next));
    }

    fn describe(&self, queue: u8, index: u16, descriptor: Descriptor) {
        let at = self.rings(queue) + 16 * u64::from(index);
        let _ = self
            .memory
            .write_obj(RawDescriptor::from(descriptor), GuestAddress(at));
    }

    /// Puts `head` in the available ring, and its index so far ahead.
    fn offer(&self, queue: u8, head: u16, ahead: u16) {
        let ring = self.rings(queue) + AVAILABLE;
        let index: u16 = self.memory.read_obj(GuestAddress(ring + 2)).unwrap_or(0);
        let place = ring + 4 + 2 * u64::from(index % self.size(queue));
        let _ = self.memory.write_obj(head, GuestAddress(place));
        let _ = self
            .memory
            .write_obj(index.wrapping_add(ahead), GuestAddress(ring + 2));
    }

    fn rings(&self, queue: u8) -> u64 {
        u64::from(queue) % self.sizes.len() as u64 * RINGS
    }

    fn size(&self, queue: u8) -> u16 {
        self.sizes[usize::from(queue) % self.sizes.len()]
    }

    /// A place for a buffer; old ones are used again.
    fn allocate(&mut self, length: u32) -> u64 {
        if self.next_buffer + u64::from(length) > MEMORY {
            self.next_buffer = BUFFERS;
        }
        let address = self.next_buffer;
        self.next_buffer += u64::from(length).next_multiple_of(16);
        address
    }

    /// The event loop serves what is ready. Of a driver that is not up it must touch nothing.
    fn turn(&self) {
        let before = match self.get(register::STATUS) & DRIVER_OK {
            0 => Some(self.contents()),
            _ => None,
        };
        self.event_loop.turn().expect("an epoll");
        if let Some(before) = before {
            assert!(
                before == self.contents(),
                "a device without a driver wrote to memory"
            );
        }
    }

    fn contents(&self) -> Vec<u8> {
        let mut bytes = vec![0; MEMORY as usize];
        self.memory
            .read_slice(&mut bytes, GuestAddress(0))
            .expect("memory");
        bytes
    }

    /// Freezes the device and goes on with another, restored.
    fn thaw(self, world: &mut impl World) -> Guest {
        let record = self.transport.save();
        let fresh = Guest::new(world, self.memory.clone());
        fresh
            .transport
            .check(&record)
            .expect("what was saved can be restored");
        let before = fresh.contents();
        fresh
            .transport
            .restore(&record)
            .expect("what was checked is restored");
        assert!(
            before == fresh.contents(),
            "a device that was restored wrote to memory"
        );
        world.attach();
        fresh.transport.release();
        fresh.event_loop.turn().expect("an epoll");
        Guest {
            sizes: self.sizes,
            next_descriptor: self.next_descriptor,
            next_buffer: self.next_buffer,
            ..fresh
        }
    }
}

/// A file of so many bytes, of nothing but memory.
pub fn memory_file(length: u64) -> OwnedFd {
    let file = rustix::fs::memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("a memory file");
    rustix::fs::ftruncate(&file, length).expect("room");
    file
}
