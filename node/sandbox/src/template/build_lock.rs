//! The lock of a template's builder, for which other builders wait.
//!
//! Invariant: the kernel releases the lock however its holder ends. A lock file that was removed is never used again.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use thaw_failpoint::{Failpoint, reach};

/// The right to build one template. The kernel releases it however this process ends.
#[derive(Debug)]
pub(super) struct BuildLock {
    path: PathBuf,
    _file: File,
}

impl BuildLock {
    /// Takes the lock. Calls `waiting` once if another process holds it.
    pub(super) fn take(path: &Path, waiting: impl Fn()) -> io::Result<BuildLock> {
        let mut told = false;
        loop {
            let file = File::options()
                .create(true)
                .truncate(false)
                .write(true)
                .mode(0o600)
                .open(path)?;
            reach(Failpoint::TemplateLockMade);
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => {
                    if !std::mem::replace(&mut told, true) {
                        waiting();
                    }
                    rustix::io::retry_on_intr(|| rustix::fs::flock(&file, FlockOperation::LockExclusive))?;
                }
                Err(Errno::INTR) => continue,
                Err(e) => return Err(e.into()),
            }
            if is_named(&file, path)? {
                return Ok(BuildLock {
                    path: path.to_owned(),
                    _file: file,
                });
            }
        }
    }
}

/// Whether a lock file still has its name. If its holder removed the name, no other process can find this lock.
fn is_named(file: &File, path: &Path) -> io::Result<bool> {
    let locked = file.metadata()?;
    let named = fs::metadata(path);
    Ok(named.is_ok_and(|n| (n.dev(), n.ino()) == (locked.dev(), locked.ino())))
}

/// Removes the lock files of killed builders.
pub(super) fn sweep_locks(root: &Path) {
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.extension().is_none_or(|e| e != "lock") {
            continue;
        }
        // Locked while it is removed, as a holder does it, so that waiting builders look for the new file.
        let Ok(file) = File::options().write(true).open(&path) else {
            continue;
        };
        let locked = rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive);
        if locked.is_ok() && is_named(&file, &path).unwrap_or(false) {
            drop(BuildLock { path, _file: file });
        }
    }
}

impl Drop for BuildLock {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
        reach(Failpoint::TemplateUnlocked);
    }
}
