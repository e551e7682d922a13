//! Makes a snapshot's directory.
//!
//! Invariant: a directory is made under a temporary name ([`super::partial`]) and renamed when it is complete, so a directory under its
//! final name is always complete.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::RenameFlags;
use thaw_failpoint::{Failpoint, reach};

use super::contents::{hash_chunks, hash_whole};
use super::directory::{
    DISKS, MANIFEST, MANIFEST_HASH, MANIFEST_SIGNATURE, MEMORY, STATE, SnapshotDir, WORKING_SET, hash_line,
};
use super::error::SnapshotError;
use super::hash::Hash;
use super::manifest::{DiskFile, Files, Manifest, Subject, check_disk_id};
use super::partial::{make_locked, sweep};
use super::signature::{SigningKey, TrustedKeys};
use crate::file_lock::FileLock;

/// A snapshot being made. Dropping it before [`Draft::finish`] removes it.
#[derive(Debug)]
pub struct Draft {
    pub(super) path: PathBuf,
    target: PathBuf,
    /// Holds the lock that shows that its maker lives.
    lock: FileLock,
    state: File,
    memory: File,
    working_set: File,
    disks: Vec<DraftDisk>,
    finished: bool,
}

/// A disk being written.
#[derive(Debug)]
pub struct DraftDisk {
    id: String,
    pub file: File,
    /// It is written as a layer over that of a snapshot below.
    pub is_layer: bool,
}

impl Draft {
    /// Begins a snapshot for `target`, and creates the parent directory if it is missing. Removes what killed makers left beside it.
    pub fn begin(target: &Path) -> Result<Draft, SnapshotError> {
        let (Some(parent), Some(_)) = (target.parent(), target.file_name()) else {
            let source = io::Error::new(io::ErrorKind::InvalidInput, "it has no name");
            return Err(SnapshotError::io("make a snapshot at", target)(source));
        };
        let parent = if parent.as_os_str().is_empty() {
            Path::new(".")
        } else {
            parent
        };
        fs::create_dir_all(parent).map_err(SnapshotError::io("create", parent))?;
        reach(Failpoint::DraftParentMade);
        if fs::symlink_metadata(target).is_ok() {
            return Err(SnapshotError::Exists {
                directory: target.to_owned(),
            });
        }
        sweep(parent);
        let (path, lock) = make_locked(parent).map_err(SnapshotError::io("create a directory in", parent))?;
        let files = || -> io::Result<_> {
            Ok((
                create(&path, STATE)?,
                create(&path, MEMORY)?,
                create(&path, WORKING_SET)?,
            ))
        };
        let (state, memory, working_set) = files()
            .inspect_err(|_| drop(fs::remove_dir_all(&path)))
            .map_err(SnapshotError::io("create files in", &path))?;
        Ok(Draft {
            path,
            target: target.to_owned(),
            lock,
            state,
            memory,
            working_set,
            disks: Vec::new(),
            finished: false,
        })
    }

    /// The empty `state`, open for reading and writing.
    pub fn state(&self) -> &File {
        &self.state
    }

    /// The empty `memory`, open for reading and writing.
    pub fn memory(&self) -> &File {
        &self.memory
    }

    /// The empty `working-set`, open for reading and writing. If it stays empty, the snapshot has none.
    pub fn working_set(&self) -> &File {
        &self.working_set
    }

    /// The directory while it is made, beside the final one: relative places are the same from both.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A new, empty disk.
    pub fn add_disk(&mut self, id: &str) -> Result<&File, SnapshotError> {
        self.add(id, false)
    }

    /// A new, empty layer over the disk of this name of a snapshot below.
    pub fn add_layer(&mut self, id: &str) -> Result<&File, SnapshotError> {
        self.add(id, true)
    }

