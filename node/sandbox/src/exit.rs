//! How `thaw` ends: one exit code for each thing that can be wrong, and one line that says so.
//!
//! The container's own exit code is passed through; 125, 126, 127 and 137 mean what they mean under `docker run`. What
//! is Thaw's own lies in 64..=120. `docs/exit-codes.md` is this table; a test compares them.

use std::fmt;
use std::io;

macro_rules! exit_codes {
    ($($name:ident = $number:literal, $slug:literal, $meaning:literal, $remedy:literal;)*) => {
        /// Every exit code that is not the container's own.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum ExitCode { $(#[doc = $meaning] $name,)* }

        impl ExitCode {
            /// All, by number.
            pub const ALL: &'static [ExitCode] = &[$(ExitCode::$name,)*];

            /// The process's exit status.
            pub fn number(self) -> u8 { match self { $(ExitCode::$name => $number,)* } }

            /// A stable name for programs.
            pub fn slug(self) -> &'static str { match self { $(ExitCode::$name => $slug,)* } }

            /// What it means.
            pub fn meaning(self) -> &'static str { match self { $(ExitCode::$name => $meaning,)* } }

            /// What to do about it.
            pub fn remedy(self) -> &'static str { match self { $(ExitCode::$name => $remedy,)* } }
        }
    };
}

