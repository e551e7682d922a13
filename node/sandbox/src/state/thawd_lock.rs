//! The lock that a thawd has on its run directory while it lives.
//!
//! A process that a thawd starts shares its descriptors, and with them every lock, until it executes its program. If the thawd is killed
//! meanwhile, the next one finds these locks taken, and would leave alone what it should remove. So it waits for this lock first.
//!
//! The kernel closes a process's descriptors one after the other, and thawd has thousands. So a lock that was taken late is free a little
//! later than this one. Directories of sandboxes and spares, the only locks of which there are many, are waited for one by one as well.

use super::{LOCK_LIMIT, RunDirectory, lock_while};
use crate::error::{Error, ErrorKind};
use crate::file_lock::FileLock;

/// The lock of a run directory. No other thawd uses the directory while this lives.
#[derive(Debug)]
pub struct ThawdLock {
    _lock: FileLock,
}

impl RunDirectory {
    /// Locks this directory for this thawd. Waits for at most some seconds until processes that a killed thawd had started have executed their
    /// programs.
    ///
    /// # Errors
    /// [`ErrorKind::Runtime`]: another thawd has it.
    pub fn lock_for_thawd(&self) -> Result<ThawdLock, Error> {
        let run = self.sandboxes.parent().unwrap_or(&self.sandboxes);
        let taken = lock_while(run, || true);
        taken.map(|lock| ThawdLock { _lock: lock }).ok_or_else(|| {
            let what = format!(
                "another thawd uses {}: it has been locked for {} s",
                run.display(),
                LOCK_LIMIT.as_secs()
            );
            Error::new(ErrorKind::Runtime, what).remedy("stop it first, or set THAW_RUN")
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::OwnedFd;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use super::*;

    #[test]
    fn lock_is_taken_once_the_last_process_that_shares_it_has_ended() {
        let place = tempfile::tempdir().unwrap();
        let run = RunDirectory::open(place.path()).unwrap();
        // As a child of a killed thawd has it.
        let shared: OwnedFd = File::open(place.path()).unwrap().into();
        rustix::fs::flock(&shared, rustix::fs::FlockOperation::LockExclusive).unwrap();
        let ended = Arc::new(AtomicBool::new(false));
        let child = std::thread::spawn({
            let ended = ended.clone();
            move || {
                std::thread::sleep(Duration::from_millis(100));
                ended.store(true, Ordering::SeqCst);
                drop(shared);
            }
        });
        let lock = run.lock_for_thawd().unwrap();
        assert!(ended.load(Ordering::SeqCst), "it was waited for");
        child.join().unwrap();
        let other = run.lock_for_thawd().unwrap_err();
        assert_eq!(other.kind, ErrorKind::Runtime);
        assert!(other.to_string().contains("another thawd uses"), "{other}");
        drop(lock);
        run.lock_for_thawd().unwrap();
    }
}
