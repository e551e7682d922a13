//! Locks of files and directories (flock(2)).
//!
//! Invariant: a lock ends when it is dropped. Closing its file is not enough: a process that another thread is starting shares the open
//! file, and with it the lock, until it executes its program.

use std::fs::File;
use std::ops::Deref;

use rustix::fs::FlockOperation;
use rustix::io::Errno;

/// A file that is locked until this is dropped, or its process ends.
#[derive(Debug)]
pub(crate) struct FileLock(File);

impl FileLock {
    /// Locks a file. Waits for the lock if the operation does.
    ///
    /// # Errors
    /// [`Errno::WOULDBLOCK`]: another holds it, and the operation does not wait.
    pub fn take(file: File, operation: FlockOperation) -> Result<FileLock, Errno> {
        rustix::io::retry_on_intr(|| rustix::fs::flock(&file, operation))?;
        Ok(FileLock(file))
    }
}

impl Deref for FileLock {
    type Target = File;

    fn deref(&self) -> &File {
        &self.0
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        let _ = rustix::fs::flock(&self.0, FlockOperation::Unlock);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_lock_is_free_though_a_child_shares_its_file() {
        let place = tempfile::tempdir().unwrap();
        let take = || {
            let file = File::open(place.path()).unwrap();
            FileLock::take(file, FlockOperation::NonBlockingLockExclusive)
        };
        let lock = take().unwrap();
        // As a child has it that does not execute its program yet.
        let shared = lock.try_clone().unwrap();
        assert_eq!(take().unwrap_err(), Errno::WOULDBLOCK);
        drop(lock);
        take().unwrap();
        drop(shared);
    }
}
