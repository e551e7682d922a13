//! Copies of paused sandboxes in a registry, from which another node takes a sandbox over when its own is gone.
//!
//! A copy is the sandbox's snapshot, whose config has the record, sealed with a key that the nodes share. Before a node resumes
//! the sandbox, it writes a claim: a reference that the copy names, with a nonce of the node. A node that finds another nonce there does not
//! resume the sandbox.
//! Registries have no atomic write, so two nodes that claim one copy within the same seconds may both believe that they have it.
//!
//! Invariants: a sandbox with a copy is not resumed without its claim, on any node. A copy that is not sealed with the key is refused.

use std::collections::BTreeMap;
use std::fs;
use std::io::Cursor;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use serde_json::json;
use thaw_failpoint::{Failpoint, reach};
use thaw_images::manifest::{Descriptor, OCI_MANIFEST};
use thaw_images::progress::{Progress, Silent};
use thaw_images::source::Push;

use super::artifact_source::{ArtifactSource, options};
use super::host_cpu::{self, Lacks};
use super::snapshot_pull::{Asked, Found};
use super::snapshot_push::{Pushing, push_from};
use super::{Node, Tenants, kept_components};
use crate::blocking::blocking;
use crate::error::{Error, ErrorKind};
use crate::image::destination;
use crate::images::failure;
use crate::snapshot::Hash;
use crate::snapshot::directory::MANIFEST;
use crate::snapshot::store::{NewSnapshot, Object, Viewer};
use crate::state::paused::here_already;
use crate::state::{Copied, Paused, Portable, Record};

/// What a claim's manifest is of.
const CLAIM_TYPE: &str = "application/vnd.thaw.claim.v1";
/// The annotation with the nonce.
const NONCE: &str = "run.thaw.nonce";
/// The only blob of a claim.
const EMPTY_TYPE: &str = "application/vnd.oci.empty.v1+json";
const EMPTY: &[u8] = b"{}";
/// How long a registry may take to be asked for a claim, and to take one.
const CLAIM_LIMIT: Duration = Duration::from_secs(30);

/// Where copies are.
#[derive(Clone)]
pub struct CopyPlace {
    /// The registry's repository.
    pub repository: String,
    /// The tag of one sandbox's copy.
    pub tag: String,
    /// The key that seals copies.
    pub key: [u8; 32],
}

impl std::fmt::Debug for CopyPlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("CopyPlace").field(&self.reference()).finish()
    }
}

impl CopyPlace {
    /// The reference of the copy.
    pub fn reference(&self) -> String {
        format!("{}:{}", self.repository, self.tag)
    }

    /// A text that belongs to the snapshot with this manifest, with its authentication.
    fn seal(&self, manifest: Hash, text: &str) -> String {
        let both = format!("{manifest}{text}");
        let hash = blake3::keyed_hash(&self.key, both.as_bytes());
        format!("{}{both}", hash.to_hex())
    }

    /// The text, if it was sealed with the key for the snapshot with this manifest.
    fn unseal<'a>(&self, manifest: Hash, sealed: &'a str) -> Option<&'a str> {
        let (hash, both) = sealed.split_at_checked(2 * blake3::OUT_LEN)?;
        let hash = blake3::Hash::from_hex(hash).ok()?;
        let is_sealed = hash == blake3::keyed_hash(&self.key, both.as_bytes());
        both.strip_prefix(&manifest.to_string()).filter(|_| is_sealed)
    }
}

impl Tenants {
    /// Pushes a copy of a paused sandbox. From then on the sandbox is resumed only after it is claimed. The end of `turn` is a value during
    /// whose life nothing resumes or removes the sandbox; it fails if something has done so.
    ///
    /// # Errors
    /// Those of a push, and of `turn`.
    pub async fn copy_paused<T>(
        &self,
        paused: &Paused,
        place: &CopyPlace,
        turn: impl Future<Output = Result<T, Error>>,
    ) -> Result<(), Error> {
        let record = paused.record();
        let to = destination::parse(&place.reference())?;
        destination::check_writable(&to)?;
        let _transfer = self.transfer(record.terms.tenant.as_ref()).await?;
        let node = self.with_stock(record.stock.as_ref()).await?;
        let fresh = Copied {
            claim: format!("{}.{}", place.reference(), hex::<4>()?),
            nonce: hex::<16>()?,
            is_complete: false,
        };
        let (of, by) = (paused.clone(), place.clone());
        let (before, note, sealed) = blocking(move || {
            let before = of.copied()?;
            // A push that failed may have named its copy: whoever found that one has its claim.
            let note = before.clone().unwrap_or(fresh);
            let sealed = by.seal(manifest_of(&of)?, &of.portable(&note.claim)?);
            Ok((before, note, sealed))
        })
        .await?;
        let pushing = Pushing {
            directory: paused.snapshot(),
            object: Object {
                id: record.id.clone(),
                name: None,
                labels: Default::default(),
                tenant: record.terms.tenant.clone(),
                sandbox: record.id.clone(),
                parent: None,
                created: record.created,
                last_used: record.created,
            },
            paused: Some(sealed),
        };
        let of = paused.clone();
        // Before anyone can find the copy.
        let noted = async move {
            let _turn = turn.await?;
            blocking(move || match of.copied()? == before {
                true => of.note_copied(&note),
                false => Err(claimed_meanwhile(&of.record().id)),
            })
            .await
        };
        push_from(&node, pushing, &to, false, silent(), noted)
            .await
            .map(drop)
    }