exit_codes! {
    DoctorFound = 1, "doctor-found", "`thaw doctor`: something essential is missing", "do what its fix column says";
    KvmMissing = 64, "kvm-missing", "there is no /dev/kvm", "enable virtualisation in the firmware and load kvm_intel or kvm_amd";
    KvmDenied = 65, "kvm-denied", "/dev/kvm may not be opened", "add this user to the group kvm, or run as root";
    KvmInadequate = 66, "kvm-inadequate", "KVM lacks a capability or refused a call", "run `thaw doctor` for what this host has";
    KernelMissing = 67, "kernel-missing", "the guest kernel is missing or unreadable", "run guest-kernel-config/build, or name a vmlinux in THAW_KERNEL";
    KernelNotPvh = 68, "kernel-not-pvh", "the guest kernel is not an ELF vmlinux with a PVH note", "use the uncompressed vmlinux that guest-kernel-config/build makes";
    GuestImageMissing = 69, "guest-image-missing", "the guest image is missing or unreadable", "put guest.erofs beside thaw, or name it in THAW_GUEST_IMAGE";
    MemoryTooSmall = 70, "memory-too-small", "the guest has too little memory", "give it more with --memory";
    GuestNotReady = 71, "guest-not-ready", "the guest did not become ready in time, or ended before", "look at the console lines above; `thaw doctor` may know why";
    HandshakeFailed = 72, "handshake-failed", "the guest did not take its identity", "look at the console lines above; a guest image of another version does this";
    DiskFull = 73, "disk-full", "the host's disk is full", "free space, or point THAW_DATA elsewhere";
    DigestMismatch = 74, "digest-mismatch", "content does not have the digest it is known by", "pull again; if it repeats, the image or its source is damaged";
    LayerTruncated = 75, "layer-truncated", "a layer ends before its end", "pull again; if it repeats, push the image again";
    UnknownMediaType = 76, "unknown-media-type", "a manifest or layer is of a kind Thaw does not read", "convert the image to OCI with tar, gzip or zstd layers";
    WrongArchitecture = 77, "wrong-architecture", "the image has nothing for this CPU architecture", "use an image built for linux/amd64";
    UnsafePath = 78, "unsafe-path", "a layer holds a name or link that leaves the image", "do not use this image: no image tool makes such layers";
    ImageMalformed = 79, "image-malformed", "an image's manifest, configuration or layer cannot be read", "build or push the image again";
    ImageNotFound = 80, "image-not-found", "there is no such image where it was looked for", "check the name and the tag";
    RegistryUnreachable = 81, "registry-unreachable", "the registry does not answer", "check the network and the name; --plain-http speaks to a registry without TLS";
    RegistryDenied = 82, "registry-denied", "the registry refused access (401 or 403)", "log in: credentials are read from ~/.docker/config.json";
    RegistryRateLimited = 83, "registry-rate-limited", "the registry says: too many requests (429)", "wait, log in, or use a mirror";
    RegistryFailed = 84, "registry-failed", "the registry failed or broke its protocol", "try again later";
    BadReference = 85, "bad-reference", "the image reference cannot be understood", "use oci:DIR[:TAG], docker-archive:FILE or [REGISTRY/]NAME[:TAG|@DIGEST]";
    VmmMissing = 86, "vmm-missing", "thaw-vmm is not installed where it is looked for", "put thaw-vmm beside thaw, or name it in THAW_VMM";
    VmmFailed = 87, "vmm-failed", "thaw-vmm refused or ended unexpectedly", "see the lines above; THAW_LOG=debug says more";
    GuestEnded = 88, "guest-ended", "the guest ended under its container", "see the console lines above";
    NetworkUnavailable = 89, "network-unavailable", "the private network cannot be made", "use --network none, or see `thaw doctor`";
    ProgramMissing = 90, "program-missing", "a program Thaw needs is not installed", "install it; `thaw doctor` names the package";
    SandboxNotFound = 91, "sandbox-not-found", "there is no such running sandbox", "see `thaw ps`";
    ImageNotStored = 92, "image-not-stored", "--pull never, and the image is not in the store", "pull it first: thaw image pull";
    DaemonUnreachable = 93, "daemon-unreachable", "thawd does not answer on its socket", "start thawd again, or remove its socket";
    NameInUse = 94, "name-in-use", "a running sandbox has this name already", "choose another --name";
    AgentFailed = 95, "agent-failed", "the guest's agent refused or broke the connection", "THAW_LOG=debug says more";
    SnapshotDamaged = 96, "snapshot-damaged", "a snapshot's file is not what its manifest says, or cannot be read", "of a template: thaw template rm, and it is built again; of your own: use another copy";
    SnapshotIncompatible = 97, "snapshot-incompatible", "the snapshot is whole, but not for this host, this machine or this version", "build it on this kind of host; thaw template inspect says what it was made for";
    SnapshotSignature = 98, "snapshot-signature", "the snapshot is not signed by a key this node trusts", "sign it when it is made, --sign KEY, or see the keys in THAW_DATA/keys";
    SnapshotNotFound = 99, "snapshot-not-found", "there is no such template or snapshot", "see `thaw template ls`";
    ConfigInvalid = 100, "config-invalid", "the configuration file cannot be read or says what cannot be", "correct the line it names; `thawd config default` shows every key";
    ImageDamaged = 101, "image-damaged", "`thaw image verify`: file data in the store is not what it was", "thaw image verify --repair fetches it again";
    ImageInUse = 102, "image-in-use", "a running sandbox uses the image", "end the sandbox first: thaw ps, thaw rm";
    NotIndexable = 103, "not-indexable", "a layer cannot be indexed: no SOCI index can describe its compression", "convert the image instead: thaw image convert";
    LoadOrderInvalid = 104, "load-order-invalid", "a load order cannot be read, or is of another image", "record it again: thaw run --record=FILE IMAGE";
    PushRefused = 105, "push-refused", "the place an image is written to cannot take it", "name a registry repository or oci:DIR[:TAG]";
    PortUnavailable = 106, "port-unavailable", "a port cannot be published: it is in use, or its address is not this host's", "publish another, or port 0 for one that is free";
    NotReady = 107, "not-ready", "the container did not become ready, or ended before", "see what it wrote, and whether it listens where the probe asks";
    Shared = 108, "shared", "the sandbox has volumes or block devices of the host, which no snapshot can hold", "run it without -v, or copy what it needs into it";
    VolumeUnavailable = 109, "volume-unavailable", "a directory, file or block device of the host cannot be shared", "check the path: volumes are not made, they must be there";
    ShareMissing = 110, "share-missing", "thaw-share is not installed where it is looked for", "put thaw-share beside thaw, or name it in THAW_SHARE";
    ShareFailed = 111, "share-failed", "thaw-share does not serve", "see the lines above; run as root, or allow user namespaces";
    ServiceFailed = 112, "service-failed", "a unit of systemd cannot be started or stopped", "see journalctl -e";
    RuntimeInUse = 113, "runtime-in-use", "`thaw uninstall`: sandboxes run", "end them first: thaw ps, or kubectl drain";
    VmmTooOld = 116, "vmm-too-old", "the sandbox's thaw-vmm is of a release that lacks this", "make the sandbox again: thaw-vmm is replaced with its sandbox";
    LimitsUnavailable = 118, "limits-unavailable", "this host cannot limit what a sandbox takes of it", "see \"Limits of a sandbox\" in docs/operations.md, or set require_limits = false in [sandbox] of thawd.toml";
    JailIncomplete = 119, "jail-incomplete", "this host cannot jail a VMM whole: namespaces or Landlock are missing", "see docs/jail.md, or set require_jail = false in [sandbox] of thawd.toml";
    DiskBudget = 120, "disk-budget", "the node's disk budget has no room for it", "remove sandboxes or snapshots, ask for a smaller disk, or raise limit in [disk] of thawd.toml";
    Runtime = 125, "runtime", "wrong usage, or an error of Thaw itself", "see `thaw --help`";
    NotExecutable = 126, "not-executable", "the container's command cannot be executed", "check its permissions and its format";
    NotFound = 127, "not-found", "the container's command was not found", "check the command and the image's PATH";
    OutOfMemory = 137, "out-of-memory", "the container was killed: out of memory (137 also after any other SIGKILL)", "give it more with --memory";
}

