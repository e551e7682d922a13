//! A stored snapshot that is being made.
//!
//! Invariant: its directory is locked from before anything is in it until it has a record. Dropped without one, it is removed.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use thaw_failpoint::{Failpoint, reach};

use super::index::{SNAPSHOT, Stored};
use super::object::{self, Object};
use super::{SnapshotStore, lock, new_id};
use crate::error::{Error, ErrorKind};
use crate::file_lock::FileLock;
use crate::tenant::Tenant;

/// What a new snapshot is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NewSnapshot {
    pub name: Option<String>,
    pub labels: BTreeMap<String, String>,
    /// The owner: that of the sandbox.
    pub tenant: Option<Tenant>,
    /// The sandbox that is frozen.
    pub sandbox: String,
    /// The stored snapshot that it was thawed from.
    pub parent: Option<String>,
}

/// A place for a snapshot in the store.
#[derive(Debug)]
pub struct Making {
    store: SnapshotStore,
    object: Object,
    entry: PathBuf,
    _lock: FileLock,
    finished: bool,
}

impl SnapshotStore {
    /// Makes the place for a snapshot. Removes what dead makers left. Blocks.
    ///
    /// # Errors
    /// [`ErrorKind::NameInUse`].
    pub fn begin(&self, new: NewSnapshot) -> Result<Making, Error> {
        let all = self.lock()?;
        self.sweep_locked();
        let id = new_id().map_err(|e| Error::system("cannot read random bytes", &e))?;
        if let Some(name) = &new.name {
            self.refuse_used_name(name, new.tenant.as_ref(), &id)?;
        }
        let entry = self.0.root.join(&id);
        let fail = |e: io::Error| Error::system(format!("cannot create {}", entry.display()), &e);
        fs::DirBuilder::new().mode(0o700).create(&entry).map_err(fail)?;
        let lock = lock(&entry).map_err(fail)?;
        drop(all);
        reach(Failpoint::ObjectPlaced);
        let created = object::now();
        Ok(Making {
            store: self.clone(),
            object: Object {
                id,
                name: new.name,
                labels: new.labels,
                tenant: new.tenant,
                sandbox: new.sandbox,
                parent: new.parent,
                created,
                last_used: created,
            },
            entry,
            _lock: lock,
            finished: false,
        })
    }
}

impl Making {
    /// Its id.
    pub fn id(&self) -> &str {
        &self.object.id
    }

    /// Where to make the snapshot. Nothing exists there yet.
    pub fn snapshot(&self) -> PathBuf {
        self.entry.join(SNAPSHOT)
    }

    /// Stores the snapshot, which is complete. Blocks.
    ///
    /// # Errors
    /// [`ErrorKind::NameInUse`]: another snapshot took the name meanwhile. [`ErrorKind::SnapshotNotFound`]: its base was removed.
    pub fn finish(mut self) -> Result<Arc<Stored>, Error> {
        let all = self.store.lock()?;
        if let Some(name) = &self.object.name {
            self.store
                .refuse_used_name(name, self.object.tenant.as_ref(), &self.object.id)?;
        }
        let made = self.store.0.registry.find(&self.snapshot())?;
        if let Some(base) = &made.manifest().subject.base {
            self.check_base(&made.path().join(&base.place))?;
        }
        let fail = |e: io::Error| Error::system(format!("cannot write into {}", self.entry.display()), &e);
        object::write(&self.entry, &self.object).map_err(fail)?;
        self.finished = true;
        // If this fails, a power loss may take the new snapshot, and no other.
        let _ = all.sync_all();
        let stored = self.store.get(&self.object.id);
        let stored = stored.ok_or_else(|| super::not_found(&self.object.id))?;
        self.store.tell_stored(&stored);
        Ok(stored)
    }

    /// Fails if the base is in the store no more. Bases elsewhere are their owners' business.
    fn check_base(&self, base: &Path) -> Result<(), Error> {
        let is_ours = base.starts_with(&self.store.0.root)
            || fs::canonicalize(&self.store.0.root).is_ok_and(|root| base.starts_with(root));
        match is_ours && self.store.id_of(base).is_none() {
            true => {
                let what = format!(
                    "the snapshot that it lies on was removed meanwhile: {}",
                    base.display()
                );
                Err(Error::new(ErrorKind::SnapshotNotFound, what))
            }
            false => Ok(()),
        }
    }
}

impl Drop for Making {
    fn drop(&mut self) {
        if !self.finished
            && let Err(e) = self.store.empty(&self.entry)
        {
            tracing::warn!("cannot remove {}: {e}", self.entry.display());
        }
    }
}
