//! The virtio-mmio transport, version 2 (virtio 1.2 §4.2): one register window per device.
//!
//! Invariants: features change only before `FEATURES_OK`, and queues only between it and `DRIVER_OK`. The device is active exactly while
//! `DRIVER_OK` is set and it has not failed. Once a write of 0 to Status returns, the device does not touch guest memory. Accesses that the
//! specification forbids are ignored, or read as zero. `freeze` saves and restores the transport.

mod freeze;

use std::sync::{Arc, Mutex, MutexGuard};

use thaw_log::LogLimit;
use thaw_protocol::control::DeviceId;
use thaw_sys::lock::Lock;
use virtio_bindings::virtio_config as status;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_queue::{Queue, QueueT};
use vmm_sys_util::eventfd::EventFd;

use super::config::ConfigSpace;
use super::device::{Activation, SharedMemory, VirtioDevice};
use super::interrupt::Interrupt;
use super::queue::DeviceQueue;
use crate::memory::GuestMemory;

/// Register offsets (§4.2.2).
pub mod register {
    pub const MAGIC_VALUE: u64 = 0x000;
    pub const VERSION: u64 = 0x004;
    pub const DEVICE_ID: u64 = 0x008;
    pub const VENDOR_ID: u64 = 0x00c;
    pub const DEVICE_FEATURES: u64 = 0x010;
    pub const DEVICE_FEATURES_SEL: u64 = 0x014;
    pub const DRIVER_FEATURES: u64 = 0x020;
    pub const DRIVER_FEATURES_SEL: u64 = 0x024;
    pub const QUEUE_SEL: u64 = 0x030;
    pub const QUEUE_NUM_MAX: u64 = 0x034;
    pub const QUEUE_NUM: u64 = 0x038;
    pub const QUEUE_READY: u64 = 0x044;
    pub const QUEUE_NOTIFY: u64 = 0x050;
    pub const INTERRUPT_STATUS: u64 = 0x060;
    pub const INTERRUPT_ACK: u64 = 0x064;
    pub const STATUS: u64 = 0x070;
    pub const QUEUE_DESC_LOW: u64 = 0x080;
    pub const QUEUE_DESC_HIGH: u64 = 0x084;
    pub const QUEUE_DRIVER_LOW: u64 = 0x090;
    pub const QUEUE_DRIVER_HIGH: u64 = 0x094;
    pub const QUEUE_DEVICE_LOW: u64 = 0x0a0;
    pub const QUEUE_DEVICE_HIGH: u64 = 0x0a4;
    pub const SHM_SEL: u64 = 0x0ac;
    pub const SHM_LEN_LOW: u64 = 0x0b0;
    pub const SHM_LEN_HIGH: u64 = 0x0b4;
    pub const SHM_BASE_LOW: u64 = 0x0b8;
    pub const SHM_BASE_HIGH: u64 = 0x0bc;
    pub const CONFIG_GENERATION: u64 = 0x0fc;
    pub const CONFIG: u64 = 0x100;
}

/// "virt", little endian.
const MAGIC: u32 = 0x7472_6976;
const VERSION: u32 = 2;
/// "THAW", little endian. Drivers ignore it.
const VENDOR: u32 = 0x5741_4854;

/// Device status bits (§2.1).
pub const ACKNOWLEDGE: u32 = status::VIRTIO_CONFIG_S_ACKNOWLEDGE;
pub const DRIVER: u32 = status::VIRTIO_CONFIG_S_DRIVER;
pub const DRIVER_OK: u32 = status::VIRTIO_CONFIG_S_DRIVER_OK;
pub const FEATURES_OK: u32 = status::VIRTIO_CONFIG_S_FEATURES_OK;
pub const NEEDS_RESET: u32 = status::VIRTIO_CONFIG_S_NEEDS_RESET;
pub const FAILED: u32 = status::VIRTIO_CONFIG_S_FAILED;