    fn add(&mut self, id: &str, is_layer: bool) -> Result<&File, SnapshotError> {
        let directory = self.path.join(DISKS);
        let fail = SnapshotError::io("create a disk in", &directory);
        let make = || -> io::Result<File> {
            check_disk_id(id).map_err(|reason| io::Error::new(io::ErrorKind::InvalidInput, reason))?;
            match fs::DirBuilder::new().mode(0o700).create(&directory) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
                _ => reach(Failpoint::DraftDisksMade),
            }
            create(&directory, id)
        };
        let file = make().map_err(fail)?;
        reach(Failpoint::DraftDiskMade);
        self.disks.push(DraftDisk {
            id: id.to_owned(),
            file,
            is_layer,
        });
        Ok(&self.disks[self.disks.len() - 1].file)
    }

    /// A disk that was added.
    pub fn disk(&self, id: &str) -> Result<&DraftDisk, SnapshotError> {
        let added = self.disks.iter().find(|added| added.id == id);
        added.ok_or_else(|| {
            let source = io::Error::new(io::ErrorKind::NotFound, "it was not added");
            SnapshotError::io("find a disk in", &self.path)(source)
        })
    }

    /// Hashes the files, writes the manifest, signs it if there is a key, and renames the directory to its final name. Blocks until all is
    /// on disk.
    pub fn finish(
        mut self,
        subject: Subject,
        key: Option<&SigningKey>,
    ) -> Result<SnapshotDir, SnapshotError> {
        let files = self
            .hash()
            .map_err(SnapshotError::io("hash the files in", &self.path))?;
        let manifest = Manifest {
            format: files.format(),
            thaw: env!("CARGO_PKG_VERSION").to_owned(),
            created: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |d| d.as_secs()),
            subject,
            files,
        };
        let bytes = manifest.encode();
        if let Err(reason) = Manifest::decode(&bytes) {
            let source = io::Error::new(io::ErrorKind::InvalidInput, reason.to_string());
            return Err(SnapshotError::io("describe", &self.target)(source));
        }
        let signature = key.map(|key| key.sign(&bytes));
        self.seal(&bytes, signature.as_ref().map(|signature| &signature[..]))
            .map_err(SnapshotError::io("write", &self.path))?;
        self.place()?;
        SnapshotDir::open(&self.target, &TrustedKeys::default())
    }

    /// Finishes a copy of a snapshot: compares the files with its manifest, which stays as it is, and so does its signature. Blocks until
    /// all is on disk.
    ///
    /// # Errors
    /// [`SnapshotError::Damaged`]: the files are not what the manifest says. Those of [`SnapshotDir::open`].
    pub fn finish_copy(
        mut self,
        manifest: &[u8],
        signature: Option<&[u8]>,
        trusted: &TrustedKeys,
    ) -> Result<SnapshotDir, SnapshotError> {
        self.has_working_set()
            .and_then(|_| self.seal(manifest, signature))
            .map_err(SnapshotError::io("write", &self.path))?;
        SnapshotDir::open(&self.path, trusted)?.verify()?;
        self.place()?;
        SnapshotDir::open(&self.target, trusted)
    }

    /// Renames the directory, which is complete, to its final name.
    fn place(&mut self) -> Result<(), SnapshotError> {
        reach(Failpoint::SnapshotDescribed);
        let root = rustix::fs::CWD;
        match rustix::fs::renameat_with(root, &self.path, root, &self.target, RenameFlags::NOREPLACE) {
            Ok(()) => self.finished = true,
            Err(rustix::io::Errno::EXIST) => {
                return Err(SnapshotError::Exists {
                    directory: self.target.clone(),
                });
            }
            Err(e) => return Err(SnapshotError::io("rename to", &self.target)(e.into())),
        }
        reach(Failpoint::SnapshotPlaced);
        if let Some(Ok(parent)) = self.target.parent().map(File::open) {
            // If this fails, a power loss may undo the rename; the files are complete under either name.
            let _ = parent.sync_all();
        }
        Ok(())
    }

    /// Whether there is a working set. If there is none, its empty file is removed.
    fn has_working_set(&self) -> io::Result<bool> {
        let is_there = self.working_set.metadata()?.len() > 0;
        if !is_there {
            fs::remove_file(self.path.join(WORKING_SET))?;
            reach(Failpoint::SnapshotWorkingSetLeft);
        }
        Ok(is_there)
    }

    fn hash(&self) -> io::Result<Files> {
        let working_set = match self.has_working_set()? {
            true => Some(hash_whole(&self.working_set)?),
            false => None,
        };
        let disk = |disk: &DraftDisk| {
            Ok(DiskFile {
                id: disk.id.clone(),
                layer: disk.is_layer,
                contents: hash_chunks(&disk.file)?,
            })
        };
        Ok(Files {
            state: hash_whole(&self.state)?,
            memory: hash_chunks(&self.memory)?,
            working_set,
            disks: self.disks.iter().map(disk).collect::<io::Result<_>>()?,
        })
    }

    fn seal(&self, manifest: &[u8], signature: Option<&[u8]>) -> io::Result<()> {
        let mut small = vec![
            (MANIFEST, manifest.to_vec()),
            (MANIFEST_HASH, hash_line(&Hash::of(manifest)).into_bytes()),
        ];
        small.extend(signature.map(|signature| (MANIFEST_SIGNATURE, signature.to_vec())));
        for (name, bytes) in &small {
            let mut file = create(&self.path, name)?;
            file.write_all(bytes)?;
            finish_file(&file)?;
            reach(Failpoint::SnapshotFileWritten);
        }
        let disks = self.disks.iter().map(|disk| &disk.file);
        for file in [&self.state, &self.memory, &self.working_set]
            .into_iter()
            .chain(disks)
        {
            finish_file(file)?;
            reach(Failpoint::SnapshotFileSealed);
        }
        if !self.disks.is_empty() {
            File::open(self.path.join(DISKS))?.sync_all()?;
        }
        self.lock.sync_all()
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.finished
            && let Err(e) = fs::remove_dir_all(&self.path)
        {
            tracing::warn!("cannot remove {}: {e}", self.path.display());
        }
    }
}

/// Makes a file durable and read-only.
fn finish_file(file: &File) -> io::Result<()> {
    file.set_permissions(fs::Permissions::from_mode(0o400))?;
    file.sync_all()
}

/// Readable by the owner alone: guest memory holds secrets.
fn create(directory: &Path, name: &str) -> io::Result<File> {
    File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(directory.join(name))
        .inspect(|_| reach(Failpoint::DraftFileMade))
}
