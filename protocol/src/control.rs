//! VMM control: how thawd (or the CLI in its own process) drives one thaw-vmm.
//!
//! The VMM inherits a *listening* SEQPACKET socket as descriptor [`CONTROL_FD`] and serves one connection at
//! a time, so a restarted thawd can connect again. The VMM answers each [`Request`] with one
//! [`Reply`](FromVmm::Reply) that has the same `id`, and sends an [`Event`] when one occurs. File descriptors
//! travel in the packet of the request that needs them, in the order its documentation gives. On a new
//! connection the VMM first sends every event that still holds (doorbell, exit), then replies.
//!
//! **Versions** ([`versions::CONTROL`]). A connection uses the oldest version until the client names the
//! newest one it speaks: with [`Command::Create`] to a new VMM, with [`Command::Hello`] to a running one. A
//! version 4 VMM does not know `Hello`: it treats the packet as malformed and closes the connection, and a
//! VMM without a machine then exits. A client must therefore know from elsewhere (the sandbox's record) that
//! a VMM is of version 4. A VMM answers a request whose tag it does not know with [`ErrorCode::Version`].

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::device_limits::DeviceLimits;
use crate::encoding::{EncodingError, decode, take};
use crate::{tags, versions};

mod device;
mod machine;

pub use device::{Backend, BlobRange, DeviceId, HOST_DISKS, ImageSpec};
pub use machine::{
    CpuBaseline, ExitReason, FreezeKind, MEMORY_MIB, MachineSpec, MachineState, MappedRegion, MemoryMode,
    StartTimes, VCPUS,
};

/// Descriptor number of the listening control socket in thaw-vmm.
pub const CONTROL_FD: i32 = 3;

/// Start of the line that a VMM logs, before the system call's name, when its seccomp filters kill it.
pub const FORBIDDEN_CALL: &str = "thaw-vmm: forbidden system call";
/// Exit code of a VMM that its seccomp filters killed: 128 + SIGSYS, as shells report it.
pub const FORBIDDEN_CODE: i32 = 128 + 31;
/// Environment variable. If its value is [`JAIL_WHOLE`], the VMM exits when any part of its jail is
/// unavailable.
pub const JAIL_VARIABLE: &str = "THAW_JAIL";
/// The value of [`JAIL_VARIABLE`] that requires the whole jail.
pub const JAIL_WHOLE: &str = "whole";
/// Environment variable. Its value is the number of the first of the descriptors with the namespaces that the VMM enters instead of
/// making its own.
pub const NAMESPACES_VARIABLE: &str = "THAW_NAMESPACES";
/// Exit code of a VMM that requires a whole jail on a host that lacks a part of it.
pub const JAIL_LACKS_CODE: i32 = 3;
/// How long a VMM may take to answer, and to read or write a machine's memory.
pub const ANSWER_LIMIT: Duration = Duration::from_secs(60);
pub const MEMORY_LIMIT: Duration = Duration::from_secs(30 * 60);
/// The newest version of this protocol.
pub const CONTROL_VERSION: u32 = versions::CONTROL.current;