/// The features that the transport offers for every device.
const TRANSPORT_FEATURES: u64 =
    1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_INDIRECT_DESC | 1 << VIRTIO_RING_F_EVENT_IDX;

/// A device with its register window.
pub struct MmioDevice {
    id: DeviceId,
    device: Arc<Mutex<dyn VirtioDevice>>,
    device_type: u32,
    features: u64,
    shared_memory: Vec<SharedMemory>,
    config: Arc<ConfigSpace>,
    interrupt: Arc<Interrupt>,
    kicks: Vec<Arc<EventFd>>,
    memory: GuestMemory,
    registers: Mutex<Registers>,
    log: LogLimit,
}

/// The values that the driver has written.
struct Registers {
    status: u32,
    device_features_select: u32,
    driver_features_select: u32,
    driver_features: u64,
    queue_select: u32,
    shared_memory_select: u32,
    queues: Vec<Queue>,
}

impl Registers {
    fn reset(&mut self) {
        self.status = 0;
        self.device_features_select = 0;
        self.driver_features_select = 0;
        self.driver_features = 0;
        self.queue_select = 0;
        self.shared_memory_select = 0;
        self.queues.iter_mut().for_each(QueueT::reset);
    }

    fn queue(&self) -> Option<&Queue> {
        self.queues.get(self.queue_select as usize)
    }

    /// The selected queue, if the driver may set it up now.
    fn queue_to_set_up(&mut self) -> Option<&mut Queue> {
        let setting_up = self.status & FEATURES_OK != 0 && self.status & DRIVER_OK == 0;
        self.queues
            .get_mut(self.queue_select as usize)
            .filter(|_| setting_up)
    }
}

impl MmioDevice {
    /// `kicks` are the eventfds of the device's queues, in order.
    pub fn new(
        id: DeviceId,
        device: Arc<Mutex<dyn VirtioDevice>>,
        interrupt: Arc<Interrupt>,
        kicks: Vec<Arc<EventFd>>,
        memory: GuestMemory,
    ) -> Result<MmioDevice, virtio_queue::Error> {
        let locked = device.locked();
        let spec = locked.spec();
        let queues = spec
            .queue_sizes
            .iter()
            .map(|size| Queue::new(*size))
            .collect::<Result<Vec<_>, _>>()?;
        let (device_type, features) = (spec.device_type, spec.features | TRANSPORT_FEATURES);
        let (shared_memory, config) = (locked.shared_memory().to_vec(), locked.config());
        drop(locked);
        let registers = Mutex::new(Registers {
            status: 0,
            device_features_select: 0,
            driver_features_select: 0,
            driver_features: 0,
            queue_select: 0,
            shared_memory_select: 0,
            queues,
        });
        Ok(MmioDevice {
            id,
            device,
            device_type,
            features,
            shared_memory,
            config,
            interrupt,
            kicks,
            memory,
            registers,
            log: LogLimit::default(),
        })
    }

