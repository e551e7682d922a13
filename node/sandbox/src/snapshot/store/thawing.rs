//! Keeps a stored snapshot while a sandbox is thawed from it.
//!
//! Invariant: a process removes a snapshot only with an exclusive lock on its directory. So no process removes a snapshot that is being thawed, or
//! that a sandbox is being frozen over ([`Kept`](crate::snapshot::kept::Kept)).
//! Once the sandbox has a record, that shows that the snapshot is in use.

use std::fs::File;

use rustix::fs::FlockOperation;
use rustix::io::Errno;

use super::{SnapshotStore, not_found, object};
use crate::error::{Error, ErrorKind};
use crate::file_lock::FileLock;

/// A snapshot from which a sandbox is being thawed. It is not removed before this is dropped.
#[derive(Debug)]
pub struct Thawing {
    _lock: FileLock,
}

impl SnapshotStore {
    /// Keeps a snapshot for a thaw. Waits while it is being removed. Blocks.
    ///
    /// # Errors
    /// [`ErrorKind::SnapshotNotFound`]: it was removed.
    pub fn begin_thaw(&self, id: &str) -> Result<Thawing, Error> {
        let entry = self.0.root.join(id);
        let file = File::open(&entry).map_err(|_| not_found(id))?;
        let lock = FileLock::take(file, FlockOperation::LockShared);
        let lock = lock.map_err(|e| Error::system(format!("cannot lock {}", entry.display()), &e.into()))?;
        match entry.join(object::OBJECT).exists() {
            true => Ok(Thawing { _lock: lock }),
            false => Err(not_found(id)),
        }
    }

    /// Locks the directory of a snapshot that is to be removed.
    ///
    /// # Errors
    /// [`ErrorKind::SnapshotInUse`]: a sandbox is being thawed from it, or frozen over it.
    pub(super) fn lock_unless_thawing(&self, id: &str) -> Result<FileLock, Error> {
        let entry = self.0.root.join(id);
        let fail = |e| Error::system(format!("cannot lock {}", entry.display()), &e);
        let file = File::open(&entry).map_err(fail)?;
        match FileLock::take(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(lock) => Ok(lock),
            Err(Errno::WOULDBLOCK) => {
                let what = format!("a sandbox is being thawed from snapshot {id}, or frozen over it");
                Err(Error::new(ErrorKind::SnapshotInUse, what))
            }
            Err(e) => Err(fail(e.into())),
        }
    }
}
