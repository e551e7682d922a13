//! Which sandbox has a name, without reading the records of all: a directory with an entry for each name in use.
//!
//! An entry is a file. Its name is the SHA-256 of the tenant (nothing for a sandbox without one), a zero byte and the sandbox's name, as 64
//! hexadecimal digits; its content is the sandbox's id. Invariants:
//!
//! - An entry is written before its sandbox exists and removed after the sandbox is gone. It counts only while the sandbox exists, so an entry
//!   that a killed process left is replaced.
//! - A process that changes an entry has a lock on its file, which the kernel releases however the process ends, and has checked under the
//!   lock that the file is still at its place.
//! - The holder of an entry's lock waits for no other lock than that of the directory of all sandboxes, whose holder waits for no entry.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use sha2::{Digest as _, Sha256};
use thaw_failpoint::{Failpoint, reach};

use super::Record;
use crate::file_lock::FileLock;
use crate::tenant::Tenant;

/// Most bytes of an id in an entry.
const MAX_ID: u64 = 64;

/// The names of the sandboxes of one kind.
#[derive(Clone, Debug)]
pub(super) struct Names {
    directory: PathBuf,
}

/// What a claim found.
#[derive(Debug)]
pub(super) enum Claimed {
    Free(Claim),
    /// The sandbox with this id has the name.
    Used(String),
}

/// A locked entry: no other process can claim the name. If it is dropped, the name is free.
#[derive(Debug)]
pub(super) struct Claim {
    entry: PathBuf,
    file: FileLock,
    is_settled: bool,
}

/// The file name of the entry of a sandbox, if the sandbox has a name.
pub(super) fn entry_name(record: &Record) -> Option<String> {
    let name = record.name.as_ref()?;
    let tenant = record.terms.tenant.as_ref().map_or("", Tenant::as_str);
    let mut hash = Sha256::new();
    hash.update(tenant);
    // It is in no tenant.
    hash.update([0u8]);
    hash.update(name);
    Some(format!("{:x}", hash.finalize()))
}

impl Names {
    /// Those with entries in this directory, which exists only while it has any.
    pub fn in_directory(directory: PathBuf) -> Names {
        Names { directory }
    }

    /// The entry of a sandbox, if the sandbox has a name.
    pub fn entry(&self, record: &Record) -> Option<PathBuf> {
        Some(self.directory.join(entry_name(record)?))
    }

    /// The id in the entry of the record's name, whether that sandbox exists or not.
    ///
    /// # Errors
    /// The entry cannot be read.
    pub fn holder(&self, record: &Record) -> io::Result<Option<String>> {
        match self.entry(record).map(File::open) {
            None => Ok(None),
            Some(Err(e)) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Some(opened) => id_in(&opened?),
        }
    }

    /// Claims the name of the entry, unless a sandbox has it for whose id `exists` is true. Waits while another process has it claimed.
    ///
    /// # Errors
    /// The entry cannot be made, locked or read.
    pub fn claim(&self, entry: PathBuf, exists: impl Fn(&str) -> bool) -> io::Result<Claimed> {
        let file = self.make_and_lock(&entry)?;
        if let Some(id) = id_in(&file)?
            && exists(&id)
        {
            return Ok(Claimed::Used(id));
        }
        reach(Failpoint::NameClaimed);
        Ok(Claimed::Free(Claim {
            entry,
            file,
            is_settled: false,
        }))
    }

    /// Writes the entry of a sandbox that has none, such as one that an earlier release made. A name that another sandbox has stays with that.
    ///
    /// # Errors
    /// The entry cannot be read or written.
    pub fn add(&self, record: &Record, exists: impl Fn(&str) -> bool) -> io::Result<()> {
        let Some(entry) = self.entry(record) else {
            return Ok(());
        };
        if self.holder(record)?.as_ref() == Some(&record.id) {
            return Ok(());
        }
        match self.claim(entry, &exists)? {
            Claimed::Free(claim) if exists(&record.id) => {
                claim.write(&record.id)?;
                drop(claim.settle());
            }
            Claimed::Free(_) => {}
            Claimed::Used(id) => {
                tracing::warn!("sandboxes {id} and {} have the same name", record.id);
            }
        }
        Ok(())
    }

