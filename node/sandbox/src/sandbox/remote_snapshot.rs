//! Snapshots in a registry that sandboxes are thawed from before all of their memory is here.
//!
//! | step | when |
//! |---|---|
//! | all steps of a pull before the packs, as [`snapshot_pull`](super::snapshot_pull) has them | before the thaw |
//! | `state`, compared with `manifest.json`; the disks | before the thaw |
//! | the parts of the memory that a guest touches | when it touches them |
//! | all other parts: those of the working set first | in the background, as [`remote_ahead`](super::remote_ahead) has it |
//! | the comparison of all files with `manifest.json`; the snapshot is stored | at the end |
//!
//! Invariants: sandboxes that are thawed from one snapshot at once share its files and its reads. Nothing is stored before the last step.
//! If the background gives up, the sandboxes run on, and the snapshot is not stored.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, Weak};

use thaw_failpoint::{Failpoint, reach};
use thaw_imagefs::digest::Digest;
use thaw_images::fetch::{self, FetchOptions};
use thaw_images::progress::{Progress, Silent};
use thaw_images::ranges::StoredBlob;
use thaw_images::reference::{ImageRef, RegistryRef};
use thaw_sys::lock::Lock;
use tokio::sync::{OnceCell, Semaphore};

use super::Node;
use super::artifact_source::options;
use super::host_cpu::Lacks;
use super::remote_ahead::{FetchAhead, each};
use super::remote_files::{MEMORY, Packs, RemoteFiles};
use super::snapshot_pull::{Asked, Found, Pulling};
use crate::blocking::blocking;
use crate::error::{Error, ErrorKind};
use crate::image::destination;
use crate::images::failure;
use crate::snapshot::artifact::ArtifactError;
use crate::snapshot::manifest::WholeFile;
use crate::snapshot::store::NewSnapshot;
use crate::snapshot::{Hash, Registered, Stored};
use crate::state::RemotePlace;
use crate::tenant::Tenant;

/// Snapshots whose rest is fetched at once. Others wait their turn, with their working sets here.
const AHEAD_AT_ONCE: usize = 2;

/// A snapshot that is being fetched.
#[derive(Debug)]
pub struct RemoteSnapshot {
    pub(super) place: RemotePlace,
    pub(super) files: Arc<RemoteFiles>,
    /// The snapshot as a VMM restores it, without its memory.
    pub(super) registered: Arc<Registered>,
    /// The bytes of `manifest.json`.
    pub(super) manifest: Vec<u8>,
}

/// What a reference names.
#[derive(Clone, Debug)]
pub enum Thawable {
    /// The directory of a stored snapshot that is the same.
    Stored(PathBuf),
    Remote(Arc<RemoteSnapshot>),
}

impl Thawable {
    /// The directory of the snapshot, which does not exist yet while it is being fetched, and the snapshot if it is being fetched.
    pub fn into_parts(self) -> (PathBuf, Option<Arc<RemoteSnapshot>>) {
        match self {
            Thawable::Stored(directory) => (directory, None),
            Thawable::Remote(remote) => (remote.registered.directory.clone(), Some(remote)),
        }
    }
}

type Key = (Digest, Option<Tenant>);
type Opening = Arc<OnceCell<Weak<RemoteSnapshot>>>;

/// The snapshots that are being fetched for a node's sandboxes. Clones share them.
#[derive(Clone, Debug)]
pub struct RemoteSnapshots {
    open: Arc<Mutex<HashMap<Key, Opening>>>,
    ahead: Arc<Semaphore>,
}

impl Default for RemoteSnapshots {
    fn default() -> RemoteSnapshots {
        RemoteSnapshots {
            open: Arc::default(),
            ahead: Arc::new(Semaphore::new(AHEAD_AT_ONCE)),
        }
    }
}

