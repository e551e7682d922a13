//! The templates of this node: `THAW_DATA/templates/<key>`, each the directory of a snapshot.
//!
//! Invariants: a directory named by a key is a complete or a damaged template, never a partial one. A template of an older kernel, guest
//! image or VMM is never used again, and stays until it is removed ([`removal`](super::removal)). Removing a template that a running machine
//! uses is safe: machines keep the memory they have mapped until they end.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use thaw_pools::vmm;
use thaw_sys::lock::Lock;

use super::key::{Ingredients, Key};
use super::{Recipe, Shape, build_lock};
use crate::error::{Error, ErrorKind};
use crate::paths::Paths;
use crate::snapshot::directory::disk_bytes;
use crate::snapshot::{
    Hash, Hold, Manifest, Registered, Registry, Signatures, SnapshotDir, SnapshotError, Subject, directory,
    sweep,
};

/// Templates held in this process's memory.
type Held = Arc<Mutex<HashMap<Key, Arc<Registered>>>>;

/// The templates under one data directory. Clones are the same store.
#[derive(Clone, Debug)]
pub struct Templates {
    paths: Paths,
    root: PathBuf,
    /// Path of thaw-vmm, if it is not in one of the usual places.
    vmm: Option<PathBuf>,
    registry: Registry,
    /// The templates that a long-lived process holds.
    held: Option<Held>,
}

/// The state of a template's directory.
#[derive(Debug)]
pub(super) enum Found {
    Whole(Arc<Registered>),
    Absent,
    /// Damaged, with the error.
    Damaged(Error),
}

/// A template on disk, or what is wrong with it.
#[derive(Debug)]
pub struct Entry {
    pub key: Key,
    pub manifest: Result<Manifest, SnapshotError>,
    /// The damage found by a comparison with its manifest, unless a file has changed since.
    pub damaged: Option<String>,
    /// Why it is no longer used; `None` if it is.
    pub stale: Option<String>,
    /// Bytes on disk.
    pub disk_bytes: u64,
}

impl Templates {
    /// Opens the store. With [`Hold::Sealed`], templates stay in this process's memory once used.
    pub fn open(paths: &Paths, hold: Hold, signatures: Signatures) -> Result<Templates, Error> {
        Ok(Templates {
            paths: paths.clone(),
            root: paths.data.join("templates"),
            vmm: None,
            registry: Registry::open(&paths.data, hold, signatures)?,
            held: (hold == Hold::Sealed).then(Arc::default),
        })
    }

    /// A store for another data directory that makes and trusts templates in the same way, and holds none yet.
    pub fn below(&self, data: &Path) -> Result<Templates, Error> {
        Ok(Templates {
            root: data.join("templates"),
            registry: self.registry.below(data)?,
            held: self.held.as_ref().map(|_| Arc::default()),
            ..self.clone()
        })
    }

    /// Removes what killed builders left: partial templates, locks without holders, partial stamps.
    pub fn sweep(&self) {
        sweep(&self.root);
        build_lock::sweep_locks(&self.root);
        self.registry.stamps().sweep();
    }

    /// The directory of the template with this key, whether it exists or not.
    pub fn directory(&self, key: &Key) -> PathBuf {
        self.root.join(key.as_str())
    }

    /// The registry that opens snapshots for this store.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Path of the thaw-vmm that makes templates now.
    fn vmm(&self) -> Result<PathBuf, Error> {
        match &self.vmm {
            Some(vmm) => Ok(vmm.clone()),
            None => Ok(vmm::find()?),
        }
    }

    /// Whether its thaw-vmm is the one with this hash.
    pub fn makes_with(&self, vmm: Hash) -> bool {
        let ours = self.vmm().ok();
        ours.is_some_and(|path| {
            self.registry
                .stamps()
                .hash_file(&path)
                .is_ok_and(|ours| ours == vmm)
        })
    }

    /// Whether this node's guest image is the one with this hash.
    pub fn has_guest_image(&self, image: Hash) -> bool {
        let ours = self.registry.stamps().hash_file(&self.paths.guest_image);
        ours.is_ok_and(|ours| ours == image)
    }

    /// Keeps copies of this node's components if a template or snapshot was made from exactly these. If a copy fails, only a thaw
    /// after an upgrade is lost.
    pub fn keep_components(&self, of: &Subject) {
        let vmm = self.vmm().ok();
        let ours = [
            (Some(&self.paths.guest_image), of.guest_image),
            (Some(&self.paths.kernel), of.kernel),
            (vmm.as_ref(), of.vmm),
        ];
        for (path, hash) in ours {
            let (Some(path), Some(hash)) = (path, hash) else {
                continue;
            };
            if let Err(e) = self.registry.components().keep(path, hash) {
                tracing::warn!("{} is not kept for snapshots that are of it: {e}", path.display());
            }
        }
    }

