//! Sends a vCPU's port and MMIO accesses to the device at that address.
//!
//! An address without a device reads as all ones and ignores writes, as on an ISA or PCI bus.

use std::os::fd::OwnedFd;

use thaw_protocol::control::{Backend, DeviceId, ExitReason};

use crate::console::Console;
use crate::layout::{MMIO_BASE, MMIO_WINDOW};
use crate::power;
use crate::virtio::mem::SizeError;
use crate::virtio::{AttachError, BusRecords, Inventory, NotSettled, RestoreError};

/// Number of virtio-mmio windows: one for each device except the console.
const VIRTIO_DEVICES: u64 = thaw_protocol::control::DeviceId::ALL.len() as u64 - 1;

/// Everything a vCPU can access that is not memory. All vCPUs share it.
pub struct Bus {
    pub console: Console,
    pub inventory: Inventory,
}

/// While this exists, no device thread touches guest memory. The caller must stop the vCPUs itself.
pub struct Quiesced<'b> {
    bus: &'b Bus,
    /// Whether the devices worked before and resume when this is dropped.
    resume: bool,
}

impl Quiesced<'_> {
    /// Returns the state that a freeze keeps of every device. This may change guest memory (a device takes what the guest has sent, and
    /// returns buffers that wait for frames), so memory and interrupt controllers must be saved after it. When the guard is dropped, the
    /// devices go on with their backends and connections unchanged.
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
    /// Gives a device its backend. The console counts as a device here.
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

    /// Waits until no device thread touches guest memory, and keeps them from it while the result exists.
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

    /// Restores a frozen machine's state into a machine that never ran. All records are checked before anything is changed. Until
    /// [`Self::start_work`] the devices touch no guest memory and raise no interrupt. Each device then needs [`Self::attach`]. Guest memory
    /// must be at its final addresses, but may still lack its contents.
    pub fn restore(&self, records: &BusRecords) -> Result<(), RestoreError> {
        self.check(records)?;
        self.console.restore(&records.console)?;
        self.inventory.restore(&records.devices)
    }

    /// The devices that keep the machine from being thawed, with the reasons. Devices in `empty` are declared to have no backend. A device
    /// in `empty` is listed if it has a backend or had one when it was frozen. A device not in `empty` is listed if it got no backend since
    /// the restore. Memory, balloon and random numbers need no backend. After a cold boot the list is empty.
    pub fn not_settled(&self, empty: &[DeviceId]) -> Vec<(DeviceId, NotSettled)> {
        let console = self.console.not_settled(empty.contains(&DeviceId::Console));
        let console = console.map(|why| (DeviceId::Console, why));
        let mut not_settled = self.inventory.not_settled(empty);
        not_settled.extend(console);
        not_settled
    }

    /// Asks the guest, through virtio-mem, to have `total_mib` MiB in all. virtio-mem offers what exceeds boot memory, in blocks of 2 MiB.
    /// Before [`Self::start_work`], the guest is notified only by that call.
    ///
    /// # Errors
    /// If the size exceeds boot memory plus the region of virtio-mem.
    pub fn request_memory(&self, total_mib: u32) -> Result<(), SizeError> {
        self.inventory.request_memory(u64::from(total_mib) << 20)
    }

    /// Notifies the guest, through the ACPI generic event device, that the generation ID in its memory has changed. The ID must be written
    /// and the interrupt controllers restored before.
    pub fn notify_generation(&self) {
        self.inventory.notify_generation();
    }

    /// Starts the devices, at the end of a cold boot or a thaw. Interrupts that the driver has not acknowledged are raised again, and
    /// queues with work left are served. Starts no thread, waits for nothing, and may be called again.
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

    /// Handles a vCPU's write to a port. Returns why the machine ends if the write ends it.
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
