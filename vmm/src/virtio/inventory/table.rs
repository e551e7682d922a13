//! The devices of a machine: a table with the parameters of each.
//!
//! A snapshot is restored only into the same devices. So every change of the table needs a new [`layout::VERSION`].

use std::sync::{Arc, Mutex};
use std::time::Duration;

use thaw_hypervisor::{Access, Vm};
use thaw_protocol::control::DeviceId;
use thaw_sys::lock::Lock;

use super::InventoryError;
use super::loops::Loops;
use crate::events::EventSink;
use crate::layout::{self, Window, memslot};
use crate::virtio::balloon::Balloon;
use crate::virtio::blk::Blk;
use crate::virtio::device::VirtioDevice;
use crate::virtio::fs::share::PATIENCE;
use crate::virtio::fs::{Fs, Images};
use crate::virtio::gate::Gate;
use crate::virtio::mem::Mem;
use crate::virtio::net::{self, Net};
use crate::virtio::pmem::Pmem;
use crate::virtio::rng::Rng;
use crate::virtio::vsock::Vsock;
use crate::virtio::window::HostWindow;

/// Devices, by slot.
const DEVICES: [(DeviceId, Spec); 13] = [
    (
        DeviceId::Root,
        Spec::Root {
            window: layout::ROOT_DAX,
            memslot: memslot::ROOT_DAX,
        },
    ),
    (DeviceId::Shared, Spec::Shared { patience: PATIENCE }),
    (DeviceId::Blk0, Spec::Blk { serial: "blk0" }),
    (DeviceId::Blk1, Spec::Blk { serial: "blk1" }),
    (DeviceId::Blk2, Spec::Blk { serial: "blk2" }),
    (DeviceId::Blk3, Spec::Blk { serial: "blk3" }),
    (
        DeviceId::Net,
        Spec::Net {
            mac: net::DEFAULT_MAC,
        },
    ),
    (DeviceId::Vsock, Spec::Vsock),
    (
        DeviceId::Pmem0,
        Spec::Pmem {
            window: layout::PMEM0,
            memslot: memslot::PMEM0,
        },
    ),
    (
        DeviceId::Pmem1,
        Spec::Pmem {
            window: layout::PMEM1,
            memslot: memslot::PMEM1,
        },
    ),
    (DeviceId::Mem, Spec::Mem),
    (DeviceId::Balloon, Spec::Balloon),
    (DeviceId::Rng, Spec::Rng),
];

/// The parameters of a device. Its backend comes later ([`super::Inventory::attach`]).
#[derive(Clone, Copy, Debug)]
enum Spec {
    /// virtio-fs: the images of a sandbox.
    Root {
        /// Guest addresses at which files appear as memory (DAX).
        window: Window,
        /// KVM memory slot of the window.
        memslot: u32,
    },
    /// virtio-fs: directories of the host, served by thaw-share.
    Shared {
        /// How long requests wait for another thaw-share when one dies.
        patience: Duration,
    },
    /// virtio-blk.
    Blk {
        /// The answer to `GET_ID`: at most 20 bytes.
        serial: &'static str,
    },
    /// virtio-net.
    Net {
        /// The address until a backend sets another.
        mac: [u8; 6],
    },
    /// virtio-vsock. Its CID is [`thaw_protocol::handshake::GUEST_CID`].
    Vsock,
    /// virtio-pmem.
    Pmem {
        /// Guest addresses at which the file appears.
        window: Window,
        /// KVM memory slot of the window.
        memslot: u32,
    },
    /// virtio-mem, at [`layout::VIRTIO_MEM`].
    Mem,
    /// virtio-balloon, for pages that the guest reports as free.
    Balloon,
    /// virtio-rng.
    Rng,
}

/// The parts that devices are built with.
pub struct Parts<'a> {
    pub loops: &'a mut Loops,
    pub gate: &'a Arc<Gate>,
    pub windows: Windows,
    pub events: EventSink,
    /// Built before the others, because the inventory calls methods of their types.
    pub root: Arc<Mutex<Fs<Images>>>,
    pub mem: Arc<Mutex<Mem>>,
}

impl Spec {
    /// The device, without a driver and without a backend.
    fn build(self, id: DeviceId, parts: &mut Parts<'_>) -> Arc<Mutex<dyn VirtioDevice>> {
        let registrar = parts.loops.of(id).registrar(id);
        match self {
            Spec::Root { .. } => parts.root.clone(),
            Spec::Shared { patience } => device(Fs::shared(parts.gate.clone(), patience)),
            Spec::Blk { serial } => device(Blk::new(serial, registrar)),
            Spec::Net { mac } => device(Net::new(mac, registrar)),
            Spec::Vsock => device(Vsock::new(registrar, parts.events.clone())),
            Spec::Pmem { .. } => device(Pmem::new(parts.windows.take(id))),
            Spec::Mem => parts.mem.clone(),
            Spec::Balloon => device(Balloon::new(parts.mem.locked().discards())),
            Spec::Rng => device(Rng::default()),
        }
    }
}

fn device(device: impl VirtioDevice + 'static) -> Arc<Mutex<dyn VirtioDevice>> {
    Arc::new(Mutex::new(device))
}

/// Builds the devices of the table, by slot.
pub fn build(mut parts: Parts<'_>) -> Vec<Arc<Mutex<dyn VirtioDevice>>> {
    let devices = DEVICES.into_iter();
    devices.map(|(id, spec)| spec.build(id, &mut parts)).collect()
}

/// The windows of a machine's devices that show files as memory.
pub struct Windows(Vec<(DeviceId, HostWindow)>);

impl Windows {
    /// Reserves the windows and adds them to the guest, read-only. Must be called before the irqchip is made: after that, KVM waits some
    /// milliseconds at each memory slot for readers of its tables.
    pub fn create(vm: &Vm) -> Result<Windows, InventoryError> {
        let mut windows = Vec::new();
        for (device, spec) in DEVICES {
            let (Spec::Root { window, memslot } | Spec::Pmem { window, memslot }) = spec else {
                continue;
            };
            let window =
                HostWindow::reserve(window).map_err(|error| InventoryError::Window { device, error })?;
            vm.set_memory(memslot, window.region().clone(), Access::ReadOnly)
                .map_err(|error| InventoryError::Kvm { device, error })?;
            windows.push((device, window));
        }
        Ok(Windows(windows))
    }

    /// The window of a device that has one.
    pub(super) fn take(&mut self, device: DeviceId) -> HostWindow {
        let at = self.0.iter().position(|(id, _)| *id == device);
        let at = at.expect("each device with a window takes it once");
        self.0.swap_remove(at).1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_has_each_device_at_its_slot() {
        let ids = DEVICES.map(|(id, _)| id);
        assert_eq!(ids, DeviceId::ALL[..ids.len()]);
        for (slot, id) in ids.into_iter().enumerate() {
            assert_eq!(id as usize, slot);
        }
    }
}
