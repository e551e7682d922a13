//! How `thaw` and `thawd` end: the exit code of each kind of error, what it means, and what to do about it.
//!
//! A container's own exit code is passed through; a closed output pipe gives 141; 125, 126, 127 and 137 have the same meaning as under `docker run`. Thaw's own codes are
//! in 59..=124. `docs/exit-codes.md` is made from this table; a test compares them.

use thaw_sandbox::error::{Error, ErrorKind};

/// The exit of a process after one kind of error.
#[derive(Clone, Copy, Debug)]
pub struct Exit {
    /// The process's exit status.
    pub number: u8,
    /// What it means.
    pub meaning: &'static str,
    /// What to do about it.
    pub remedy: &'static str,
}

macro_rules! exits {
    ($($kind:ident = $number:literal, $meaning:literal, $remedy:literal;)*) => {
        /// The kinds in the order of their numbers, as in the document.
        const KINDS: &[ErrorKind] = &[$(ErrorKind::$kind,)*];

        /// The exit for this kind of error.
        pub fn exit(kind: ErrorKind) -> Exit {
            match kind {
                $(ErrorKind::$kind => Exit { number: $number, meaning: $meaning, remedy: $remedy },)*
            }
        }
    };
}

exits! {
    SandboxClaimed = 59, "another node has resumed or deleted the paused sandbox", "ask the other nodes for it; `thaw rm` removes what is left of it here";
    NodeCapacity = 60, "the node has no room for another machine of this size", "remove sandboxes, ask another node, or raise the ratios in [capacity] of thawd.toml";
    CreationRate = 61, "the tenant makes more sandboxes in a minute than it may", "ask again after the seconds Retry-After says";
    HookMissing = 62, "an after_thaw hook is required, and the snapshot or the sandbox has none", "run the sandbox with --after-thaw, or leave --require-hook out";
    HookFailed = 63, "a hook of the container failed", "see its output above; `thaw exec` runs its command again";
    KvmMissing = 64, "there is no /dev/kvm", "enable virtualisation in the firmware and load kvm_intel or kvm_amd";
    KvmDenied = 65, "/dev/kvm may not be opened", "add this user to the group kvm, or run as root";
    KvmInadequate = 66, "KVM lacks a capability or refused a call", "run `thaw doctor` for what this host has";
    KernelMissing = 67, "the guest kernel is missing or unreadable", "run guest-kernel-config/build, or name a vmlinux in THAW_KERNEL";
    KernelNotPvh = 68, "the guest kernel is not an ELF vmlinux with a PVH note", "use the uncompressed vmlinux that guest-kernel-config/build makes";
    GuestImageMissing = 69, "the guest image is missing or unreadable", "put guest.erofs beside thaw, or name it in THAW_GUEST_IMAGE";
    MemoryTooSmall = 70, "the guest has too little memory", "give it more with --memory";
    GuestNotReady = 71, "the guest did not become ready in time, or ended before", "look at the console lines above; `thaw doctor` may know why";
    HandshakeFailed = 72, "the guest did not take its identity", "look at the console lines above; a guest image of another version does this";
    DiskFull = 73, "the host's disk is full", "free space, or point THAW_DATA elsewhere";
    DigestMismatch = 74, "content does not have the digest it is known by", "pull again; if it repeats, the image or its source is damaged";
    LayerTruncated = 75, "a layer ends before its end", "pull again; if it repeats, push the image again";
    UnknownMediaType = 76, "a manifest or layer is of a kind Thaw does not read", "convert the image to OCI with tar, gzip or zstd layers";
    WrongArchitecture = 77, "the image has nothing for this CPU architecture", "use an image built for linux/amd64";
    UnsafePath = 78, "a layer holds a name or link that leaves the image", "do not use this image: no image tool makes such layers";
    ImageMalformed = 79, "an image's manifest, configuration or layer cannot be read", "build or push the image again";
    ImageNotFound = 80, "there is no such image where it was looked for", "check the name and the tag";
    RegistryUnreachable = 81, "the registry does not answer", "check the network and the name; --plain-http speaks to a registry without TLS";
    RegistryDenied = 82, "the registry refused access (401 or 403)", "log in: credentials are read from ~/.docker/config.json";
    RegistryRateLimited = 83, "the registry says: too many requests (429)", "wait, log in, or use a mirror";
    RegistryFailed = 84, "the registry failed or broke its protocol", "try again later";
    BadReference = 85, "the image reference cannot be understood", "use oci:DIR[:TAG], docker-archive:FILE[:TAG] or [REGISTRY/]NAME[:TAG][@sha256:...]";
    VmmMissing = 86, "thaw-vmm is not installed where it is looked for", "put thaw-vmm beside thaw, or name it in THAW_VMM";
    VmmFailed = 87, "thaw-vmm refused or ended unexpectedly", "see the lines above; THAW_LOG=debug says more";
    GuestEnded = 88, "the guest ended under its container", "see the console lines above";
    NetworkUnavailable = 89, "the private network cannot be made", "use --network none, or see `thaw doctor`";
    ProgramMissing = 90, "a program Thaw needs is not installed", "install it; `thaw doctor` names the package";
    SandboxNotFound = 91, "there is no such running sandbox", "see `thaw ps`";
    ImageNotStored = 92, "--pull never, and the image is not in the store", "pull it first: thaw image pull";
    DaemonUnreachable = 93, "thawd does not answer on its socket", "start thawd again, or remove its socket";
    NameInUse = 94, "a running sandbox or a stored snapshot has this name already", "choose another --name";
    AgentFailed = 95, "the guest's agent refused or broke the connection", "THAW_LOG=debug says more";
    SnapshotDamaged = 96, "a snapshot's file is not what its manifest says, or cannot be read", "of a template: thaw template rm, and it is built again; of your own: use another copy";
    SnapshotIncompatible = 97, "the snapshot is whole, but not for this host, this machine or this version", "build it on this kind of host; thaw template inspect says what it was made for";
    SnapshotSignature = 98, "the snapshot is not signed by a key this node trusts", "sign it when it is made, --sign KEY, or see the keys in THAW_DATA/keys";
    SnapshotNotFound = 99, "there is no such template or snapshot", "see `thaw snapshot ls` or `thaw template ls`";
    ConfigInvalid = 100, "the configuration file cannot be read or says what cannot be", "correct the line it names; `thawd config default` shows every key";
    ImageDamaged = 101, "`thaw image verify`: file data in the store is not what it was", "thaw image verify --repair fetches it again";
    ImageInUse = 102, "a running sandbox uses the image", "end the sandbox first: thaw ps, thaw rm";
    NotIndexable = 103, "a layer cannot be indexed: no SOCI index can describe its compression", "convert the image instead: thaw image convert";
    LoadOrderInvalid = 104, "a load order cannot be read, or is of another image", "record it again: thaw run --record=FILE IMAGE";
    PushRefused = 105, "the place an image is written to cannot take it", "name a registry repository or oci:DIR[:TAG]";
    PortUnavailable = 106, "a port cannot be published: it is in use, or its address is not this host's", "publish another, or port 0 for one that is free";
    NotReady = 107, "the container did not become ready, or ended before", "see what it wrote, and whether it listens where the probe asks";
    Shared = 108, "the sandbox has volumes or block devices of the host, which no snapshot can hold", "run it without -v, or copy what it needs into it";
    VolumeUnavailable = 109, "a directory, file or block device of the host cannot be shared", "check the path: volumes are not made, they must be there";
    ShareMissing = 110, "thaw-share is not installed where it is looked for", "put thaw-share beside thaw, or name it in THAW_SHARE";
    ShareFailed = 111, "thaw-share does not serve", "see the lines above; run as root, or allow user namespaces";
    ServiceFailed = 112, "a unit of systemd cannot be started or stopped", "see journalctl -e";
    RuntimeInUse = 113, "`thaw uninstall`: sandboxes run", "end them first: thaw ps, or kubectl drain";
    SnapshotInUse = 114, "a sandbox or another snapshot needs the snapshot", "remove first what the message names: thaw rm, thaw snapshot rm";
    MemoryReleased = 115, "the sandbox is paused with its memory released", "resume it first: thaw resume";
    VmmTooOld = 116, "the sandbox's thaw-vmm is of a release that lacks this", "make the sandbox again: thaw-vmm is replaced with its sandbox";
    MemoryKept = 117, "the memory of the sandbox cannot be released", "pause it with its memory: thaw pause without --release-memory";
    LimitsUnavailable = 118, "this host cannot limit what a sandbox takes of it", "see \"Limits of a sandbox\" in docs/operations.md, or set require_limits = false in [sandbox] of thawd.toml";
    JailIncomplete = 119, "this host cannot jail a VMM whole: namespaces or Landlock are missing", "see docs/jail.md, or set require_jail = false in [sandbox] of thawd.toml";
    DiskBudget = 120, "the node's disk budget has no room for it", "remove sandboxes or snapshots, ask for a smaller disk, or raise limit in [disk] of thawd.toml";
    NotASnapshot = 121, "what a registry has by this reference is no snapshot", "pull an image with `thaw image pull`; check the name and the tag";
    SnapshotMalformed = 122, "a registry's snapshot contradicts itself, or exceeds a limit", "do not use it: push it again from the node that froze it";
    SnapshotDelta = 123, "a delta cannot be pushed: it needs the snapshot that it lies on", "freeze the sandbox without --delta, and push that";
    TenantQuota = 124, "the tenant's quota has no room for it", "remove sandboxes or snapshots of the tenant, or have this node's administrator raise the limit";
    Runtime = 125, "wrong usage, or an error of Thaw itself", "see `thaw --help`";
    NotExecutable = 126, "the container's command cannot be executed", "check its permissions and its format";
    NotFound = 127, "the container's command was not found", "check the command and the image's PATH";
    OutOfMemory = 137, "the container was killed: out of memory (137 also after any other SIGKILL)", "give it more with --memory";
}

