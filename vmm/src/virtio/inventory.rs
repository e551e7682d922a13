//! The thirteen virtio devices of every machine, by slot.
//!
//! [`table`] lists them. [`Inventory::new`] builds them without backends, with their irqfds, ioeventfds and threads; [`Windows`] are made
//! before that. All work that takes host-wide locks is done then, none later. Slots, MMIO windows and interrupt lines follow from
//! [`DeviceId`].
//!
//! The threads touch guest memory only while the [`Gate`] is open: after [`Inventory::start_work`] and until [`Inventory::quiesce`]. Before
//! [`Inventory::start_work`], each restored device must be [settled](BackendCheck).

mod loops;
mod table;
mod wiring;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};

use thaw_hypervisor::Vm;
use thaw_protocol::control::{Backend, DeviceId, ImageSpec};
use thaw_protocol::device_limits::DeviceLimits;
use thaw_sys::lock::Lock;
use vm_memory::{GuestMemory as _, GuestMemoryRegion};
use vmm_sys_util::eventfd::EventFd;

pub use self::loops::{DISK_THREADS, Loops};
use self::table::Parts;
pub use self::table::Windows;
use self::wiring::{assemble, eventfd};
use super::backend_check::{BackendCheck, NotSettled};
use super::device::{AttachError, RestoreError, VirtioDevice};
use super::device_thread::DeviceThread;
use super::discards::Discards;
use super::fs::{Fs, Images};
use super::gate::Gate;
use super::mem::{self, BLOCK, Mem, MemorySlots, SizeError};
use super::mmio::MmioDevice;
use super::state::DeviceRecord;
use super::window::WindowError;
use crate::events::EventSink;
use crate::jail;
use crate::layout::{self, MMIO_BASE, MMIO_WINDOW, Window};
use crate::memory::GuestMemory;

/// Why the devices could not be made.
#[derive(Debug, thiserror::Error)]
pub enum InventoryError {
    /// KVM refused a memslot, irqfd or ioeventfd.
    #[error("{device:?}: {error}")]
    Kvm {
        device: DeviceId,
        error: thaw_hypervisor::Error,
    },
    /// KVM refused the interrupt of the generic event device.
    #[error("generic event device: {0}")]
    GenericEvent(thaw_hypervisor::Error),
    /// Address space for a window could not be reserved.
    #[error("{device:?}: {error}")]
    Window { device: DeviceId, error: WindowError },
    /// The region of virtio-mem could not be reserved, or overlaps boot memory.
    #[error("virtio-mem region: {0}")]
    Region(String),
    /// An eventfd, an epoll or a thread could not be created.
    #[error("{what}: {error}")]
    System { what: &'static str, error: io::Error },
    /// A device declares a queue size that is not a power of two.
    #[error("{device:?}: {error}")]
    Queue {
        device: DeviceId,
        error: virtio_queue::Error,
    },
}

/// Every virtio device of a machine.
pub struct Inventory {
    /// By slot.
    transports: Vec<MmioDevice>,
    /// The same devices, by slot.
    devices: Vec<Arc<Mutex<dyn VirtioDevice>>>,
    /// By slot: the check that a restored device has a backend.
    backend_checks: Vec<BackendCheck>,
    /// The devices in the slots [`DeviceId::Root`] and [`DeviceId::Mem`] again, to add images and to request memory.
    root: Arc<Mutex<Fs<Images>>>,
    mem: Arc<Mutex<Mem>>,
    memory: GuestMemory,
    /// The line of the ACPI generic event device.
    generation: EventFd,
    gate: Arc<Gate>,
    _threads: Vec<DeviceThread>,
}

impl Inventory {
    /// Makes the devices and registers their resources with KVM. The memory's slots (`windows` among them), the irqchip and the vCPUs must
    /// exist: an irqfd needs the irqchip.
    pub fn new(
        memory: &GuestMemory,
        mut windows: Windows,
        vm: &Arc<Vm>,
        events: EventSink,
    ) -> Result<Inventory, InventoryError> {
        let mut loops = Loops::new().map_err(|error| InventoryError::System { what: "epoll", error })?;
        let gate = Arc::new(Gate::new());
        let root = Fs::root(windows.take(DeviceId::Root), gate.clone());
        let root = Arc::new(Mutex::new(root));
        let hotplug = mem::reserve(layout::VIRTIO_MEM).map_err(|e| InventoryError::Region(e.to_string()))?;
        let host = hotplug.as_ptr() as usize;
        jail::set_hotplug_region(host..host + layout::VIRTIO_MEM.size as usize);
        let hotplug = Arc::new(hotplug);
        let memory = memory
            .insert_region(hotplug.clone())
            .map_err(|e| InventoryError::Region(e.to_string()))?;
        let mem = Arc::new(Mutex::new(Mem::new(MemorySlots::new(hotplug, vm.clone()))));
        let devices = table::build(Parts {
            loops: &mut loops,
            gate: &gate,
            windows,
            events,
            root: root.clone(),
            mem: mem.clone(),
        });
        let transports = assemble(&devices, &mut loops, &memory, vm)?;
        let generation = eventfd()?;
        vm.register_irqfd(&generation, layout::GED_GSI)
            .map_err(InventoryError::GenericEvent)?;
        let threads = loops.start(&gate).map_err(|error| InventoryError::System {
            what: "device thread",
            error,
        })?;
        Ok(Inventory {
            transports,
            backend_checks: devices.iter().map(|_| BackendCheck::default()).collect(),
            devices,
            root,
            mem,
            memory,
            generation,
            gate,
            _threads: threads,
        })
    }

