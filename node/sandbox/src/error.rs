//! The error of this crate: its kind, what happened, and lines that explain it.
//!
//! Each kind has a stable name for programs, its slug. This crate knows nothing of exit codes, HTTP statuses or generic
//! remedies: thaw-daemon's `exit` and `problem` map each kind to those.

use std::fmt;
use std::io;

macro_rules! error_kinds {
    ($($name:ident = $slug:literal, $meaning:literal;)*) => {
        /// What went wrong.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum ErrorKind { $(#[doc = $meaning] $name,)* }

        impl ErrorKind {
            /// All kinds.
            pub const ALL: &'static [ErrorKind] = &[$(ErrorKind::$name,)*];

            /// A stable name for programs.
            pub fn slug(self) -> &'static str { match self { $(ErrorKind::$name => $slug,)* } }
        }
    };
}

error_kinds! {
    HookMissing = "hook-missing", "an after_thaw hook is required, and the snapshot or the sandbox has none";
    HookFailed = "hook-failed", "a hook of the container failed";
    KvmMissing = "kvm-missing", "there is no /dev/kvm";
    KvmDenied = "kvm-denied", "/dev/kvm may not be opened";
    KvmInadequate = "kvm-inadequate", "KVM lacks a capability or refused a call";
    KernelMissing = "kernel-missing", "the guest kernel is missing or unreadable";
    KernelNotPvh = "kernel-not-pvh", "the guest kernel is not an ELF vmlinux with a PVH note";
    GuestImageMissing = "guest-image-missing", "the guest image is missing or unreadable";
    MemoryTooSmall = "memory-too-small", "the guest has too little memory";
    GuestNotReady = "guest-not-ready", "the guest did not become ready in time, or ended before";
    HandshakeFailed = "handshake-failed", "the guest did not take its identity";
    DiskFull = "disk-full", "the host's disk is full";
    DigestMismatch = "digest-mismatch", "content does not have the digest it is known by";
    LayerTruncated = "layer-truncated", "a layer ends before its end";
    UnknownMediaType = "unknown-media-type", "a manifest or layer is of a kind Thaw does not read";
    WrongArchitecture = "wrong-architecture", "the image has nothing for this CPU architecture";
    UnsafePath = "unsafe-path", "a layer holds a name or link that leaves the image";
    ImageMalformed = "image-malformed", "an image's manifest, configuration or layer cannot be read";
    ImageNotFound = "image-not-found", "there is no such image where it was looked for";
    RegistryUnreachable = "registry-unreachable", "the registry does not answer";
    RegistryDenied = "registry-denied", "the registry refused access (401 or 403)";
    RegistryRateLimited = "registry-rate-limited", "the registry says: too many requests (429)";
    RegistryFailed = "registry-failed", "the registry failed or broke its protocol";
    BadReference = "bad-reference", "the image reference cannot be understood";
    VmmMissing = "vmm-missing", "thaw-vmm is not installed where it is looked for";
    VmmFailed = "vmm-failed", "thaw-vmm refused or ended unexpectedly";
    GuestEnded = "guest-ended", "the guest ended under its container";
    NetworkUnavailable = "network-unavailable", "the private network cannot be made";
    ProgramMissing = "program-missing", "a program Thaw needs is not installed";
    SandboxNotFound = "sandbox-not-found", "there is no such running sandbox";
    SandboxClaimed = "sandbox-claimed", "another node has resumed or deleted the paused sandbox";
    ImageNotStored = "image-not-stored", "the image is not in the store, and may not be pulled";
    DaemonUnreachable = "daemon-unreachable", "thawd does not answer on its socket";
    NameInUse = "name-in-use", "a running sandbox or a stored snapshot has this name already";
    AgentFailed = "agent-failed", "the guest's agent refused or broke the connection";
    SnapshotDamaged = "snapshot-damaged", "a snapshot's file is not what its manifest says, or cannot be read";
    SnapshotIncompatible = "snapshot-incompatible", "the snapshot is whole, but not for this host, this machine or this version";
    SnapshotSignature = "snapshot-signature", "the snapshot is not signed by a key this node trusts";
    SnapshotNotFound = "snapshot-not-found", "there is no such template or snapshot";
    SnapshotInUse = "snapshot-in-use", "a sandbox or another snapshot needs the snapshot";
    ConfigInvalid = "config-invalid", "the configuration file cannot be read or says what cannot be";
    ImageDamaged = "image-damaged", "file data in the store is not what it was";
    ImageInUse = "image-in-use", "a running sandbox uses the image";
    NotIndexable = "not-indexable", "a layer cannot be indexed: no SOCI index can describe its compression";
    LoadOrderInvalid = "load-order-invalid", "a load order cannot be read, or is of another image";
    PushRefused = "push-refused", "the place an image is written to cannot take it";
    PortUnavailable = "port-unavailable", "a port cannot be published: it is in use, or its address is not this host's";
    NotReady = "not-ready", "the container did not become ready, or ended before";
    Shared = "shared", "the sandbox has volumes or block devices of the host, which no snapshot can hold";
    VolumeUnavailable = "volume-unavailable", "a directory, file or block device of the host cannot be shared";
    ShareMissing = "share-missing", "thaw-share is not installed where it is looked for";
    ShareFailed = "share-failed", "thaw-share does not serve";
    ServiceFailed = "service-failed", "a unit of systemd cannot be started or stopped";
    RuntimeInUse = "runtime-in-use", "Thaw cannot be uninstalled while sandboxes run";
    MemoryReleased = "memory-released", "the sandbox is paused with its memory released";
    MemoryKept = "memory-kept", "the memory of the sandbox cannot be released";
    VmmTooOld = "vmm-too-old", "the sandbox's thaw-vmm is of a release that lacks this";
    LimitsUnavailable = "limits-unavailable", "this host cannot limit what a sandbox takes of it";
    JailIncomplete = "jail-incomplete", "this host cannot jail a VMM whole: namespaces or Landlock are missing";
    NotASnapshot = "not-a-snapshot", "what a registry has by this reference is no snapshot";
    SnapshotMalformed = "snapshot-malformed", "a registry's snapshot contradicts itself, or exceeds a limit";
    SnapshotDelta = "snapshot-delta", "a delta cannot be pushed: it needs the snapshot that it lies on";
    DiskBudget = "disk-budget", "the node's disk budget has no room for it";
    TenantQuota = "tenant-quota", "the tenant's quota has no room for it";
    CreationRate = "creation-rate", "the tenant makes more sandboxes in a minute than it may";
    NodeCapacity = "node-capacity", "the node has no room for another machine of this size";
    Runtime = "runtime", "wrong usage, or an error of Thaw itself";
    NotExecutable = "not-executable", "the container's command cannot be executed";
    NotFound = "not-found", "the container's command was not found";
    OutOfMemory = "out-of-memory", "the container was killed: out of memory";
}

