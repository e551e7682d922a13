//! Sends a vCPU's port and MMIO accesses to the device at that address.
//!
//! An address without a device reads as all ones and ignores writes, as on an ISA or PCI bus.

use std::os::fd::OwnedFd;

use thaw_protocol::control::{Backend, DeviceId, ExitReason};

use crate::console::Console;
use crate::layout::{MMIO_BASE, MMIO_WINDOW};
use crate::power;
use crate::virtio::mem::SizeError;
use crate::virtio::{AttachError, BusRecords, Inventory, RestoreError, Unsettled};

/// Virtio-mmio windows: the devices of the machine but the console.
const VIRTIO_DEVICES: u64 = thaw_protocol::control::DeviceId::ALL.len() as u64 - 1;

/// Everything a vCPU can reach that is not memory. Shared by all of them.
pub struct Bus {
    pub console: Console,
    pub inventory: Inventory,
}

/// Proof that no device thread touches guest memory, or will before this is dropped. vCPUs are the caller's to stop.
pub struct Quiesced<'b> {
    bus: &'b Bus,
    /// The devices were working: they shall again.
    resume: bool,
}

impl Quiesced<'_> {
    /// What a freeze keeps of every device. Guest memory may change by this (what the guest has sent is taken, what
    /// waits for frames is given back), so it comes before memory and interrupt controllers are saved. The devices go
    /// on as they are once the guard is dropped, their backends and connections untouched.
    pub fn save(&self) -> BusRecords {
        BusRecords {
            console: self.bus.console.save(),
            devices: self.bus.inventory.save(),
        }
    }
}

impl Drop for Quiesced<'_> {
    fn drop(&mut self) {
        if self.resume {
            self.bus.start_work();
        }
    }
}

impl Bus {
    /// Gives a device, the console included, its backend.
    pub fn attach(&self, device: DeviceId, backend: Backend, fds: Vec<OwnedFd>) -> Result<(), AttachError> {
        let attached = match device {
            DeviceId::Console => self.console.attach(backend, fds),
            device => self.inventory.attach(device, backend, fds),
        };
        attached.map_err(|error| match error {
            AttachError::Frozen(what) => AttachError::Frozen(format!("{device:?}: {what}")),
            AttachError::Invalid(what) => AttachError::Invalid(format!("{device:?}: {what}")),
            other => other,
        })
    }

    /// Waits until no device thread touches guest memory, and keeps them from it.
    pub fn quiesce(&self) -> Quiesced<'_> {
        Quiesced {
            bus: self,
            resume: self.inventory.quiesce(),
        }
    }

    /// Whether [`Self::restore`] would accept these records; changes nothing.
    pub fn check(&self, records: &BusRecords) -> Result<(), RestoreError> {
        self.console.check(&records.console)?;
        self.inventory.check(&records.devices)
    }

    /// Puts a machine that never ran into a frozen one's state. All records are checked before anything is changed.
    /// Devices do nothing by it (guest memory is not touched, no interrupt is raised) until [`Self::start_work`]; every
    /// one then needs [`Self::attach`]. Guest memory need not have its contents yet, but must be where it will be.
    pub fn restore(&self, records: &BusRecords) -> Result<(), RestoreError> {
        self.check(records)?;
        self.console.restore(&records.console)?;
        self.inventory.restore(&records.devices)
    }

    /// The devices that forbid a thaw in which those in `empty` are to have no backend, and why: those that were neither
    /// attached since the restore nor are in `empty`, and those in `empty` that have a backend or had one when frozen.
    /// Memory, balloon and random numbers need none. Nothing after a cold boot.
    pub fn unsettled(&self, empty: &[DeviceId]) -> Vec<(DeviceId, Unsettled)> {
        let console = self.console.unsettled(empty.contains(&DeviceId::Console));
        let console = console.map(|why| (DeviceId::Console, why));
        let mut unsettled = self.inventory.unsettled(empty);
        unsettled.extend(console);
        unsettled
    }

    /// Asks the guest, by virtio-mem, to have `total_mib` MiB in all; what boot memory does not cover is offered, in
    /// blocks of 2 MiB. Before [`Self::start_work`] the guest hears of it then.
    ///
    /// # Errors
    /// More than boot memory and the region of virtio-mem.
    pub fn request_memory(&self, total_mib: u32) -> Result<(), SizeError> {
        self.inventory.request_memory(u64::from(total_mib) << 20)
    }

    /// Tells the guest, by the ACPI generic event device, that the generation ID in its memory is new. After it was
    /// written and the interrupt controllers are restored.
    pub fn notify_generation(&self) {
        self.inventory.notify_generation();
    }

    /// Lets the devices work, at the end of a cold boot or a thaw: interrupts the driver has not acknowledged are raised
    /// again, queues with work left are served. Spawns nothing, waits for nothing; may be called again.
    pub fn start_work(&self) {
        self.console.start_work();
        self.inventory.start_work();
    }

    pub fn port_read(&self, port: u16, data: &mut [u8]) {
        match (Console::register(port), port) {
            (Some(register), _) => data.fill_with(|| self.console.read(register)),
            (None, power::SLEEP_STATUS_PORT | power::KEYBOARD_PORT) => data.fill(0),
            _ => data.fill(0xff),
        }
    }

    /// Says why the machine ends, if this write ends it.
    pub fn port_write(&self, port: u16, data: &[u8]) -> Option<ExitReason> {
        if let Some(register) = Console::register(port) {
            data.iter().for_each(|byte| self.console.write(register, *byte));
            return None;
        }
        data.first().and_then(|value| power::write(port, *value))
    }

    pub fn mmio_read(&self, address: u64, data: &mut [u8]) {
        match is_virtio(address) {
            true => self.inventory.mmio_read(address, data),
            false => data.fill(0xff),
        }
    }

    pub fn mmio_write(&self, address: u64, data: &[u8]) {
        if is_virtio(address) {
            self.inventory.mmio_write(address, data);
        }
    }
}

fn is_virtio(address: u64) -> bool {
    (MMIO_BASE..MMIO_BASE + VIRTIO_DEVICES * MMIO_WINDOW).contains(&address)
}

#[cfg(test)]
#[path = "bus_test.rs"]
mod tests;
