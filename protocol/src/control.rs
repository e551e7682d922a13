//! VMM control: what thawd (or the CLI in its own process) says to one thaw-vmm.
//!
//! The VMM inherits a *listening* SEQPACKET socket as descriptor [`CONTROL_FD`] and serves one connection at a time, so
//! that a restarted thawd can connect again. Each [`Request`] is answered by one [`Reply`] with the same `id`;
//! [`Event`]s come unasked. Descriptors travel beside the request that names them, in the order its documentation says.
//! A new connection first gets every event that still holds (doorbell, exit), then replies.
//!
//! **Versions** ([`versions::CONTROL`]). A connection speaks the oldest version until its peer has said which it speaks: by
//! [`Command::Create`] to a VMM that is new, by [`Command::Hello`] to one that runs. A VMM of version 4 has no `Hello`, and takes
//! one for garbage: it closes the connection, which ends a VMM without a machine. So whoever connects must know from elsewhere (a
//! sandbox's record) whether it is one. A request whose tag a VMM does not know is refused ([`ErrorCode::Version`]).

use serde::{Deserialize, Serialize};

use crate::encoding::{EncodingError, decode, take};
use crate::limits::DeviceLimits;
use crate::{tags, versions};

/// The descriptor number at which thaw-vmm finds its listening control socket.
pub const CONTROL_FD: i32 = 3;

/// What a VMM's log says, before the call's name, when it ends because it made a system call that its filters forbid.
pub const FORBIDDEN_CALL: &str = "thaw-vmm: forbidden system call";
/// The exit code of such a VMM: as a shell tells SIGSYS.
pub const FORBIDDEN_CODE: i32 = 128 + 31;
/// The variable whose value [`JAIL_WHOLE`] has a VMM end where its jail would lack a wall.
pub const JAIL_VARIABLE: &str = "THAW_JAIL";
/// See [`JAIL_VARIABLE`].
pub const JAIL_WHOLE: &str = "whole";
/// The exit code of such a VMM.
pub const JAIL_LACKS_CODE: i32 = 3;
/// Version of this protocol.
pub const CONTROL_VERSION: u32 = versions::CONTROL.current;

/// Least and most guest memory, in MiB.
pub const MEMORY_MIB: std::ops::RangeInclusive<u32> = 64..=65536;
/// Least and most vCPUs.
pub const VCPUS: std::ops::RangeInclusive<u8> = 1..=16;

/// The devices every machine has, whatever backs them (DESIGN §5). The discriminant is the device's slot: its MMIO
/// window, interrupt line and ACPI `_UID` follow from it, so the order is frozen with every template.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(remote = "Self")]
#[repr(u8)]
pub enum DeviceId {
    /// virtio-fs, tag `thaw`: the image slots.
    Root = 0,
    /// virtio-fs, tag [`crate::share::TAG`]: writable host directories.
    Shared = 1,
    /// virtio-blk: `/dev/vda` the writable layer, then block devices of the host ([`HOST_DISKS`]).
    Blk0 = 2,
    Blk1 = 3,
    Blk2 = 4,
    Blk3 = 5,
    Net = 6,
    Vsock = 7,
    /// virtio-pmem: `/dev/pmem0` the guest image, `/dev/pmem1` image data.
    Pmem0 = 8,
    Pmem1 = 9,
    /// virtio-mem.
    Mem = 10,
    Balloon = 11,
    Rng = 12,
    /// The 16550 console: output only, for logs.
    Console = 13,
}

tags!(DeviceId {
    Root = DeviceId::Root as u32,
    Shared = DeviceId::Shared as u32,
    Blk0 = DeviceId::Blk0 as u32,
    Blk1 = DeviceId::Blk1 as u32,
    Blk2 = DeviceId::Blk2 as u32,
    Blk3 = DeviceId::Blk3 as u32,
    Net = DeviceId::Net as u32,
    Vsock = DeviceId::Vsock as u32,
    Pmem0 = DeviceId::Pmem0 as u32,
    Pmem1 = DeviceId::Pmem1 as u32,
    Mem = DeviceId::Mem as u32,
    Balloon = DeviceId::Balloon as u32,
    Rng = DeviceId::Rng as u32,
    Console = DeviceId::Console as u32,
});

/// The slots of block devices of the host, which a machine is given while it runs. The last holds its image, where that is a disk.
pub const HOST_DISKS: [DeviceId; 3] = [DeviceId::Blk1, DeviceId::Blk2, DeviceId::Blk3];