/// A failure: its kind, its text and its explanation.
#[derive(Debug)]
pub struct Error {
    pub kind: ErrorKind,
    /// "<what>: <where>".
    pub what: String,
    /// "<what to do>", if it is better than the generic remedy for the kind.
    pub remedy: Option<String>,
    /// Lines that explain the error, shown before it: of the guest's console, or of the VMM's log.
    pub context: Vec<String>,
    /// Whether a machine died or fell silent before it was ready, without a refusal. A retry may help.
    pub machine_lost: bool,
    /// Seconds after which the same request may succeed, if that is known.
    pub retry_after_s: Option<u64>,
}

impl Error {
    /// An error without a remedy of its own.
    pub fn new(kind: ErrorKind, what: impl Into<String>) -> Error {
        Error {
            kind,
            what: what.into(),
            remedy: None,
            context: Vec::new(),
            machine_lost: false,
            retry_after_s: None,
        }
    }

    /// Sets after how many seconds the same request may succeed.
    pub fn retry_after(self, seconds: u64) -> Error {
        Error {
            retry_after_s: Some(seconds),
            ..self
        }
    }

    /// Marks the error as a lost machine: a retry may help.
    pub fn lost(self) -> Error {
        Error {
            machine_lost: true,
            ..self
        }
    }

