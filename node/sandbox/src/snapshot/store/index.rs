//! The stored snapshots in memory.
//!
//! Invariant: the disk decides. An entry is used only while its record's file is the one it was read from; a manifest, which never
//! changes, is read once. So a listing costs one `stat` for each snapshot, also if another process changes the store.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;
use thaw_protocol::api;

use super::object::{self, Object, Version};
use crate::id::is_id;
use crate::snapshot::directory::disk_bytes;
use crate::snapshot::error::SnapshotError;
use crate::snapshot::hash::Hash;
use crate::snapshot::manifest::Manifest;
use crate::snapshot::register::Registry;

/// Name of the snapshot's own directory within its entry.
pub(super) const SNAPSHOT: &str = "snapshot";

/// A stored snapshot.
#[derive(Clone, Debug)]
pub struct Stored {
    pub object: Object,
    /// The directory that a thaw takes.
    pub directory: PathBuf,
    pub(super) facts: Arc<Facts>,
}

/// What never changes of a stored snapshot.
#[derive(Debug)]
pub(super) struct Facts {
    /// Bytes on disk.
    pub bytes: u64,
    pub said: Result<Said, String>,
}

/// What its manifest says.
#[derive(Debug)]
pub(super) struct Said {
    pub hash: Hash,
    /// Hash of the manifest that it lies on.
    pub base: Option<Hash>,
    /// For callers; `base` is left out.
    pub shown: api::SnapshotManifest,
}

impl Stored {
    /// Bytes on disk.
    pub fn bytes(&self) -> u64 {
        self.facts.bytes
    }

    /// The hash of its manifest, if that can be read.
    pub fn hash(&self) -> Option<Hash> {
        self.facts.said.as_ref().ok().map(|said| said.hash)
    }

    /// The hash of the manifest that it lies on, if it is a delta.
    pub(super) fn base(&self) -> Option<Hash> {
        self.facts.said.as_ref().ok().and_then(|said| said.base)
    }
}

/// The entries that were read, by id.
#[derive(Debug, Default)]
pub(super) struct Index(BTreeMap<String, (Version, Arc<Stored>)>);

impl Index {
    /// Reads what changed on disk. An entry whose record cannot be read is left out.
    pub(super) fn refresh(&mut self, root: &Path, registry: &Registry) {
        let ids: BTreeSet<String> = ids(root).collect();
        self.0.retain(|id, _| ids.contains(id));
        for id in ids {
            self.entry(root, registry, &id);
        }
    }

    /// The entry with this id, as it is on disk.
    pub(super) fn entry(&mut self, root: &Path, registry: &Registry, id: &str) -> Option<Arc<Stored>> {
        let directory = root.join(id);
        let Some(version) = Version::of(&directory) else {
            self.0.remove(id);
            return None;
        };
        // What could not be read may be readable now.
        let known = self.0.get(id).filter(|(_, stored)| stored.facts.said.is_ok());
        if let Some((_, stored)) = known.filter(|(known, _)| *known == version) {
            return Some(stored.clone());
        }
        let snapshot = directory.join(SNAPSHOT);
        let facts = known.map(|(_, stored)| stored.facts.clone());
        let object = match object::read(&directory) {
            Ok(object) if object.id == id => object,
            Ok(object) => {
                tracing::warn!(
                    "{} is the record of {}: it is ignored",
                    directory.display(),
                    object.id
                );
                self.0.remove(id);
                return None;
            }
            Err(e) => {
                tracing::warn!("the record in {} cannot be read: {e}", directory.display());
                self.0.remove(id);
                return None;
            }
        };
        let stored = Arc::new(Stored {
            object,
            facts: facts.unwrap_or_else(|| Arc::new(Facts::read(registry, &snapshot))),
            directory: snapshot,
        });
        self.0.insert(id.to_owned(), (version, stored.clone()));
        Some(stored)
    }

    /// Forgets what was read of an entry's manifest.
    pub(super) fn forget(&mut self, id: &str) {
        self.0.remove(id);
    }

    /// All entries, as they were when they were last read, ordered by id.
    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<Stored>> {
        self.0.values().map(|(_, stored)| stored)
    }
}

/// The ids of all entries in the store, complete or not.
pub(super) fn ids(root: &Path) -> impl Iterator<Item = String> + use<> {
    let entries = fs::read_dir(root).into_iter().flatten();
    let names = entries.filter_map(io::Result::ok).map(|entry| entry.file_name());
    names.filter_map(|name| name.into_string().ok().filter(|name| is_id(name)))
}

impl Facts {
    fn read(registry: &Registry, directory: &Path) -> Facts {
        Facts {
            bytes: disk_bytes(directory),
            said: said(registry, directory).map_err(|e| e.to_string()),
        }
    }
}

fn said(registry: &Registry, directory: &Path) -> Result<Said, SnapshotError> {
    let found = registry.find(directory)?;
    if let Some(region) = found.known_damage(registry.stamps()) {
        return Err(SnapshotError::Damaged {
            directory: directory.to_owned(),
            region,
        });
    }
    Ok(Said {
        hash: found.hash(),
        base: found.manifest().subject.base.as_ref().map(|base| base.manifest),
        shown: shown(found.manifest(), found.hash()),
    })
}

/// What callers see of a manifest.
fn shown(manifest: &Manifest, hash: Hash) -> api::SnapshotManifest {
    /// The part of a workload that is shown.
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Workload {
        image: String,
        command: Vec<String>,
        cpus: u8,
        memory_mib: u32,
        containers: Vec<Container>,
    }
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Container {
        hooks: api::Hooks,
    }
    let (subject, files) = (&manifest.subject, &manifest.files);
    let workload = subject
        .workload
        .as_ref()
        .and_then(|workload| Workload::deserialize(workload).ok());
    let Workload {
        image,
        command,
        cpus,
        memory_mib,
        containers,
    } = workload.unwrap_or_default();
    let text = |hash: Option<Hash>| hash.map(|hash| hash.to_string());
    api::SnapshotManifest {
        hash: hash.to_string(),
        thaw: manifest.thaw.clone(),
        image,
        command,
        images: subject.images.iter().map(|image| image.digest.clone()).collect(),
        cpus,
        memory_mib,
        baseline: crate::template::baseline(manifest),
        processor: subject.cpu.host.clone(),
        vmm: text(subject.vmm),
        kernel: text(subject.kernel),
        guest_image: text(subject.guest_image),
        memory_data_bytes: files.memory.data_bytes,
        disk_data_bytes: files.disks.iter().map(|disk| disk.contents.data_bytes).sum(),
        base: subject.base.as_ref().map(|base| api::SnapshotBase {
            hash: base.manifest.to_string(),
            snapshot: None,
        }),
        hooks: containers.into_iter().next().unwrap_or_default().hooks,
    }
}