impl DeviceId {
    /// Every device, in slot order.
    pub const ALL: [DeviceId; 14] = [
        DeviceId::Root,
        DeviceId::Shared,
        DeviceId::Blk0,
        DeviceId::Blk1,
        DeviceId::Blk2,
        DeviceId::Blk3,
        DeviceId::Net,
        DeviceId::Vsock,
        DeviceId::Pmem0,
        DeviceId::Pmem1,
        DeviceId::Mem,
        DeviceId::Balloon,
        DeviceId::Rng,
        DeviceId::Console,
    ];
}

/// What a vCPU says it is: the host's own processor, or less, so that a snapshot thaws on several kinds of host.
/// The x86-64 levels are those of the System V psABI.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(remote = "Self", rename_all = "kebab-case")]
pub enum CpuBaseline {
    /// All that this host's KVM offers.
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
    /// vCPUs, [`VCPUS`].
    pub vcpus: u8,
    /// Boot memory in MiB, [`MEMORY_MIB`]; virtio-mem may add to it.
    pub memory_mib: u32,
    /// For a cold boot. A restored machine's vCPUs are what its snapshot says.
    pub cpu: CpuBaseline,
    /// Exit when the control connection closes: for a sandbox that must not outlive the process that made it.
    pub tethered: bool,
}

/// What stands behind a device. Each variant says which descriptors come beside it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub enum Backend {
    /// One descriptor: a regular file or block device; its size is the capacity (rounded down to 512 bytes). A machine that has
    /// a block device cannot be frozen.
    Disk { read_only: bool },
    /// One descriptor: a tap, `IFF_NO_PI | IFF_VNET_HDR`. `prepared`: its vnet headers are of 12 bytes and it has every
    /// offload (checksums; TSO4, TSO6, ECN), so that nobody need ask it, which would take the host's RTNL.
    Tap { mac: [u8; 6], prepared: bool },
    /// One descriptor: a listening unix stream socket. A peer that connects says `CONNECT <port>\n` and is answered
    /// `OK <host port>\n` once the guest has accepted (the hybrid-vsock convention of Firecracker and Kata).
    Vsock,
    /// One descriptor: a regular file mapped privately into the pmem window, which it must fit.
    Pmem,
    /// One descriptor: where console output is written. Output is dropped, never waited for, when it is not writable.
    Console,
    /// One descriptor: a SEQPACKET socket to ask for missing chunks over ([`crate::miss`]). Replaces an earlier one;
    /// pending misses are issued again.
    Misses,
    /// One descriptor: a SEQPACKET socket over which the root device, or a disk that is an image, tells which bytes of
    /// blobs it was asked for ([`crate::access`]). Replaces an earlier one.
    Accesses,
    /// A read-only disk that holds an image as one EROFS file system: its metadata, then its blobs at their addresses.
    /// Descriptors: the metadata file, then for each blob data and ready bitmap, then a SEQPACKET socket for misses, which
    /// [`Backend::Misses`] replaces.
    Image { blobs: Vec<BlobRange> },
    /// One descriptor: the relay of a thaw-share ([`crate::share`]), a STREAM socket. Of the shared device, once in its life:
    /// the guest's files are that process's. A machine that has it cannot be frozen.
    Share,
}

tags!(Backend {
    Disk = 0,
    Tap = 1,
    Vsock = 2,
    Pmem = 3,
    Console = 4,
    Misses = 5,
    Accesses = 6,
    Image = 7,
    Share = 8,
});

/// How a restored machine's memory gets its contents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(remote = "Self", rename_all = "lowercase")]
pub enum MemoryMode {
    /// The files' data is mapped privately; pages come as they are touched, those of the working set in advance.
    #[default]
    Cow,
    /// As `Cow`, and every page of data is mapped in advance.
    Populate,
    /// Nothing is mapped: the process that holds the userfaultfd fills each page as it is touched.
    Uffd,
}

tags!(MemoryMode {
    Cow "cow" = 0,
    Populate "populate" = 1,
    Uffd "uffd" = 2,
});

/// What a freeze writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub enum FreezeKind {
    /// All memory that is not zero.
    Full,
    /// The pages written since the machine was restored; thawed on top of the memory it was restored from.
    Delta,
}

tags!(FreezeKind {
    Full = 0,
    Delta = 1,
});

/// Guest memory as one process has it mapped: what a userfault server must know to find a page's contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MappedRegion {
    /// First address in the VMM's address space.
    pub host_address: u64,
    /// Bytes.
    pub size: u64,
    /// First guest-physical address; a memory file has each region at the sum of the sizes of those before it.
    pub guest_address: u64,
}

