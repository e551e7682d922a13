//! The thirteen virtio devices of every machine, by slot.
//!
//! [`Inventory::new`] makes them all with empty backends, and their memslots, irqfds and ioeventfds: what takes
//! host-wide locks is done here, none of it later. Slots, MMIO windows and interrupt lines follow from [`DeviceId`].

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use thaw_hypervisor::{Access, Vm};
use thaw_protocol::control::{Backend, DeviceId, ImageSpec};
use vm_memory::{GuestAddress, GuestRegionMmap, MmapRegion};
use vmm_sys_util::eventfd::EventFd;

use super::balloon::Balloon;
use super::blk::Blk;
use super::device::{AttachError, VirtioDevice};
use super::event_loop::{EventLoop, Running};
use super::fs::Fs;
use super::interrupt::Interrupt;
use super::mem::{Mem, MemorySlots};
use super::mmio::{MmioDevice, register};
use super::net::Net;
use super::pmem::Pmem;
use super::rng::Rng;
use super::vsock::Vsock;
use super::window::{HostWindow, WindowError};
use crate::events::EventSink;
use crate::layout::{self, MMIO_BASE, MMIO_WINDOW, Window, memslot};
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
    /// Address space for a window could not be reserved.
    #[error("{device:?}: {error}")]
    Window { device: DeviceId, error: WindowError },
    /// The region of virtio-mem could not be reserved, or overlaps boot memory.
    #[error("virtio-mem region: {0}")]
    Region(String),
    /// An eventfd, epoll or thread could not be had.
    #[error("{what}: {error}")]
    System { what: &'static str, error: io::Error },
    /// A device asks for a queue size that is not a power of two.
    #[error("{device:?}: {error}")]
    Queue {
        device: DeviceId,
        error: virtio_queue::Error,
    },
    /// [`Inventory::start`] was called before.
    #[error("the devices were started already")]
    Started,
}

/// Every virtio device of a machine.
pub struct Inventory {
    /// By slot.
    transports: Vec<MmioDevice>,
    /// The same devices, by slot.
    devices: Vec<Arc<Mutex<dyn VirtioDevice>>>,
    /// Slot [`DeviceId::Root`] again: the one device that takes images.
    root: Arc<Mutex<Fs>>,
    memory: GuestMemory,
    event_loop: Mutex<Loop>,
}

/// The event loop's life.
enum Loop {
    Waiting(EventLoop),
    Running { _thread: Running },
    Failed,
}

impl Inventory {
    /// Makes the devices and registers what KVM must know of them. Boot memory's slots, the irqchip and the vCPUs exist
    /// by then: an irqfd needs the irqchip.
    pub fn new(memory: &GuestMemory, vm: &Arc<Vm>, events: EventSink) -> Result<Inventory, InventoryError> {
        let event_loop = EventLoop::new().map_err(|error| InventoryError::System { what: "epoll", error })?;
        let root = Arc::new(Mutex::new(Fs::root(dax_window(
            vm,
            DeviceId::Root,
            layout::ROOT_DAX,
            memslot::ROOT_DAX,
        )?)));
        let hotplug = Arc::new(hotplug_region(layout::VIRTIO_MEM)?);
        let memory = memory
            .insert_region(hotplug.clone())
            .map_err(|e| InventoryError::Region(e.to_string()))?;
        let pmem = |device, window, slot| Ok(Pmem::new(dax_window(vm, device, window, slot)?));

        let devices: Vec<Arc<Mutex<dyn VirtioDevice>>> = vec![
            root.clone(),
            Arc::new(Mutex::new(Fs::shared())),
            Arc::new(Mutex::new(Blk::new(DeviceId::Blk0))),
            Arc::new(Mutex::new(Blk::new(DeviceId::Blk1))),
            Arc::new(Mutex::new(Blk::new(DeviceId::Blk2))),
            Arc::new(Mutex::new(Blk::new(DeviceId::Blk3))),
            Arc::new(Mutex::new(Net::new(event_loop.registrar(DeviceId::Net)))),
            Arc::new(Mutex::new(Vsock::new(
                event_loop.registrar(DeviceId::Vsock),
                events,
            ))),
            Arc::new(Mutex::new(pmem(DeviceId::Pmem0, layout::PMEM0, memslot::PMEM0)?)),
            Arc::new(Mutex::new(pmem(DeviceId::Pmem1, layout::PMEM1, memslot::PMEM1)?)),
            Arc::new(Mutex::new(Mem::new(MemorySlots::new(hotplug, vm.clone())))),
            Arc::new(Mutex::new(Balloon::new())),
            Arc::new(Mutex::new(Rng::new())),
        ];
        Inventory::assemble(devices, root, event_loop, &memory, vm)
    }

