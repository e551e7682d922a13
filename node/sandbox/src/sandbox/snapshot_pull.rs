//! Pulls a snapshot from a registry, or a layout directory, into the store.
//!
//! | step | refuses |
//! |---|---|
//! | OCI manifest, config | what is no snapshot, what is too large, a host without the CPU's features or the guest image, a full quota or budget |
//! | documents | a signature that is required and missing, documents that contradict each other |
//! | images | those that are neither stored nor in a registry |
//! | packs | bytes without their hash |
//! | comparison with the snapshot's manifest | files that are not what it says |
//!
//! Invariants: nothing is stored before all steps are done. A pull that fails, is dropped or is killed leaves nothing: it writes into a
//! place of the store that has no record.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use thaw_failpoint::{Failpoint, reach};
use thaw_imagefs::digest::Digest;
use thaw_images::progress::{Event, Progress};
use thaw_images::reference::ImageRef;
use thaw_protocol::api::PullSnapshot;
use tokio::task::JoinSet;

use super::artifact_source::{ArtifactSource, options};
use super::host_cpu::{self, Lacks};
use super::provenance::frozen_images;
use super::{Node, Tenants, budget, kept_components};
use crate::admission::SnapshotPlace;
use crate::blocking::blocking;
use crate::error::{Error, ErrorKind};
use crate::image::destination;
use crate::images::Pull;
use crate::snapshot::artifact::config::ImageSource;
use crate::snapshot::artifact::unpack::{Placed, UnpackError};
use crate::snapshot::artifact::{ArtifactError, Config, Listing, Table, state};
use crate::snapshot::manifest::{Manifest, WholeFile};
use crate::snapshot::store::{Making, NewSnapshot, SnapshotStore, Viewer};
use crate::snapshot::{Draft, Hash, SnapshotDir, Stored};

/// Packs that are fetched at once. Each has at most one chunk in memory, and may wait for the registry's answer longer than for its bytes.
const FETCHED_AT_ONCE: usize = 8;

/// What to pull, and for whom.
pub(super) struct Asked {
    pub from: ImageRef,
    pub plain_http: bool,
    pub new: NewSnapshot,
    /// Whether images may be pulled from a registry on this host's loopback.
    pub may_loopback: bool,
    /// A sandbox runs from it already: it counts in the quota and the disk budget, and is not refused.
    pub is_adopted: bool,
}

impl Tenants {
    /// Pulls a snapshot for a viewer, into the store of its tenant. Dropping the future stops the pull.
    ///
    /// # Errors
    /// Those of each step in the table above.
    pub async fn pull_snapshot(
        &self,
        viewer: &Viewer,
        request: &PullSnapshot,
        progress: Arc<dyn Progress>,
    ) -> Result<(SnapshotStore, Arc<Stored>), Error> {
        let _transfer = self.transfer(viewer.tenant.as_ref()).await?;
        let node = self.for_new(viewer.tenant.as_ref()).await?;
        let asked = Asked {
            from: destination::parse(&request.reference)?,
            plain_http: request.plain_http,
            new: NewSnapshot {
                name: request.name.clone(),
                labels: request.labels.clone(),
                tenant: viewer.tenant.clone(),
                ..NewSnapshot::default()
            },
            may_loopback: viewer.is_node,
            is_adopted: false,
        };
        let stored = pull(&node, asked, host_cpu::lacks, progress).await?;
        Ok((node.stored.clone(), stored))
    }
}

/// Pulls a snapshot into the store of a node.
pub(super) async fn pull(
    node: &Node,
    asked: Asked,
    lacks: Lacks,
    progress: Arc<dyn Progress>,
) -> Result<Arc<Stored>, Error> {
    let found = Found::open(node, &asked, &progress).await?;
    let pulling = found.begin(node, &asked, lacks, &progress).await?;
    pulling.fetch(&progress).await?.finish(node).await
}

/// A snapshot in a registry, of which only the OCI manifest and the config were read.
pub(super) struct Found {
    pub source: Arc<ArtifactSource>,
    /// Digest of the OCI manifest.
    pub digest: Digest,
    pub listing: Listing,
    pub config: Config,
}

impl Found {
    /// # Errors
    /// Those of [`ArtifactSource::listing`] and [`ArtifactSource::document`].
    pub(super) async fn open(
        node: &Node,
        asked: &Asked,
        progress: &Arc<dyn Progress>,
    ) -> Result<Found, Error> {
        let options = options(&node.images, asked.plain_http);
        let source = Arc::new(ArtifactSource::open(&asked.from, &options, progress.clone()).await?);
        let (digest, listing) = source.listing().await?;
        let config =
            Config::decode(&source.document(&listing.config).await?).map_err(|e| source.refuse(e))?;
        reach(Failpoint::PullListed);
        Ok(Found {
            source,
            digest,
            listing,
            config,
        })
    }