/// One cache file of an image: a range of the metadata's synthesized address space (DESIGN §7).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlobRange {
    /// First byte in the synthesized address space; a multiple of 4096.
    pub address: u64,
    /// Bytes, a multiple of 4096.
    pub length: u64,
    /// SHA-256 of the layer this holds the file data of (its DiffID): names it in a [`crate::miss::Miss`].
    pub digest: [u8; 32],
}

/// An image to show in a slot of the root device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageSpec {
    /// Directory name under the root device's root.
    pub name: String,
    /// The cache files, by address. Beside the request come the metadata file's descriptor, then for each blob two:
    /// data, ready bitmap.
    pub blobs: Vec<BlobRange>,
}

/// What is asked of the VMM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub enum Command {
    /// Makes the machine, every device with an empty backend. One descriptor: /dev/kvm. Once per process, first. `version` is
    /// the newest its sender speaks; a VMM that does not understand it refuses.
    Create { version: u32, machine: MachineSpec },
    /// Loads a snapshot into a created machine, which is then parked: all is set, no vCPU has run. Descriptors: the state
    /// file, then `layers` memory files, the one at the bottom first (none with [`MemoryMode::Uffd`], but
    /// /dev/userfaultfd), then, if `working_set`, that file. All are only read. What a device had as backend is gone: each
    /// needs an [`Command::Attach`] (the root device an image or a miss socket), or to be declared empty by
    /// [`Command::Thaw`].
    /// Answered by [`Response::Restored`].
    Restore {
        layers: u8,
        working_set: bool,
        mode: MemoryMode,
    },
    /// Lets a parked machine run, with a new VM generation ID. The devices in `empty` shall have no backend. Refused, naming
    /// them, while devices are neither attached nor among those, and where one among those had a backend when frozen or
    /// has one now. With `memory_mib` above boot memory, virtio-mem offers the guest the difference.
    Thaw { memory_mib: u32, empty: Vec<DeviceId> },
    /// Writes a paused machine's state and memory. Three descriptors: the state file and the memory file, both empty and
    /// writable, and this process's `/proc/<pid>/pagemap`. The machine stays paused. Answered by [`Response::Frozen`].
    Freeze { kind: FreezeKind },
    /// Writes the pages the guest and its devices have touched since the restore. Two descriptors: the file, empty and
    /// writable, and this process's pagemap.
    WorkingSet,
    /// Asks the guest, by virtio-mem, to have this much memory in all.
    Resize { memory_mib: u32 },
    /// Gives a device its backend.
    Attach { device: DeviceId, backend: Backend },
    /// Shows an image in slot `slot` (1..=65535) of the root device.
    AddImage { slot: u16, image: ImageSpec },
    /// Takes an image away. The guest must have unmounted it.
    RemoveImage { slot: u16 },
    /// Cold boot. One descriptor: an ELF vmlinux with a PVH entry note.
    Boot { cmdline: String },
    /// Stops the vCPUs outside guest code.
    Pause,
    /// Lets them run again.
    Resume,
    /// What state the machine is in.
    Status,
    /// Ends the process.
    Shutdown,
    /// Takes a started machine's disk away: its descriptor is closed when this is answered, the guest has errors from then on.
    /// One that has none is answered alike.
    Detach { device: DeviceId },
    /// Sets how much a disk or the network may do from now on, in place of what was set before; its buckets are full. At any
    /// time in a machine's life; no snapshot holds it. Since version 5.
    Limit { device: DeviceId, limits: DeviceLimits },
    /// Asks which version the VMM speaks, whatever state its machine is in. `version` is the newest the sender speaks. Answered by
    /// [`Response::Hello`]. Since version 5.
    Hello { version: u32 },
}

impl Command {
    /// The first version that has it.
    pub fn since(&self) -> u32 {
        match self {
            Command::Limit { .. } | Command::Hello { .. } => 5,
            _ => 4,
        }
    }
}

tags!(Command {
    Create = 0,
    Restore = 1,
    Thaw = 2,
    Freeze = 3,
    WorkingSet = 4,
    Resize = 5,
    Attach = 6,
    AddImage = 7,
    RemoveImage = 8,
    Boot = 9,
    Pause = 10,
    Resume = 11,
    Status = 12,
    Shutdown = 13,
    Detach = 14,
    Limit = 15,
    Hello = 16,
});

/// A [`Command`] and the number its reply will carry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    pub id: u32,
    pub command: Command,
}

