//! What keeps an image in the store while a sandbox uses it.
//!
//! Invariant: a store has one descriptor for each leased image, however many lease it. The last lease to be dropped closes it, and a
//! duplicate that another process was given keeps the image by itself. Such a process must be trusted: by unlocking the file it would end
//! all these leases.

use std::collections::HashMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};

use thaw_sys::lock::Lock as _;

use super::{Image, Lock, record};
use crate::error::Error;

/// Keeps an image from being removed for as long as it, a clone, or a duplicate of its descriptor is open.
#[derive(Clone, Debug)]
pub struct Lease(Arc<Lock>);

impl Lease {
    /// The descriptor, to pass to another process that will hold the lease too.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.descriptor()
    }
}

/// The leases of a store that are held, by file. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Leases(Arc<Mutex<HashMap<PathBuf, Weak<Lock>>>>);

impl Leases {
    /// The lease of this file that is held; not that of an earlier file, whose image was removed as damaged.
    fn held(&self, path: &Path) -> io::Result<Option<Lease>> {
        let held = self.0.locked().get(path).and_then(Weak::upgrade);
        still_at(path, held)
    }

    /// This lease, or another one of the same file that was noted meanwhile.
    fn note(&self, path: &Path, lease: Lease) -> io::Result<Lease> {
        let mut held = self.0.locked();
        let earlier = held.get(path).and_then(Weak::upgrade);
        if let Some(earlier) = still_at(path, earlier)? {
            return Ok(earlier);
        }
        held.retain(|_, lease| lease.strong_count() > 0);
        held.insert(path.to_owned(), Arc::downgrade(&lease.0));
        Ok(lease)
    }
}

/// The lease by a lock, if the path still leads to the locked file.
fn still_at(path: &Path, lock: Option<Arc<Lock>>) -> io::Result<Option<Lease>> {
    match lock {
        Some(lock) => Ok(lock.is_at(path)?.then_some(Lease(lock))),
        None => Ok(None),
    }
}

impl Image {
    /// Keeps the image while a sandbox uses it.
    ///
    /// # Errors
    /// `NotFound` if it was removed meanwhile: pull again.
    pub fn lease(&self) -> Result<Lease, Error> {
        let path = self.directory.join(record::LEASE);
        let failed = |error| Error::io(&path, error);
        let lease = match self.leases.held(&path).map_err(failed)? {
            Some(lease) => lease,
            None => {
                let lock = Lock::shared_existing(&path).map_err(failed)?;
                let lock = lock.ok_or_else(|| self.gone())?;
                self.leases.note(&path, Lease(Arc::new(lock))).map_err(failed)?
            }
        };
        // Eviction removes the least recently used image first. A failure to note the time on a full disk does no harm.
        if let Err(error) = record::touch(&path) {
            tracing::debug!(image = %self.digest, %error, "cannot note the lease's time");
        }
        Ok(lease)
    }

    fn gone(&self) -> Error {
        Error::NotFound {
            what: format!("image {}", self.digest),
            place: "the store".into(),
            advice: "it was removed meanwhile: pull it again".into(),
        }
    }
}