    /// Does all steps before the packs.
    ///
    /// # Errors
    /// Those of each step.
    pub(super) async fn begin(
        self,
        node: &Node,
        asked: &Asked,
        lacks: Lacks,
        progress: &Arc<dyn Progress>,
    ) -> Result<Pulling, Error> {
        let (source, listing, config) = (&self.source, &self.listing, &self.config);
        check_host(node, source, config, lacks).await?;
        let documents = [&listing.manifest, &listing.state, &listing.table].map(|it| it.size);
        let small = documents.iter().fold(0u64, |sum, size| sum.saturating_add(*size));
        let bytes = config.data_bytes.saturating_add(small);
        let (place, share) = match asked.is_adopted {
            true => (
                node.admission.adopt_snapshot(asked.new.tenant.as_ref(), bytes),
                node.budget.adopt_snapshot(bytes),
            ),
            false => (
                node.admit_snapshot(asked.new.tenant.clone(), bytes).await?,
                node.budget.copied_snapshot(bytes).await?,
            ),
        };
        let (store, new) = (node.stored.clone(), asked.new.clone());
        let sandbox = config.sandbox.clone();
        let making = blocking(move || store.begin(NewSnapshot { sandbox, ..new })).await?;

        let documents = documents_of(node, source, listing, config).await?;
        reach(Failpoint::PullDocumentsRead);
        images(node, asked, source, config, progress).await?;
        reach(Failpoint::PullImagesThere);
        let (of, subject) = (node.clone(), documents.manifest.subject.clone());
        // Compares the images' metadata too: the guest has inode numbers of it.
        blocking(move || frozen_images(&of, &subject).map(drop)).await?;
        let begun = begin(making, &documents).await?;
        reach(Failpoint::PullBegun);
        Ok(Pulling {
            found: self,
            documents,
            begun,
            share,
            _place: place,
        })
    }
}

/// A pull whose documents are here and agree with each other. The memory and the disks are holes.
pub(super) struct Pulling {
    pub found: Found,
    pub documents: Documents,
    pub begun: Begun,
    share: budget::Share,
    /// Held until the snapshot is stored and counts itself.
    _place: SnapshotPlace,
}

impl Pulling {
    /// Fetches the packs into the memory and the disks.
    ///
    /// # Errors
    /// Those of the source; bytes without their hash.
    pub(super) async fn fetch(mut self, progress: &Arc<dyn Progress>) -> Result<Pulling, Error> {
        let files = std::mem::take(&mut self.begun.files);
        let (source, listing) = (&self.found.source, &self.found.listing);
        progress.event(Event::Resolved {
            digest: self.found.digest,
            layers: listing.packs.len(),
        });
        let table = self.documents.table.clone();
        fetch_packs(source, listing, table, files, progress).await?;
        Ok(self)
    }

    /// Compares the files, which are complete, with the manifest, and stores the snapshot.
    ///
    /// # Errors
    /// [`ErrorKind::SnapshotMalformed`]: they are not what the manifest says. Those of [`Making::finish`].
    pub(super) async fn finish(self, node: &Node) -> Result<Arc<Stored>, Error> {
        let of = node.clone();
        self.finish_as(node, move |making, made| {
            kept_components::note(&of, &made);
            let stored = making.finish()?;
            of.snapshots.hold_ahead(&of, &made);
            Ok((stored.clone(), stored.directory.clone()))
        })
        .await
    }

    /// Compares the files, which are complete, with the manifest. `keep`, which may block, then keeps the snapshot and returns where it is.
    /// What it leaves in the place in the store is removed, unless it finishes that.
    ///
    /// # Errors
    /// [`ErrorKind::SnapshotMalformed`]: they are not what the manifest says. Those of `keep`.
    pub(super) async fn finish_as<T: Send + 'static>(
        self,
        node: &Node,
        keep: impl FnOnce(Making, SnapshotDir) -> Result<(T, PathBuf), Error> + Send + 'static,
    ) -> Result<T, Error> {
        let (of, reference) = (node.clone(), self.found.source.reference.clone());
        let (begun, documents, share, _place) = (self.begun, self.documents, self.share, self._place);
        blocking(move || {
            let Begun { making, draft, .. } = begun;
            let made = compared(&of, &reference, draft, &documents)?;
            let (kept, place) = keep(making, made)?;
            of.budget.written(share, &place);
            Ok(kept)
        })
        .await
    }
}

