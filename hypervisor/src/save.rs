//! Saves and restores a vCPU, in the orders that KVM requires (Documentation/virt/kvm/api.rst).

use kvm_bindings::kvm_msr_entry;

use crate::state::VcpuState;
use crate::{Error, GuestTime, Result, Vcpu, msr, xsave};

/// Tolerated deviation of a TSC's frequency in parts per million. NTP corrects this much, and it is KVM's own tolerance.
const TSC_TOLERANCE_PPM: u64 = 250;
/// The bits that enable nested virtualisation (AMD's manual volume 2, 3.1.7; Intel's volume 3, 2.5).
const EFER_SVME: u64 = 1 << 12;
const CR4_VMXE: u64 = 1 << 13;
/// Far from any TSC value a guest can have: 48 years at 3 GHz.
const FAR: u64 = 1 << 62;

impl Vcpu {
    /// Saves everything KVM holds of the vCPU. Its last run must have ended with
    /// [`crate::Exit::Interrupted`], or it must not have run, so that no access to a device is incomplete.
    ///
    /// # Errors
    /// [`Error::Unfinished`] after another exit; [`Error::Ioctl`] if a call fails.
    pub fn save(&self) -> Result<VcpuState> {
        if self.unfinished {
            return Err(Error::Unfinished { vcpu: self.index });
        }
        let fd = &self.fd;
        // KVM_GET_MP_STATE processes a pending INIT or SIPI, KVM_GET_VCPU_EVENTS a pending exception's CR2 or
        // DR6. Both must precede reading the registers that these change.
        let mp_state = fd.get_mp_state().map_err(Error::ioctl("KVM_GET_MP_STATE"))?;
        let events = fd
            .get_vcpu_events()
            .map_err(Error::ioctl("KVM_GET_VCPU_EVENTS"))?;
        Ok(VcpuState {
            cpuid: self.cpuid.clone(),
            tsc_khz: self.tsc_khz()?,
            mp_state,
            regs: self.regs()?,
            sregs: self.sregs()?,
            xsave: xsave::get(fd, self.vm.xsave_size())?,
            xcrs: fd.get_xcrs().map_err(Error::ioctl("KVM_GET_XCRS"))?,
            debug_regs: fd.get_debug_regs().map_err(Error::ioctl("KVM_GET_DEBUGREGS"))?,
            lapic: fd.get_lapic().map_err(Error::ioctl("KVM_GET_LAPIC"))?,
            msrs: self.vm.saved_msrs().read(fd)?,
            events,
        })
    }

    /// Restores a saved vCPU into a new one, except its time: [`Vcpu::start_time`] must be called before it
    /// first runs. The machine's memory must be in place, because KVM writes the guest's wall clock to it.
    /// [`crate::Vm::restore_interrupts`] must follow after all vCPUs.
    ///
    /// A local APIC timer in one-shot or periodic mode counts from now on; Linux uses TSC-deadline mode here.
    ///
    /// # Errors
    /// [`Error::Virtualises`] for a forged state; [`Error::Msr`] with the MSR that is not part of a vCPU's
    /// state or that KVM refuses (unless it has its value already); [`Error::TscFrequency`],
    /// [`Error::XsaveSize`], [`Error::Ioctl`].
    pub fn restore(&mut self, state: &VcpuState) -> Result<()> {
        check_virtualisation(state)?;
        // First the values that KVM checks the others against; then segments and EFER before the general registers' RFLAGS, the APIC base
        // before the APIC, the APIC's timer mode before its MSRs; last the values that the others would clear.
        if self.cpuid.as_slice() != state.cpuid.as_slice() {
            self.set_cpuid(&state.cpuid)?;
        }
        self.set_tsc_khz(state.tsc_khz)?;
        self.set_sregs(&state.sregs)?;
        self.set_regs(&state.regs)?;
        let fd = &self.fd;
        xsave::set(fd, &state.xsave, self.vm.xsave_size())?;
        fd.set_xcrs(&state.xcrs).map_err(Error::ioctl("KVM_SET_XCRS"))?;
        fd.set_debug_regs(&state.debug_regs)
            .map_err(Error::ioctl("KVM_SET_DEBUGREGS"))?;
        fd.set_lapic(&state.lapic)
            .map_err(Error::ioctl("KVM_SET_LAPIC"))?;
        let msrs = timeless(&state.msrs, state.msr(msr::TSC).unwrap_or(0));
        self.vm.saved_msrs().set(fd, &msrs)?;
        fd.set_mp_state(state.mp_state)
            .map_err(Error::ioctl("KVM_SET_MP_STATE"))?;
        fd.set_vcpu_events(&state.events)
            .map_err(Error::ioctl("KVM_SET_VCPU_EVENTS"))?;
        self.notify_paused();
        self.stopped = Some(state.msr(msr::TSC_DEADLINE).unwrap_or(0));
        Ok(())
    }

    /// Starts a restored vCPU's time: sets its TSC to that of `time`, and arms a saved TSC deadline. One
    /// cheap call, on any thread, directly before it first runs. Has no effect if its time was started.
    ///
    /// A software KVM may show guests the host's TSC and ignore this; their kvmclock is still correct.
    pub fn start_time(&mut self, time: &GuestTime) -> Result<()> {
        let Some(deadline) = self.stopped.take() else {
            return Ok(());
        };
        let entries = [
            msr::entry(msr::TSC, time.tsc()),
            msr::entry(msr::TSC_DEADLINE, deadline),
        ];
        msr::set(&self.fd, &entries[..1 + usize::from(deadline != 0)])
    }

    /// The frequency of its TSC in kHz.
    pub fn tsc_khz(&self) -> Result<u32> {
        self.fd.get_tsc_khz().map_err(Error::ioctl("KVM_GET_TSC_KHZ"))
    }

    /// Sets the TSC to the frequency the guest booted with, if this host's differs noticeably.
    fn set_tsc_khz(&self, saved: u32) -> Result<()> {
        let host = self.tsc_khz()?;
        if u64::from(saved.abs_diff(host)) * 1_000_000 <= u64::from(host) * TSC_TOLERANCE_PPM {
            return Ok(());
        }
        let different = Error::TscFrequency { saved, host };
        if !self.vm.tsc_control() {
            return Err(different);
        }
        self.fd.set_tsc_khz(saved).map_err(|_| different)
    }
}

/// Refuses a vCPU with nested virtualisation. KVM accepts EFER from the VMM whatever the vCPU's CPUID says.
fn check_virtualisation(state: &VcpuState) -> Result<()> {
    if state.sregs.efer & EFER_SVME != 0 {
        return Err(Error::Virtualises("EFER.SVME"));
    }
    match state.sregs.cr4 & CR4_VMXE {
        0 => Ok(()),
        _ => Err(Error::Virtualises("CR4.VMXE")),
    }
}

/// The MSRs without the timer, and with a TSC far from the real one. KVM treats a TSC within a second of the
/// last one set as that last one; before Linux 6.7 also the zero that it set when the vCPU was created.
/// Without this, the TSC of a machine frozen in its first second would start with the age of the restoring
/// process.
fn timeless(msrs: &[kvm_msr_entry], tsc: u64) -> Vec<kvm_msr_entry> {
    let mut timeless: Vec<_> = msrs
        .iter()
        .copied()
        .filter(|m| m.index != msr::TSC && m.index != msr::TSC_DEADLINE)
        .collect();
    timeless.push(msr::entry(msr::TSC, tsc.wrapping_add(FAR)));
    timeless
}