    /// Removes a paused sandbox. If a registry has a copy of it, a claim is written in the background, so that no node takes it over; a
    /// failure of that is logged.
    ///
    /// # Errors
    /// The files cannot be removed.
    pub async fn forget_paused(&self, paused: &Paused) -> Result<(), Error> {
        let node = self.with_stock(paused.record().stock.as_ref()).await?;
        let (of, by, turns) = (paused.clone(), node.clone(), self.claims.clone());
        let note = blocking(move || {
            let note = of.copied();
            by.forget_paused(&of).map(|()| note)
        });
        match note.await? {
            Ok(None) => {}
            Ok(Some(note)) => drop(tokio::spawn(async move {
                let _turn = turns.acquire().await;
                if let Err(e) = claim(&node, &note).await {
                    tracing::warn!("a deleted sandbox could be resumed from its copy: {e}");
                }
            })),
            Err(e) => tracing::warn!("a deleted sandbox may have a copy: {e}"),
        }
        Ok(())
    }

    /// Claims a paused sandbox for this node, if a registry has a copy of it. No other node resumes it from then on.
    ///
    /// # Errors
    /// [`ErrorKind::SandboxClaimed`]: another node has resumed or deleted it. The registry does not answer.
    pub async fn claim_paused(&self, paused: &Paused) -> Result<(), Error> {
        let of = paused.clone();
        let Some(note) = blocking(move || of.copied()).await? else {
            return Ok(());
        };
        if !claim(self.shared(), &note).await? {
            return Err(taken(&paused.record().id));
        }
        let of = paused.clone();
        blocking(move || of.forget_copied()).await
    }

    /// Deletes a paused sandbox of a node that is gone, for a viewer that reaches it: writes the claim of its copy, so that no node resumes it.
    ///
    /// # Errors
    /// [`ErrorKind::SandboxNotFound`]: there is no copy that the nodes made. [`ErrorKind::SandboxClaimed`]: a node has claimed it. The
    /// registry does not answer.
    pub async fn discard_copy(&self, place: &CopyPlace, viewer: &Viewer) -> Result<(), Error> {
        let _turn = self.claims.acquire().await;
        let copy = FoundCopy::find(self.shared(), place, viewer, &silent()).await?;
        match claim(self.shared(), &copy.note).await? {
            true => Ok(()),
            false => Err(taken(&copy.record.id)),
        }
    }

    /// Makes a paused sandbox of this node of a copy, for a viewer that reaches it. It is not claimed yet.
    ///
    /// # Errors
    /// [`ErrorKind::SandboxNotFound`]: there is no copy that the nodes made. [`ErrorKind::SandboxClaimed`]: a node has claimed it. Those of
    /// a pull.
    pub async fn take_paused(&self, place: &CopyPlace, viewer: &Viewer) -> Result<Paused, Error> {
        self.take(place, viewer, host_cpu::lacks).await
    }

    /// The same, with what this host's processor lacks.
    pub(super) async fn take(
        &self,
        place: &CopyPlace,
        viewer: &Viewer,
        lacks: Lacks,
    ) -> Result<Paused, Error> {
        let _transfer = self.transfer(viewer.tenant.as_ref()).await?;
        let progress = silent();
        let FoundCopy {
            found,
            mut asked,
            portable,
            record,
            note,
        } = FoundCopy::find(self.shared(), place, viewer, &progress).await?;
        refuse_claimed(self.shared(), &note, &record.id).await?;
        let node = self.with_stock(record.stock.as_ref()).await?;
        asked.new.tenant = record.terms.tenant.clone();
        let pulling = found.begin(&node, &asked, lacks, &progress).await?;
        let fetched = pulling.fetch(&progress).await?;
        // A pull takes long. Another call may have resumed the sandbox here meanwhile.
        refuse_claimed(self.shared(), &note, &record.id).await?;
        let of = node.clone();
        fetched
            .finish_as(&node, move |_store, made| {
                adopt(&of, made.path(), record, &portable, &note)
            })
            .await
    }
}