/// Refuses a snapshot that this host could not thaw.
async fn check_host(
    node: &Node,
    source: &ArtifactSource,
    config: &Config,
    lacks: Lacks,
) -> Result<(), Error> {
    let cpuid = config.cpuid().map_err(|e| source.refuse(e))?;
    let (vcpus, frozen) = (config.facts.machine.vcpus, config.facts.guest_image);
    let (of, what) = (node.clone(), source.reference.clone());
    blocking(move || {
        host_cpu::check(lacks, &cpuid, vcpus, &what)?;
        kept_components::guest_image(&of.templates, &of.paths, frozen).map(drop)
    })
    .await
}

/// The documents of a snapshot, compared with each other.
pub(super) struct Documents {
    pub manifest_bytes: Vec<u8>,
    pub manifest: Manifest,
    signature: Option<Vec<u8>>,
    pub state: Vec<u8>,
    pub working_set: Option<Vec<u8>>,
    pub table: Arc<Placed>,
}

async fn documents_of(
    node: &Node,
    source: &ArtifactSource,
    listing: &Listing,
    config: &Config,
) -> Result<Documents, Error> {
    let malformed = |part, problem: &str| source.refuse(ArtifactError::malformed(part, problem));
    let manifest_bytes = source.document(&listing.manifest).await?;
    let signature = match &listing.signature {
        Some(signature) => Some(source.document(signature).await?),
        None => None,
    };
    // As for a directory: a manifest without a trusted signature is not parsed.
    let trusted = node.templates.registry().trusted();
    trusted
        .check(&manifest_bytes, signature.as_deref())
        .map_err(|reason| {
            let what = format!("{} is refused: {reason}", source.reference);
            Error::new(ErrorKind::SnapshotSignature, what)
        })?;
    let found = WholeFile {
        bytes: manifest_bytes.len() as u64,
        blake3: Hash::of(&manifest_bytes),
    };
    if found != config.manifest {
        return Err(malformed("manifest", "it is not the one that the config names"));
    }
    let manifest = Manifest::decode(&manifest_bytes).map_err(|e| malformed("manifest", &e.to_string()))?;
    config.check_manifest(&manifest).map_err(|e| source.refuse(e))?;
    let state = source.document(&listing.state).await?;
    let cpuid = config.cpuid_bytes().map_err(|e| source.refuse(e))?;
    if state::cpuid(&state) != Some(&cpuid[..]) {
        return Err(malformed("state", "it has another CPUID than the config"));
    }
    let table = Table::decode(&source.document(&listing.table).await?).map_err(|e| source.refuse(e))?;
    let files = [&manifest.files.memory].into_iter().map(|memory| memory.bytes);
    let files = files.chain(manifest.files.disks.iter().map(|disk| disk.contents.bytes));
    table
        .check_sizes(listing.packs.iter().map(|pack| pack.size), files)
        .map_err(|e| source.refuse(e))?;
    if table.data_bytes() != config.data_bytes {
        return Err(malformed(
            "table",
            "its chunks have more or less data than the config says",
        ));
    }
    let working_set = match &listing.working_set {
        Some(working_set) => Some(source.document(working_set).await?),
        None if manifest.files.working_set.is_some() => {
            return Err(malformed(
                "working set",
                "there is none, and the manifest has one",
            ));
        }
        None => None,
    };
    Ok(Documents {
        manifest_bytes,
        manifest,
        signature,
        state,
        working_set,
        table: Arc::new(Placed::new(table)),
    })
}

/// Pulls the images of the sandbox that the store does not have.
async fn images(
    node: &Node,
    asked: &Asked,
    source: &ArtifactSource,
    config: &Config,
    progress: &Arc<dyn Progress>,
) -> Result<(), Error> {
    for image in &config.images {
        let (images, digest) = (node.images.clone(), image.digest.clone());
        if blocking(move || images.by_digest(&digest)).await?.is_some() {
            continue;
        }
        let place = image.place().map_err(|e| source.refuse(e))?;
        let Some(place) = place.filter(|place| asked.may_loopback || !place.is_loopback()) else {
            return Err(not_stored(source, image));
        };
        let options = node.images.pull_options(Pull::Missing, asked.plain_http);
        let reference = ImageRef::Registry(place);
        let pulled = node
            .images
            .pull_with(&reference, &options, progress.clone())
            .await?;
        let expected: Digest = image.digest.parse().unwrap_or(pulled.digest);
        if pulled.digest != expected {
            let what = format!("{reference} is not the image that the snapshot needs");
            return Err(Error::new(ErrorKind::SnapshotIncompatible, what));
        }
    }
    Ok(())
}

fn not_stored(source: &ArtifactSource, image: &ImageSource) -> Error {
    let what = format!(
        "{} needs image {}, which is not in the store and was of no registry that it could be pulled from",
        source.reference, image.digest
    );
    Error::new(ErrorKind::ImageNotStored, what)
        .remedy("copy that image to this node, pull it with thaw image pull, and pull the snapshot again")
}

