//! The snapshots of sandboxes that the node keeps: `THAW_DATA/frozen/<id>`.
//!
//! | in it | what |
//! |---|---|
//! | `snapshot/` | the snapshot, as [`Draft`](super::Draft) makes it |
//! | `object.json` | its record ([`object`]) |
//!
//! Invariants: a snapshot is stored exactly while its record exists, which is written last and removed first. Who makes or removes one
//! holds a lock on its directory; if it is killed, the next maker or the next start removes what has no record. Names are given, records
//! changed and bases checked under the lock of the whole store, so that names stay unique and no delta loses its base, whichever
//! processes use the store.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use rustix::fs::FlockOperation;
use thaw_failpoint::{Failpoint, reach};
use thaw_protocol::api::ChangeSnapshot;
use thaw_sys::lock::Lock;

use super::hash::Hash;
use super::register::Registry;
use crate::error::{Error, ErrorKind};
use crate::file_lock::FileLock;
use crate::id::{is_id, new_id};
use crate::tenant::Tenant;
use index::{Index, SNAPSHOT, ids};
use observer::Observed;

mod find;
mod index;
mod making;
pub mod object;
mod observer;
mod retention;
mod shown;
mod thawing;

pub use find::{Viewer, find};
pub use index::Stored;
pub use making::{Making, NewSnapshot};
pub use object::Object;
pub use observer::Observer;
pub use retention::Retention;
pub use thawing::Thawing;

/// Under the data directory. `snapshots` there belongs to containerd's snapshotter.
const FROZEN: &str = "frozen";

/// The stored snapshots under one data directory. Clones are the same store.
#[derive(Clone, Debug)]
pub struct SnapshotStore(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    root: PathBuf,
    registry: Registry,
    index: Mutex<Index>,
    observed: Observed,
}

/// Whom a stored snapshot serves: the id of a sandbox on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum User {
    /// It was thawed from the snapshot.
    Running(String),
    /// It is paused with its memory released, and lies on the snapshot.
    Paused(String),
}

/// Finds whom a stored snapshot serves.
pub type UserOf<'a> = &'a dyn Fn(&Stored) -> Option<User>;

/// Changes of a record.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// `Some(None)` removes the name.
    pub name: Option<Option<String>>,
    /// Whether all labels are removed first.
    pub clear_labels: bool,
    /// Labels to set, or to remove.
    pub labels: BTreeMap<String, Option<String>>,
}

impl From<ChangeSnapshot> for Change {
    fn from(change: ChangeSnapshot) -> Change {
        Change {
            name: change.name,
            clear_labels: change.labels == Some(None),
            labels: change.labels.flatten().unwrap_or_default(),
        }
    }
}

impl SnapshotStore {
    /// Opens the store under a data directory, whether anything is stored or not. `registry` opens its snapshots.
    pub fn open(data: &Path, registry: Registry) -> SnapshotStore {
        SnapshotStore::observed(data, registry, Observed::default())
    }

    fn observed(data: &Path, registry: Registry, observed: Observed) -> SnapshotStore {
        SnapshotStore(Arc::new(Inner {
            root: data.join(FROZEN),
            registry,
            index: Mutex::default(),
            observed,
        }))
    }

    /// The store under another data directory, with the same trust and the same observer.
    ///
    /// # Errors
    /// The directory of stamps there cannot be made.
    pub fn below(&self, data: &Path) -> Result<SnapshotStore, Error> {
        let registry = self.0.registry.below(data)?;
        Ok(SnapshotStore::observed(data, registry, self.0.observed.clone()))
    }

    /// Whether anything was ever stored under a data directory.
    pub fn exists(data: &Path) -> bool {
        data.join(FROZEN).is_dir()
    }

    /// The records under a data directory, without the manifests: for a process that needs only names. Blocks.
    pub fn objects(data: &Path) -> Vec<Object> {
        let root = data.join(FROZEN);
        ids(&root)
            .filter_map(|id| object::read(&root.join(id)).ok())
            .collect()
    }

    /// Removes what dead makers and removers left. Blocks.
    pub fn sweep(&self) {
        if self.0.root.exists()
            && let Ok(_all) = self.lock()
        {
            self.sweep_locked();
        }
    }

    /// All stored snapshots, ordered by id. Blocks.
    pub fn list(&self) -> Vec<Arc<Stored>> {
        let mut index = self.0.index.locked();
        index.refresh(&self.0.root, &self.0.registry);
        index.all().cloned().collect()
    }