    /// Removes the entry with this file name, of a sandbox that is gone.
    pub fn forget(&self, entry_name: &str, id: &str) {
        forget(&self.directory.join(entry_name), id);
    }

    /// Removes the entries of sandboxes for whose ids `exists` is false, and the directory if it has none then. Leaves those that a process is
    /// changing.
    pub fn sweep(&self, exists: impl Fn(&str) -> bool) {
        for entry in fs::read_dir(&self.directory).into_iter().flatten().flatten() {
            let is_unused = |id: Option<&str>| !id.is_some_and(&exists);
            match remove_if(&entry.path(), is_unused) {
                Ok(true) => reach(Failpoint::NameSwept),
                Ok(false) => {}
                Err(e) => tracing::warn!("cannot remove {}: {e}", entry.path().display()),
            }
        }
        // A process may have been killed after it made the directory.
        let _ = fs::remove_dir(&self.directory);
    }

    /// Makes the entry, if it is missing, and locks it.
    fn make_and_lock(&self, entry: &Path) -> io::Result<FileLock> {
        let mut directory = fs::DirBuilder::new();
        directory.recursive(true).mode(0o700);
        let mut options = File::options();
        options
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600);
        loop {
            match directory.create(&self.directory) {
                // This also happens if the directory existed and was removed since.
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
                _ => {}
            }
            let file = match options.open(entry) {
                // The directory was removed with its last entry.
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                opened => opened?,
            };
            let file = FileLock::take(file, FlockOperation::LockExclusive)?;
            if is_at(&file, entry)? {
                return Ok(file);
            }
        }
    }
}

impl Claim {
    /// Writes the id of the sandbox that gets the name, and that does not exist yet.
    pub fn write(&self, id: &str) -> io::Result<()> {
        self.file.set_len(0)?;
        self.file.write_all_at(id.as_bytes(), 0)?;
        reach(Failpoint::NameGiven);
        Ok(())
    }

    /// The sandbox exists: it has the name. Returns the entry's path, for [`forget`].
    pub fn settle(mut self) -> PathBuf {
        self.is_settled = true;
        self.entry.clone()
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if !self.is_settled
            && let Err(e) = remove(&self.entry)
        {
            tracing::warn!("cannot remove {}: {e}", self.entry.display());
        }
    }
}

/// Removes the entry of a sandbox that is gone. If another process has claimed the name, the entry is that process's.
pub(super) fn forget(entry: &Path, id: &str) {
    match remove_if(entry, |named| named == Some(id)) {
        Ok(true) => reach(Failpoint::NameForgotten),
        Ok(false) => {}
        Err(e) => tracing::warn!("cannot remove {}: {e}", entry.display()),
    }
}

/// Removes an entry if its id is such, and no process has it locked. Returns whether it was removed.
fn remove_if(entry: &Path, is_such: impl FnOnce(Option<&str>) -> bool) -> io::Result<bool> {
    let file = match File::open(entry) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
        opened => opened?,
    };
    let Ok(file) = FileLock::take(file, FlockOperation::NonBlockingLockExclusive) else {
        return Ok(false);
    };
    if !is_at(&file, entry)? || !is_such(id_in(&file)?.as_deref()) {
        return Ok(false);
    }
    remove(entry).map(|()| true)
}

/// Removes an entry, and the directory with its last one. The caller has the entry locked.
fn remove(entry: &Path) -> io::Result<()> {
    fs::remove_file(entry)?;
    if let Some(directory) = entry.parent() {
        let _ = fs::remove_dir(directory);
    }
    Ok(())
}

/// Whether the file is still the one with this name.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let named = match fs::metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
        named => named?,
    };
    let opened = file.metadata()?;
    Ok((opened.dev(), opened.ino()) == (named.dev(), named.ino()))
}

/// The id in an entry; `None` if the entry is empty, as a killed process leaves it, or damaged.
fn id_in(file: &File) -> io::Result<Option<String>> {
    let mut bytes = Vec::new();
    file.take(MAX_ID).read_to_end(&mut bytes)?;
    let id = String::from_utf8(bytes).ok();
    Ok(id.filter(|id| Path::new(id).file_name().is_some_and(|name| name == id.as_str())))
}

#[cfg(test)]
#[path = "names_test.rs"]
mod tests;
