//! Where a vCPU's port and MMIO accesses go.
//!
//! What answers nowhere reads as all ones and ignores writes, as an ISA or PCI bus without a device does.

use thaw_protocol::control::ExitReason;

use crate::console::Console;
use crate::layout::{MMIO_BASE, MMIO_WINDOW};
use crate::power;
use crate::virtio::Inventory;

/// Virtio-mmio windows: the devices of the machine but the console.
const VIRTIO_DEVICES: u64 = thaw_protocol::control::DeviceId::ALL.len() as u64 - 1;

/// Everything a vCPU can reach that is not memory. Shared by all of them.
pub struct Bus {
    pub console: Console,
    pub inventory: Inventory,
}

impl Bus {
    pub fn port_read(&self, port: u16, data: &mut [u8]) {
        match (Console::register(port), port) {
            (Some(register), _) => data.fill_with(|| self.console.read(register)),
            (None, power::SLEEP_STATUS_PORT) => data.fill(0),
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