/// Exit status of `thaw doctor` if the host lacks something essential.
pub const DOCTOR_FOUND: u8 = 1;
const DOCTOR_ROW: &str =
    "| 1 | `doctor-found` | `thaw doctor`: something essential is missing | do what its fix column says |\n";

/// An error and its remedy as one line.
pub fn line(error: &Error) -> String {
    match error.remedy {
        Some(_) => error.to_string(),
        None => format!("{error}; {}", exit(error.kind).remedy),
    }
}

/// The section of docs/troubleshooting.md for this kind of error.
fn section(kind: ErrorKind) -> &'static str {
    use ErrorKind::*;
    match kind {
        KvmMissing | KvmDenied | KvmInadequate => "kvm-is-missing-or-inadequate",
        KernelMissing | KernelNotPvh | GuestImageMissing | VmmMissing | ProgramMissing | ShareMissing => {
            "a-file-or-program-of-thaw-is-missing"
        }
        MemoryTooSmall | GuestNotReady | HandshakeFailed | VmmFailed | AgentFailed | ShareFailed => {
            "a-sandbox-does-not-start"
        }
        TenantQuota | CreationRate | NodeCapacity => "a-quota-or-the-node-is-full",
        GuestEnded | OutOfMemory => "a-sandbox-ended-by-itself",
        NotReady => "a-container-does-not-become-ready",
        HookMissing | HookFailed => "a-hook-fails",
        DiskFull | DiskBudget => "the-disk-is-full",
        RegistryUnreachable | RegistryDenied | RegistryRateLimited | RegistryFailed => {
            "a-registry-does-not-give-an-image"
        }
        DigestMismatch | LayerTruncated | UnknownMediaType | WrongArchitecture | UnsafePath
        | ImageMalformed | ImageNotFound | BadReference | ImageNotStored | ImageDamaged | ImageInUse
        | NotIndexable | LoadOrderInvalid | PushRefused => "an-image-cannot-be-used",
        NetworkUnavailable | PortUnavailable => "no-network-or-no-port",
        SandboxNotFound | SandboxClaimed | NameInUse | MemoryReleased => "a-sandbox-is-not-found",
        DaemonUnreachable | ServiceFailed => "thawd-does-not-answer",
        SnapshotDamaged | SnapshotIncompatible | SnapshotSignature | SnapshotNotFound | SnapshotInUse
        | NotASnapshot | SnapshotMalformed | SnapshotDelta | Shared | MemoryKept => {
            "a-snapshot-or-template-is-refused"
        }
        ConfigInvalid => "the-configuration-is-refused",
        VolumeUnavailable => "a-volume-cannot-be-shared",
        VmmTooOld | LimitsUnavailable | JailIncomplete | RuntimeInUse => "a-node-refuses-after-an-upgrade",
        Runtime | NotExecutable | NotFound => "a-command-fails",
    }
}

