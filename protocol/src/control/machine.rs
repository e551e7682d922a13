//! A machine: its shape, memory and states.

use serde::{Deserialize, Serialize};

use crate::tags;

/// Limits of guest memory, in MiB.
pub const MEMORY_MIB: std::ops::RangeInclusive<u32> = 64..=65536;
/// Limits of the number of vCPUs.
pub const VCPUS: std::ops::RangeInclusive<u8> = 1..=16;

/// Which CPU features the guest sees: all of the host's, or the subset of a baseline, so that a snapshot
/// thaws on several kinds of host. The x86-64 levels are those of the System V psABI.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(remote = "Self", rename_all = "kebab-case")]
pub enum CpuBaseline {
    /// Every feature that this host's KVM supports.
    #[default]
    Host,
    #[serde(rename = "x86-64-v2")]
    V2,
    #[serde(rename = "x86-64-v3")]
    V3,
    #[serde(rename = "x86-64-v4")]
    V4,
}

tags!(CpuBaseline {
    Host "host" = 0,
    V2 "x86-64-v2" = 1,
    V3 "x86-64-v3" = 2,
    V4 "x86-64-v4" = 3,
});

/// The shape of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineSpec {
    /// Number of vCPUs, within [`VCPUS`].
    pub vcpus: u8,
    /// Boot memory in MiB, within [`MEMORY_MIB`]; virtio-mem may add to it.
    pub memory_mib: u32,
    /// Used by a cold boot. A restored machine has the CPUID of its snapshot.
    pub cpu: CpuBaseline,
    /// Exit when the control connection closes, for a sandbox that must not outlive the process that created
    /// it.
    pub tethered: bool,
}

/// How a restored machine's memory gets its contents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(remote = "Self", rename_all = "lowercase")]
pub enum MemoryMode {
    /// The memory files are mapped privately. Pages load on first access; those of the working set are mapped
    /// in advance.
    #[default]
    Cow,
    /// As `Cow`, and every page that has data is mapped in advance.
    Populate,
    /// The process that holds the userfaultfd fills each page on first access.
    Uffd,
}

tags!(MemoryMode {
    Cow "cow" = 0,
    Populate "populate" = 1,
    Uffd "uffd" = 2,
});

/// Which memory a freeze writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub enum FreezeKind {
    /// All memory that is not zero.
    Full,
    /// The pages written since the restore. To thaw it, the memory files of that restore must lie below it.
    Delta,
    /// What differs from the lowest `layers` memory files of the restore: the pages written since, and the data
    /// of the memory files above these. To thaw it, these alone must lie below it. Since version 7.
    DeltaOver { layers: u8 },
}

impl FreezeKind {
    /// The first protocol version that has this kind.
    pub fn since(&self) -> u32 {
        match self {
            FreezeKind::DeltaOver { .. } => 7,
            FreezeKind::Full | FreezeKind::Delta => 4,
        }
    }
}

tags!(FreezeKind {
    Full = 0,
    Delta = 1,
    DeltaOver = 2,
});

/// One mapping of guest memory in the VMM. A userfaultfd server needs it to find a page's contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MappedRegion {
    /// First address in the VMM's address space.
    pub host_address: u64,
    /// Size in bytes.
    pub size: u64,
    /// First guest-physical address. In a memory file, a region's offset is the sum of the sizes of the
    /// regions before it.
    pub guest_address: u64,
}

/// The states of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub enum MachineState {
    /// The process has no machine yet.
    #[serde(rename = "Shell")]
    NoMachine,
    /// Created, not started.
    Created,
    /// A snapshot is loaded; no vCPU has run.
    Parked,
    Running,
    Paused,
    /// The machine ended.
    Exited(ExitReason),
}

tags!(MachineState {
    NoMachine "Shell" = 0,
    Created = 1,
    Parked = 2,
    Running = 3,
    Paused = 4,
    Exited = 5,
});

/// Why a machine ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub enum ExitReason {
    /// The guest powered off (ACPI S5).
    PowerOff,
    /// The guest requested a reset. With `panic=-1 reboot=k` on its command line, a kernel panic or the exit
    /// of PID 1 does this.
    Reset,
    /// A vCPU failed; the text names the exit reason and the address.
    Fault(String),
}

tags!(ExitReason {
    PowerOff = 0,
    Reset = 1,
    Fault = 2,
});

/// Times of the steps of a start, in nanoseconds of the host's CLOCK_MONOTONIC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartTimes {
    /// thaw-vmm's `main` began.
    pub process: u64,
    /// The VMM had entered its jail.
    pub jailed: u64,
    /// [`Command::Create`](super::Command::Create) finished.
    pub created: u64,
    /// [`Command::Restore`](super::Command::Restore) finished; 0 after a cold boot.
    pub restored: u64,
    /// [`Command::Thaw`](super::Command::Thaw) started the vCPUs; 0 after a cold boot.
    pub thawed: u64,
    /// The first vCPU entered the guest.
    pub entered: u64,
}
