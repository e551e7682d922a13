//! The state of one vCPU, and its parts.

use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, KVM_MP_STATE_INIT_RECEIVED, KVM_MP_STATE_SIPI_RECEIVED,
    KVM_MP_STATE_UNINITIALIZED, kvm_cpuid_entry2, kvm_debugregs, kvm_lapic_state, kvm_mp_state,
    kvm_msr_entry, kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs,
};
use zerocopy::IntoBytes;

use super::{StateError, decode_struct, decode_structs, sorted, to_bytes};
use crate::msr;

/// Minimum size of an XSAVE area, and all that KVM_GET_XSAVE returns.
pub(crate) const XSAVE_MIN: usize = 4096;
/// Largest accepted XSAVE area in bytes. AMX's tiles end at 11,008; this leaves room for later components.
const XSAVE_MAX: usize = 65536;
/// Most accepted MSRs. KVM lists some 150.
const MSRS_MAX: usize = 4096;

/// The parts of a vCPU's state. The numbers are those of the state file and never change. A part's bytes are
/// the named structure of linux/kvm.h and asm/kvm.h (x86-64, little-endian).
#[repr(u16)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum VcpuPart {
    /// 1: CPUID: up to 256 `struct kvm_cpuid_entry2` of 40 bytes (KVM_SET_CPUID2).
    Cpuid = 1,
    /// 2: the frequency of its TSC in kHz: one u32 (KVM_GET_TSC_KHZ).
    TscKhz = 2,
    /// 3: runnable, halted, waiting for INIT or SIPI: `struct kvm_mp_state`, 4 bytes.
    MpState = 3,
    /// 4: general registers, RIP, RFLAGS: `struct kvm_regs`, 144 bytes.
    Regs = 4,
    /// 5: segments, control registers, EFER, APIC base: `struct kvm_sregs`, 312 bytes.
    Sregs = 5,
    /// 6: x87, SSE, AVX and later registers: the standard (not compacted) XSAVE area as CPUID leaf 0xD lays it out
    /// (KVM_GET_XSAVE2); 4096 to 65,536 bytes, a multiple of 4.
    Xsave = 6,
    /// 7: XCR0: `struct kvm_xcrs`, 392 bytes.
    Xcrs = 7,
    /// 8: breakpoints: `struct kvm_debugregs`, 128 bytes.
    DebugRegs = 8,
    /// 9: the local APIC's register page: `struct kvm_lapic_state`, 1024 bytes.
    Lapic = 9,
    /// 10: model-specific registers: up to 4096 `struct kvm_msr_entry` of 16 bytes each (u32 index, u32 zero, u64
    /// value). IA32_TIME_STAMP_COUNTER (0x10) is always among them.
    Msrs = 10,
    /// 11: pending exceptions, interrupts and NMIs: `struct kvm_vcpu_events`, 64 bytes.
    Events = 11,
}

impl VcpuPart {
    /// Every part in the order of their numbers, in which they are written.
    pub const ALL: [VcpuPart; 11] = [
        VcpuPart::Cpuid,
        VcpuPart::TscKhz,
        VcpuPart::MpState,
        VcpuPart::Regs,
        VcpuPart::Sregs,
        VcpuPart::Xsave,
        VcpuPart::Xcrs,
        VcpuPart::DebugRegs,
        VcpuPart::Lapic,
        VcpuPart::Msrs,
        VcpuPart::Events,
    ];
}

impl TryFrom<u16> for VcpuPart {
    type Error = StateError;

    fn try_from(number: u16) -> Result<VcpuPart, StateError> {
        VcpuPart::ALL
            .into_iter()
            .find(|&part| part as u16 == number)
            .ok_or(StateError::Unknown { what: "vCPU", number })
    }
}

/// Everything KVM holds of one vCPU, from [`crate::Vcpu::save`] and for [`crate::Vcpu::restore`].
#[derive(Clone, Debug)]
pub struct VcpuState {
    pub(crate) cpuid: CpuId,
    pub(crate) tsc_khz: u32,
    pub(crate) mp_state: kvm_mp_state,
    pub(crate) regs: kvm_regs,
    pub(crate) sregs: kvm_sregs,
    /// At least [`XSAVE_MIN`] bytes, a multiple of 4.
    pub(crate) xsave: Vec<u8>,
    pub(crate) xcrs: kvm_xcrs,
    pub(crate) debug_regs: kvm_debugregs,
    pub(crate) lapic: kvm_lapic_state,
    pub(crate) msrs: Vec<kvm_msr_entry>,
    pub(crate) events: kvm_vcpu_events,
}

impl VcpuState {
    /// The vCPU's CPUID, for [`crate::cpuid::missing`].
    pub fn cpuid(&self) -> &CpuId {
        &self.cpuid
    }

    /// The frequency of its TSC in kHz.
    pub fn tsc_khz(&self) -> u32 {
        self.tsc_khz
    }

