//! The floor: what a program pays that does the necessary system calls and nothing else, in one thread.
//!
//! Invariant: each sample is of a machine of its own, so that none finds pages another has mapped. The guest writes one
//! byte to a port as its first instruction. Its template has data in every page above 2 MiB, like that of the bare guest.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, Msrs, kvm_debugregs, kvm_irqchip, kvm_lapic_state, kvm_mp_state,
    kvm_msr_entry, kvm_regs, kvm_sregs, kvm_userspace_memory_region, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};

const MIB: usize = 1 << 20;
const PAGE: usize = 4096;
/// Where the guest's code is.
const CODE: u64 = 0x10_0000;
/// The port it writes to.
const PORT: u16 = 0x3f8;

/// A frozen machine: memory in a file, and its vCPU's state.
pub struct Frozen {
    kvm: Kvm,
    cpuid: CpuId,
    memory: File,
    size: usize,
    state: VcpuState,
}

/// All that KVM gives and takes of a vCPU, and the interrupt controllers.
struct VcpuState {
    regs: kvm_regs,
    sregs: kvm_sregs,
    xsave: Box<kvm_xsave>,
    xcrs: kvm_xcrs,
    msrs: Msrs,
    lapic: kvm_lapic_state,
    events: kvm_vcpu_events,
    debug: kvm_debugregs,
    mp: kvm_mp_state,
    chips: [kvm_irqchip; 3],
}

/// How much of a vCPU is set.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    /// Registers and segments: all this guest needs.
    Registers,
    /// What any guest needs.
    Whole,
}

/// A sealed file of `memory_mib` whose pages above 2 MiB all hold data, and which has the guest's code.
pub fn template_memory(memory_mib: u32) -> io::Result<File> {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
    let file = File::from(memfd_create(
        "floor",
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
    )?);
    let size = memory_mib as usize * MIB;
    file.set_len(size as u64)?;
    // out dx, al; 1: hlt; jmp 1b
    file.write_all_at(&[0xee, 0xf4, 0xeb, 0xfd], CODE)?;
    let mut chunk = vec![0u8; 2 * MIB];
    for page in chunk.chunks_mut(PAGE) {
        page[0] = 1;
    }
    for at in (2 * MIB..size).step_by(chunk.len()) {
        file.write_all_at(&chunk, at as u64)?;
    }
    fcntl_add_seals(
        &file,
        SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL,
    )?;
    Ok(file)
}

impl Frozen {
    /// A machine of `memory`, frozen before its first instruction.
    pub fn new(memory: File) -> io::Result<Frozen> {
        let kvm = Kvm::new().map_err(ioctl("opening /dev/kvm"))?;
        let cpuid = kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(ioctl("KVM_GET_SUPPORTED_CPUID"))?;
        let size = memory.metadata()?.len() as usize;
        let shell = Shell::new(&kvm, &cpuid, size)?;
        let state = VcpuState::save(&kvm, &shell)?;
        Ok(Frozen {
            kvm,
            cpuid,
            memory,
            size,
            state,
        })
    }

    /// A machine with reserved memory and a vCPU, of which nothing is set.
    pub fn shell(&self) -> io::Result<Shell> {
        Shell::new(&self.kvm, &self.cpuid, self.size)
    }

    /// Maps the template into `shell` and sets its vCPU.
    pub fn restore(&self, shell: &Shell, depth: Depth) -> io::Result<()> {
        shell.memory.map(&self.memory)?;
        self.state.set(shell, depth)
    }

    /// Forks a process that makes a machine, runs it to its first port write, and ends; waits for its end. The caller has one thread.
    pub fn cycle_in_child(&self) -> io::Result<()> {
        let run = || {
            self.shell().and_then(|mut shell| {
                self.restore(&shell, Depth::Whole)?;
                shell.run()
            })
        };
        // SAFETY: there is no other thread, so the child finds no lock that another has taken.
        let child = match unsafe { libc::fork() } {
            -1 => return Err(io::Error::last_os_error()),
            0 => {
                let code = i32::from(run().is_err());
                // SAFETY: _exit ends this process; nothing of it is used any more.
                unsafe { libc::_exit(code) }
            }
            child => rustix::process::Pid::from_raw(child),
        };
        let status = rustix::process::waitpid(child, rustix::process::WaitOptions::empty())?;
        match status.and_then(|(_, status)| status.exit_status()) {
            Some(0) => Ok(()),
            _ => Err(io::Error::other("a forked machine did not run")),
        }
    }
}

