//! Failpoints: places between two externally visible steps at which a test can kill or stop a process.
//!
//! This is a crate of its own so that there is one list for crates that do not depend on each other.
//! [`arm`]ed with the name of a [`Failpoint`], the process kills itself there with SIGKILL, or waits there
//! until its test lets it continue. A test takes the names from [`Failpoint::ALL`], so that it covers every
//! one. An unarmed failpoint costs one relaxed load and an untaken branch.

use std::fmt;
use std::fs::File;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};

macro_rules! failpoints {
    ($($(#[$doc:meta])* $name:ident = $slug:literal,)*) => {
        /// A place between two steps.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u16)]
        pub enum Failpoint {
            $($(#[$doc])* $name,)*
        }

        impl Failpoint {
            /// All failpoints, in the order of their declaration.
            pub const ALL: &'static [Failpoint] = &[$(Failpoint::$name),*];

            /// Its name: the operation, and which of its steps is complete.
            pub fn name(self) -> &'static str {
                match self {
                    $(Failpoint::$name => $slug,)*
                }
            }
        }
    };
}

failpoints! {
    RunDirectoryMade = "run.made",
    /// The directory of all sandboxes exists and is locked.
    DirectoriesLocked = "directory.all-locked",
    DirectoryMade = "directory.made",
    DirectoryLocked = "directory.locked",
    /// Including the directory of all sandboxes, if it is empty.
    DirectoriesRemoved = "delete.all-removed",
    /// A record's new file exists and is empty.
    RecordMade = "record.made",
    /// A record's new text exists beside the old.
    RecordBegun = "record.begun",
    RecordWritten = "record.written",
    /// The entry of a name exists and is empty.
    NameClaimed = "name.claimed",
    /// A name's entry says which sandbox gets the name. The sandbox does not exist yet.
    NameGiven = "name.given",
    /// The sandbox and the entry of its name are gone.
    NameForgotten = "name.forgotten",
    /// An entry that a dead process left is removed.
    NameSwept = "name.swept",
    VersionsWritten = "versions.written",
    VersionsReserved = "versions.reserved",

    DiskDirectoryMade = "disk.directory-made",
    DiskTemplateBegun = "disk.template-begun",
    DiskTemplateFormatted = "disk.template-formatted",
    DiskTemplateMade = "disk.template-made",
    DiskMade = "disk.made",
    NetworkTableWritten = "network.table-written",
    NetworkNamespaceMade = "network.namespace-made",
    NetworkTapMade = "network.tap-made",
    /// The slot has a number, and nothing else.
    NetworkPairMade = "network.pair-made",
    NetworkPairSet = "network.pair-set",
    NetworkPairUp = "network.pair-up",
    NetworkHostAddressed = "network.host-addressed",
    NetworkRouted = "network.routed",
    NetworkAddressed = "network.addressed",
    NetworkRulesMade = "network.rules-made",
    NetworkFastLoaded = "network.fast-loaded",
    /// One of the two programs is attached.
    NetworkFastAttached = "network.fast-attached",
    NetworkFastOn = "network.fast-on",
    NetworkPairDeleted = "network.pair-deleted",
    /// In a pod's namespace, and receives no frames yet.
    PodTapMade = "pod.tap-made",
    PodTapUp = "pod.tap-up",
    /// One of the two qdiscs that redirect a pod's frames.
    PodIngressMade = "pod.ingress-made",
    /// One of the two directions.
    PodRedirected = "pod.redirected",
    /// Connections to the pod's localhost on the host are redirected to us.
    PodLoopbackLed = "pod.loopback-led",
    PodLoopbackLeft = "pod.loopback-left",
    /// A pod's own interface receives its frames again.
    PodLeft = "pod.left",
    PolicyInForce = "policy.in-force",
    PolicyFastLeft = "policy.fast-left",
    PolicyConnectionsEnded = "policy.connections-ended",
    PublishReserved = "publish.reserved",
    PublishInserted = "publish.inserted",
    PublishRemoved = "publish.removed",
    /// A port whose sandbox is gone.
    PublishSwept = "publish.swept",
    /// In one of the cgroup hierarchies.
    CgroupDirectoryMade = "cgroup.directory-made",
    CgroupEntered = "cgroup.entered",
    CgroupDirectoryRemoved = "cgroup.directory-removed",
    /// If no other sandbox uses it.
    CgroupParentRemoved = "cgroup.parent-removed",
    CgroupSwept = "cgroup.swept",
    VmmListening = "vmm.listening",
    /// A tethered VMM is connected, and its socket's name is removed.
    VmmUnlisted = "tethered.unlisted",
    VmmLogMade = "vmm.log-made",
    /// Its identity is not recorded yet.
    VmmSpawned = "vmm.spawned",

    /// Made ahead, and not in its pool yet.
    FillMade = "fill.made",
    FillReady = "fill.ready",
    ClaimPopped = "claim.popped",
    ClaimChecked = "claim.checked",
    /// Made for a claim that found the pool empty.
    ClaimMade = "claim.made",
    ReleaseQueued = "release.queued",
    ReleaseTaken = "release.taken",
    ReleaseDestroyed = "release.destroyed",
    CloseBegun = "close.begun",
    CloseDestroyed = "close.destroyed",
    CloseEnded = "close.ended",

    SpareDirectoryMade = "spare.directory-made",
    SpareRecorded = "spare.recorded",
    SpareInCgroup = "spare.in-cgroup",
    SpareMachineMade = "spare.machine-made",
    /// A template is loaded into it.
    SpareRestored = "spare.restored",
    /// The backends that every sandbox of its pool has are attached to it.
    SpareFitted = "spare.fitted",
    /// Its directory has the record of the sandbox that takes it, and is still among the spares'.
    SpareTaken = "spare.taken",
    /// Its directory is the sandbox's.
    SpareMoved = "spare.moved",

    TemplateLockMade = "template.lock-made",
    TemplateLocked = "template.locked",
    TemplateDrafted = "template.drafted",
    TemplateBooted = "template.booted",
    TemplateFrozen = "template.frozen",
    TemplateRehearsed = "template.rehearsed",
    TemplateUnlocked = "template.unlocked",

    CreateImageThere = "create.image-there",
    CreateVmmRecorded = "create.vmm-recorded",
    CreateInCgroup = "create.in-cgroup",
    CreateMachineMade = "create.machine-made",
    CreateRestored = "create.restored",
    CreateLeased = "create.leased",
    CreateVsockListening = "create.vsock-listening",
    CreateAttached = "create.attached",
    CreateRunning = "create.running",
    CreateAcknowledged = "create.acknowledged",
    CreateReady = "create.ready",
    /// The sandbox is listed, and the request is not answered yet.
    CreateShown = "create.shown",
    /// The answer to a request with an idempotency key is in the sandbox's directory, under a temporary name.
    AnswerBegun = "answer.begun",
    AnswerNoted = "answer.noted",
    /// The container is recorded beside the earlier record.
    ContainerBegun = "container.begun",
    ContainerNoted = "container.noted",
    /// The file for its output exists.
    JournalBegun = "journal.begun",

    ThawRegistered = "thaw.registered",
    ThawDiskCopied = "thaw.disk-copied",
    PauseDone = "pause.done",
    ResumeDone = "resume.done",
    /// The directory of a sandbox that is paused with its memory released exists and is locked.
    PausedPlaced = "paused.placed",
    /// The entry of its name exists among those of paused sandboxes.
    PausedNamed = "paused.named",
    /// Its record exists under a temporary name.
    PausedBegun = "paused.begun",
    /// Its record exists, and its machine too.
    PausedWritten = "paused.written",
    /// It is listed as paused, and its machine still exists.
    PausedShown = "paused.shown",
    /// A spare that is to continue it has its record, and its directory is still among the spares'.
    PausedSpareTaken = "paused.spare-taken",
    /// The spare's directory has its id.
    PausedSpareMoved = "paused.spare-moved",
    /// The machine that continues it is ready.
    PausedThawed = "paused.thawed",
    /// Its record is removed.
    PausedForgotten = "paused.forgotten",
    PausedRemoved = "paused.removed",
    /// The entry of its name is removed.
    PausedNameForgotten = "paused.name-forgotten",
    /// What a dead process left of one is removed.
    PausedSwept = "paused.swept",
    /// The note of a paused sandbox's copy exists under a temporary name.
    CopyBegun = "copy.begun",
    /// The note exists. The registry may have no copy yet.
    CopyNoted = "copy.noted",
    /// The registry has the copy, and the note does not say so.
    CopyPushed = "copy.pushed",
    /// The snapshot of a copy is in the directory of a sandbox that is taken over.
    CopyMoved = "copy.moved",
    /// So is all else but its record.
    CopyUnpacked = "copy.unpacked",
    /// The sandbox that was taken over has its record, and is not listed.
    CopyTaken = "copy.taken",
    /// The registry has the claim of a sandbox that is to be resumed or was deleted.
    CopyClaimed = "copy.claimed",
    /// The note of a sandbox that is to be resumed is removed.
    CopyForgotten = "copy.forgotten",

    DraftParentMade = "draft.parent-made",
    DraftMade = "draft.made",
    DraftLocked = "draft.locked",
    DraftFileMade = "draft.file-made",
    DraftDisksMade = "draft.disks-made",
    DraftDiskMade = "draft.disk-made",
    DraftSwept = "draft.swept",
    FreezeNoted = "freeze.noted",
    FreezeDrafted = "freeze.drafted",
    /// Its memory is write-protected, where that is possible.
    FreezePrepared = "freeze.prepared",
    FreezeQuiesced = "freeze.quiesced",
    FreezePaused = "freeze.paused",
    FreezeMemoryWritten = "freeze.memory-written",
    FreezeDiskCopied = "freeze.disk-copied",
    FreezeResumed = "freeze.resumed",
    FreezeContinued = "freeze.continued",
    SnapshotWorkingSetLeft = "snapshot.working-set-left",
    SnapshotFileWritten = "snapshot.file-written",
    SnapshotFileSealed = "snapshot.file-sealed",
    /// The manifest exists, under the directory's temporary name.
    SnapshotDescribed = "snapshot.described",
    SnapshotPlaced = "snapshot.placed",
    FreezeForgotten = "freeze.forgotten",
    SnapshotDoomed = "snapshot.doomed",
    SnapshotRemoved = "snapshot.removed",
    SnapshotForgotten = "snapshot.forgotten",
    /// A stored snapshot's directory exists and is locked.
    ObjectPlaced = "object.placed",
    /// The new file of its record exists and is empty.
    ObjectMade = "object.made",
    ObjectBegun = "object.begun",
    ObjectWritten = "object.written",
    /// Its record is removed, so it is not listed any more.
    ObjectForgotten = "object.forgotten",
    ObjectEmptied = "object.emptied",
    ObjectRemoved = "object.removed",
    /// What a dead maker or remover left is removed.
    ObjectSwept = "object.swept",
    StampMade = "stamp.made",
    StampWritten = "stamp.written",
    StampPlaced = "stamp.placed",
    StampSwept = "stamp.swept",
    ForkFrozen = "fork.frozen",
    /// All clones exist, and none is listed.
    ForkThawed = "fork.thawed",
    ScratchForgotten = "scratch.forgotten",
    ScratchRemoved = "scratch.removed",

    /// The snapshot was compared with its manifest, and nothing is sent yet.
    PushRead = "push.read",
    /// A pack that waits to be sent is a file without a name.
    PushPackMade = "push.pack-made",
    /// The registry has a blob, sent now or before.
    PushBlobThere = "push.blob-there",
    PushPacksThere = "push.packs-there",
    /// The registry has everything but the OCI manifest.
    PushDocumentsThere = "push.documents-there",
    PushNamed = "push.named",
    /// The OCI manifest and the config were read.
    PullListed = "pull.listed",
    PullDocumentsRead = "pull.documents-read",
    PullImagesThere = "pull.images-there",
    /// The small files are written in the store; the memory and the disks are holes.
    PullBegun = "pull.begun",
    PullPackWritten = "pull.pack-written",
    PullPacksWritten = "pull.packs-written",
    /// The files are what the manifest says; the snapshot has no record yet.
    PullCompared = "pull.compared",
    /// The rest of a snapshot in a registry is about to be fetched in the background.
    RemoteBegun = "remote.begun",
    /// The disks are here, and no machine is claimed yet.
    RemoteDisksFetched = "remote.disks-fetched",
    /// The machine has its memory, and no server of its page faults.
    RemoteLoaded = "remote.loaded",
    /// Its page faults are served, and no record says where its memory comes from.
    RemoteServed = "remote.served",
    /// The snapshot's manifest is in its directory.
    RemoteDescribed = "remote.described",
    /// A part of the memory was read from the registry, and is not written.
    RemotePartRead = "remote.part-read",
    RemotePartWritten = "remote.part-written",
    RemoteWorkingSetFetched = "remote.working-set-fetched",
    /// All parts are here; the snapshot is not stored.
    RemoteRestFetched = "remote.rest-fetched",
    /// The page faults of an adopted machine are served again.
    RemoteServedAgain = "remote.served-again",
    /// A page fault was taken from the kernel, and is not served.
    PagesFaultRead = "pages.fault-read",
    /// The thread that faulted goes on, or waits for its part.
    PagesFaultServed = "pages.fault-served",

    DeleteForgotten = "delete.forgotten",
    /// The end of a sandbox is noted in its directory, and its machine runs.
    DeleteNoted = "delete.noted",
    DeleteKilled = "delete.killed",
    DeleteReaped = "delete.reaped",
    DeleteCgroupReleased = "delete.cgroup-released",
    DeleteNetworkReleased = "delete.network-released",
    DeleteDiskReleased = "delete.disk-released",
    DeleteDirectoryRemoved = "delete.directory-removed",

    FailedDirectoryMade = "failed.directory-made",
    FailedBegun = "failed.begun",
    FailedNoted = "failed.noted",
    FailedForgotten = "failed.forgotten",

    CleanSwept = "clean.swept",
    CleanKilled = "clean.killed",
    CleanCgroupRemoved = "clean.cgroup-removed",
    CleanDirectoryRemoved = "clean.directory-removed",
    AdoptOwned = "adopt.owned",
    AdoptConnected = "adopt.connected",
    AdoptAttached = "adopt.attached",
    AdoptRecorded = "adopt.recorded",
    AdoptShown = "adopt.shown",

    ServeOldRemoved = "serve.old-removed",
    /// The socket exists, and its owner is not set yet.
    ServeBound = "serve.bound",
    ServeListening = "serve.listening",
    ServeEnded = "serve.ended",
    ServeReleased = "serve.released",

    StoreDirectoryMade = "store.directory-made",
    StoreLockMade = "store.lock-made",
    StorePartialMade = "store.partial-made",
    /// What a dead process left is removed.
    StorePartialCleared = "store.partial-cleared",
    StorePartialPlaced = "store.partial-placed",
    StoreFileMade = "store.file-made",
    StoreFileWritten = "store.file-written",
    StoreFileRenamed = "store.file-renamed",
    StoreFileRemoved = "store.file-removed",
    StoreDirectoryDoomed = "store.directory-doomed",
    StoreDirectoryRemoved = "store.directory-removed",
    LayerDataMade = "store.data-made",
    LayerDataWritten = "store.data-written",
    /// It has its final length and is one hole.
    LayerDataReserved = "store.data-reserved",
    ReadyMade = "store.ready-made",
    ReadyWritten = "store.ready-written",
    ImageMetadataMade = "store.metadata-made",
    ImageMetadataWritten = "store.metadata-written",
    ChunkDigestLearned = "store.chunk-digest-learned",
    ChunkWritten = "store.chunk-written",
    ChunkReady = "store.chunk-ready",
    RepairWritten = "store.repair-written",
    RepairReady = "store.repair-ready",
    EvictDataMade = "store.evict-data-made",
    EvictReadyWritten = "store.evict-ready-written",
    EvictLinked = "store.evict-linked",
    EvictExchanged = "store.evict-exchanged",
    EvictOldRemoved = "store.evict-old-removed",
    RecordingMade = "store.recording-made",
    RecordingWritten = "store.recording-written",
    RecordingSettled = "store.recording-settled",
    RecordingEnded = "store.recording-ended",
    OrderBegun = "store.order-begun",
    OrderWritten = "store.order-written",
    OrderPlaced = "store.order-placed",
    LayoutMade = "layout.made",
    LayoutSwept = "layout.swept",
    LayoutFileMade = "layout.file-made",
    LayoutFileWritten = "layout.file-written",
    LayoutFilePlaced = "layout.file-placed",
}

/// The number of the armed failpoint plus one; 0 if none is armed.
static ARMED: AtomicU32 = AtomicU32::new(0);
/// How many more times it is passed, including the one that triggers.
static PASSES: AtomicU32 = AtomicU32::new(0);

/// The file that exists while the process waits. `None`: the process dies.
static HELD: OnceLock<PathBuf> = OnceLock::new();
/// Interval at which a waiting process checks the file.
const LOOK: Duration = Duration::from_millis(1);

/// There is no such failpoint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no failpoint is {0:?}")]
pub struct Unknown(String);

impl fmt::Display for Failpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Makes this process die at `NAME`, or at `NAME:N` the Nth time it gets there. With `=PATH` appended, it
/// creates that file there and waits until the file is gone.
pub fn arm(text: &str) -> Result<(), Unknown> {
    let unknown = || Unknown(text.to_owned());
    let (place, held) = match text.split_once('=') {
        Some((place, held)) => (place, Some(PathBuf::from(held))),
        None => (text, None),
    };
    let (name, passes) = match place.split_once(':') {
        Some((name, passes)) => (name, passes.parse().map_err(|_| unknown())?),
        None => (place, 1),
    };
    let known = |point: &&Failpoint| point.name() == name;
    let point = Failpoint::ALL.iter().find(known).ok_or_else(unknown)?;
    if let Some(held) = held {
        HELD.set(held).map_err(|_| unknown())?;
    }
    PASSES.store(passes, Ordering::Relaxed);
    ARMED.store(*point as u32 + 1, Ordering::Release);
    Ok(())
}

/// Marks the place of a failpoint.
#[inline]
pub fn reach(point: Failpoint) {
    if ARMED.load(Ordering::Relaxed) == point as u32 + 1 {
        reached();
    }
}

#[cold]
fn reached() {
    if PASSES.fetch_sub(1, Ordering::AcqRel) != 1 {
        return;
    }
    if let Some(held) = HELD.get() {
        if let Err(e) = File::create(held) {
            tracing::error!("cannot create {}: {e}", held.display());
        }
        while held.exists() {
            std::thread::sleep(LOOK);
        }
        return;
    }
    let _ = kill_process(getpid(), Signal::KILL);
    // The signal may take a moment; do nothing until then.
    loop {
        std::thread::park();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_many_and_each_is_one_points() {
        let mut names: Vec<&str> = Failpoint::ALL.iter().map(|p| p.name()).collect();
        assert!(names.len() > 150);
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Failpoint::ALL.len());
        for (number, point) in Failpoint::ALL.iter().enumerate() {
            assert_eq!(*point as usize, number);
        }
    }

    #[test]
    fn what_is_no_failpoint_cannot_be_armed() {
        for text in ["", "create", "create.ready:", "create.ready:x", "create.ready:-1"] {
            assert_eq!(arm(text), Err(Unknown(text.into())));
        }
    }
}