    /// The driver reads `data.len()` bytes at `offset` of the window.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        if let Some(at) = offset.checked_sub(register::CONFIG) {
            return self.config.read(at as usize, data);
        }
        data.fill(0);
        // Registers are read whole (§4.2.2.2).
        if let Ok(word) = <&mut [u8; 4]>::try_from(data) {
            *word = self.read_register(offset).to_le_bytes();
        }
    }

    /// The driver writes `data` at `offset` of the window.
    pub fn write(&self, offset: u64, data: &[u8]) {
        if let Some(at) = offset.checked_sub(register::CONFIG) {
            return self.config.write(at as usize, data);
        }
        if let Ok(word) = <[u8; 4]>::try_from(data) {
            self.write_register(offset, u32::from_le_bytes(word));
        }
    }

    fn read_register(&self, offset: u64) -> u32 {
        match offset {
            register::MAGIC_VALUE => MAGIC,
            register::VERSION => VERSION,
            register::DEVICE_ID => self.device_type,
            register::VENDOR_ID => VENDOR,
            register::INTERRUPT_STATUS => self.interrupt.reasons(),
            register::CONFIG_GENERATION => self.config.generation(),
            _ => self.read_negotiated(offset, &self.registers()),
        }
    }

    fn read_negotiated(&self, offset: u64, registers: &Registers) -> u32 {
        match offset {
            register::DEVICE_FEATURES => half(self.features, registers.device_features_select),
            register::QUEUE_NUM_MAX => registers.queue().map_or(0, |q| u32::from(q.max_size())),
            register::QUEUE_READY => registers.queue().map_or(0, |q| u32::from(q.ready())),
            register::STATUS => registers.status | if self.interrupt.failed() { NEEDS_RESET } else { 0 },
            register::SHM_LEN_LOW => half(self.shared_memory(registers).1, 0),
            register::SHM_LEN_HIGH => half(self.shared_memory(registers).1, 1),
            register::SHM_BASE_LOW => half(self.shared_memory(registers).0, 0),
            register::SHM_BASE_HIGH => half(self.shared_memory(registers).0, 1),
            _ => 0,
        }
    }

    /// Base and length of the selected region; all ones if there is none (§4.2.2 SHMLenLow).
    fn shared_memory(&self, registers: &Registers) -> (u64, u64) {
        self.shared_memory
            .iter()
            .find(|region| u32::from(region.id) == registers.shared_memory_select)
            .map_or((u64::MAX, u64::MAX), |region| {
                (region.window.start, region.window.size)
            })
    }

    fn write_register(&self, offset: u64, value: u32) {
        match offset {
            register::INTERRUPT_ACK => return self.interrupt.acknowledge(value),
            register::QUEUE_NOTIFY => return self.kick(value),
            _ => {}
        }
        let mut registers = self.registers();
        match offset {
            register::DEVICE_FEATURES_SEL => registers.device_features_select = value,
            register::DRIVER_FEATURES_SEL => registers.driver_features_select = value,
            register::DRIVER_FEATURES => write_driver_features(&mut registers, value),
            register::QUEUE_SEL => registers.queue_select = value,
            register::SHM_SEL => registers.shared_memory_select = value,
            register::STATUS => self.write_status(&mut registers, value),
            _ => {
                if let Some(queue) = registers.queue_to_set_up() {
                    write_queue(queue, offset, value);
                }
            }
        }
    }

    /// A notification of a queue without an ioeventfd, or one that KVM did not match to it.
    fn kick(&self, queue: u32) {
        if let Some(kick) = self.kicks.get(queue as usize) {
            // Fails only if a kick is pending.
            let _ = kick.write(1);
        }
    }

    /// Applies the driver's steps of initialization (§3.1.1), which must come in their order.
    fn write_status(&self, registers: &mut Registers, value: u32) {
        if value == 0 {
            return self.reset(registers);
        }
        let old = registers.status;
        // A driver must not clear a bit (§2.1.1), and cannot set the bit that belongs to the device.
        let value = value & !NEEDS_RESET;
        if value & old != old {
            return;
        }
        let mut new = value & (ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK | FAILED);
        if new & DRIVER != 0 && new & ACKNOWLEDGE == 0 {
            return;
        }
        if new & !old & FEATURES_OK != 0 && !self.accepts(registers, new) {
            new &= !FEATURES_OK;
        }
        if new & DRIVER_OK != 0 && new & FEATURES_OK == 0 {
            new &= !DRIVER_OK;
        }
        registers.status = new;
        if new & !old & DRIVER_OK != 0 {
            self.activate(registers);
        }
    }

    fn accepts(&self, registers: &Registers, status: u32) -> bool {
        status & DRIVER != 0 && self.acceptable(registers.driver_features)
    }

    fn acceptable(&self, features: u64) -> bool {
        features & !self.features == 0 && features & 1 << VIRTIO_F_VERSION_1 != 0
    }

    fn activate(&self, registers: &Registers) {
        let Some(activation) = self.activation(registers) else {
            if let Some(dropped) = self.log.pass() {
                tracing::warn!(device = ?self.id, dropped, "the driver set up a queue outside memory");
            }
            self.interrupt.set_driver_ok(true);
            return self.interrupt.fail();
        };
        self.interrupt.set_driver_ok(true);
        // Earlier kicks found no queue, so the queues are kicked now. After `activate`, so that no kick reaches a device that is not active
        // yet.
        let mut device = self.device.locked();
        if let Err(error) = device.activate(activation) {
            if let Some(dropped) = self.log.pass() {
                tracing::warn!(device = ?self.id, %error, dropped, "activation failed");
            }
            device.reset();
            return self.interrupt.fail();
        }
        drop(device);
        (0..self.kicks.len() as u32).for_each(|queue| self.kick(queue));
    }

    /// The driver's setup, or `None` if a queue is outside memory.
    fn activation(&self, registers: &Registers) -> Option<Activation> {
        Some(Activation {
            memory: self.memory.clone(),
            features: registers.driver_features,
            queues: self.queues(registers)?,
        })
    }

    fn queues(&self, registers: &Registers) -> Option<Vec<DeviceQueue>> {
        let event_idx = registers.driver_features & 1 << VIRTIO_RING_F_EVENT_IDX != 0;
        let queues = registers.queues.iter().zip(&self.kicks).enumerate();
        queues
            .map(|(index, (queue, kick))| {
                if queue.ready() && !queue.is_valid(&self.memory) {
                    return None;
                }
                let mut queue = Queue::try_from(queue.state()).ok()?;
                queue.set_event_idx(event_idx);
                Some(DeviceQueue::new(
                    index,
                    queue,
                    self.memory.clone(),
                    self.interrupt.clone(),
                    kick.clone(),
                ))
            })
            .collect()
    }

    fn reset(&self, registers: &mut Registers) {
        self.device.locked().reset();
        self.interrupt.reset();
        registers.reset();
    }

    fn registers(&self) -> MutexGuard<'_, Registers> {
        // Plain values, valid even if a thread panicked while it held the lock.
        self.registers.locked()
    }
}