impl RemoteSnapshots {
    /// Finds a snapshot in a registry: stored already, being fetched already, or to be fetched from now on. Must be called within a tokio
    /// runtime.
    ///
    /// # Errors
    /// Those of the steps of a pull before its packs.
    pub(super) async fn open(
        &self,
        node: &Node,
        asked: &Asked,
        lacks: Lacks,
        progress: &Arc<dyn Progress>,
    ) -> Result<Thawable, Error> {
        let found = Found::open(node, asked, progress).await?;
        let (manifest, tenant) = (found.config.manifest.blake3, asked.new.tenant.clone());
        if let Some(stored) = stored(node, manifest, tenant.clone()).await? {
            return Ok(Thawable::Stored(stored.directory.clone()));
        }
        let opening = self.opening((found.digest, tenant));
        let mut ours = None;
        let begun = &mut ours;
        let known = opening.get_or_try_init(move || async move {
            let remote = begin(node, asked, found, lacks, progress).await?;
            let known = Arc::downgrade(&remote);
            *begun = Some(remote);
            Ok::<_, Error>(known)
        });
        let known = known.await?.clone();
        // It has been stored between the two looks if it is gone.
        match ours.or_else(|| known.upgrade()) {
            Some(remote) => Ok(Thawable::Remote(remote)),
            None => {
                let what = format!("{} has just been fetched or given up", asked.from);
                Err(Error::new(ErrorKind::SnapshotNotFound, what).remedy("thaw it again"))
            }
        }
    }

    fn opening(&self, key: Key) -> Opening {
        let mut open = self.open.locked();
        open.retain(|_, opening| match opening.get() {
            Some(known) => known.strong_count() > 0,
            None => Arc::strong_count(opening) > 1,
        });
        open.entry(key).or_default().clone()
    }

    /// The files of a snapshot that an earlier process fetched: from the store, or again from the registry.
    ///
    /// # Errors
    /// Those of [`RemoteSnapshots::open`].
    pub(super) async fn again(&self, node: &Node, place: &RemotePlace) -> Result<Arc<RemoteFiles>, Error> {
        let asked = Asked {
            from: destination::parse(&place.reference)?,
            plain_http: false,
            new: NewSnapshot {
                tenant: place.tenant.clone(),
                ..NewSnapshot::default()
            },
            // The sandbox has its images already.
            may_loopback: false,
            is_adopted: true,
        };
        let silent: Arc<dyn Progress> = Arc::new(Silent);
        let found = match stored(node, place.manifest, place.tenant.clone()).await? {
            Some(stored) => Thawable::Stored(stored.directory.clone()),
            // Its vCPUs run here already.
            None => self.open(node, &asked, |_, _| Ok(Vec::new()), &silent).await?,
        };
        match found {
            Thawable::Remote(remote) if remote.place.manifest == place.manifest => Ok(remote.files.clone()),
            Thawable::Remote(_) => {
                let what = format!("{} is another snapshot now", place.reference);
                Err(Error::new(ErrorKind::SnapshotNotFound, what))
            }
            Thawable::Stored(directory) => {
                let (node, hash) = (node.clone(), place.manifest);
                blocking(move || {
                    let snapshot = node.templates.registry().find(&directory)?;
                    if snapshot.hash() != hash {
                        let what = format!("{} is another snapshot now", directory.display());
                        return Err(Error::new(ErrorKind::SnapshotNotFound, what));
                    }
                    let memory = snapshot.contents()?.memory_and_disks.swap_remove(0);
                    let expected = &snapshot.manifest().files.memory;
                    Ok(Arc::new(RemoteFiles::complete(memory, expected)))
                })
                .await
            }
        }
    }
}

/// The stored snapshot with this manifest that this tenant owns.
async fn stored(node: &Node, manifest: Hash, tenant: Option<Tenant>) -> Result<Option<Arc<Stored>>, Error> {
    let store = node.stored.clone();
    blocking(move || {
        let is_it = |it: &Arc<Stored>| it.hash() == Some(manifest) && it.object.tenant == tenant;
        Ok(store.list().into_iter().find(is_it))
    })
    .await
}

