//! The thirteen virtio devices of every machine, by slot.
//!
//! [`Inventory::new`] makes them all with empty backends, and their memslots, irqfds and ioeventfds: what takes
//! host-wide locks is done here, none of it later. Slots, MMIO windows and interrupt lines follow from [`DeviceId`].
//!
//! The virtio-fs device is `super::fs::Fs`, a [`super::VirtioDevice`] with its own threads, and also
//! `Fs::root(dax: HostWindow) -> Fs`, `Fs::shared() -> Fs`,
//! `Fs::add_image(&mut self, slot: u16, image: ImageSpec, fds: Vec<OwnedFd>) -> Result<(), AttachError>` and
//! `Fs::remove_image(&mut self, slot: u16) -> Result<(), AttachError>`.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use thaw_hypervisor::Vm;
use thaw_protocol::control::{Backend, DeviceId, ImageSpec};

use super::device::AttachError;
use crate::events::EventSink;
use crate::memory::GuestMemory;

/// Every virtio device of a machine.
pub struct Inventory {}

impl Inventory {
    /// Makes the devices and registers what KVM must know of them. Call it after memory slots of boot memory, irqchip
    /// and vCPUs exist (FIELD: that order is the cheap one).
    pub fn new(memory: &GuestMemory, vm: &Arc<Vm>, events: EventSink) -> Result<Inventory, InventoryError>;

    /// Gives `device` its backend. Not for the console.
    pub fn attach(&self, device: DeviceId, backend: Backend, fds: Vec<OwnedFd>) -> Result<(), AttachError>;

    /// Shows an image in a slot of the root device; `fds` as [`ImageSpec::blobs`] says.
    pub fn add_image(&self, slot: u16, image: ImageSpec, fds: Vec<OwnedFd>) -> Result<(), AttachError>;

    /// Takes an image away.
    pub fn remove_image(&self, slot: u16) -> Result<(), AttachError>;

    /// A vCPU read `data.len()` bytes at guest address `address`. Addresses of no device read as zero.
    pub fn mmio_read(&self, address: u64, data: &mut [u8]);

    /// A vCPU wrote `data` at guest address `address`. Addresses of no device ignore it.
    pub fn mmio_write(&self, address: u64, data: &[u8]);

    /// Starts the event loop's thread. Once, before the first vCPU runs.
    pub fn start(&self) -> Result<(), InventoryError>;
}
