//! Pushes a stored snapshot to a registry, or into a layout directory.
//!
//! Invariants: what is sent was compared with the snapshot's manifest since this boot. A blob that the destination has is not sent again.
//! The OCI manifest is sent last, so a reference never names a part of a snapshot. A pack that waits to be sent is a file without a name,
//! so nothing is left of a push that is killed.

use std::fs::File;
use std::io::{BufWriter, Cursor, Read, Seek, Write};
use std::path::PathBuf;
use std::sync::Arc;

use thaw_failpoint::{Failpoint, reach};
use thaw_hypervisor::cpuid::required;
use thaw_hypervisor::state::decode_cpuid;
use thaw_images::manifest::{Descriptor, OCI_MANIFEST};
use thaw_images::progress::{Event, Progress};
use thaw_images::reference::ImageRef;
use thaw_images::source::{Push, Upload};
use thaw_protocol::api::{PushSnapshot, PushedSnapshot};
use tokio::task::JoinSet;

use super::artifact_source::{ArtifactSource, options};
use super::{Node, Tenants};
use crate::blocking::blocking;
use crate::error::{Error, ErrorKind};
use crate::image::destination;
use crate::images::failure;
use crate::snapshot::artifact::config::{Config, FORMAT, Facts, ImageSource};
use crate::snapshot::artifact::listing::{
    CONFIG_TYPE, MANIFEST_TYPE, PACK_TYPE, SIGNATURE_TYPE, STATE_TYPE, TABLE_TYPE, WORKING_SET_TYPE,
};
use crate::snapshot::artifact::pack::PackError;
use crate::snapshot::artifact::{CHUNK, Listing, Packer, Table, state};
use crate::snapshot::directory::Contents;
use crate::snapshot::manifest::{Kind, Manifest, WholeFile};
use crate::snapshot::store::{Object, Viewer};
use crate::snapshot::{Hash, Stored, WorkingSets};

/// Most packs that are sent at once. Small ones wait for the registry's answers longer than for the network.
const SENT_AT_ONCE: u64 = 8;
/// Most bytes of packs that are sent at once: they are files meanwhile.
const SENT_BYTES: u64 = 192 << 20;

impl Tenants {
    /// Pushes a stored snapshot that a viewer reaches.
    ///
    /// # Errors
    /// [`ErrorKind::SnapshotNotFound`]; [`ErrorKind::SnapshotDelta`]; [`ErrorKind::PushRefused`]: the reference cannot be written to, or
    /// the snapshot is too large; those of a damaged snapshot, and of the registry.
    pub async fn push_snapshot(
        &self,
        wanted: &str,
        viewer: &Viewer,
        request: &PushSnapshot,
        progress: Arc<dyn Progress>,
    ) -> Result<PushedSnapshot, Error> {
        let to = destination::parse(&request.reference)?;
        destination::check_writable(&to)?;
        let _transfer = self.transfer(viewer.tenant.as_ref()).await?;
        let (tenants, wanted, viewer) = (self.clone(), wanted.to_owned(), viewer.clone());
        let found = blocking(move || tenants.find_snapshot(&wanted, &viewer)).await?;
        let node = self.with_stock(found.stock.as_ref()).await?;
        push(&node, &found.stored, &to, request.plain_http, progress).await
    }
}

/// A snapshot that was compared with its manifest.
struct Whole {
    manifest: Manifest,
    hash: Hash,
    contents: Contents,
    /// The first vCPU's CPUID, as its `state` has it.
    cpuid: Vec<u8>,
    /// Names of the CPU's features.
    features: Vec<String>,
    images: Vec<ImageSource>,
}

/// What is pushed: a stored snapshot, or that of a paused sandbox.
#[derive(Clone, Debug)]
pub(super) struct Pushing {
    pub directory: PathBuf,
    pub object: Object,
    /// See [`Config::paused`].
    pub paused: Option<String>,
}