    /// Puts each device behind its window, and connects window and interrupt to KVM.
    fn assemble(
        devices: Vec<Arc<Mutex<dyn VirtioDevice>>>,
        root: Arc<Mutex<Fs>>,
        mut event_loop: EventLoop,
        memory: &GuestMemory,
        vm: &Vm,
    ) -> Result<Inventory, InventoryError> {
        let mut transports = Vec::with_capacity(devices.len());
        for (id, device) in DeviceId::ALL.into_iter().zip(&devices) {
            let (queues, own_threads) = {
                let device = lock(device);
                (device.queue_sizes().len(), device.has_own_threads())
            };
            let interrupt = Arc::new(Interrupt::new(eventfd()?));
            vm.register_irqfd(interrupt.line(), layout::gsi(id))
                .map_err(|error| InventoryError::Kvm { device: id, error })?;
            let kicks = kicks(vm, id, queues)?;
            if !own_threads {
                event_loop
                    .serve(id, device.clone(), interrupt.clone(), kicks.clone())
                    .map_err(|error| InventoryError::System {
                        what: "epoll_ctl",
                        error,
                    })?;
            }
            let transport = MmioDevice::new(id, device.clone(), interrupt, kicks, memory.clone())
                .map_err(|error| InventoryError::Queue { device: id, error })?;
            transports.push(transport);
        }
        Ok(Inventory {
            transports,
            devices,
            root,
            memory: memory.clone(),
            event_loop: Mutex::new(Loop::Waiting(event_loop)),
        })
    }

    /// All guest memory: boot memory, then the region of virtio-mem as the last, 64 GiB of address space of which only
    /// [`Self::plugged`] has contents.
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// What of the virtio-mem region is plugged, in order, neighbours merged: guest addresses. For a freeze, and, after
    /// [`crate::bus::Bus::restore`], what was plugged in the snapshot.
    pub fn plugged(&self) -> Vec<Window> {
        unimplemented!()
    }

    /// Gives `device` its backend. Not for the console. The device may be running: it takes effect at once.
    pub fn attach(&self, device: DeviceId, backend: Backend, fds: Vec<OwnedFd>) -> Result<(), AttachError> {
        match self.devices.get(device as usize) {
            Some(device) => lock(device).attach(backend, fds),
            None => Err(AttachError::WrongKind("the console is not a virtio device")),
        }
    }

    /// Shows an image in a slot of the root device; `fds` as [`ImageSpec::blobs`] says.
    pub fn add_image(&self, slot: u16, image: ImageSpec, fds: Vec<OwnedFd>) -> Result<(), AttachError> {
        self.root
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .add_image(slot, image, fds)
    }

    /// Takes an image away.
    pub fn remove_image(&self, slot: u16) -> Result<(), AttachError> {
        self.root
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove_image(slot)
    }

    /// A vCPU read `data.len()` bytes at guest address `address`. Addresses of no device read as zero.
    pub fn mmio_read(&self, address: u64, data: &mut [u8]) {
        match self.transport(address) {
            Some((transport, offset)) => transport.read(offset, data),
            None => data.fill(0),
        }
    }

    /// A vCPU wrote `data` at guest address `address`. Addresses of no device ignore it.
    pub fn mmio_write(&self, address: u64, data: &[u8]) {
        if let Some((transport, offset)) = self.transport(address) {
            transport.write(offset, data);
        }
    }

    /// Starts the event loop's thread. Once, before the first vCPU runs.
    pub fn start(&self) -> Result<(), InventoryError> {
        let mut event_loop = self.event_loop.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut *event_loop, Loop::Failed) {
            Loop::Waiting(waiting) => {
                let thread = waiting.start().map_err(|error| InventoryError::System {
                    what: "device thread",
                    error,
                })?;
                *event_loop = Loop::Running { _thread: thread };
                Ok(())
            }
            other => {
                *event_loop = other;
                Err(InventoryError::Started)
            }
        }
    }

    fn transport(&self, address: u64) -> Option<(&MmioDevice, u64)> {
        let offset = address.checked_sub(MMIO_BASE)?;
        let slot = usize::try_from(offset / MMIO_WINDOW).ok()?;
        Some((self.transports.get(slot)?, offset % MMIO_WINDOW))
    }
}

/// A window's address space, shown to the guest read-only.
fn dax_window(vm: &Vm, device: DeviceId, window: Window, slot: u32) -> Result<HostWindow, InventoryError> {
    let window = HostWindow::reserve(window).map_err(|error| InventoryError::Window { device, error })?;
    vm.set_memory(slot, window.region().clone(), Access::ReadOnly)
        .map_err(|error| InventoryError::Kvm { device, error })?;
    Ok(window)
}

/// Address space for all that virtio-mem may plug. Costs nothing until touched, so devices may know it from the start.
fn hotplug_region(window: Window) -> Result<GuestRegionMmap<()>, InventoryError> {
    let mapping = MmapRegion::build(
        None,
        window.size as usize,
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
    )
    .map_err(|e| InventoryError::Region(e.to_string()))?;
    GuestRegionMmap::new(mapping, GuestAddress(window.start))
        .ok_or_else(|| InventoryError::Region("past the end of addresses".into()))
}

/// The eventfds of a device's queues: KVM signals one when the driver writes its queue's number to QueueNotify.
fn kicks(vm: &Vm, device: DeviceId, queues: usize) -> Result<Vec<Arc<EventFd>>, InventoryError> {
    let notify = MMIO_BASE + device as u64 * MMIO_WINDOW + register::QUEUE_NOTIFY;
    (0..queues as u32)
        .map(|queue| {
            let kick = eventfd()?;
            vm.register_ioevent(&kick, notify, Some(queue))
                .map_err(|error| InventoryError::Kvm { device, error })?;
            Ok(Arc::new(kick))
        })
        .collect()
}

fn eventfd() -> Result<EventFd, InventoryError> {
    EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC).map_err(|error| InventoryError::System {
        what: "eventfd",
        error,
    })
}

fn lock(device: &Mutex<dyn VirtioDevice>) -> MutexGuard<'_, dyn VirtioDevice + 'static> {
    device.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[path = "inventory_test.rs"]
mod tests;