fn write_driver_features(registers: &mut Registers, value: u32) {
    let negotiating = registers.status & DRIVER != 0 && registers.status & FEATURES_OK == 0;
    let shift = match registers.driver_features_select {
        0 => 0,
        1 => 32,
        _ => return,
    };
    if negotiating {
        let kept = registers.driver_features & !(0xffff_ffff << shift);
        registers.driver_features = kept | u64::from(value) << shift;
    }
}

fn write_queue(queue: &mut Queue, offset: u64, value: u32) {
    if offset == register::QUEUE_READY {
        return queue.set_ready(value == 1);
    }
    // A ready queue must not be changed (§4.2.2.2).
    if queue.ready() {
        return;
    }
    match offset {
        register::QUEUE_NUM => queue.set_size(u16::try_from(value).unwrap_or(0)),
        register::QUEUE_DESC_LOW => queue.set_desc_table_address(Some(value), None),
        register::QUEUE_DESC_HIGH => queue.set_desc_table_address(None, Some(value)),
        register::QUEUE_DRIVER_LOW => queue.set_avail_ring_address(Some(value), None),
        register::QUEUE_DRIVER_HIGH => queue.set_avail_ring_address(None, Some(value)),
        register::QUEUE_DEVICE_LOW => queue.set_used_ring_address(Some(value), None),
        register::QUEUE_DEVICE_HIGH => queue.set_used_ring_address(None, Some(value)),
        _ => {}
    }
}

fn half(value: u64, select: u32) -> u32 {
    match select {
        0 => value as u32,
        1 => (value >> 32) as u32,
        _ => 0,
    }
}

#[cfg(test)]
#[path = "mmio_test.rs"]
mod tests;