/// Pushes a stored snapshot of a node.
pub(super) async fn push(
    node: &Node,
    stored: &Arc<Stored>,
    to: &ImageRef,
    plain_http: bool,
    progress: Arc<dyn Progress>,
) -> Result<PushedSnapshot, Error> {
    let pushing = Pushing {
        directory: stored.directory.clone(),
        object: stored.object.clone(),
        paused: None,
    };
    push_from(node, pushing, to, plain_http, progress, async { Ok(()) }).await
}

/// Pushes a snapshot of a node. Everything is sent before `before_name` ends, but the reference does not name it before that.
pub(super) async fn push_from(
    node: &Node,
    pushing: Pushing,
    to: &ImageRef,
    plain_http: bool,
    progress: Arc<dyn Progress>,
    before_name: impl Future<Output = Result<(), Error>>,
) -> Result<PushedSnapshot, Error> {
    let (of, from) = (node.clone(), pushing.clone());
    let mut whole = blocking(move || read(&of, &from)).await?;
    reach(Failpoint::PushRead);
    refuse_other_tag(node, to, plain_http, &progress).await?;
    let opened = Push::open(to, &options(&node.images, plain_http), progress.clone()).await;
    let sending = Sending {
        push: Arc::new(opened.map_err(failure)?),
        progress,
    };
    let mut sent = Sent::default();
    let files = std::mem::take(&mut whole.contents.memory_and_disks);
    let scratch = node.images.store.root().to_owned();
    let (table, packs) = send_packs(&sending, files, scratch, &mut sent).await?;
    reach(Failpoint::PushPacksThere);
    let config = config(pushing, &whole, &table);
    let Contents {
        manifest,
        signature,
        state,
        working_set,
        ..
    } = whole.contents;
    let mut documents = Documents {
        sending: &sending,
        sent: &mut sent,
    };
    let listing = Listing {
        config: documents.send(CONFIG_TYPE, config.encode()).await?,
        manifest: documents.send(MANIFEST_TYPE, manifest).await?,
        signature: documents.send_any(SIGNATURE_TYPE, signature).await?,
        state: documents.send(STATE_TYPE, state).await?,
        working_set: documents.send_any(WORKING_SET_TYPE, working_set).await?,
        table: documents.send(TABLE_TYPE, table.encode()).await?,
        packs,
    };
    let bytes = listing.encode();
    // What no node would pull gets no name.
    Listing::decode(&bytes).map_err(too_large)?;
    before_name.await?;
    reach(Failpoint::PushDocumentsThere);
    let pushed = sending.push.manifest(destination::tag(to), OCI_MANIFEST, &bytes);
    let digest = pushed.await.map_err(failure)?;
    reach(Failpoint::PushNamed);
    Ok(PushedSnapshot {
        reference: to.to_string(),
        digest: digest.to_string(),
        sent_bytes: sent.bytes,
        present_bytes: sent.present,
    })
}

/// Refuses a tag that names something else than a snapshot: the credentials are the node's, and the caller may be a tenant.
async fn refuse_other_tag(
    node: &Node,
    to: &ImageRef,
    plain_http: bool,
    progress: &Arc<dyn Progress>,
) -> Result<(), Error> {
    if !matches!(to, ImageRef::Registry(_)) {
        return Ok(());
    }
    let there = ArtifactSource::open(to, &options(&node.images, plain_http), progress.clone()).await?;
    match there.listing().await {
        Err(e) if e.kind == ErrorKind::NotASnapshot => {
            let what = format!("{to} is no snapshot, and a push would replace it");
            Err(Error::new(ErrorKind::PushRefused, what).remedy("choose another tag"))
        }
        // Some registries deny what does not exist yet.
        Err(e) if matches!(e.kind, ErrorKind::ImageNotFound | ErrorKind::RegistryDenied) => Ok(()),
        Err(e)
            if matches!(
                e.kind,
                ErrorKind::SnapshotMalformed | ErrorKind::SnapshotIncompatible
            ) =>
        {
            Ok(())
        }
        Err(e) => Err(e),
        Ok(_) => Ok(()),
    }
}