impl ExitCode {
    /// docs/exit-codes.md.
    pub fn document() -> String {
        let mut text = String::from(
            "# Exit codes of `thaw`\n\n\
             `thaw run` and `thaw exec` exit with their process's own code, or 128 and the signal's number if a signal ended it.\n\
             Everything else is one line on stderr, `thaw: <what>: <where>; <what to do>` (with `--json` an object\n\
             `{\"error\": {\"code\", \"exit\", \"message\"}}`), and one of:\n\n\
             | exit | code | means | what to do |\n|---:|---|---|---|\n",
        );
        for code in ExitCode::ALL {
            text.push_str(&format!(
                "| {} | `{}` | {} | {} |\n",
                code.number(),
                code.slug(),
                code.meaning(),
                code.remedy()
            ));
        }
        text.push_str("\nThis table is made from `node/sandbox/src/exit.rs`; a test keeps them the same.\n");
        text
    }
}

/// Why a command ended without success.
#[derive(Debug)]
pub struct Failure {
    pub code: ExitCode,
    /// "<what>: <where>".
    pub what: String,
    /// "<what to do>", where it is better than the code's own.
    pub remedy: Option<String>,
    /// Lines that explain it, shown before it: the guest's console, the VMM's log.
    pub context: Vec<String>,
    /// A machine died or fell silent before it was ready; nothing was refused. Another may do.
    pub machine_lost: bool,
}

impl Failure {
    /// A failure with its code's own remedy.
    pub fn new(code: ExitCode, what: impl Into<String>) -> Failure {
        Failure {
            code,
            what: what.into(),
            remedy: None,
            context: Vec::new(),
            machine_lost: false,
        }
    }

    /// The same, of a machine that died or fell silent.
    pub fn lost(self) -> Failure {
        Failure {
            machine_lost: true,
            ..self
        }
    }

    /// The same, after which nothing is tried again.
    pub fn for_good(self) -> Failure {
        Failure {
            machine_lost: false,
            ..self
        }
    }

    /// The same with another remedy.
    pub fn remedy(mut self, remedy: impl Into<String>) -> Failure {
        self.remedy = Some(remedy.into());
        self
    }

