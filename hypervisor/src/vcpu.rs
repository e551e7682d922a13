//! One vCPU: its registers, and running it until an exit.

use std::sync::Arc;

use kvm_bindings::{CpuId, kvm_msr_entry, kvm_regs, kvm_sregs};
use kvm_ioctls::{VcpuExit, VcpuFd};

use crate::{Error, Kicker, Result, Vm, msr};

/// Why a vCPU left the guest. The data of a read must be filled in before the vCPU runs again.
#[derive(Debug)]
pub enum Exit<'a> {
    /// `in`: the port, and the buffer for the result.
    PortRead { port: u16, data: &'a mut [u8] },
    /// `out`; for `rep outs` all elements in order.
    PortWrite { port: u16, data: &'a [u8] },
    /// A load from an address without a memory slot.
    MmioRead { address: u64, data: &'a mut [u8] },
    /// A store to an address without a memory slot, or to a read-only slot.
    MmioWrite { address: u64, data: &'a [u8] },
    /// A signal or a [`Kicker`], or KVM must be entered again.
    Interrupted,
    /// Triple fault.
    Shutdown,
    /// `hlt` that KVM does not handle (without an in-kernel APIC).
    Halted,
    /// KVM cannot continue; [`Vcpu::internal_error`] has the reason.
    InternalError,
    /// The processor refused the vCPU's state, with this reason code.
    FailedEntry { reason: u64 },
    /// Guest memory whose backing is unavailable.
    MemoryFault { address: u64 },
    /// An exit that this machine does not use.
    Other(String),
}

/// One vCPU. Its ioctls are cheapest on the thread that runs it.
#[derive(Debug)]
pub struct Vcpu {
    pub(crate) fd: VcpuFd,
    kicker: Arc<Kicker>,
    pub(crate) index: u8,
    /// The vCPU accesses the machine's memory, so it must not outlive the mappings.
    pub(crate) vm: Arc<Vm>,
    /// The CPUID it was given. KVM_GET_CPUID2 differs: it contains bits that change at run time (OSXSAVE),
    /// and on some KVMs host features that the guest was not given.
    pub(crate) cpuid: CpuId,
    /// KVM completes the last exit when it is entered again.
    pub(crate) unfinished: bool,
    /// Restored without [`Vcpu::start_time`] so far: the TSC deadline to arm then.
    pub(crate) stopped: Option<u64>,
}

impl Vm {
    /// Creates vCPU `index`. Must follow the interrupt controllers.
    pub fn create_vcpu(self: &Arc<Self>, index: u8) -> Result<Vcpu> {
        let fd = self
            .fd
            .create_vcpu(index.into())
            .map_err(Error::ioctl("KVM_CREATE_VCPU"))?;
        Vcpu::new(self.clone(), fd, index)
    }
}

impl Vcpu {
    fn new(vm: Arc<Vm>, fd: VcpuFd, index: u8) -> Result<Vcpu> {
        let kicker = Arc::new(Kicker::new(&fd, vm.run_size())?);
        Ok(Vcpu {
            fd,
            kicker,
            index,
            vm,
            cpuid: CpuId::new(0).map_err(|_| Error::Missing("room for a CPUID"))?,
            unfinished: false,
            stopped: None,
        })
    }

    /// Its number, which is also its APIC id.
    pub fn index(&self) -> u8 {
        self.index
    }

    /// Interrupts it from another thread.
    pub fn kicker(&self) -> Arc<Kicker> {
        self.kicker.clone()
    }

    /// Sets its CPUID. Must be called before it first runs.
    pub fn set_cpuid(&mut self, cpuid: &CpuId) -> Result<()> {
        self.fd
            .set_cpuid2(cpuid)
            .map_err(Error::ioctl("KVM_SET_CPUID2"))?;
        self.cpuid = cpuid.clone();
        Ok(())
    }

    pub fn regs(&self) -> Result<kvm_regs> {
        self.fd.get_regs().map_err(Error::ioctl("KVM_GET_REGS"))
    }

    pub fn set_regs(&self, regs: &kvm_regs) -> Result<()> {
        self.fd.set_regs(regs).map_err(Error::ioctl("KVM_SET_REGS"))
    }

    pub fn sregs(&self) -> Result<kvm_sregs> {
        self.fd.get_sregs().map_err(Error::ioctl("KVM_GET_SREGS"))
    }

    pub fn set_sregs(&self, sregs: &kvm_sregs) -> Result<()> {
        self.fd.set_sregs(sregs).map_err(Error::ioctl("KVM_SET_SREGS"))
    }

    /// Sets MSRs, given as (index, value).
    ///
    /// # Errors
    /// [`Error::Msr`] with the first entry whose MSR is unknown to KVM or whose value it refuses.
    pub fn set_msrs(&self, msrs: &[(u32, u64)]) -> Result<()> {
        let entries: Vec<kvm_msr_entry> = msrs
            .iter()
            .map(|&(index, data)| msr::entry(index, data))
            .collect();
        msr::set(&self.fd, &entries)
    }

    /// Tells the guest that its host paused it, so that its soft-lockup watchdog ignores the gap
    /// (`KVM_KVMCLOCK_CTRL`). Returns whether that succeeded: a guest without kvmclock has no such watchdog
    /// yet.
    pub fn notify_paused(&self) -> bool {
        self.fd.kvmclock_ctrl().is_ok()
    }

    /// Enters the guest and returns with the next exit.
    ///
    /// # Errors
    /// [`Error::TimeStopped`] for a restored vCPU without [`Vcpu::start_time`].
    pub fn run(&mut self) -> Result<Exit<'_>> {
        if self.stopped.is_some() {
            return Err(Error::TimeStopped { vcpu: self.index });
        }
        self.unfinished = true;
        let exit = match self.fd.run() {
            Ok(exit) => exit,
            Err(e) => {
                return match e.errno() {
                    libc::EINTR => {
                        self.kicker.clear();
                        self.unfinished = false;
                        Ok(Exit::Interrupted)
                    }
                    // An application processor just received its INIT or SIPI: KVM must be entered again.
                    libc::EAGAIN => {
                        self.unfinished = false;
                        Ok(Exit::Interrupted)
                    }
                    _ => Err(Error::ioctl("KVM_RUN")(e)),
                };
            }
        };
        Ok(match exit {
            VcpuExit::IoIn(port, data) => Exit::PortRead { port, data },
            VcpuExit::IoOut(port, data) => Exit::PortWrite { port, data },
            VcpuExit::MmioRead(address, data) => Exit::MmioRead { address, data },
            VcpuExit::MmioWrite(address, data) => Exit::MmioWrite { address, data },
            VcpuExit::Intr => {
                self.unfinished = false;
                Exit::Interrupted
            }
            VcpuExit::Shutdown => Exit::Shutdown,
            VcpuExit::Hlt => Exit::Halted,
            VcpuExit::InternalError => Exit::InternalError,
            VcpuExit::FailEntry(reason, _cpu) => Exit::FailedEntry { reason },
            VcpuExit::MemoryFault { gpa, .. } => Exit::MemoryFault { address: gpa },
            other => Exit::Other(format!("{other:?}")),
        })
    }

    /// After [`Exit::InternalError`]: KVM's sub-error (linux/kvm.h, `KVM_INTERNAL_ERROR_*`; 1 is an
    /// instruction it could not emulate) and up to 15 bytes of the instruction, if KVM reports them.
    pub fn internal_error(&mut self) -> (u32, Vec<u8>) {
        let run = self.fd.get_kvm_run();
        // SAFETY: the last exit was KVM_EXIT_INTERNAL_ERROR (or the caller gets meaningless numbers: every bit pattern
        // is valid), so this is the union's live field.
        let internal = unsafe { run.__bindgen_anon_1.internal };
        let words = &internal.data[..(internal.ndata as usize).min(internal.data.len())];
        // Bit 0 of data[0]: instruction bytes follow, preceded by their number (struct emulation_failure).
        let bytes = match words {
            [flags, rest @ ..] if flags & 1 != 0 => {
                let raw: Vec<u8> = rest.iter().flat_map(|word| word.to_le_bytes()).collect();
                let count = raw.first().copied().unwrap_or(0).min(15) as usize;
                raw.get(1..1 + count).unwrap_or_default().to_vec()
            }
            _ => Vec::new(),
        };
        (internal.suberror, bytes)
    }
}
