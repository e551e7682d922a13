//! A sandbox's directory: its record, its sockets, and the lock of its owner.
//!
//! Invariant: the record is replaced by a rename, so a reader never sees a partial record.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use thaw_failpoint::{Failpoint, reach};
use thaw_pools::process::ProcessRecord;

use super::record::{RECORD, Record, read_record};
use super::{CONTROL_SOCKET, lock_all, names, remove_if_empty, unreadable};
use crate::error::{Error, ErrorKind};
use crate::file_lock::FileLock;

/// A sandbox's directory that this process owns: removed when dropped, unless [`SandboxDirectory::keep`] was called.
#[derive(Debug)]
pub struct SandboxDirectory {
    path: PathBuf,
    /// `None` in a [handle](SandboxDirectory::handle).
    _lock: Option<FileLock>,
    remove_on_drop: bool,
    /// The entry of its name, if it has one.
    name: Option<PathBuf>,
    /// The VMM that a file beside the record names.
    marked: OnceLock<ProcessRecord>,
}

impl SandboxDirectory {
    pub(super) fn locked(path: PathBuf, lock: FileLock) -> SandboxDirectory {
        SandboxDirectory {
            path,
            _lock: Some(lock),
            remove_on_drop: true,
            name: None,
            marked: OnceLock::new(),
        }
    }
}

impl SandboxDirectory {
    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Path of the sandbox's vsock socket, also for other processes.
    pub fn vsock_socket(&self) -> PathBuf {
        vsock_socket(&self.path)
    }

    /// Path of its VMM's control socket.
    pub fn control_socket(&self) -> PathBuf {
        self.path.join(CONTROL_SOCKET)
    }

    /// Writes the record completely or not at all. First marks which process the VMM is, for a release that cannot read the record.
    pub fn write(&self, record: &Record) -> Result<(), Error> {
        let (new, path) = (self.path.join("record.new"), self.path.join(RECORD));
        let write = || -> io::Result<()> {
            if let Some(vmm) = record.vmm
                && self.marked.get() != Some(&vmm)
            {
                unreadable::mark(&self.path, vmm)?;
                let _ = self.marked.set(vmm);
            }
            let mut file = File::create(&new)?;
            reach(Failpoint::RecordMade);
            file.write_all(&thaw_records::encode(record)?)?;
            reach(Failpoint::RecordBegun);
            fs::rename(&new, &path)?;
            reach(Failpoint::RecordWritten);
            Ok(())
        };
        write().map_err(|e| Error::system(format!("cannot write {}", path.display()), &e))
    }

    /// Makes its removal remove this entry of its name too.
    pub(super) fn set_name(&mut self, entry: Option<PathBuf>) {
        self.name = entry;
    }

    /// Moves it, with its files and its lock, to `to` on the same file system. A crash leaves it in one of the two places.
    ///
    /// # Errors
    /// As of rename(2); it stays where it was.
    pub(super) fn move_to(&mut self, to: PathBuf) -> io::Result<()> {
        fs::rename(&self.path, &to)?;
        self.path = to;
        Ok(())
    }

    /// Another handle for a task of the owner. It holds no lock and removes nothing when dropped.
    pub fn handle(&self) -> io::Result<SandboxDirectory> {
        fs::metadata(&self.path)?;
        Ok(SandboxDirectory {
            path: self.path.clone(),
            _lock: None,
            remove_on_drop: false,
            name: None,
            marked: OnceLock::new(),
        })
    }

    /// The record as it was last written.
    pub fn record(&self) -> Result<Record, Error> {
        read_record(&self.path).map_err(|e| Error::new(ErrorKind::Runtime, e.to_string()))
    }

    /// Makes a drop keep the directory.
    pub fn keep(&mut self) {
        self.remove_on_drop = false;
    }
}

/// Path of the vsock socket of the sandbox in `directory`.
pub fn vsock_socket(directory: &Path) -> PathBuf {
    directory.join("vsock.sock")
}

/// Path of the socket on which the owner of the sandbox in `directory` serves its API, unless thawd owns it.
pub fn owner_socket(directory: &Path) -> PathBuf {
    directory.join("owner.sock")
}

impl Drop for SandboxDirectory {
    fn drop(&mut self) {
        if !self.remove_on_drop {
            return;
        }
        if let Err(e) = fs::remove_dir_all(&self.path) {
            tracing::warn!("cannot remove {}: {e}", self.path.display());
        }
        reach(Failpoint::DeleteDirectoryRemoved);
        if let (Some(entry), Some(id)) = (&self.name, self.path.file_name().and_then(|id| id.to_str())) {
            names::forget(entry, id);
        }
        if let Some(sandboxes) = self.path.parent()
            && let Ok(all) = lock_all(sandboxes)
        {
            remove_if_empty(sandboxes, &all);
        }
    }
}