/// A copy in a registry that a node with the key made, of which nothing large was read. The viewer reaches its sandbox.
struct FoundCopy {
    found: Found,
    asked: Asked,
    portable: Portable,
    record: Record,
    /// A claim of this node, which is not written yet.
    note: Copied,
}

impl FoundCopy {
    /// # Errors
    /// [`ErrorKind::SandboxNotFound`]: there is no such copy. Those of [`Found::open`].
    async fn find(
        node: &Node,
        place: &CopyPlace,
        viewer: &Viewer,
        progress: &Arc<dyn Progress>,
    ) -> Result<FoundCopy, Error> {
        let asked = Asked {
            from: destination::parse(&place.reference())?,
            plain_http: false,
            new: NewSnapshot::default(),
            may_loopback: viewer.is_node,
            is_adopted: false,
        };
        let found = Found::open(node, &asked, progress).await;
        let found = found.map_err(|e| match is_absent(&e) {
            true => no_copy(place),
            false => e,
        })?;
        let (sealed, manifest) = (found.config.paused.as_deref(), found.config.manifest.blake3);
        let portable = sealed.and_then(|sealed| place.unseal(manifest, sealed));
        let portable: Portable = portable
            .and_then(|text| serde_json::from_str(text).ok())
            .ok_or_else(|| no_copy(place))?;
        let record = portable.record();
        let tenant = record.terms.tenant.as_ref();
        let is_theirs = viewer.is_node || (tenant.is_some() && tenant == viewer.tenant.as_ref());
        if !is_theirs || !place.tag.starts_with(&record.id) {
            return Err(no_copy(place));
        }
        let note = Copied {
            claim: portable.claim.clone(),
            nonce: hex::<16>()?,
            is_complete: true,
        };
        Ok(FoundCopy {
            found,
            asked,
            portable,
            record,
            note,
        })
    }
}

/// The hash of the manifest of a paused sandbox's snapshot.
fn manifest_of(paused: &Paused) -> Result<Hash, Error> {
    let file = paused.snapshot().join(MANIFEST);
    let bytes = fs::read(&file);
    let bytes = bytes.map_err(|e| Error::system(format!("cannot read {}", file.display()), &e))?;
    Ok(Hash::of(&bytes))
}

/// Makes a paused sandbox of a complete snapshot, which is moved, and returns where that is then. Blocks.
fn adopt(
    node: &Node,
    snapshot: &Path,
    record: Record,
    portable: &Portable,
    note: &Copied,
) -> Result<(Paused, PathBuf), Error> {
    let draft = node.paused.begin_absent(&record.id)?;
    // Looked for after the place is made, which a resume removes after it has made this.
    if node.run.directory(&record.id).exists() {
        return Err(here_already(&record.id));
    }
    let place = draft.snapshot();
    let moved = fs::rename(snapshot, &place);
    moved.map_err(|e| Error::system(format!("cannot make {}", place.display()), &e))?;
    reach(Failpoint::CopyMoved);
    // Before it has a record, so that no paused sandbox loses what it was made with.
    if let Ok(made) = node.templates.registry().find(&place) {
        kept_components::note(node, &made);
    }
    portable.unpack(draft.directory(), note)?;
    reach(Failpoint::CopyUnpacked);
    let paused = draft.finish_filled(record)?;
    reach(Failpoint::CopyTaken);
    Ok((node.count_paused(paused), place))
}

/// Writes a claim, unless there is one. Returns whether it is this node's.
async fn claim(node: &Node, note: &Copied) -> Result<bool, Error> {
    if let Some(there) = nonce_at(node, &note.claim).await? {
        return Ok(there == note.nonce);
    }
    in_time(&note.claim, write_claim(node, note)).await?;
    reach(Failpoint::CopyClaimed);
    // Of two that were written at once, the later one counts.
    match nonce_at(node, &note.claim).await? {
        Some(there) => Ok(there == note.nonce),
        None => Err(no_claim(&note.claim, "it is not there after it was written")),
    }
}

/// Fails if a node has claimed the sandbox.
async fn refuse_claimed(node: &Node, note: &Copied, id: &str) -> Result<(), Error> {
    match nonce_at(node, &note.claim).await? {
        Some(_) => Err(taken(id)),
        None => Ok(()),
    }
}