    /// The snapshot with this id. Blocks.
    pub fn get(&self, id: &str) -> Option<Arc<Stored>> {
        let mut index = self.0.index.locked();
        is_id(id).then(|| index.entry(&self.0.root, &self.0.registry, id))?
    }

    /// The id of the stored snapshot in this directory, if it is one of this store.
    pub fn id_of(&self, snapshot: &Path) -> Option<String> {
        let (root, snapshot) = (
            fs::canonicalize(&self.0.root).ok()?,
            fs::canonicalize(snapshot).ok()?,
        );
        let entry = snapshot.strip_prefix(root).ok()?.parent()?.to_str()?.to_owned();
        self.get(&entry).map(|stored| stored.object.id.clone())
    }

    /// Notes that a sandbox is thawed from it now. A failure is logged: the thaw does not depend on it. Blocks.
    pub fn note_use(&self, id: &str) {
        let noted = self.update(id, |object| {
            object.last_used = object::now().max(object.last_used);
            Ok(())
        });
        if let Err(e) = noted {
            tracing::warn!("cannot note the use of snapshot {id}: {e}");
        }
    }

    /// Changes the name and the labels of a snapshot. Blocks.
    ///
    /// # Errors
    /// [`ErrorKind::NameInUse`], [`ErrorKind::SnapshotNotFound`].
    pub fn change(&self, id: &str, change: &Change) -> Result<Arc<Stored>, Error> {
        self.update(id, |object| {
            if let Some(name) = &change.name {
                if let Some(name) = name {
                    self.refuse_used_name(name, object.tenant.as_ref(), &object.id)?;
                }
                object.name.clone_from(name);
            }
            if change.clear_labels {
                object.labels.clear();
            }
            for (label, value) in &change.labels {
                match value {
                    Some(value) => object.labels.insert(label.clone(), value.clone()),
                    None => object.labels.remove(label),
                };
            }
            Ok(())
        })
    }

    /// Removes a snapshot. Blocks.
    ///
    /// # Errors
    /// [`ErrorKind::SnapshotInUse`]: another stored snapshot or a paused sandbox lies on it, or a sandbox is being thawed from it, or, unless
    /// `force`, was.
    pub fn remove(&self, id: &str, user_of: UserOf<'_>, force: bool) -> Result<(), Error> {
        let all = self.lock()?;
        let stored = self.get(id).ok_or_else(|| not_found(id))?;
        let in_use = |what: String| Err(Error::new(ErrorKind::SnapshotInUse, what));
        if stored.hash().is_none()
            && let Err(e) = self.0.registry.find(&stored.directory)
            && e.is_passing()
        {
            // Whether something lies on it cannot be told.
            return Err(e.into());
        }
        if let Some(above) = stored.hash().and_then(|hash| self.over(hash)) {
            return in_use(format!(
                "snapshot {id} is the base of snapshot {}",
                above.object.id
            ));
        }
        // Before its users are sought: a snapshot that is being made over it has no manifest yet.
        let _removing = self.lock_unless_thawing(id)?;
        match user_of(&stored) {
            Some(User::Paused(sandbox)) => {
                return in_use(format!(
                    "snapshot {id} is the base of sandbox {sandbox}, which is paused with its memory released"
                ));
            }
            Some(User::Running(sandbox)) if !force => {
                return in_use(format!("sandbox {sandbox} was thawed from snapshot {id}"));
            }
            _ => {}
        }
        let entry = self.0.root.join(id);
        let fail = |e: io::Error| Error::system(format!("cannot remove {}", entry.display()), &e);
        fs::remove_file(entry.join(object::OBJECT)).map_err(fail)?;
        reach(Failpoint::ObjectForgotten);
        self.0.index.locked().forget(id);
        self.tell_removed(id);
        drop(all);
        self.empty(&entry).map_err(fail)
    }

    /// A stored snapshot that lies on the snapshot whose manifest has this hash. Blocks.
    pub fn over(&self, base: Hash) -> Option<Arc<Stored>> {
        self.list().into_iter().find(|stored| stored.base() == Some(base))
    }