/// Does the steps before a thaw but for the disks, and begins to fetch the rest in the background.
async fn begin(
    node: &Node,
    asked: &Asked,
    found: Found,
    lacks: Lacks,
    progress: &Arc<dyn Progress>,
) -> Result<Arc<RemoteSnapshot>, Error> {
    let pulling = found.begin(node, asked, lacks, progress).await?;
    let (documents, source) = (&pulling.documents, &pulling.found.source);
    let manifest = &documents.manifest;
    let state = WholeFile {
        bytes: documents.state.len() as u64,
        blake3: Hash::of(&documents.state),
    };
    if state != manifest.files.state {
        let problem = "it is not the one that the manifest names";
        return Err(source.refuse(ArtifactError::malformed("state", problem)));
    }
    let fetch_options = FetchOptions {
        source: options(&node.images, asked.plain_http),
        client: node.images.client.clone(),
    };
    let ranges = fetch::open(&asked.from, &fetch_options, progress.clone()).await;
    let packs = pulling.found.listing.packs.iter().map(|pack| StoredBlob {
        digest: pack.digest,
        size: pack.size,
        urls: Vec::new(),
    });
    let fail = |e: std::io::Error| Error::system("cannot open the snapshot's files", &e);
    let disks = manifest.files.disks.iter();
    let expected = std::iter::once(&manifest.files.memory).chain(disks.clone().map(|disk| &disk.contents));
    let opened = pulling.begun.files.iter().zip(expected);
    let opened = opened.map(|(file, expected)| Ok((file.try_clone()?, expected)));
    let packs = Packs {
        reference: source.reference.clone(),
        ranges: ranges.map_err(failure)?,
        packs: packs.collect(),
        table: documents.table.clone(),
    };
    let files = RemoteFiles::new(packs, opened.collect::<std::io::Result<_>>().map_err(fail)?);
    let disks = pulling.begun.files[1..].iter().zip(disks);
    let disks = disks.map(|(file, disk)| Ok((disk.id.clone(), file.try_clone()?.into())));
    let registered = Registered::without_memory(
        manifest.clone(),
        Hash::of(&documents.manifest_bytes),
        pulling.begun.making.snapshot(),
        &documents.state,
        disks.collect::<std::io::Result<_>>().map_err(fail)?,
    );
    let remote = Arc::new(RemoteSnapshot {
        place: RemotePlace {
            reference: pinned(&asked.from, pulling.found.digest),
            digest: pulling.found.digest,
            manifest: Hash::of(&documents.manifest_bytes),
            tenant: asked.new.tenant.clone(),
        },
        files: Arc::new(files),
        registered: Arc::new(registered.map_err(fail)?),
        manifest: documents.manifest_bytes.clone(),
    });
    reach(Failpoint::RemoteBegun);
    tokio::spawn(complete(node.clone(), remote.clone(), pulling));
    Ok(remote)
}

/// The reference of exactly this manifest, whatever its tag becomes.
fn pinned(from: &ImageRef, digest: Digest) -> String {
    match from {
        ImageRef::Registry(place) => RegistryRef {
            digest: Some(digest),
            ..place.clone()
        }
        .to_string(),
        other => other.to_string(),
    }
}

/// Fetches what is missing, and stores the snapshot.
async fn complete(node: Node, remote: Arc<RemoteSnapshot>, pulling: Pulling) {
    let reference = &remote.place.reference;
    let stored = async {
        let ahead = FetchAhead::of(&remote.files, pulling.documents.working_set.as_deref());
        ahead.working_set(&remote.files).await?;
        reach(Failpoint::RemoteWorkingSetFetched);
        let _turn = node.remote.ahead.acquire().await;
        ahead.rest(&remote.files).await?;
        reach(Failpoint::RemoteRestFetched);
        pulling.finish(&node).await
    };
    match stored.await {
        Ok(stored) => tracing::info!("{reference} is stored as snapshot {}", stored.object.id),
        Err(e) => tracing::warn!("{reference} is not stored, and sandboxes thawed from it run on: {e}"),
    }
}

impl RemoteSnapshot {
    /// Makes the disks complete: a sandbox gets copies of them, or layers over them.
    ///
    /// # Errors
    /// Those of [`RemoteFiles::fetch`].
    pub(super) async fn fetch_disks(&self) -> Result<(), Error> {
        let parts = (MEMORY + 1..self.files.count()).flat_map(|file| self.files.parts(file));
        each(parts.collect(), |part| {
            let files = self.files.clone();
            async move { files.fetch(part).await }
        })
        .await
    }
}
