//! A cold boot: writes kernel, start info and tables into memory, then starts the vCPUs.

use std::fs::File;
use std::os::fd::OwnedFd;

use thaw_protocol::control::ErrorCode;

use super::refusal::{invalid, kernel_error, kvm_error, refused};
use super::{Created, Outcome, Started, descriptors};
use crate::arch::x86_64::{acpi, pvh, registers};
use crate::layout::PVH_START_INFO;
use crate::{kernel, vmgenid};

/// Loads kernel, start info and ACPI tables into memory and sets the boot vCPU's registers to start there. `fds`: the kernel.
pub fn prepare(created: &Created, cmdline: &str, fds: Vec<OwnedFd>) -> Outcome<()> {
    let [file] = descriptors(fds, "the kernel")?;
    let memory = &created.body.memory;
    let Some(boot_vcpu) = created.vcpus.boot_vcpu() else {
        return Err(invalid("the machine has no vCPU".into()));
    };
    let entry = kernel::load(memory, &mut File::from(file)).map_err(kernel_error)?;
    let rsdp = acpi::write_tables(memory, created.body.spec.vcpus).map_err(|e| invalid(e.to_string()))?;
    pvh::write_start_info(memory, cmdline, rsdp).map_err(|e| invalid(e.to_string()))?;
    vmgenid::write(memory).map_err(|e| refused(ErrorCode::System, e.to_string()))?;
    registers::set_entry(&boot_vcpu, entry, PVH_START_INFO).map_err(kvm_error)
}

/// Starts devices and vCPUs.
pub fn start(created: Created) -> Started {
    let Created { body, vcpus } = created;
    body.bus.start_work();
    vcpus.resume();
    Started {
        body,
        vcpus,
        base: None,
    }
}
