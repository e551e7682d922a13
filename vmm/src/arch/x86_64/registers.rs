//! The boot vCPU's registers at a PVH entry (xen/public/arch-x86/hvm/start_info.h): 32-bit protected mode, flat
//! segments, paging and interrupts off, EBX pointing at the start info. The other vCPUs wait for their INIT and SIPI.

use thaw_hypervisor::{Result, Vcpu, kvm_regs, kvm_segment};

const CR0_PE: u64 = 1;
const CR0_ET: u64 = 1 << 4;
/// Bit 1 of RFLAGS is always set.
const RFLAGS_RESERVED: u64 = 1 << 1;

const IA32_MISC_ENABLE: u32 = 0x1a0;
/// Without it Linux on Intel does not use `rep movsb` (enhanced fast strings).
const MISC_ENABLE_FAST_STRING: u64 = 1;
const MTRR_DEF_TYPE: u32 = 0x2ff;
/// MTRRs on, all memory write-back.
const MTRR_ENABLED_WRITE_BACK: u64 = 1 << 11 | 6;

/// Makes `vcpu` enter the guest at `entry` with the start info at `start_info`.
pub fn set_entry(vcpu: &Vcpu, entry: u64, start_info: u64) -> Result<()> {
    let mut sregs = vcpu.sregs()?;
    sregs.cs = flat_segment(0x8, 0xb);
    let data = flat_segment(0x10, 0x3);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    // A busy 32-bit TSS, byte-granular, of minimal size.
    sregs.tr = kvm_segment {
        base: 0,
        limit: 0x67,
        selector: 0x18,
        type_: 0xb,
        present: 1,
        ..Default::default()
    };
    sregs.cr0 = CR0_PE | CR0_ET;
    sregs.cr4 = 0;
    sregs.efer = 0;
    vcpu.set_sregs(&sregs)?;
    vcpu.set_regs(&kvm_regs {
        rip: entry,
        rbx: start_info,
        rflags: RFLAGS_RESERVED,
        ..Default::default()
    })
}

/// Sets the model-specific registers that firmware would set. Must be called for every vCPU.
pub fn set_firmware_msrs(vcpu: &Vcpu) -> Result<()> {
    vcpu.set_msrs(&[
        (IA32_MISC_ENABLE, MISC_ENABLE_FAST_STRING),
        (MTRR_DEF_TYPE, MTRR_ENABLED_WRITE_BACK),
    ])
}

/// A 4 GiB segment from 0, 32-bit, present, ring 0.
fn flat_segment(selector: u16, type_: u8) -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: u32::MAX,
        selector,
        type_,
        present: 1,
        db: 1,
        s: 1,
        g: 1,
        ..Default::default()
    }
}