    /// The hashes of the components of all templates in this store.
    pub fn components(&self) -> impl Iterator<Item = Hash> {
        let manifests = self.keys().into_iter().filter_map(|key| {
            let found = self.registry.find(&self.directory(&key)).ok()?;
            Some(found.manifest().subject.components().collect::<Vec<_>>())
        });
        manifests.flatten()
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// The ingredients of a template of this shape made now. Blocks, unless all of them were hashed before.
    pub fn ingredients(&self, recipe: &Recipe) -> Result<Ingredients, Error> {
        Ingredients::gather(&self.paths, &self.vmm()?, recipe, self.registry.stamps())
    }

    /// The ingredients, if the hashes of all of them are remembered.
    pub(super) fn remembered_ingredients(&self, recipe: &Recipe) -> Option<Ingredients> {
        let vmm = self.vmm().ok()?;
        Ingredients::remembered(&self.paths, &vmm, recipe, self.registry.stamps())
    }

    /// The template of this key, if this process holds it.
    pub(super) fn in_memory(&self, key: &Key) -> Option<Arc<Registered>> {
        let held = self.held.as_ref()?.locked();
        held.get(key).cloned()
    }

    /// The template whose manifest has this hash, if this process holds it.
    pub(crate) fn held_by_hash(&self, manifest: Hash) -> Option<Arc<Registered>> {
        let held = self.held.as_ref()?.locked();
        held.values().find(|template| template.hash == manifest).cloned()
    }

    /// The shapes of the templates that this process holds and that can serve a sandbox of this size, the best first.
    pub(super) fn shapes_in_memory(&self, vcpus: u8, memory_mib: u32) -> Vec<Shape> {
        let Some(held) = &self.held else {
            return Vec::new();
        };
        let shapes: HashSet<Shape> = held
            .locked()
            .values()
            .map(|template| Shape::of(&template.manifest))
            .filter(|shape| shape.can_serve(vcpus, memory_mib))
            .collect();
        let mut shapes: Vec<Shape> = shapes.into_iter().collect();
        shapes.sort_by_key(|shape| shape.preference(vcpus));
        shapes
    }

    /// The template of this key, verified. `None` if there is none. Blocks while it is read.
    pub fn open_existing(&self, key: &Key) -> Result<Option<Arc<Registered>>, Error> {
        if let Some(registered) = self.in_memory(key) {
            return Ok(Some(registered));
        }
        let registered = match self.registry.register(&self.directory(key)) {
            Ok(registered) => Arc::new(registered),
            Err(SnapshotError::NotFound { .. }) if !self.directory(key).exists() => return Ok(None),
            Err(e) if e.is_damage() => {
                self.note_damage(key, &e);
                let failure = Error::new(ErrorKind::SnapshotDamaged, e.to_string());
                return Err(failure.remedy(format!(
                    "thaw template rm {key}; it is built again when it is needed"
                )));
            }
            Err(e) => return Err(e.into()),
        };
        if let Some(held) = &self.held {
            let mut held = held.locked();
            // Another thread may have been faster: then both use its copy, and share the memory.
            return Ok(Some(held.entry(key.clone()).or_insert(registered).clone()));
        }
        Ok(Some(registered))
    }

    /// The same, but a damaged template is not an error.
    pub(super) fn look(&self, key: &Key) -> Result<Found, Error> {
        match self.open_existing(key) {
            Ok(Some(registered)) => Ok(Found::Whole(registered)),
            Ok(None) => Ok(Found::Absent),
            Err(e) if e.kind == ErrorKind::SnapshotDamaged => Ok(Found::Damaged(e)),
            Err(e) => Err(e),
        }
    }

    /// Compares every byte of a template with its manifest, and remembers damage.
    ///
    /// # Errors
    /// The damage.
    pub fn verify(&self, key: &Key) -> Result<SnapshotDir, SnapshotError> {
        let snapshot = self.registry.find(&self.directory(key))?;
        snapshot.verify().inspect_err(|e| self.note_damage(key, e))?;
        Ok(snapshot)
    }

    /// Remembers damage for listings. Damage that [`Registry::find`] detects itself need not be remembered.
    fn note_damage(&self, key: &Key, error: &SnapshotError) {
        let SnapshotError::Damaged { region, .. } = error else {
            return;
        };
        if let Ok(snapshot) = self.registry.find(&self.directory(key)) {
            snapshot.remember_damage(self.registry.stamps(), region);
        }
    }

    /// The shape of the template for a sandbox of this size: the best of those in the store, or else a damaged one, or else the one to be
    /// built first.
    pub fn shape_for(&self, vcpus: u8, memory_mib: u32, command_line: &str) -> Shape {
        let there = |shape: &Shape| {
            let recipe = Recipe {
                shape: *shape,
                command_line: command_line.to_owned(),
            };
            let ingredients = self.ingredients(&recipe).ok();
            ingredients.is_some_and(|i| self.directory(&i.key()).exists())
        };
        let mut shapes: Vec<Shape> = self
            .keys()
            .iter()
            .filter_map(|key| self.registry.find(&self.directory(key)).ok())
            .map(|snapshot| Shape::of(snapshot.manifest()))
            .filter(|shape| shape.can_serve(vcpus, memory_mib))
            .collect();
        shapes.sort_by_key(|shape| shape.preference(vcpus));
        let best = shapes.into_iter().find(&there);
        // A damaged one is built again, or reported, rather than another one built beside it.
        best.or_else(|| Shape::sufficient(vcpus, memory_mib).find(&there))
            .unwrap_or_else(|| Shape::serving(vcpus, memory_mib))
    }

    /// All templates, by key. `command_line` is the one a template would be booted with now.
    pub fn list(&self, command_line: &str) -> Vec<Entry> {
        self.keys()
            .into_iter()
            .map(|key| self.entry(key, command_line))
            .collect()
    }

    /// The entry of one template.
    pub fn entry(&self, key: Key, command_line: &str) -> Entry {
        let directory = self.directory(&key);
        let found = self.registry.find(&directory);
        let damaged = match &found {
            Ok(snapshot) => snapshot.known_damage(self.registry.stamps()),
            Err(e) => e.is_damage().then(|| e.to_string()),
        };
        let manifest = found.map(|s| s.manifest().clone());
        let stale = manifest
            .as_ref()
            .ok()
            .and_then(|m| self.stale(&key, m, command_line));
        Entry {
            key,
            manifest,
            damaged,
            stale,
            disk_bytes: disk_bytes(&directory),
        }
    }

    /// Why this node would make this template differently now.
    fn stale(&self, key: &Key, manifest: &Manifest, command_line: &str) -> Option<String> {
        let recipe = Recipe {
            shape: Shape::of(manifest),
            command_line: command_line.to_owned(),
        };
        let now = match self.ingredients(&recipe) {
            Ok(now) => now,
            Err(e) => return Some(e.what),
        };
        if now.key() == *key {
            return None;
        }
        let was = &manifest.subject;
        let mut other = Vec::new();
        other.extend((was.kernel != Some(now.kernel)).then_some("kernel"));
        other.extend((was.guest_image != Some(now.guest_image)).then_some("guest image"));
        other.extend((was.vmm != Some(now.vmm)).then_some("thaw-vmm"));
        other.extend((was.command_line.as_ref() != Some(&now.command_line)).then_some("kernel command line"));
        Some(match other.is_empty() {
            true => "of another processor or host kernel".into(),
            false => format!("of another {}", other.join(", ")),
        })
    }

    /// The template with this key or prefix of a key.
    pub fn find(&self, wanted: &str) -> Result<Key, Error> {
        let mut begin = self
            .keys()
            .into_iter()
            .filter(|k| !wanted.is_empty() && k.as_str().starts_with(wanted));
        match (begin.next(), begin.next()) {
            (Some(one), None) => Ok(one),
            (Some(_), Some(_)) => Err(Error::new(
                ErrorKind::SnapshotNotFound,
                format!("more than one template begins with {wanted}"),
            )),
            (None, _) => Err(Error::new(
                ErrorKind::SnapshotNotFound,
                format!("no template is {wanted}"),
            )),
        }
    }

    /// Removes a template, whatever lies on it.
    pub(super) fn discard(&self, key: &Key) -> Result<(), Error> {
        if let Some(held) = &self.held {
            held.locked().remove(key);
        }
        Ok(directory::remove(&self.directory(key), self.registry.stamps())?)
    }

    fn keys(&self) -> Vec<Key> {
        let entries = fs::read_dir(&self.root)
            .into_iter()
            .flatten()
            .filter_map(io::Result::ok);
        let mut keys: Vec<Key> = entries
            .filter(|e| e.file_type().is_ok_and(|t| t.is_dir()))
            .filter_map(|e| e.file_name().to_str()?.parse().ok())
            .collect();
        keys.sort();
        keys
    }
}

#[cfg(test)]
#[path = "store_test.rs"]
pub(super) mod tests;