    /// All guest memory: boot memory, then as the last region that of virtio-mem, 64 GiB of address space in which only [`Self::plugged`]
    /// is memory.
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// The plugged parts of the virtio-mem region as guest addresses, in order, neighbours merged. After [`crate::bus::Bus::restore`], the
    /// parts that were plugged in the snapshot.
    pub fn plugged(&self) -> Vec<Window> {
        self.mem().plugged()
    }

    /// Whether devices may discard, plug and unplug guest memory.
    pub fn discards(&self) -> Arc<Discards> {
        self.mem().discards()
    }

    /// Whether `address` is in an unplugged part of the virtio-mem region, which the guest may not write to.
    pub fn is_unplugged(&self, address: u64) -> bool {
        self.mem().is_unplugged(address)
    }

    /// Gives `device`, which must not be the console, its backend. Takes effect at once, also in a running device.
    pub fn attach(&self, device: DeviceId, backend: Backend, fds: Vec<OwnedFd>) -> Result<(), AttachError> {
        let slot = device as usize;
        let (Some(device), Some(check)) = (self.devices.get(slot), self.backend_checks.get(slot)) else {
            return Err(AttachError::WrongKind("the console is not a virtio device"));
        };
        // A socket for access reports is no backend. A socket for misses is one only for the root device.
        let settles = match backend {
            Backend::Accesses => false,
            Backend::Misses => slot == DeviceId::Root as usize,
            _ => true,
        };
        device.locked().attach(backend, fds)?;
        if settles {
            check.settle();
        }
        Ok(())
    }

    /// Removes the disk of a machine that has been started.
    pub fn detach(&self, device: DeviceId) -> Result<(), AttachError> {
        match self.devices.get(device as usize) {
            Some(device) => device.locked().detach(),
            None => Err(AttachError::WrongKind("the console is not a virtio device")),
        }
    }

    /// Sets the rate limits of `device` from now on. The device may be running.
    pub fn limit(&self, device: DeviceId, limits: DeviceLimits) -> Result<(), AttachError> {
        match self.devices.get(device as usize) {
            Some(device) => device.locked().limit(limits),
            None => Err(AttachError::WrongKind("the console has no rate limit")),
        }
    }

    /// Adds an image in a slot of the root device. `fds` are as [`ImageSpec::blobs`] describes.
    pub fn add_image(&self, slot: u16, image: ImageSpec, fds: Vec<OwnedFd>) -> Result<(), AttachError> {
        self.root().add_image(slot, image, fds)?;
        self.backend_checks[DeviceId::Root as usize].settle();
        Ok(())
    }

    /// Removes an image.
    pub fn remove_image(&self, slot: u16) -> Result<(), AttachError> {
        self.root().remove_image(slot)
    }

    /// The first device whose backend belongs to the host, so that a snapshot cannot contain it.
    pub fn of_the_host(&self) -> Option<DeviceId> {
        let mut devices = DeviceId::ALL.into_iter().zip(&self.devices);
        devices.find_map(|(id, device)| device.locked().is_of_the_host().then_some(id))
    }

    /// Keeps the device threads from guest memory until [`Self::start_work`]. Returns when none touches it any more, and whether they were
    /// working before.
    pub fn quiesce(&self) -> bool {
        self.gate.close()
    }

    /// The state a freeze keeps of the devices, in slot order. Only while [`Self::quiesce`]d and with the vCPUs paused.
    pub fn save(&self) -> Vec<DeviceRecord> {
        self.transports.iter().map(MmioDevice::save).collect()
    }

