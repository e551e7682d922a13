//! Directories for snapshots that only one process needs, `THAW_DATA/forks/`, removed when it ends.
//!
//! Invariant: the process that made a directory holds a lock on it while it lives. The next start removes directories without a lock.

use std::fs;
use std::path::{Path, PathBuf};

use thaw_failpoint::{Failpoint, reach};

use super::error::SnapshotError;
use super::partial::{make_locked, sweep};
use super::register::Registry;
use super::stamp::Stamps;
use crate::error::{Error, ErrorKind};
use crate::file_lock::FileLock;

/// Name under the data directory. On the same file system as the disks, so that they can be cloned.
const FORKS: &str = "forks";
const SNAPSHOT: &str = "snapshot";

/// A directory for one snapshot. Dropping it removes both.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
    stamps: Stamps,
    _lock: FileLock,
}

impl Scratch {
    /// Makes one under the data directory.
    pub fn make(data: &Path, stamps: Stamps) -> Result<Scratch, SnapshotError> {
        let forks = data.join(FORKS);
        fs::create_dir_all(&forks).map_err(SnapshotError::io("create", &forks))?;
        let (path, lock) = make_locked(&forks).map_err(SnapshotError::io("create a directory in", &forks))?;
        Ok(Scratch {
            path,
            stamps,
            _lock: lock,
        })
    }

    /// Makes one for a snapshot to thaw clones from. `signed` tells whether the snapshot will be signed.
    ///
    /// # Errors
    /// [`ErrorKind::SnapshotSignature`]: signatures are required here, and the snapshot will have none.
    pub fn for_clones(data: &Path, registry: &Registry, signed: bool) -> Result<Scratch, Error> {
        if registry.trusted().required() && !signed {
            let what = "only signed snapshots are thawed here, and clones are thawed from one";
            return Err(
                Error::new(ErrorKind::SnapshotSignature, what).remedy("name a key trusted here: --sign KEY")
            );
        }
        Ok(Scratch::make(data, registry.stamps().clone())?)
    }

    /// The path for the snapshot, where nothing exists yet.
    pub fn snapshot(&self) -> PathBuf {
        self.path.join(SNAPSHOT)
    }

    /// Whether a snapshot is in such a directory under this data directory.
    pub fn holds(data: &Path, snapshot: &Path) -> bool {
        let forks = fs::canonicalize(data.join(FORKS));
        let snapshot = fs::canonicalize(snapshot).unwrap_or_else(|_| snapshot.to_owned());
        forks.is_ok_and(|forks| snapshot.starts_with(forks))
    }

    /// Removes the directories under the data directory whose makers are dead.
    pub fn sweep(data: &Path) {
        sweep(&data.join(FORKS));
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Ok(place) = fs::canonicalize(self.snapshot()) {
            self.stamps.forget(&place);
        }
        reach(Failpoint::ScratchForgotten);
        if let Err(e) = fs::remove_dir_all(&self.path) {
            tracing::warn!("cannot remove {}: {e}", self.path.display());
        }
        reach(Failpoint::ScratchRemoved);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(data: &Path) -> Vec<PathBuf> {
        let entries = fs::read_dir(data.join(FORKS)).into_iter().flatten();
        entries.map(|e| e.unwrap().path()).collect()
    }

    #[test]
    fn a_living_makers_place_stays_and_a_dead_ones_is_swept() {
        let data = tempfile::tempdir().unwrap();
        let stamps = Stamps::open(&data.path().join("verified")).unwrap();
        Scratch::sweep(data.path());
        let living = Scratch::make(data.path(), stamps.clone()).unwrap();
        let dead = Scratch::make(data.path(), stamps.clone()).unwrap();
        for scratch in [&living, &dead] {
            fs::create_dir(scratch.snapshot()).unwrap();
            fs::write(scratch.snapshot().join("memory"), b"secret").unwrap();
        }
        // As after a kill: the lock is released, and everything else stays.
        rustix::fs::flock(&*dead._lock, rustix::fs::FlockOperation::Unlock).unwrap();
        std::mem::forget(dead);
        assert_eq!(left(data.path()).len(), 2);
        Scratch::sweep(data.path());
        assert_eq!(left(data.path()), std::slice::from_ref(&living.path));
        assert!(living.snapshot().join("memory").exists());
        drop(living);
        assert!(left(data.path()).is_empty());
    }
}