/// A machine.
pub struct Shell {
    vcpu: VcpuFd,
    vm: VmFd,
    // Unmapped last: the machine reaches it.
    memory: Reserved,
}

impl Shell {
    fn new(kvm: &Kvm, cpuid: &CpuId, size: usize) -> io::Result<Shell> {
        let vm = kvm.create_vm().map_err(ioctl("KVM_CREATE_VM"))?;
        let memory = Reserved::new(size)?;
        let region = kvm_userspace_memory_region {
            slot: 0,
            flags: 0,
            guest_phys_addr: 0,
            memory_size: size as u64,
            userspace_addr: memory.address as u64,
        };
        // SAFETY: the range is a mapping of our own, which outlives the machine: `Shell` drops it last.
        unsafe { vm.set_user_memory_region(region) }.map_err(ioctl("KVM_SET_USER_MEMORY_REGION"))?;
        vm.create_irq_chip().map_err(ioctl("KVM_CREATE_IRQCHIP"))?;
        let vcpu = vm.create_vcpu(0).map_err(ioctl("KVM_CREATE_VCPU"))?;
        vcpu.set_cpuid2(cpuid).map_err(ioctl("KVM_SET_CPUID2"))?;
        Ok(Shell { vcpu, vm, memory })
    }

    /// Runs until the guest's first port write.
    pub fn run(&mut self) -> io::Result<()> {
        match self.vcpu.run().map_err(ioctl("KVM_RUN"))? {
            VcpuExit::IoOut(PORT, _) => Ok(()),
            other => Err(io::Error::other(format!("the guest exits with {other:?}"))),
        }
    }
}

impl VcpuState {
    /// The state of a fresh vCPU, in flat 32-bit protected mode before [`CODE`].
    fn save(kvm: &Kvm, shell: &Shell) -> io::Result<VcpuState> {
        let vcpu = &shell.vcpu;
        let mut sregs = vcpu.get_sregs().map_err(ioctl("KVM_GET_SREGS"))?;
        sregs.cr0 |= 1;
        for segment in [&mut sregs.ds, &mut sregs.es, &mut sregs.ss] {
            *segment = flat(segment.selector, 3);
        }
        sregs.cs = flat(8, 11);
        let regs = kvm_regs {
            rip: CODE,
            rdx: PORT.into(),
            rflags: 2,
            ..Default::default()
        };
        let chip = |id: u32| {
            let mut chip = kvm_irqchip {
                chip_id: id,
                ..Default::default()
            };
            shell
                .vm
                .get_irqchip(&mut chip)
                .map_err(ioctl("KVM_GET_IRQCHIP"))?;
            Ok::<_, io::Error>(chip)
        };
        Ok(VcpuState {
            regs,
            sregs,
            xsave: Box::new(vcpu.get_xsave().map_err(ioctl("KVM_GET_XSAVE"))?),
            xcrs: vcpu.get_xcrs().map_err(ioctl("KVM_GET_XCRS"))?,
            msrs: settable_msrs(kvm, vcpu)?,
            lapic: vcpu.get_lapic().map_err(ioctl("KVM_GET_LAPIC"))?,
            events: vcpu.get_vcpu_events().map_err(ioctl("KVM_GET_VCPU_EVENTS"))?,
            debug: vcpu.get_debug_regs().map_err(ioctl("KVM_GET_DEBUGREGS"))?,
            mp: vcpu.get_mp_state().map_err(ioctl("KVM_GET_MP_STATE"))?,
            chips: [chip(0)?, chip(1)?, chip(2)?],
        })
    }

