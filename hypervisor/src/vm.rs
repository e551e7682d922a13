//! One virtual machine: memory slots, interrupt controllers, and the eventfds that KVM signals or waits for.
//!
//! Invariant: the [`Vm`] shares ownership of a memory slot's mapping until the slot is removed or replaced,
//! so the guest can never access host memory that was unmapped and reused.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use kvm_bindings::{
    KVM_CAP_VM_DISABLE_NX_HUGE_PAGES, KVM_MEM_READONLY, kvm_clock_data, kvm_enable_cap, kvm_irqchip,
    kvm_userspace_memory_region,
};
use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use thaw_sys::lock::Lock;
use vm_memory::{Address, GuestMemoryRegion, GuestRegionMmap};
use vmm_sys_util::eventfd::EventFd;

use crate::msr::SavedMsrs;
use crate::state::{ClockState, InterruptPart, InterruptState};
use crate::{Capabilities, Error, Kvm, Result};

const PAGE_SIZE: u64 = 4096;

/// How the guest may access a memory slot. A write to a read-only slot exits as MMIO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    ReadOnly,
    ReadWrite,
}

/// One virtual machine. Shared by its vCPUs and devices; every method may be called from any thread.
#[derive(Debug)]
pub struct Vm {
    // Closed before `slots` is dropped: fields are dropped in order.
    pub(crate) fd: VmFd,
    slots: Mutex<BTreeMap<u32, Arc<GuestRegionMmap<()>>>>,
    saved_msrs: Arc<SavedMsrs>,
    capabilities: Capabilities,
}

impl Kvm {
    /// Creates an empty machine: no memory, no interrupt controller, no vCPU.
    pub fn create_vm(&self) -> Result<Arc<Vm>> {
        Vm::new(self).map(Arc::new)
    }
}

impl Vm {
    fn new(kvm: &Kvm) -> Result<Vm> {
        loop {
            match kvm.fd.create_vm() {
                Ok(fd) => {
                    return Ok(Vm {
                        fd,
                        slots: Mutex::default(),
                        saved_msrs: kvm.saved_msrs.clone(),
                        capabilities: *kvm.capabilities(),
                    });
                }
                // Creating a VM starts kernel work that a pending signal interrupts.
                Err(e) if e.errno() == libc::EINTR => continue,
                Err(e) => return Err(Error::ioctl("KVM_CREATE_VM")(e)),
            }
        }
    }

    /// Shows `region` to the guest at its own guest address and replaces the slot's previous region
    /// (`KVM_SET_USER_MEMORY_REGION`).
    ///
    /// The slot stays tied to the region's host addresses: when they are remapped (`MAP_FIXED`), the guest
    /// sees the new mapping at once, without this slow call.
    ///
    /// # Errors
    /// [`Error::Unaligned`] unless address and size are multiples of 4096; [`Error::Ioctl`] if KVM refuses,
    /// for example because it overlaps another slot.
    pub fn set_memory(&self, slot: u32, region: Arc<GuestRegionMmap<()>>, access: Access) -> Result<()> {
        let (address, size) = (region.start_addr().raw_value(), region.len());
        if !address.is_multiple_of(PAGE_SIZE) || !size.is_multiple_of(PAGE_SIZE) || size == 0 {
            return Err(Error::Unaligned { slot, address, size });
        }
        let description = kvm_userspace_memory_region {
            slot,
            flags: if access == Access::ReadOnly {
                KVM_MEM_READONLY
            } else {
                0
            },
            guest_phys_addr: address,
            memory_size: size,
            userspace_addr: region.as_ptr() as u64,
        };
        let mut slots = self.slots.locked();
        // SAFETY: the host range is the whole of a live mapping, which `slots` keeps alive until the slot is replaced
        // or removed below, or this Vm (and with it, by `Arc`, every vCPU) is gone. Guest accesses to it are those of
        // another processor on shared memory, which vm-memory's volatile accessors allow for.
        unsafe { self.fd.set_user_memory_region(description) }
            .map_err(Error::ioctl("KVM_SET_USER_MEMORY_REGION"))?;
        slots.insert(slot, region);
        Ok(())
    }