/// Reads a snapshot, and refuses what cannot be pushed. Blocks.
fn read(node: &Node, pushing: &Pushing) -> Result<Whole, Error> {
    let registry = node.templates.registry();
    let snapshot = registry.find(&pushing.directory)?;
    let (id, manifest) = (&pushing.object.id, snapshot.manifest());
    if let Some(base) = &manifest.subject.base {
        let what = format!(
            "snapshot {id} is a delta on {}, which would be missing elsewhere",
            base.manifest
        );
        return Err(Error::new(ErrorKind::SnapshotDelta, what));
    }
    if manifest.subject.kind != Kind::Sandbox {
        let what = format!("snapshot {id} is a template, which each node builds itself");
        return Err(Error::new(ErrorKind::PushRefused, what));
    }
    snapshot.verify_once(registry.stamps())?;
    if manifest.files.state.bytes > state::MAX_STATE {
        return Err(damaged(id, "its state is larger than any can be"));
    }
    let mut contents = snapshot.contents()?;
    if contents.working_set.is_none() {
        contents.working_set = recorded(registry.working_sets(), snapshot.hash());
    }
    let cpuid = state::cpuid(&contents.state).map(<[u8]>::to_vec);
    let cpuid = cpuid.ok_or_else(|| damaged(id, "its state does not say which processor it needs"))?;
    let decoded = decode_cpuid(&cpuid).map_err(|e| damaged(id, &e.to_string()))?;
    let images = manifest.subject.images.iter().map(|image| {
        let stored = node.images.by_digest(&image.digest)?;
        Ok(ImageSource {
            reference: stored.and_then(|stored| of_registry(&stored.reference)),
            digest: image.digest.clone(),
            metadata: image.metadata,
        })
    });
    Ok(Whole {
        images: images.collect::<Result<_, Error>>()?,
        manifest: manifest.clone(),
        hash: snapshot.hash(),
        contents,
        features: required(&decoded),
        cpuid,
    })
}

fn damaged(id: &str, why: &str) -> Error {
    Error::new(ErrorKind::SnapshotDamaged, format!("snapshot {id}: {why}"))
}

/// An image's reference without its digest, if it is one of a registry: other nodes do not have this one's directories.
fn of_registry(reference: &str) -> Option<String> {
    match reference.parse() {
        Ok(ImageRef::Registry(mut place)) => {
            place.digest = None;
            Some(place.to_string())
        }
        _ => None,
    }
}

/// The working set that this node recorded of a snapshot. One that cannot be read is left out: it is a hint.
fn recorded(working_sets: &WorkingSets, manifest: Hash) -> Option<Vec<u8>> {
    let mut file = working_sets.find(manifest)?;
    let mut bytes = Vec::new();
    let read = file.rewind().and_then(|()| file.read_to_end(&mut bytes));
    read.ok().map(|_| bytes)
}

fn config(pushing: Pushing, whole: &Whole, table: &Table) -> Config {
    let Pushing { object, paused, .. } = pushing;
    Config {
        format: FORMAT,
        name: object.name,
        labels: object.labels,
        sandbox: object.sandbox,
        paused,
        manifest: WholeFile {
            bytes: whole.contents.manifest.len() as u64,
            blake3: whole.hash,
        },
        facts: Facts::of(&whole.manifest),
        cpuid: Config::encoded_cpuid(&whole.cpuid),
        features: whole.features.clone(),
        chunk_bytes: CHUNK,
        data_bytes: table.data_bytes(),
        images: whole.images.clone(),
    }
}

/// What was sent, and what was there.
#[derive(Debug, Default)]
struct Sent {
    bytes: u64,
    present: u64,
}

impl Sent {
    fn count(&mut self, blob: &Descriptor, was_sent: bool) {
        let of = match was_sent {
            true => &mut self.bytes,
            false => &mut self.present,
        };
        *of += blob.size;
    }
}

/// Sends documents, and counts them.
struct Documents<'a> {
    sending: &'a Sending,
    sent: &'a mut Sent,
}