/// The text of docs/exit-codes.md.
pub fn document() -> String {
    let mut text = String::from(
        "# Exit codes of `thaw`\n\n\
         `thaw run` and `thaw exec` exit with their process's own code, or 128 and the signal's number if a signal ended it.\n\
         If the reader of their output has closed its pipe, they exit with 141, as `thaw logs` and `thaw attach` do.\n\
         Everything else is one line on stderr, `thaw: <what>: <where>; <what to do>` (with `--json` an object\n\
         `{\"error\": {\"code\", \"exit\", \"message\"}}`), and one of:\n\n\
         | exit | code | means | what to do |\n|---:|---|---|---|\n",
    );
    text.push_str(DOCTOR_ROW);
    for kind in KINDS {
        let Exit {
            number,
            meaning,
            remedy,
        } = exit(*kind);
        text.push_str(&format!(
            "| {number} | [`{}`](troubleshooting.md#{}) | {meaning} | {remedy} |\n",
            kind.slug(),
            section(*kind)
        ));
    }
    text.push_str("\nThis table is made from `node/daemon/src/exit.rs`; a test keeps them the same.\n");
    text
}

/// Makes a panic of any thread end the process, after its message is printed. The next start cleans up, as after any other end.
pub fn end_on_panic() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        print(panic);
        std::process::abort();
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_are_distinct_and_in_range() {
        let mut numbers: Vec<u8> = KINDS.iter().map(|kind| exit(*kind).number).collect();
        assert!(numbers.is_sorted());
        numbers.dedup();
        assert_eq!(numbers.len(), ErrorKind::ALL.len());
        assert!(numbers.iter().all(|n| matches!(n, 59..=127 | 137)));
    }

    #[test]
    fn exit_codes_document_matches_the_table() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/exit-codes.md");
        if std::env::var_os("THAW_WRITE_DOCS").is_some() {
            std::fs::write(path, document()).unwrap();
        }
        let written = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            written == document(),
            "docs/exit-codes.md is stale: run the tests with THAW_WRITE_DOCS=1"
        );
    }

    #[test]
    fn each_exit_code_has_a_section_of_troubleshooting() {
        let text = include_str!("../../../docs/troubleshooting.md");
        let heading = |line: &str| Some(line.strip_prefix("## ")?.to_lowercase().replace(' ', "-"));
        let sections: Vec<String> = text.lines().filter_map(heading).collect();
        for kind in KINDS {
            let wanted = section(*kind);
            assert!(sections.iter().any(|s| s == wanted), "{kind:?}: {wanted}");
        }
    }

    #[test]
    fn error_line_without_own_remedy_has_the_kinds() {
        let error = Error::new(ErrorKind::RegistryFailed, "registry said\r\n\x1b[31mboo.");
        assert_eq!(line(&error), "registry said   [31mboo; try again later");
        assert_eq!(line(&error.remedy("wait")), "registry said   [31mboo; wait");
    }
}