    /// Whether [`Self::restore`] would accept these records; changes nothing.
    pub fn check(&self, records: &[DeviceRecord]) -> Result<(), RestoreError> {
        let ids = |ids: &mut dyn Iterator<Item = DeviceId>| format!("{:?}", ids.collect::<Vec<_>>());
        let here = DeviceId::ALL.into_iter().take(self.transports.len());
        if !records.iter().map(|record| record.id).eq(here.clone()) {
            return Err(RestoreError::Device {
                frozen: ids(&mut records.iter().map(|record| record.id)),
                here: ids(&mut here.clone()),
            });
        }
        self.transports
            .iter()
            .zip(records)
            .try_for_each(|(transport, record)| transport.check(record))
    }

    /// Restores a frozen machine's device states into a machine that never ran. All records are checked first.
    pub fn restore(&self, records: &[DeviceRecord]) -> Result<(), RestoreError> {
        self.check(records)?;
        self.gate.close();
        for ((transport, record), check) in self.transports.iter().zip(records).zip(&self.backend_checks) {
            transport.restore(record)?;
            match record.id {
                // This process is their backend.
                DeviceId::Mem | DeviceId::Balloon | DeviceId::Rng => check.settle(),
                _ => check.restored(record.backed),
            }
        }
        Ok(())
    }

    /// The devices that keep a machine from being thawed, and why. Those in `empty` are declared to have no backend.
    pub fn not_settled(&self, empty: &[DeviceId]) -> Vec<(DeviceId, NotSettled)> {
        let mut not_settled = Vec::new();
        for ((id, device), check) in DeviceId::ALL
            .into_iter()
            .zip(&self.devices)
            .zip(&self.backend_checks)
        {
            let declared_empty = empty.contains(&id).then(|| device.locked().is_backed());
            not_settled.extend(check.not_settled(declared_empty).map(|why| (id, why)));
        }
        not_settled
    }

    /// Prepares the devices before a restored guest runs. May wait for their backends. The error names the first device that failed, and
    /// why.
    pub fn before_running(&self) -> Result<(), (DeviceId, String)> {
        let mut devices = DeviceId::ALL.into_iter().zip(&self.devices);
        devices.try_for_each(|(id, device)| device.locked().before_running().map_err(|why| (id, why)))
    }

    /// Asks the guest, through virtio-mem, to have `total` bytes of memory in all. virtio-mem offers what exceeds boot memory.
    pub fn request_memory(&self, total: u64) -> Result<(), SizeError> {
        let regions = self.memory.iter();
        let boot: u64 = regions
            .filter(|region| region.start_addr().0 != layout::VIRTIO_MEM.start)
            .map(GuestMemoryRegion::len)
            .sum();
        let wanted = total.saturating_sub(boot).next_multiple_of(BLOCK);
        self.mem().set_requested_size(wanted)
    }

    /// Raises the generic event device's interrupt: the VM generation ID has changed.
    pub fn notify_generation(&self) {
        // Fails only if an interrupt is pending.
        let _ = self.generation.write(1);
    }

    /// Starts the device threads. Pending interrupts of restored devices are raised; queues with work have been kicked already. Waits for
    /// nothing.
    pub fn start_work(&self) {
        self.transports.iter().for_each(MmioDevice::release);
        self.gate.open();
    }

    /// A vCPU read `data.len()` bytes at guest address `address`. Addresses without a device read as zero.
    pub fn mmio_read(&self, address: u64, data: &mut [u8]) {
        match self.transport(address) {
            Some((transport, offset)) => transport.read(offset, data),
            None => data.fill(0),
        }
    }

    /// A vCPU wrote `data` at guest address `address`. Writes to addresses without a device are ignored.
    pub fn mmio_write(&self, address: u64, data: &[u8]) {
        if let Some((transport, offset)) = self.transport(address) {
            transport.write(offset, data);
        }
    }

    fn root(&self) -> MutexGuard<'_, Fs<Images>> {
        self.root.locked()
    }

    fn mem(&self) -> MutexGuard<'_, Mem> {
        self.mem.locked()
    }

    fn transport(&self, address: u64) -> Option<(&MmioDevice, u64)> {
        let offset = address.checked_sub(MMIO_BASE)?;
        let slot = usize::try_from(offset / MMIO_WINDOW).ok()?;
        Some((self.transports.get(slot)?, offset % MMIO_WINDOW))
    }
}

#[cfg(test)]
#[path = "inventory_test.rs"]
mod tests;