    /// Its general registers.
    pub fn regs(&self) -> &kvm_regs {
        &self.regs
    }

    /// The value of an MSR, if it was saved.
    pub fn msr(&self, index: u32) -> Option<u64> {
        self.msrs.iter().find(|m| m.index == index).map(|m| m.data)
    }

    /// Whether it waits for an INIT or SIPI from another vCPU.
    pub fn awaits_startup(&self) -> bool {
        let waiting = [
            KVM_MP_STATE_UNINITIALIZED,
            KVM_MP_STATE_INIT_RECEIVED,
            KVM_MP_STATE_SIPI_RECEIVED,
        ];
        waiting.contains(&self.mp_state.mp_state)
    }

    /// Number of saved MSRs.
    pub fn msr_count(&self) -> usize {
        self.msrs.len()
    }

    /// Encodes every part of [`VcpuPart::ALL`], in that order.
    pub fn parts(&self) -> Vec<(VcpuPart, Vec<u8>)> {
        VcpuPart::ALL.map(|part| (part, self.part(part))).into()
    }

    fn part(&self, part: VcpuPart) -> Vec<u8> {
        match part {
            VcpuPart::Cpuid => self.cpuid.as_slice().as_bytes().to_vec(),
            VcpuPart::TscKhz => self.tsc_khz.to_le_bytes().to_vec(),
            VcpuPart::MpState => to_bytes(&self.mp_state),
            VcpuPart::Regs => to_bytes(&self.regs),
            VcpuPart::Sregs => to_bytes(&self.sregs),
            VcpuPart::Xsave => self.xsave.clone(),
            VcpuPart::Xcrs => to_bytes(&self.xcrs),
            VcpuPart::DebugRegs => to_bytes(&self.debug_regs),
            VcpuPart::Lapic => to_bytes(&self.lapic),
            VcpuPart::Msrs => self.msrs.as_slice().as_bytes().to_vec(),
            VcpuPart::Events => to_bytes(&self.events),
        }
    }

    /// Decodes the state from its parts, in any order.
    ///
    /// # Errors
    /// [`StateError`] with the part that is missing, duplicate or invalid.
    pub fn from_parts(parts: &[(VcpuPart, &[u8])]) -> Result<VcpuState, StateError> {
        let [
            cpuid,
            tsc_khz,
            mp_state,
            regs,
            sregs,
            xsave,
            xcrs,
            debug_regs,
            lapic,
            msrs,
            events,
        ] = sorted(VcpuPart::ALL, parts)?;
        let state = VcpuState {
            cpuid: decode_cpuid(cpuid)?,
            tsc_khz: decode_struct(VcpuPart::TscKhz, tsc_khz)?,
            mp_state: decode_struct(VcpuPart::MpState, mp_state)?,
            regs: decode_struct(VcpuPart::Regs, regs)?,
            sregs: decode_struct(VcpuPart::Sregs, sregs)?,
            xsave: xsave_from(xsave)?,
            xcrs: decode_struct(VcpuPart::Xcrs, xcrs)?,
            debug_regs: decode_struct(VcpuPart::DebugRegs, debug_regs)?,
            lapic: decode_struct(VcpuPart::Lapic, lapic)?,
            msrs: decode_structs(VcpuPart::Msrs, msrs, MSRS_MAX)?,
            events: decode_struct(VcpuPart::Events, events)?,
        };
        if state.msr(msr::TSC).is_none() {
            return Err(content(VcpuPart::Msrs, "the TSC is not among them"));
        }
        if state.tsc_khz == 0 {
            return Err(content(VcpuPart::TscKhz, "a TSC that stands still"));
        }
        Ok(state)
    }
}

/// Decodes [`VcpuPart::Cpuid`] alone, for [`crate::cpuid::missing`].
///
/// # Errors
/// [`StateError::Length`]: these are not up to 256 entries.
pub fn decode_cpuid(bytes: &[u8]) -> Result<CpuId, StateError> {
    let entries: Vec<kvm_cpuid_entry2> = decode_structs(VcpuPart::Cpuid, bytes, KVM_MAX_CPUID_ENTRIES)?;
    CpuId::from_entries(&entries).map_err(|_| content(VcpuPart::Cpuid, "too many entries"))
}

fn xsave_from(bytes: &[u8]) -> Result<Vec<u8>, StateError> {
    if !(XSAVE_MIN..=XSAVE_MAX).contains(&bytes.len()) || !bytes.len().is_multiple_of(4) {
        return Err(StateError::Length {
            part: format!("{:?}", VcpuPart::Xsave),
            actual: bytes.len(),
            expected: format!("a multiple of 4 from {XSAVE_MIN} to {XSAVE_MAX}"),
        });
    }
    Ok(bytes.to_vec())
}

fn content(part: VcpuPart, what: &'static str) -> StateError {
    StateError::Content {
        part: format!("{part:?}"),
        what,
    }
}