/// A snapshot that is being written. The fields are dropped in this order: the place is removed last.
pub(super) struct Begun {
    draft: Draft,
    /// The memory and the disks.
    pub files: Vec<File>,
    pub making: Making,
}

/// Begins the snapshot's directory: its small files are written, the memory and the disks are holes. The thread that writes them has the
/// place, so that a pull that is dropped meanwhile removes it after that.
async fn begin(making: Making, documents: &Documents) -> Result<Begun, Error> {
    let (place, of) = (making.snapshot(), documents.manifest.files.clone());
    let state = documents.state.clone();
    let own = of.working_set.as_ref().and(documents.working_set.clone());
    blocking(move || {
        // Moved in here, so that it outlives the draft also on a failure.
        let making = making;
        let mut draft = Draft::begin(&place)?;
        let fail = |e| Error::system(format!("cannot write into {}", place.display()), &e);
        draft.state().write_all(&state).map_err(fail)?;
        draft
            .working_set()
            .write_all(&own.unwrap_or_default())
            .map_err(fail)?;
        draft.memory().set_len(of.memory.bytes).map_err(fail)?;
        let mut files = vec![draft.memory().try_clone().map_err(fail)?];
        for disk in &of.disks {
            let file = draft.add_disk(&disk.id)?;
            file.set_len(disk.contents.bytes).map_err(fail)?;
            files.push(file.try_clone().map_err(fail)?);
        }
        Ok(Begun { draft, files, making })
    })
    .await
}

/// Fetches all packs, a few at once, and writes their chunks to the files.
async fn fetch_packs(
    source: &Arc<ArtifactSource>,
    listing: &Listing,
    table: Arc<Placed>,
    files: Vec<File>,
    progress: &Arc<dyn Progress>,
) -> Result<(), Error> {
    let files = Arc::new(files);
    let mut fetches: JoinSet<Result<(), Error>> = JoinSet::new();
    let done = |joined: Result<Result<(), Error>, tokio::task::JoinError>| {
        joined.map_err(|e| Error::new(ErrorKind::Runtime, e.to_string()))?
    };
    for (number, pack) in (0u32..).zip(&listing.packs) {
        while fetches.len() >= FETCHED_AT_ONCE
            && let Some(joined) = fetches.join_next().await
        {
            done(joined)?;
        }
        let (source, progress, pack) = (source.clone(), progress.clone(), pack.clone());
        let (table, files) = (table.clone(), files.clone());
        fetches.spawn(async move {
            progress.event(Event::Started {
                layer: pack.digest,
                total: Some(pack.size),
            });
            let unpack = move |reader: &mut dyn std::io::Read| table.unpack(number, reader, &files);
            let unpacked = source.read(&pack, unpack).await?;
            let unpacked = unpacked.map_err(|e| match e {
                UnpackError::Write(e) => Error::system("cannot write the snapshot", &e),
                other => source.refuse(ArtifactError::malformed("pack", format!("{number}: {other}"))),
            })?;
            reach(Failpoint::PullPackWritten);
            progress.event(Event::Unpacked {
                layer: pack.digest,
                unpacked,
            });
            Ok(())
        });
    }
    while let Some(joined) = fetches.join_next().await {
        done(joined)?;
    }
    reach(Failpoint::PullPacksWritten);
    Ok(())
}

/// Compares the files with the manifest. Blocks.
fn compared(node: &Node, reference: &str, draft: Draft, documents: &Documents) -> Result<SnapshotDir, Error> {
    let registry = node.templates.registry();
    let signature = documents.signature.as_deref();
    let made = draft.finish_copy(&documents.manifest_bytes, signature, registry.trusted());
    let made: SnapshotDir = made.map_err(|e| match e.is_damage() {
        true => ArtifactError::malformed("manifest", format!("the files are others: {e}")).of(reference),
        false => e.into(),
    })?;
    if let (None, Some(hint)) = (&documents.manifest.files.working_set, &documents.working_set) {
        keep_working_set(node, made.hash(), hint);
    }
    reach(Failpoint::PullCompared);
    Ok(made)
}

/// Keeps the working set that the pushing node recorded. A failure is logged: it is a hint, and the first thaw records another.
fn keep_working_set(node: &Node, manifest: Hash, hint: &[u8]) {
    let working_sets = node.templates.registry().working_sets();
    let kept = working_sets.draft().and_then(|mut draft| {
        draft.write_all(hint)?;
        working_sets.keep(manifest, &draft)
    });
    match kept {
        // Removes one that a VMM would refuse.
        Ok(()) => drop(working_sets.find(manifest)),
        Err(e) => tracing::warn!("the working set of a pulled snapshot is not kept: {e}"),
    }
}

#[cfg(test)]
#[path = "snapshot_registry_test.rs"]
mod tests;