impl Documents<'_> {
    async fn send(&mut self, media_type: &str, bytes: Vec<u8>) -> Result<Descriptor, Error> {
        let descriptor = Descriptor::of(media_type, &bytes);
        let was_sent = self.sending.blob(&descriptor, Cursor::new(bytes)).await?;
        self.sent.count(&descriptor, was_sent);
        Ok(descriptor)
    }

    async fn send_any(
        &mut self,
        media_type: &str,
        bytes: Option<Vec<u8>>,
    ) -> Result<Option<Descriptor>, Error> {
        match bytes {
            Some(bytes) => self.send(media_type, bytes).await.map(Some),
            None => Ok(None),
        }
    }
}

/// A destination.
#[derive(Clone)]
struct Sending {
    push: Arc<Push>,
    progress: Arc<dyn Progress>,
}

impl Sending {
    /// Sends a blob unless it is there. Returns whether it was sent.
    async fn blob(&self, blob: &Descriptor, content: impl Upload) -> Result<bool, Error> {
        let there = self.push.blob_exists(&blob.digest).await.map_err(failure)?;
        let is_there = there == Some(blob.size);
        if !is_there {
            let sent = self.push.upload(&blob.digest, blob.size, content).await;
            sent.map_err(failure)?;
        }
        reach(Failpoint::PushBlobThere);
        self.progress.event(Event::Pushing {
            blob: blob.digest,
            sent: blob.size,
            total: blob.size,
        });
        Ok(!is_there)
    }
}

/// Cuts and packs files, and sends the packs, a few at once.
async fn send_packs(
    sending: &Sending,
    files: Vec<File>,
    scratch: PathBuf,
    sent: &mut Sent,
) -> Result<(Table, Vec<Descriptor>), Error> {
    let fail = |e| Error::system("cannot look at the snapshot's files", &e);
    let (mut packer, at_once) = blocking(move || {
        let packer = Packer::new(files).map_err(fail)?;
        let at_once = (SENT_BYTES / packer.span()).min(SENT_AT_ONCE);
        Ok((packer, at_once as usize))
    })
    .await?;
    let mut packs = Vec::new();
    let mut uploads = JoinSet::new();
    let mut count = |joined: Result<Result<(Descriptor, bool), Error>, tokio::task::JoinError>| {
        let joined = joined.map_err(|e| Error::new(ErrorKind::Runtime, e.to_string()))?;
        joined.map(|(blob, was_sent)| sent.count(&blob, was_sent))
    };
    loop {
        let scratch = scratch.clone();
        let (back, made) = blocking(move || {
            let made = one_pack(&mut packer, scratch)?;
            Ok((packer, made))
        })
        .await?;
        packer = back;
        let Some((blob, content)) = made else { break };
        packs.push(blob.clone());
        while uploads.len() >= at_once
            && let Some(joined) = uploads.join_next().await
        {
            count(joined)?;
        }
        let sending = sending.clone();
        uploads.spawn(async move {
            let was_sent = sending.blob(&blob, content).await?;
            Ok((blob, was_sent))
        });
    }
    while let Some(joined) = uploads.join_next().await {
        count(joined)?;
    }
    Ok((packer.into_table(), packs))
}

fn too_large(why: impl std::fmt::Display) -> Error {
    let what = format!("the snapshot is too large to push: {why}");
    Error::new(ErrorKind::PushRefused, what)
}

/// Writes the next pack to a file without a name. Blocks.
fn one_pack(packer: &mut Packer, scratch: PathBuf) -> Result<Option<(Descriptor, File)>, Error> {
    let fail = |e| Error::system(format!("cannot write into {}", scratch.display()), &e);
    let mut content = BufWriter::new(tempfile::tempfile_in(&scratch).map_err(fail)?);
    let pack = packer.pack(&mut content).map_err(|e| match e {
        PackError::Io(e) => fail(e),
        PackError::TooMany => too_large(e),
    })?;
    content.flush().map_err(fail)?;
    let Some(pack) = pack else { return Ok(None) };
    let content = content.into_inner().map_err(|e| fail(e.into_error()))?;
    reach(Failpoint::PushPackMade);
    Ok(Some((
        Descriptor::new(PACK_TYPE, pack.digest, pack.size),
        content,
    )))
}