/// A request to the VMM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub enum Command {
    /// Makes the machine; every device starts without a backend. One descriptor: /dev/kvm. The first request
    /// of a process, and sent once. `version` is the newest the client speaks; a VMM that does not support it
    /// refuses.
    Create { version: u32, machine: MachineSpec },
    /// Loads a snapshot into a created machine, which is then parked: fully set up, but no vCPU has run.
    /// Descriptors: the state file, then `layers` memory files from the bottom up (with [`MemoryMode::Uffd`]
    /// none, but /dev/userfaultfd), then the working set file if `working_set`. All are only read. The
    /// backends at the time of the freeze are not restored: each device needs an [`Command::Attach`] (the
    /// root device an image or a miss socket), or [`Command::Thaw`] must declare it empty. The answer is
    /// [`Response::Restored`].
    Restore {
        layers: u8,
        working_set: bool,
        mode: MemoryMode,
    },
    /// Starts a parked machine with a new VM generation ID. The devices in `empty` have no backend. The VMM
    /// refuses, and names the devices, if any device is neither attached nor in `empty`, or if a device in
    /// `empty` had a backend when frozen or has one now. If `memory_mib` exceeds boot memory, virtio-mem
    /// offers the guest the difference.
    Thaw { memory_mib: u32, empty: Vec<DeviceId> },
    /// Writes the state and memory of a paused machine, which stays paused. Three descriptors: the state file
    /// and the memory file, both empty and writable, and the VMM's `/proc/<pid>/pagemap`. The answer is
    /// [`Response::Frozen`].
    Freeze { kind: FreezeKind },
    /// Prepares a freeze after which the guest goes on: write-protects the memory of a running machine, which
    /// runs meanwhile, so that it stops for a moment only. Three descriptors: the memory file, empty and
    /// writable, the VMM's `/proc/<pid>/pagemap`, and /dev/userfaultfd. [`ErrorCode::Unprotected`] if the
    /// kernel cannot protect this machine's memory, or an overloaded host not in time: then only
    /// [`Command::Freeze`] remains. Since version 6.
    PrepareFreeze { kind: FreezeKind },
    /// Makes this the moment of the snapshot: saves the state of a paused machine whose freeze is prepared.
    /// One descriptor: the state file, empty and writable. The VMM writes memory once the machine runs again,
    /// between other requests. Since version 6.
    BeginFreeze,
    /// Answered with [`Response::Frozen`] when all memory and the state are written. Since version 6.
    FinishFreeze,
    /// Ends a prepared freeze, in whatever step it is. Succeeds also if there is none. The end of the
    /// connection does the same. Since version 6.
    CancelFreeze,
    /// Writes which pages the guest and its devices have touched since the restore. Two descriptors: the
    /// file, empty and writable, and the VMM's pagemap.
    WorkingSet,
    /// Asks the guest, through virtio-mem, to have this much memory in total.
    Resize { memory_mib: u32 },
    /// Gives a device its backend.
    Attach { device: DeviceId, backend: Backend },
    /// Shows an image in slot `slot` (1..=65535) of the root device.
    AddImage { slot: u16, image: ImageSpec },
    /// Removes an image. The guest must have unmounted it.
    RemoveImage { slot: u16 },
    /// Cold boot. One descriptor: an ELF vmlinux with a PVH entry note.
    Boot { cmdline: String },
    /// Stops the vCPUs outside guest mode.
    Pause,
    /// Resumes paused vCPUs.
    Resume,
    /// Returns the machine's state.
    Status,
    /// Ends the process.
    Shutdown,
    /// Detaches the disk of a started machine. The VMM has closed its descriptor when it answers; the guest's
    /// later requests fail. Succeeds also if there is no disk.
    Detach { device: DeviceId },
    /// Sets the rate limits of a disk or the network, in any state of the machine. They replace earlier
    /// limits, and their buckets start full. Snapshots do not contain them. Since version 5.
    Limit { device: DeviceId, limits: DeviceLimits },
    /// Negotiates the version, in any state of the machine. `version` is the newest the client speaks. The
    /// answer is [`Response::Hello`]. Since version 5.
    Hello { version: u32 },
}

impl Command {
    /// The first protocol version that has this command.
    pub fn since(&self) -> u32 {
        match self {
            Command::PrepareFreeze { kind } => kind.since().max(6),
            Command::BeginFreeze | Command::FinishFreeze | Command::CancelFreeze => 6,
            Command::Freeze { kind } => kind.since(),
            Command::Attach { backend, .. } => backend.since(),
            Command::Limit { .. } | Command::Hello { .. } => 5,
            _ => 4,
        }
    }

    /// How long a VMM may take to answer. Work that takes milliseconds can take seconds on a host where a
    /// thousand VMMs start at once.
    pub fn time_limit(&self) -> Duration {
        match self {
            Command::Restore { .. }
            | Command::Freeze { .. }
            | Command::PrepareFreeze { .. }
            | Command::FinishFreeze
            | Command::WorkingSet => MEMORY_LIMIT,
            _ => ANSWER_LIMIT,
        }
    }