    /// Compares every byte of a snapshot with its manifest, and remembers damage. Returns what is damaged. Blocks.
    ///
    /// # Errors
    /// It cannot be read, for another reason than damage.
    pub fn verify(&self, stored: &Stored) -> Result<Vec<String>, Error> {
        let registry = &self.0.registry;
        let damaged = match registry.find(&stored.directory) {
            Ok(snapshot) => {
                let damaged = snapshot.damage()?;
                if !damaged.is_empty() {
                    snapshot.remember_damage(registry.stamps(), &damaged.join(", "));
                }
                let base = snapshot.manifest().subject.base.as_ref();
                let lost = base.and_then(|base| {
                    let under = registry.find(&snapshot.path().join(&base.place));
                    let is_it = under.is_ok_and(|under| under.hash() == base.manifest);
                    (!is_it).then(|| format!("its base at {}", base.place.display()))
                });
                damaged.into_iter().chain(lost).collect()
            }
            Err(e) if e.is_damage() => vec![e.to_string()],
            Err(e) => return Err(e.into()),
        };
        // Listings show it from now on.
        let id = &stored.object.id;
        self.0.index.locked().forget(id);
        if let Ok(_all) = self.lock()
            && let Some(now) = self.get(id)
        {
            self.tell_stored(&now);
        }
        Ok(damaged)
    }

    /// Reads a record, changes it and writes it, if it differs.
    fn update(
        &self,
        id: &str,
        change: impl FnOnce(&mut Object) -> Result<(), Error>,
    ) -> Result<Arc<Stored>, Error> {
        let _all = self.lock()?;
        let stored = self.get(id).ok_or_else(|| not_found(id))?;
        let mut object = stored.object.clone();
        change(&mut object)?;
        if object == stored.object {
            return Ok(stored);
        }
        let entry = self.0.root.join(id);
        object::write(&entry, &object)
            .map_err(|e| Error::system(format!("cannot write the record in {}", entry.display()), &e))?;
        let stored = self.get(id).ok_or_else(|| not_found(id))?;
        self.tell_stored(&stored);
        Ok(stored)
    }

    fn refuse_used_name(&self, name: &str, tenant: Option<&Tenant>, but: &str) -> Result<(), Error> {
        let all = self.list();
        let named = all.iter().map(|stored| &stored.object).find(|object| {
            object.name.as_deref() == Some(name) && object.tenant.as_ref() == tenant && object.id != but
        });
        match named {
            Some(other) => {
                let what = format!("snapshot {} has the name {name} already", other.id);
                Err(Error::new(ErrorKind::NameInUse, what))
            }
            None => Ok(()),
        }
    }

    /// Locks the whole store, and creates its directory for its owner alone if it is missing.
    fn lock(&self) -> Result<FileLock, Error> {
        let root = &self.0.root;
        let fail = |e: io::Error| Error::system(format!("cannot lock {}", root.display()), &e);
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(root);
        made.and_then(|()| lock(root)).map_err(fail)
    }

    /// Removes every entry without a record that no process locks, and records that were not finished.
    fn sweep_locked(&self) {
        for id in ids(&self.0.root) {
            let entry = self.0.root.join(id);
            if entry.join(object::OBJECT).exists() {
                let _ = fs::remove_file(entry.join(object::NEW));
                continue;
            }
            let Ok(file) = File::open(&entry) else { continue };
            if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
                continue;
            }
            match self.empty(&entry) {
                Ok(()) => {
                    reach(Failpoint::ObjectSwept);
                    tracing::info!("removed {}, which a dead process left", entry.display());
                }
                Err(e) => tracing::warn!("cannot remove {}: {e}", entry.display()),
            }
        }
    }

    /// Removes the directory of an entry that has no record. The caller holds its lock.
    fn empty(&self, entry: &Path) -> io::Result<()> {
        let snapshot = entry.join(SNAPSHOT);
        let place = fs::canonicalize(&snapshot);
        match fs::remove_dir_all(&snapshot) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => reach(Failpoint::ObjectEmptied),
        }
        if let Ok(place) = place {
            self.0.registry.stamps().forget(&place);
        }
        fs::remove_dir_all(entry)?;
        reach(Failpoint::ObjectRemoved);
        Ok(())
    }
}

/// The error for an id or a name that no stored snapshot has.
fn not_found(wanted: &str) -> Error {
    Error::new(
        ErrorKind::SnapshotNotFound,
        format!("no stored snapshot has the id or the name {wanted}"),
    )
    .remedy("see `thaw snapshot ls`")
}

/// Locks a directory, and waits for the lock.
fn lock(directory: &Path) -> io::Result<FileLock> {
    Ok(FileLock::take(
        File::open(directory)?,
        FlockOperation::LockExclusive,
    )?)
}

#[cfg(test)]
#[path = "store_test.rs"]
mod tests;
