//! Connects devices to the guest and to KVM: a register window, an interrupt and its irqfd, and an eventfd for each queue, which is an
//! ioeventfd if the guest rings it often.

use std::sync::{Arc, Mutex};

use thaw_hypervisor::Vm;
use thaw_protocol::control::DeviceId;
use thaw_sys::lock::Lock;
use vmm_sys_util::eventfd::EventFd;

use super::InventoryError;
use super::loops::Loops;
use crate::layout::{self, MMIO_BASE, MMIO_WINDOW};
use crate::memory::GuestMemory;
use crate::virtio::device::VirtioDevice;
use crate::virtio::interrupt::Interrupt;
use crate::virtio::mmio::{MmioDevice, register};

/// Gives each device its register window, and connects window and interrupt to KVM.
pub fn assemble(
    devices: &[Arc<Mutex<dyn VirtioDevice>>],
    loops: &mut Loops,
    memory: &GuestMemory,
    vm: &Vm,
) -> Result<Vec<MmioDevice>, InventoryError> {
    let mut transports = Vec::with_capacity(devices.len());
    for (id, device) in DeviceId::ALL.into_iter().zip(devices) {
        let (queues, own_threads) = {
            let device = device.locked();
            (device.spec().queue_sizes.len(), device.has_own_threads())
        };
        let interrupt = Arc::new(Interrupt::new(eventfd()?));
        vm.register_irqfd(interrupt.line(), layout::gsi(id))
            .map_err(|error| InventoryError::Kvm { device: id, error })?;
        let kicks = kicks(vm, id, queues)?;
        if !own_threads {
            loops
                .of(id)
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
    Ok(transports)
}

/// Whether KVM itself signals the eventfds of a device's queues, so that a vCPU need not leave the guest for it. KVM copies its table of
/// addresses for each, and waits for readers of the old one, which can take milliseconds. So devices that a guest rings rarely go without:
/// [`MmioDevice`] signals their eventfds.
fn is_rung_often(device: DeviceId) -> bool {
    !matches!(
        device,
        DeviceId::Pmem0 | DeviceId::Pmem1 | DeviceId::Mem | DeviceId::Balloon | DeviceId::Rng
    )
}

/// The eventfds of a device's queues: one is signalled when the driver writes its queue's number to QueueNotify.
fn kicks(vm: &Vm, device: DeviceId, queues: usize) -> Result<Vec<Arc<EventFd>>, InventoryError> {
    let notify = MMIO_BASE + device as u64 * MMIO_WINDOW + register::QUEUE_NOTIFY;
    (0..queues as u32)
        .map(|queue| {
            let kick = eventfd()?;
            if is_rung_often(device) {
                vm.register_ioevent(&kick, notify, Some(queue))
                    .map_err(|error| InventoryError::Kvm { device, error })?;
            }
            Ok(Arc::new(kick))
        })
        .collect()
}

pub fn eventfd() -> Result<EventFd, InventoryError> {
    EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC).map_err(|error| InventoryError::System {
        what: "eventfd",
        error,
    })
}
