//! `/dev/kvm`: checks that it is KVM and probes its capabilities.

use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::sync::Arc;

use kvm_bindings::{CpuId, KVM_API_VERSION, KVM_MAX_CPUID_ENTRIES};
use kvm_ioctls::Cap;

use crate::msr::SavedMsrs;
use crate::state::XSAVE_MIN;
use crate::{Error, Result};

/// KVM's misc device number (linux/miscdevice.h, `KVM_MINOR`).
const KVM_DEVICE: (u32, u32) = (10, 232);

/// The capabilities that every machine needs. The error for a missing one names it.
const REQUIRED: [(Cap, &str); 20] = [
    (Cap::Irqchip, "KVM_CAP_IRQCHIP"),
    (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
    (
        Cap::DestroyMemoryRegionWorks,
        "KVM_CAP_DESTROY_MEMORY_REGION_WORKS",
    ),
    (Cap::SyncMmu, "KVM_CAP_SYNC_MMU"),
    (Cap::ReadonlyMem, "KVM_CAP_READONLY_MEM"),
    (Cap::SetTssAddr, "KVM_CAP_SET_TSS_ADDR"),
    (Cap::SetIdentityMapAddr, "KVM_CAP_SET_IDENTITY_MAP_ADDR"),
    (Cap::ExtCpuid, "KVM_CAP_EXT_CPUID"),
    (Cap::MpState, "KVM_CAP_MP_STATE"),
    (Cap::VcpuEvents, "KVM_CAP_VCPU_EVENTS"),
    (Cap::Debugregs, "KVM_CAP_DEBUGREGS"),
    (Cap::Xcrs, "KVM_CAP_XCRS"),
    (Cap::GetTscKhz, "KVM_CAP_GET_TSC_KHZ"),
    (Cap::IrqRouting, "KVM_CAP_IRQ_ROUTING"),
    (Cap::Irqfd, "KVM_CAP_IRQFD"),
    (Cap::Ioeventfd, "KVM_CAP_IOEVENTFD"),
    (Cap::Clocksource, "KVM_CAP_CLOCKSOURCE"),
    (Cap::AdjustClock, "KVM_CAP_ADJUST_CLOCK"),
    (Cap::TscDeadlineTimer, "KVM_CAP_TSC_DEADLINE_TIMER"),
    (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
];

/// Optional capabilities of this host's KVM. Probed once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// `KVM_CAP_MAX_VCPUS`: most vCPUs of a machine.
    pub max_vcpus: usize,
    /// `KVM_CAP_NR_MEMSLOTS`: most memory slots of a machine.
    pub memory_slots: usize,
    /// `KVM_CAP_VM_DISABLE_NX_HUGE_PAGES`: a machine can switch off the iTLB-multihit mitigation and its
    /// kernel thread.
    pub disable_nx_huge_pages: bool,
    /// `KVM_CAP_TSC_CONTROL`: a vCPU's TSC can have another frequency than the host's.
    pub tsc_control: bool,
    /// `KVM_CAP_XSAVE2`: size in bytes of a vCPU's XSAVE area with what this process may use; 4096 if KVM
    /// does not report it.
    pub xsave_size: usize,
}

/// An open `/dev/kvm` with everything that machines need.
#[derive(Debug)]
pub struct Kvm {
    pub(crate) fd: kvm_ioctls::Kvm,
    capabilities: Capabilities,
    supported_cpuid: CpuId,
    pub(crate) saved_msrs: Arc<SavedMsrs>,
}

impl Kvm {
    /// Probes an open `/dev/kvm`.
    ///
    /// # Errors
    /// [`Error::NotKvm`] if it is another device, [`Error::Missing`] with the first capability it lacks.
    pub fn from_fd(fd: OwnedFd) -> Result<Kvm> {
        check_device(&fd)?;
        // SAFETY: `into_raw_fd` gives up the only ownership of an open descriptor, which kvm_ioctls::Kvm takes over.
        let fd = unsafe { kvm_ioctls::Kvm::from_raw_fd(fd.into_raw_fd()) };
        let version = fd.get_api_version();
        if version != KVM_API_VERSION as i32 {
            return Err(Error::NotKvm(format!(
                "KVM_GET_API_VERSION answers {version}, not {KVM_API_VERSION}"
            )));
        }
        for (capability, name) in REQUIRED {
            if !fd.check_extension(capability) {
                return Err(Error::Missing(name));
            }
        }
        let supported_cpuid = fd
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(Error::ioctl("KVM_GET_SUPPORTED_CPUID"))?;
        let listed_msrs = fd
            .get_msr_index_list()
            .map_err(Error::ioctl("KVM_GET_MSR_INDEX_LIST"))?;
        let capabilities = Capabilities {
            max_vcpus: fd.get_max_vcpus(),
            memory_slots: fd.get_nr_memslots(),
            disable_nx_huge_pages: fd
                .check_extension_raw(kvm_bindings::KVM_CAP_VM_DISABLE_NX_HUGE_PAGES.into())
                > 0,
            tsc_control: fd.check_extension(Cap::TscControl),
            xsave_size: usize::try_from(fd.check_extension_int(Cap::Xsave2))
                .unwrap_or(0)
                .max(XSAVE_MIN),
        };
        Ok(Kvm {
            fd,
            capabilities,
            supported_cpuid,
            saved_msrs: Arc::new(SavedMsrs::new(listed_msrs.as_slice())),
        })
    }

    /// Optional capabilities of this KVM.
    pub fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// `KVM_GET_SUPPORTED_CPUID`: every feature a vCPU can have. [`crate::cpuid::for_vcpu`] makes a vCPU's
    /// CPUID from it.
    pub fn supported_cpuid(&self) -> &CpuId {
        &self.supported_cpuid
    }
}

/// Checks the device, because other drivers give other meanings to KVM's ioctl numbers.
fn check_device(fd: &OwnedFd) -> Result<()> {
    let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: `fd` is open and `stat` is writable memory of the size the call fills in.
    if unsafe { libc::fstat(fd.as_raw_fd(), stat.as_mut_ptr()) } != 0 {
        return Err(Error::NotKvm(std::io::Error::last_os_error().to_string()));
    }
    // SAFETY: fstat succeeded, so it has filled in all of `stat`.
    let stat = unsafe { stat.assume_init() };
    let device = (libc::major(stat.st_rdev), libc::minor(stat.st_rdev));
    match stat.st_mode & libc::S_IFMT {
        libc::S_IFCHR if device == KVM_DEVICE => Ok(()),
        libc::S_IFCHR => Err(Error::NotKvm(format!(
            "it is character device {}:{}",
            device.0, device.1
        ))),
        _ => Err(Error::NotKvm("it is not a character device".into())),
    }
}