async fn write_claim(node: &Node, note: &Copied) -> Result<(), Error> {
    let at = destination::parse(&note.claim)?;
    let push = Push::open(&at, &options(&node.images, false), silent()).await;
    let push = push.map_err(failure)?;
    let empty = Descriptor::of(EMPTY_TYPE, EMPTY);
    let uploaded = push.upload(&empty.digest, empty.size, Cursor::new(EMPTY.to_vec()));
    uploaded.await.map_err(failure)?;
    let manifest = json!({
        "schemaVersion": 2, "mediaType": OCI_MANIFEST, "artifactType": CLAIM_TYPE, "config": &empty, "layers": [&empty],
        "annotations": {NONCE: note.nonce},
    });
    let bytes = manifest.to_string().into_bytes();
    let written = push.manifest(destination::tag(&at), OCI_MANIFEST, &bytes);
    written.await.map(drop).map_err(failure)
}

/// The nonce of the claim that was written, if one was.
async fn nonce_at(node: &Node, claim: &str) -> Result<Option<String>, Error> {
    #[derive(Deserialize)]
    struct Manifest {
        #[serde(default)]
        annotations: BTreeMap<String, String>,
    }
    let at = destination::parse(claim)?;
    let read = async {
        let source = ArtifactSource::open(&at, &options(&node.images, false), silent()).await?;
        source.manifest().await
    };
    match in_time(claim, read).await {
        Ok(bytes) => {
            let manifest = serde_json::from_slice::<Manifest>(&bytes).ok();
            let nonce = manifest.and_then(|mut manifest| manifest.annotations.remove(NONCE));
            nonce.map(Some).ok_or_else(|| no_claim(claim, "it is no claim"))
        }
        Err(e) if e.kind == ErrorKind::ImageNotFound => Ok(None),
        Err(e) => Err(e),
    }
}

async fn in_time<T>(claim: &str, work: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    match tokio::time::timeout(CLAIM_LIMIT, work).await {
        Ok(done) => done,
        Err(_) => {
            let what = format!("{claim}: no answer within {} s", CLAIM_LIMIT.as_secs());
            Err(Error::new(ErrorKind::RegistryUnreachable, what))
        }
    }
}

/// Whether a registry has no such copy. Some deny what does not exist.
fn is_absent(e: &Error) -> bool {
    matches!(e.kind, ErrorKind::ImageNotFound | ErrorKind::RegistryDenied)
}

fn no_claim(claim: &str, why: &str) -> Error {
    let what = format!("cannot tell which node has the sandbox: {claim}: {why}");
    Error::new(ErrorKind::RegistryFailed, what)
}

fn claimed_meanwhile(id: &str) -> Error {
    let what = format!("a resume of sandbox {id} was tried while it was copied");
    Error::new(ErrorKind::Runtime, what).remedy("it is copied again")
}

fn no_copy(place: &CopyPlace) -> Error {
    let what = format!("no paused sandbox is at {}", place.reference());
    Error::new(ErrorKind::SandboxNotFound, what)
}

fn taken(id: &str) -> Error {
    let what = format!("sandbox {id} was resumed or deleted by another node");
    Error::new(ErrorKind::SandboxClaimed, what)
}

fn silent() -> Arc<dyn Progress> {
    Arc::new(Silent)
}

/// `N` random bytes in hexadecimal.
fn hex<const N: usize>() -> Result<String, Error> {
    let bytes = crate::random::<N>().map_err(|e| Error::system("cannot read random bytes", &e))?;
    Ok(bytes.iter().map(|b| format!("{b:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(key: u8) -> CopyPlace {
        CopyPlace {
            repository: "registry.example/paused".into(),
            tag: "0123456789ab00ff".into(),
            key: [key; 32],
        }
    }

    #[test]
    fn seal_is_of_one_key_one_snapshot_and_one_text() {
        let (one, other) = (Hash::of(b"one"), Hash::of(b"other"));
        let sealed = place(1).seal(one, "{}");
        assert_eq!(place(1).unseal(one, &sealed), Some("{}"));
        assert_eq!(place(2).unseal(one, &sealed), None);
        assert_eq!(place(1).unseal(other, &sealed), None);
        for wrong in ["", "{}", &sealed[1..], &format!("{sealed} "), &"ä".repeat(64)] {
            assert_eq!(place(1).unseal(one, wrong), None, "{wrong}");
        }
        assert!(!format!("{:?}", place(1)).contains("key"));
    }
}