    /// Marks the error as final: no retry.
    pub fn for_good(self) -> Error {
        Error {
            machine_lost: false,
            ..self
        }
    }

    /// Sets the remedy.
    pub fn remedy(mut self, remedy: impl Into<String>) -> Error {
        self.remedy = Some(remedy.into());
        self
    }

    /// An error of the operating system. A full disk gets its own kind.
    pub fn system(what: impl fmt::Display, source: &io::Error) -> Error {
        let kind = if is_full(source) {
            ErrorKind::DiskFull
        } else {
            ErrorKind::Runtime
        };
        let error = Error::new(kind, format!("{what}: {source}"));
        if kind == ErrorKind::Runtime {
            error.remedy(exhausted(source).unwrap_or("see `thaw doctor`"))
        } else {
            error
        }
    }
}

/// What to do where this process, or the host, has no room for another descriptor.
fn exhausted(error: &io::Error) -> Option<&'static str> {
    match error.raw_os_error()? {
        libc::EMFILE => {
            Some("raise the descriptors that thawd may have: LimitNOFILE of its service, or ulimit -n")
        }
        libc::ENFILE => Some("raise fs.file-max"),
        _ => None,
    }
}

/// Whether an I/O error means that the disk is full.
pub fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    )
}

/// Whether an error or one of its sources is an I/O error that means that the disk is full.
pub fn is_full_somewhere(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        if error.downcast_ref::<io::Error>().is_some_and(is_full) {
            return true;
        }
        next = error.source();
    }
    false
}

/// Replaces control characters, because registries and guests choose parts of a message.
fn one_line(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = self.what.trim_end_matches(['.', '\n']).to_owned();
        if let Some(remedy) = &self.remedy {
            line.push_str("; ");
            line.push_str(remedy);
        }
        f.write_str(&one_line(&line))
    }
}

impl std::error::Error for Error {}

impl From<thaw_pools::Error> for Error {
    fn from(error: thaw_pools::Error) -> Error {
        let kind = match &error {
            thaw_pools::Error::ProgramMissing { .. } => ErrorKind::ProgramMissing,
            thaw_pools::Error::VmmMissing { .. } => ErrorKind::VmmMissing,
            thaw_pools::Error::ShareMissing { .. } => ErrorKind::ShareMissing,
            thaw_pools::Error::Share { .. } => ErrorKind::ShareFailed,
            thaw_pools::Error::ProgramFailed { message, .. } if message.contains("No space left") => {
                ErrorKind::DiskFull
            }
            other if is_full_somewhere(other) => ErrorKind::DiskFull,
            _ => ErrorKind::Runtime,
        };
        Error::new(kind, error.to_string())
    }
}

impl From<thaw_network::Error> for Error {
    fn from(error: thaw_network::Error) -> Error {
        let kind = match &error {
            thaw_network::Error::PortInUse { .. } | thaw_network::Error::NotOurAddress { .. } => {
                ErrorKind::PortUnavailable
            }
            other if is_full_somewhere(other) => ErrorKind::DiskFull,
            _ => ErrorKind::Runtime,
        };
        Error::new(kind, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_kind_slugs_are_distinct() {
        let mut slugs: Vec<_> = ErrorKind::ALL.iter().map(|kind| kind.slug()).collect();
        slugs.sort();
        slugs.dedup();
        assert_eq!(slugs.len(), ErrorKind::ALL.len());
    }

    #[test]
    fn error_message_with_control_characters_is_one_line() {
        let error = Error::new(ErrorKind::RegistryFailed, "registry said\r\n\x1b[31mboo");
        assert_eq!(error.to_string(), "registry said   [31mboo");
        let error = error.remedy("try\nagain");
        assert_eq!(error.to_string(), "registry said   [31mboo; try again");
    }

    #[test]
    fn full_disk_behind_other_errors_is_found() {
        let full = io::Error::from_raw_os_error(libc::ENOSPC);
        let pool = thaw_pools::Error::Io {
            what: "size",
            place: "/x".into(),
            source: full,
        };
        assert_eq!(Error::from(pool).kind, ErrorKind::DiskFull);
        assert!(!is_full_somewhere(&io::Error::other("no")));
    }
}
