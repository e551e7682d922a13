//! Keeps the directory of a snapshot while another is made that lies on it.
//!
//! Invariant: a process that removes a directory first takes an exclusive lock on it, and then looks for snapshots that lie on it. A process that
//! makes a snapshot over it holds a shared lock until the new manifest, which names its base, is in its place. So no complete snapshot loses its
//! base, also if either process is killed.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::FlockOperation;
use rustix::io::Errno;

use crate::file_lock::FileLock;

/// A directory that is not removed before this is dropped.
#[derive(Debug)]
pub struct Kept {
    _lock: FileLock,
}

/// A directory that its holder alone may remove.
#[derive(Debug)]
pub(crate) struct Doomed {
    _lock: FileLock,
}

impl Kept {
    /// Keeps a directory. Waits while it is being removed. Blocks.
    ///
    /// # Errors
    /// It was removed.
    pub fn take(directory: &Path) -> io::Result<Kept> {
        let lock = FileLock::take(File::open(directory)?, FlockOperation::LockShared)?;
        match is_named(&lock, directory)? {
            true => Ok(Kept { _lock: lock }),
            false => Err(io::ErrorKind::NotFound.into()),
        }
    }
}

impl Doomed {
    /// `None` if something keeps the directory. Blocks.
    ///
    /// # Errors
    /// It was removed.
    pub(crate) fn take(directory: &Path) -> io::Result<Option<Doomed>> {
        match FileLock::take(File::open(directory)?, FlockOperation::NonBlockingLockExclusive) {
            Ok(lock) if is_named(&lock, directory)? => Ok(Some(Doomed { _lock: lock })),
            // Another may be there since, which somebody keeps.
            Ok(_) => Err(io::ErrorKind::NotFound.into()),
            Err(Errno::WOULDBLOCK) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }
}

/// Whether a locked directory still has its name.
fn is_named(lock: &File, directory: &Path) -> io::Result<bool> {
    let (locked, named) = (lock.metadata()?, fs::metadata(directory)?);
    Ok((named.dev(), named.ino()) == (locked.dev(), locked.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_directory_is_not_removed_and_a_removed_one_not_kept() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join("s");
        fs::create_dir(&directory).unwrap();
        let kept = [Kept::take(&directory).unwrap(), Kept::take(&directory).unwrap()];
        assert!(Doomed::take(&directory).unwrap().is_none());
        drop(kept);
        let doomed = Doomed::take(&directory).unwrap().unwrap();
        let late = std::thread::spawn({
            let directory = directory.clone();
            move || Kept::take(&directory).is_err()
        });
        fs::rename(&directory, place.path().join("removed")).unwrap();
        drop(doomed);
        assert!(late.join().unwrap());
    }
}