impl Request {
    /// Reads a request. One whose command is unknown is told from what is no request: it is of a later version, and has a number
    /// to be answered by.
    ///
    /// # Errors
    /// The bytes are no request.
    pub fn read(bytes: &[u8]) -> Result<Result<Request, (u32, EncodingError)>, EncodingError> {
        match decode(bytes) {
            Ok(request) => Ok(Ok(request)),
            Err(e @ EncodingError::UnknownTag { .. }) => Ok(Err((take::<u32>(bytes)?.0, e))),
            Err(e) => Err(e),
        }
    }
}

/// Where the machine is in its life.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub enum MachineState {
    /// No machine yet.
    Shell,
    /// Made, not started.
    Created,
    /// A snapshot is loaded; nothing has run.
    Parked,
    Running,
    Paused,
    /// Ended, and why.
    Exited(ExitReason),
}

tags!(MachineState {
    Shell = 0,
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
    /// The guest asked for a reset: with `panic=-1 reboot=k` on its command line, a kernel panic or PID 1's death.
    Reset,
    /// A vCPU could not go on; the text says which exit and where.
    Fault(String),
}

tags!(ExitReason {
    PowerOff = 0,
    Reset = 1,
    Fault = 2,
});

/// Moments of a start, CLOCK_MONOTONIC nanoseconds of the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartTimes {
    /// thaw-vmm's `main` began.
    pub process: u64,
    /// The jail was closed.
    pub jailed: u64,
    /// [`Command::Create`] was done.
    pub created: u64,
    /// [`Command::Restore`] was done; 0 after a cold boot.
    pub restored: u64,
    /// [`Command::Thaw`] let the vCPUs go; 0 after a cold boot.
    pub thawed: u64,
    /// The first vCPU entered the guest.
    pub entered: u64,
}

/// A successful answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub enum Response {
    Done,
    Status {
        state: MachineState,
        times: StartTimes,
        /// Page faults of the vCPU threads since the guest was first entered (getrusage(2): minor and major).
        faults: u64,
    },
    /// A snapshot is loaded. With [`MemoryMode::Uffd`] the userfaultfd comes beside it, and `regions` says where it watches.
    Restored {
        regions: Vec<MappedRegion>,
        /// Pages mapped in advance, and how long that took, in nanoseconds.
        populated_pages: u64,
        populate_ns: u64,
    },
    /// A snapshot is written.
    Frozen {
        /// Bytes of memory data written: the rest of the file is holes.
        memory_bytes: u64,
    },
    /// The newest version that both sides speak, which the connection has from here on, and the release the VMM is of, for
    /// people.
    Hello {
        version: u32,
        release: String,
    },
}

tags!(Response {
    Done = 0,
    Status = 1,
    Restored = 2,
    Frozen = 3,
    Hello = 4,
});

/// A refused request: a stable code for programs, a sentence for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct ControlError {
    pub code: ErrorCode,
    pub message: String,
}

/// What kind of refusal it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub enum ErrorCode {
    /// The request does not fit the machine's state.
    WrongState,
    /// A value is out of range, a descriptor is missing or of the wrong kind.
    Invalid,
    /// KVM lacks a capability or refused.
    Kvm,
    /// The kernel file is not an ELF with a PVH note.
    NotPvh,
    /// The guest has too little memory for its kernel.
    MemoryTooSmall,
    /// A snapshot file is damaged, cut short or of an unknown version.
    Snapshot,
    /// The snapshot is whole, but not for this host or this machine.
    Incompatible,
    /// Devices have no backend, or one that does not match what was frozen.
    Unswapped,
    /// The machine has what no snapshot can hold: files or block devices of the host that its guest has open.
    Shared,
    /// A system call failed.
    System,
    /// What was asked is of a version the VMM does not understand. Since version 5.
    Version,
}

tags!(ErrorCode {
    WrongState = 0,
    Invalid = 1,
    Kvm = 2,
    NotPvh = 3,
    MemoryTooSmall = 4,
    Snapshot = 5,
    Incompatible = 6,
    Unswapped = 7,
    Shared = 8,
    System = 9,
    Version = 10,
});

/// What comes unasked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub enum Event {
    /// The guest dialled vsock port [`crate::handshake::HANDSHAKE_PORT`] of the host: its agent listens. The dial is
    /// always answered by a reset, so the doorbell leaves no connection behind. At: CLOCK_MONOTONIC nanoseconds.
    Doorbell { at: u64 },
    /// The machine ended.
    Exited(ExitReason),
}

tags!(Event {
    Doorbell = 0,
    Exited = 1,
});

/// Everything the VMM sends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub enum FromVmm {
    Reply {
        id: u32,
        result: Result<Response, ControlError>,
    },
    Event(Event),
}

tags!(FromVmm {
    Reply = 0,
    Event = 1,
});