    /// Removes a slot's memory from the guest and releases the mapping.
    pub fn remove_memory(&self, slot: u32) -> Result<()> {
        let mut slots = self.slots.locked();
        let Some(region) = slots.get(&slot) else {
            return Ok(());
        };
        let description = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: region.start_addr().raw_value(),
            memory_size: 0,
            userspace_addr: region.as_ptr() as u64,
        };
        // SAFETY: size 0 removes the slot; KVM touches no host memory for it afterwards.
        unsafe { self.fd.set_user_memory_region(description) }
            .map_err(Error::ioctl("KVM_SET_USER_MEMORY_REGION"))?;
        slots.remove(&slot);
        Ok(())
    }

    /// Creates the interrupt controllers (local APICs, IOAPIC). Must follow memory and precede vCPUs.
    pub fn create_irqchip(&self) -> Result<()> {
        self.fd
            .create_irq_chip()
            .map_err(Error::ioctl("KVM_CREATE_IRQCHIP"))
    }

    /// Gives KVM three pages to use for real mode on Intel (`KVM_SET_TSS_ADDR`).
    pub fn set_tss_address(&self, address: u64) -> Result<()> {
        self.fd
            .set_tss_address(address as usize)
            .map_err(Error::ioctl("KVM_SET_TSS_ADDR"))
    }

    /// Gives KVM a page to use for real-mode paging on Intel (`KVM_SET_IDENTITY_MAP_ADDR`). Must precede
    /// vCPUs.
    pub fn set_identity_map_address(&self, address: u64) -> Result<()> {
        self.fd
            .set_identity_map_address(address)
            .map_err(Error::ioctl("KVM_SET_IDENTITY_MAP_ADDR"))
    }

    /// Switches off the iTLB-multihit mitigation, whose kernel thread costs up to 100 ms per machine before
    /// Linux 6.14. Must precede vCPUs. Returns whether that succeeded; it requires CAP_SYS_BOOT in the
    /// initial user namespace.
    pub fn disable_nx_huge_pages(&self) -> bool {
        let capability = kvm_enable_cap {
            cap: KVM_CAP_VM_DISABLE_NX_HUGE_PAGES,
            ..Default::default()
        };
        self.fd.enable_cap(&capability).is_ok()
    }

    /// Makes each signal of `event` an edge on interrupt line `gsi`.
    pub fn register_irqfd(&self, event: &EventFd, gsi: u32) -> Result<()> {
        self.fd
            .register_irqfd(event, gsi)
            .map_err(Error::ioctl("KVM_IRQFD"))
    }

    /// Makes a guest write at MMIO `address` signal `event` instead of exiting: a 32-bit write of exactly
    /// `datamatch`, or any write without it.
    pub fn register_ioevent(&self, event: &EventFd, address: u64, datamatch: Option<u32>) -> Result<()> {
        let at = IoEventAddress::Mmio(address);
        match datamatch {
            Some(value) => self.fd.register_ioevent(event, &at, value),
            None => self.fd.register_ioevent(event, &at, NoDatamatch),
        }
        .map_err(Error::ioctl("KVM_IOEVENTFD"))
    }

    /// Saves the interrupt controllers that vCPUs share. No vCPU may run.
    pub fn save_interrupts(&self) -> Result<InterruptState> {
        let mut chips = [kvm_irqchip::default(); 3];
        for (chip, part) in chips.iter_mut().zip(InterruptPart::ALL) {
            chip.chip_id = part.chip_id();
            self.fd
                .get_irqchip(chip)
                .map_err(Error::ioctl("KVM_GET_IRQCHIP"))?;
        }
        Ok(InterruptState { chips })
    }

    /// Restores the interrupt controllers. Must follow every [`crate::Vcpu::restore`]: the IOAPIC immediately
    /// delivers its pending interrupts to the local APICs, and restoring those would lose them.
    pub fn restore_interrupts(&self, state: &InterruptState) -> Result<()> {
        for chip in &state.chips {
            self.fd
                .set_irqchip(chip)
                .map_err(Error::ioctl("KVM_SET_IRQCHIP"))?;
        }
        Ok(())
    }

    /// The guest's kvmclock now.
    pub fn clock(&self) -> Result<ClockState> {
        let clock = self.fd.get_clock().map_err(Error::ioctl("KVM_GET_CLOCK"))?;
        Ok(ClockState {
            nanoseconds: clock.clock,
        })
    }

    /// Continues the guest's kvmclock from `clock`. Must be called at the thaw, before a vCPU runs.
    pub fn set_clock(&self, clock: &ClockState) -> Result<()> {
        // No flags: KVM_CLOCK_REALTIME would add the time the machine was frozen.
        let clock = kvm_clock_data {
            clock: clock.nanoseconds,
            ..Default::default()
        };
        self.fd.set_clock(&clock).map_err(Error::ioctl("KVM_SET_CLOCK"))
    }

    pub(crate) fn saved_msrs(&self) -> &SavedMsrs {
        &self.saved_msrs
    }

    /// Size of a vCPU's XSAVE area in bytes, as KVM reads and writes it.
    pub(crate) fn xsave_size(&self) -> usize {
        self.capabilities.xsave_size
    }

    pub(crate) fn tsc_control(&self) -> bool {
        self.capabilities.tsc_control
    }

    /// `KVM_GET_VCPU_MMAP_SIZE`, as read at creation.
    pub(crate) fn run_size(&self) -> usize {
        self.fd.run_size()
    }
}
