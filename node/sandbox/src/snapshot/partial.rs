//! Temporary directories of snapshots that are being made or removed, beside the final ones.
//!
//! Invariant: the process that makes or removes one holds a lock on it. If that process is killed, the lock is free, and the next maker in
//! the same parent directory removes it.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use thaw_failpoint::{Failpoint, reach};

use crate::file_lock::FileLock;

/// Prefix of the names of partial directories.
const PARTIAL: &str = ".thaw-partial-";

/// Makes a directory and locks it, before a sweep can mistake it for one of a dead maker.
pub(super) fn make_locked(parent: &Path) -> io::Result<(PathBuf, FileLock)> {
    loop {
        let unique: String = crate::random::<8>()?.iter().map(|b| format!("{b:02x}")).collect();
        let path = parent.join(format!("{PARTIAL}{unique}"));
        fs::DirBuilder::new().mode(0o700).create(&path)?;
        reach(Failpoint::DraftMade);
        let Ok(opened) = File::open(&path) else { continue };
        let lock = FileLock::take(opened, FlockOperation::LockExclusive)?;
        let named = fs::metadata(&path).is_ok_and(|named| {
            lock.metadata()
                .is_ok_and(|locked| (locked.dev(), locked.ino()) == (named.dev(), named.ino()))
        });
        if named {
            reach(Failpoint::DraftLocked);
            return Ok((path, lock));
        }
    }
}

/// Removes the partial snapshots of dead makers beside `target`.
pub fn sweep_beside(target: &Path) {
    if let Some(parent) = target.parent() {
        sweep(parent);
    }
}

/// Removes the partial snapshots of dead makers in `parent`.
pub(crate) fn sweep(parent: &Path) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    let partial = entries
        .filter_map(|e| e.ok())
        .filter(|e| e.file_name().to_str().is_some_and(|n| n.starts_with(PARTIAL)));
    for entry in partial {
        let path = entry.path();
        let Ok(lock) = File::open(&path) else { continue };
        if rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
            match fs::remove_dir_all(&path) {
                Ok(()) => {
                    reach(Failpoint::DraftSwept);
                    tracing::info!("removed {}, which a dead maker left", path.display());
                }
                Err(e) => tracing::warn!("cannot remove {}: {e}", path.display()),
            }
        }
    }
}