    /// Whether a response can be the answer to this command.
    pub fn is_answered_by(&self) -> fn(&Response) -> bool {
        match self {
            Command::Restore { .. } => |response| matches!(response, Response::Restored { .. }),
            Command::Freeze { .. } | Command::FinishFreeze => {
                |response| matches!(response, Response::Frozen { .. })
            }
            Command::Hello { .. } => |response| matches!(response, Response::Hello { .. }),
            Command::Status => |response| matches!(response, Response::Status { .. }),
            _ => |response| matches!(response, Response::Done),
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
    PrepareFreeze = 17,
    BeginFreeze = 18,
    FinishFreeze = 19,
    CancelFreeze = 20,
});

/// A [`Command`] and the id that its reply repeats.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    pub id: u32,
    pub command: Command,
}

impl Request {
    /// Decodes a request. The inner `Err` is a request of a later version: it has an id to reply to, but its
    /// command is unknown.
    ///
    /// # Errors
    /// The bytes are not a request.
    pub fn read(bytes: &[u8]) -> Result<Result<Request, (u32, EncodingError)>, EncodingError> {
        match decode(bytes) {
            Ok(request) => Ok(Ok(request)),
            Err(e @ EncodingError::UnknownTag { .. }) => Ok(Err((take::<u32>(bytes)?.0, e))),
            Err(e) => Err(e),
        }
    }
}

/// The result of a request that succeeded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub enum Response {
    Done,
    Status {
        state: MachineState,
        times: StartTimes,
        /// Page faults of the vCPU threads, minor and major, since the first entry into the guest
        /// (getrusage(2)).
        faults: u64,
    },
    /// A snapshot is loaded. With [`MemoryMode::Uffd`] the packet carries the userfaultfd, and `regions`
    /// lists the address ranges it covers.
    Restored {
        regions: Vec<MappedRegion>,
        /// Pages mapped in advance, and how many nanoseconds that took.
        populated_pages: u64,
        populate_ns: u64,
    },
    /// A snapshot is written.
    Frozen {
        /// Bytes of memory data written; the rest of the file is holes.
        memory_bytes: u64,
    },
    /// The newest version both sides speak, which the connection uses from here on, and the VMM's release for
    /// messages to people.
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

/// Why a request failed: a stable code for programs and a sentence for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct ControlError {
    pub code: ErrorCode,
    pub message: String,
}

impl ControlError {
    /// The version with which to send [`Command::Create`] again, if this may be the answer of a VMM that does not support `version`: it
    /// may be the program of an earlier release, kept for its snapshots.
    pub fn older_version(&self, version: u32) -> Option<u32> {
        let may_be_older = self.code == ErrorCode::Invalid && version > versions::CONTROL.oldest;
        may_be_older.then(|| version - 1)
    }
}

/// The kinds of failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub enum ErrorCode {
    /// The machine's state does not permit the request.
    WrongState,
    /// A value is out of range, or a descriptor is missing or of the wrong kind.
    Invalid,
    /// KVM lacks a capability, or a KVM call failed.
    Kvm,
    /// The kernel file is not an ELF with a PVH note.
    NotPvh,
    /// The guest's memory is too small for its kernel.
    MemoryTooSmall,
    /// A snapshot file is damaged, truncated or of an unknown version.
    Snapshot,
    /// The snapshot is valid, but does not fit this host or this machine.
    Incompatible,
    /// A device has no backend, or one that differs in kind from when the machine was frozen.
    Unswapped,
    /// The guest has files or block devices of the host open, which a snapshot cannot contain.
    Shared,
    /// A system call failed.
    System,
    /// The VMM does not support the version of the request. Since version 5.
    Version,
    /// The kernel cannot write-protect the machine's memory for a freeze that the guest runs through. Since
    /// version 6.
    Unprotected,
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
    Unprotected = 11,
});

/// A message that the VMM sends without a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub enum Event {
    /// The guest connected to the host's vsock port [`crate::handshake::HANDSHAKE_PORT`]: its agent now
    /// listens. The VMM always resets this connection, so none is left over. `at` is in nanoseconds of
    /// CLOCK_MONOTONIC.
    Doorbell { at: u64 },
    /// The machine ended.
    Exited(ExitReason),
}

tags!(Event {
    Doorbell = 0,
    Exited = 1,
});

/// Every message the VMM sends.
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