    /// An error of the host's system, which may be a full disk.
    pub fn system(what: impl fmt::Display, error: &io::Error) -> Failure {
        let code = if is_full(error) {
            ExitCode::DiskFull
        } else {
            ExitCode::Runtime
        };
        let failure = Failure::new(code, format!("{what}: {error}"));
        if code == ExitCode::Runtime {
            failure.remedy("see `thaw doctor`")
        } else {
            failure
        }
    }
}

/// Whether an I/O error says that there is no room.
pub fn is_full(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    )
}

/// Whether an error or any error behind it is an I/O error that says that there is no room.
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

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let remedy = self.remedy.as_deref().unwrap_or(self.code.remedy());
        // One line, whatever the parts were: messages of registries and guests are theirs to choose.
        let line = format!("{}; {remedy}", self.what.trim_end_matches(['.', '\n']));
        let line: String = line
            .chars()
            .map(|c| if c.is_control() { ' ' } else { c })
            .collect();
        f.write_str(&line)
    }
}

impl std::error::Error for Failure {}

impl From<thaw_pools::Error> for Failure {
    fn from(error: thaw_pools::Error) -> Failure {
        let code = match &error {
            thaw_pools::Error::ProgramMissing { .. } => ExitCode::ProgramMissing,
            thaw_pools::Error::VmmMissing { .. } => ExitCode::VmmMissing,
            thaw_pools::Error::ShareMissing { .. } => ExitCode::ShareMissing,
            thaw_pools::Error::Share { .. } => ExitCode::ShareFailed,
            thaw_pools::Error::ProgramFailed { message, .. } if message.contains("No space left") => {
                ExitCode::DiskFull
            }
            other if is_full_somewhere(other) => ExitCode::DiskFull,
            _ => ExitCode::Runtime,
        };
        Failure::new(code, error.to_string())
    }
}

impl From<thaw_network::Error> for Failure {
    fn from(error: thaw_network::Error) -> Failure {
        let code = match &error {
            thaw_network::Error::PortInUse { .. } | thaw_network::Error::NotOurAddress { .. } => {
                ExitCode::PortUnavailable
            }
            other if is_full_somewhere(other) => ExitCode::DiskFull,
            _ => ExitCode::Runtime,
        };
        Failure::new(code, error.to_string())
    }
}

/// Has a panic of any thread end the process, once it is said where it was: what it left half done is for the next start
/// to find, as after any other end.
pub fn end_on_panic() {
    let say = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        say(panic);
        std::process::abort();
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_distinct_and_in_their_range() {
        let mut numbers: Vec<u8> = ExitCode::ALL.iter().map(|c| c.number()).collect();
        assert!(numbers.is_sorted());
        let count = numbers.len();
        numbers.dedup();
        assert_eq!(numbers.len(), count);
        assert!(
            numbers
                .iter()
                .all(|n| matches!(n, 1 | 64..=120 | 125..=127 | 137))
        );
        let mut slugs: Vec<_> = ExitCode::ALL.iter().map(|c| c.slug()).collect();
        slugs.sort();
        slugs.dedup();
        assert_eq!(slugs.len(), count);
    }

    #[test]
    fn the_document_is_the_enum() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/exit-codes.md");
        if std::env::var_os("THAW_WRITE_DOCS").is_some() {
            std::fs::write(path, ExitCode::document()).unwrap();
        }
        let written = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            written == ExitCode::document(),
            "docs/exit-codes.md is stale: run the tests with THAW_WRITE_DOCS=1"
        );
    }

    #[test]
    fn a_failure_is_one_line_whatever_was_said() {
        let failure = Failure::new(ExitCode::RegistryFailed, "registry said\r\n\x1b[31mboo");
        assert_eq!(failure.to_string(), "registry said   [31mboo; try again later");
    }

    #[test]
    fn a_full_disk_is_found_behind_other_errors() {
        let full = io::Error::from_raw_os_error(libc::ENOSPC);
        let pool = thaw_pools::Error::Io {
            what: "size",
            place: "/x".into(),
            source: full,
        };
        assert_eq!(Failure::from(pool).code, ExitCode::DiskFull);
        assert!(!is_full_somewhere(&io::Error::other("no")));
    }
}