    fn set(&self, shell: &Shell, depth: Depth) -> io::Result<()> {
        let vcpu = &shell.vcpu;
        vcpu.set_sregs(&self.sregs).map_err(ioctl("KVM_SET_SREGS"))?;
        vcpu.set_regs(&self.regs).map_err(ioctl("KVM_SET_REGS"))?;
        if depth == Depth::Registers {
            return Ok(());
        }
        for chip in &self.chips {
            shell.vm.set_irqchip(chip).map_err(ioctl("KVM_SET_IRQCHIP"))?;
        }
        vcpu.set_xcrs(&self.xcrs).map_err(ioctl("KVM_SET_XCRS"))?;
        // SAFETY: this guest enables no feature by arch_prctl, so that the state has the 4096 bytes of `kvm_xsave`.
        unsafe { vcpu.set_xsave(&self.xsave) }.map_err(ioctl("KVM_SET_XSAVE"))?;
        vcpu.set_lapic(&self.lapic).map_err(ioctl("KVM_SET_LAPIC"))?;
        vcpu.set_msrs(&self.msrs).map_err(ioctl("KVM_SET_MSRS"))?;
        vcpu.set_debug_regs(&self.debug)
            .map_err(ioctl("KVM_SET_DEBUGREGS"))?;
        vcpu.set_mp_state(self.mp).map_err(ioctl("KVM_SET_MP_STATE"))?;
        vcpu.set_vcpu_events(&self.events)
            .map_err(ioctl("KVM_SET_VCPU_EVENTS"))
    }
}

/// A flat 4 GiB segment (Intel SDM vol. 3A §3.4.5): type 11 is code, 3 data.
fn flat(selector: u16, type_: u8) -> kvm_bindings::kvm_segment {
    kvm_bindings::kvm_segment {
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

/// Every MSR the host lists that this vCPU gives and takes back.
fn settable_msrs(kvm: &Kvm, vcpu: &VcpuFd) -> io::Result<Msrs> {
    let list = kvm
        .get_msr_index_list()
        .map_err(ioctl("KVM_GET_MSR_INDEX_LIST"))?;
    let mut kept: Vec<kvm_msr_entry> = Vec::new();
    for &index in list.as_slice() {
        let entry = kvm_msr_entry {
            index,
            ..Default::default()
        };
        let mut one = Msrs::from_entries(&[entry]).map_err(io::Error::other)?;
        let read = vcpu.get_msrs(&mut one).map_err(ioctl("KVM_GET_MSRS"))? == 1;
        if read && vcpu.set_msrs(&one).map_err(ioctl("KVM_SET_MSRS"))? == 1 {
            kept.push(one.as_slice()[0]);
        }
    }
    Msrs::from_entries(&kept).map_err(io::Error::other)
}

/// A range of address space, unmapped when dropped.
struct Reserved {
    address: *mut libc::c_void,
    size: usize,
}

impl Reserved {
    fn new(size: usize) -> io::Result<Reserved> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: an anonymous mapping at an address of the kernel's choice replaces nothing.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                size,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                -1,
                0,
            )
        };
        match address {
            libc::MAP_FAILED => Err(io::Error::last_os_error()),
            address => Ok(Reserved { address, size }),
        }
    }

    /// Maps `file` over all of it, privately.
    fn map(&self, file: &File) -> io::Result<()> {
        let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE;
        // SAFETY: MAP_FIXED replaces exactly our own mapping, to which no reference exists.
        let address = unsafe {
            libc::mmap(
                self.address,
                self.size,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                file.as_raw_fd(),
                0,
            )
        };
        match address {
            libc::MAP_FAILED => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nothing refers to it any more.
        unsafe { libc::munmap(self.address, self.size) };
    }
}

/// Says which call failed.
fn ioctl(call: &'static str) -> impl Fn(kvm_ioctls::Error) -> io::Error {
    move |e| io::Error::other(format!("{call}: {e}"))
}
