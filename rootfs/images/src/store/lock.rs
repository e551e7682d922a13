//! Locks between processes: flock on a file that is deleted only by a process that holds it exclusively.
//!
//! After a process gets the lock, the path must still lead to the locked file. If it does not, the file was deleted
//! meanwhile, and the process tries the new one.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};
use thaw_failpoint::{Failpoint, reach};

/// A held lock; released when dropped.
#[derive(Debug)]
pub struct Lock {
    file: File,
    /// Whether duplicates of its descriptor hold it too, until the last of them is closed.
    is_passed_on: bool,
}

impl Lock {
    /// Waits for the exclusive lock.
    pub fn exclusive(path: &Path) -> io::Result<Self> {
        loop {
            if let Some(lock) = Self::take(open(path)?, path, FlockOperation::LockExclusive)? {
                return Ok(lock);
            }
        }
    }

    /// Waits for the shared lock.
    pub fn shared(path: &Path) -> io::Result<Self> {
        loop {
            if let Some(lock) = Self::take(open(path)?, path, FlockOperation::LockShared)? {
                return Ok(lock);
            }
        }
    }

    /// Waits for a shared lock on a file that must exist and stay. An exclusive lock on it is held only for moments, or while
    /// the file is being removed. Duplicates of its descriptor hold the lock too.
    pub fn shared_existing(path: &Path) -> io::Result<Option<Self>> {
        match File::open(path) {
            Ok(file) => {
                let mut lock = Self::take(file, path, FlockOperation::LockShared)?;
                if let Some(lock) = &mut lock {
                    lock.is_passed_on = true;
                }
                Ok(lock)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Takes the lock exclusively if it is free.
    pub fn try_exclusive(path: &Path) -> io::Result<Option<Self>> {
        Self::take(open(path)?, path, FlockOperation::NonBlockingLockExclusive)
    }

    fn take(file: File, path: &Path, operation: FlockOperation) -> io::Result<Option<Self>> {
        loop {
            match flock(&file, operation) {
                Ok(()) => break,
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
        let is_passed_on = false;
        let lock = Self { file, is_passed_on };
        Ok(lock.is_at(path)?.then_some(lock))
    }

    /// Whether the path leads to the locked file.
    pub fn is_at(&self, path: &Path) -> io::Result<bool> {
        let locked = self.file.metadata()?;
        match std::fs::metadata(path) {
            Ok(named) => Ok((named.dev(), named.ino()) == (locked.dev(), locked.ino())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing the file is not enough: a process that is being started has a copy of the descriptor for a moment.
        if !self.is_passed_on {
            let _ = flock(&self.file, FlockOperation::Unlock);
        }
    }
}

fn open(path: &Path) -> io::Result<File> {
    File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .inspect(|_| reach(Failpoint::StoreLockMade))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_and_exclusive_exclude_each_other() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let first = Lock::shared(&path).unwrap();
        let second = Lock::shared(&path).unwrap();
        assert!(Lock::try_exclusive(&path).unwrap().is_none());
        drop((first, second));
        let alone = Lock::try_exclusive(&path).unwrap().unwrap();
        let waiting = std::thread::spawn({
            let path = path.clone();
            move || Lock::shared_existing(&path).unwrap().is_some()
        });
        drop(alone);
        assert!(waiting.join().unwrap());
    }

    #[test]
    fn a_lock_on_a_deleted_file_is_none() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let held = Lock::exclusive(&path).unwrap();
        let waiting = std::thread::spawn({
            let path = path.clone();
            move || Lock::exclusive(&path).unwrap()
        });
        std::fs::remove_file(&path).unwrap();
        drop(held);
        let got = waiting.join().unwrap();
        assert_eq!(
            got.file.metadata().unwrap().ino(),
            std::fs::metadata(&path).unwrap().ino()
        );
        assert!(
            Lock::shared_existing(&directory.path().join("none"))
                .unwrap()
                .is_none()
        );
    }
}
