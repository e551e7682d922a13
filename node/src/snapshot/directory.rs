//! A snapshot's directory.
//!
//! | file | what |
//! |---|---|
//! | `manifest.json` | [`Manifest`] |
//! | `manifest.b3` | the manifest's BLAKE3, as `b3sum` writes it |
//! | `manifest.sig` | its signature, if it is signed ([`super::signature`]) |
//! | `state`, `memory`, `working-set` | written by thaw-vmm |
//! | `disks/<id>` | the disks of a sandbox, sparse |
//!
//! Invariants: a directory is made under another name and renamed whole, so one that looks whole is; what a killed maker
//! leaves is locked by nobody and removed by the next maker beside it. Files are opened once, by no symbolic link, and
//! what was verified is what is handed on.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{FlockOperation, Mode, OFlags, RenameFlags};

use super::contents::{data_pages, hash_chunks, hash_whole, scan};
use super::error::SnapshotError;
use super::hash::Hash;
use super::manifest::CHUNK;
use super::manifest::{
    ChunkedFile, DiskFile, FORMAT, Files, MAX_MANIFEST, Manifest, ManifestError, Subject, WholeFile,
    check_disk_id,
};
use super::signature::{SIGNATURE, SigningKey, TrustedKeys};
use super::stamp::{Identity, Stamps};

const MANIFEST: &str = "manifest.json";
const MANIFEST_HASH: &str = "manifest.b3";
const MANIFEST_SIGNATURE: &str = "manifest.sig";
const STATE: &str = "state";
const MEMORY: &str = "memory";
const WORKING_SET: &str = "working-set";
const DISKS: &str = "disks";
/// Directories that are being made begin with this.
const PARTIAL: &str = ".thaw-partial-";

/// A snapshot being made. Dropped unfinished, it is removed.
#[derive(Debug)]
pub struct Draft {
    path: PathBuf,
    target: PathBuf,
    /// Holds the lock that says it has a maker.
    lock: File,
    state: File,
    memory: File,
    working_set: File,
    disks: Vec<(String, File)>,
    finished: bool,
}

impl Draft {
    /// Begins one that will be at `target`, whose parent is made where it is missing. Removes what killed makers left
    /// beside it.
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

    /// The empty `memory`, likewise.
    pub fn memory(&self) -> &File {
        &self.memory
    }

    /// The empty `working-set`, likewise. Left empty, the snapshot has none.
    pub fn working_set(&self) -> &File {
        &self.working_set
    }

    /// A new, empty disk.
    pub fn add_disk(&mut self, id: &str) -> Result<&File, SnapshotError> {
        let directory = self.path.join(DISKS);
        let fail = SnapshotError::io("create a disk in", &directory);
        let make = || -> io::Result<File> {
            check_disk_id(id).map_err(|reason| io::Error::new(io::ErrorKind::InvalidInput, reason))?;
            match fs::DirBuilder::new().mode(0o700).create(&directory) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
                _ => {}
            }
            create(&directory, id)
        };
        let file = make().map_err(fail)?;
        self.disks.push((id.to_owned(), file));
        Ok(&self.disks[self.disks.len() - 1].1)
    }

    /// Hashes what was written, writes the manifest, signs it if there is a key, and gives it all its name. Blocks until
    /// it is on disk.
    pub fn finish(
        mut self,
        subject: Subject,
        key: Option<&SigningKey>,
    ) -> Result<SnapshotDir, SnapshotError> {
        let manifest = Manifest {
            format: FORMAT,
            thaw: env!("CARGO_PKG_VERSION").to_owned(),
            created: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |d| d.as_secs()),
            subject,
            files: self
                .hash()
                .map_err(SnapshotError::io("hash the files in", &self.path))?,
        };
        let bytes = manifest.encode();
        if let Err(reason) = Manifest::decode(&bytes) {
            let source = io::Error::new(io::ErrorKind::InvalidInput, reason.to_string());
            return Err(SnapshotError::io("describe", &self.target)(source));
        }
        self.seal(&bytes, key)
            .map_err(SnapshotError::io("write", &self.path))?;
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
        if let Some(Ok(parent)) = self.target.parent().map(File::open) {
            // Where this fails the name may be lost with the power; the files are whole under either.
            let _ = parent.sync_all();
        }
        SnapshotDir::open(&self.target, &TrustedKeys::default())
    }

    fn hash(&self) -> io::Result<Files> {
        let working_set = match self.working_set.metadata()?.len() {
            0 => {
                fs::remove_file(self.path.join(WORKING_SET))?;
                None
            }
            _ => Some(hash_whole(&self.working_set)?),
        };
        let disk = |(id, file): &(String, File)| {
            Ok(DiskFile {
                id: id.clone(),
                contents: hash_chunks(file)?,
            })
        };
        Ok(Files {
            state: hash_whole(&self.state)?,
            memory: hash_chunks(&self.memory)?,
            working_set,
            disks: self.disks.iter().map(disk).collect::<io::Result<_>>()?,
        })
    }

    fn seal(&self, manifest: &[u8], key: Option<&SigningKey>) -> io::Result<()> {
        let mut small = vec![
            (MANIFEST, manifest.to_vec()),
            (MANIFEST_HASH, hash_line(&Hash::of(manifest)).into_bytes()),
        ];
        small.extend(key.map(|key| (MANIFEST_SIGNATURE, key.sign(manifest).to_vec())));
        for (name, bytes) in &small {
            let mut file = create(&self.path, name)?;
            file.write_all(bytes)?;
            finish_file(&file)?;
        }
        let disks = self.disks.iter().map(|(_, file)| file);
        for file in [&self.state, &self.memory, &self.working_set]
            .into_iter()
            .chain(disks)
        {
            finish_file(file)?;
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

/// On disk, and not to be written again.
fn finish_file(file: &File) -> io::Result<()> {
    file.set_permissions(fs::Permissions::from_mode(0o400))?;
    file.sync_all()
}

fn hash_line(hash: &Hash) -> String {
    format!("{hash}  {MANIFEST}\n")
}

/// Guest memory holds secrets: for its owner alone.
fn create(directory: &Path, name: &str) -> io::Result<File> {
    File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(directory.join(name))
}

/// Makes a directory and locks it before a sweeper can take it for a dead maker's.
fn make_locked(parent: &Path) -> io::Result<(PathBuf, File)> {
    loop {
        let unique: String = crate::random::<8>()?.iter().map(|b| format!("{b:02x}")).collect();
        let path = parent.join(format!("{PARTIAL}{unique}"));
        fs::DirBuilder::new().mode(0o700).create(&path)?;
        let Ok(lock) = File::open(&path) else { continue };
        rustix::io::retry_on_intr(|| rustix::fs::flock(&lock, FlockOperation::LockExclusive))?;
        let named = fs::metadata(&path).is_ok_and(|named| {
            lock.metadata()
                .is_ok_and(|locked| (locked.dev(), locked.ino()) == (named.dev(), named.ino()))
        });
        if named {
            return Ok((path, lock));
        }
    }
}

/// Removes the half-made snapshots in `parent` whose makers are dead.
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
                Ok(()) => tracing::info!("removed {}, which a dead maker left", path.display()),
                Err(e) => tracing::warn!("cannot remove {}: {e}", path.display()),
            }
        }
    }
}

/// A snapshot that is there, with its manifest read, found whole and signed as it must be.
#[derive(Debug)]
pub struct SnapshotDir {
    path: PathBuf,
    manifest: Manifest,
    hash: Hash,
    files: OpenFiles,
}

/// Its files, open for reading.
#[derive(Debug)]
pub(super) struct OpenFiles {
    pub state: File,
    pub memory: File,
    pub working_set: Option<File>,
    pub disks: Vec<(String, File)>,
    manifest: File,
}

impl SnapshotDir {
    /// Opens one and checks its manifest. Its files are not compared with it yet.
    pub fn open(path: &Path, trusted: &TrustedKeys) -> Result<SnapshotDir, SnapshotError> {
        let open = || -> io::Result<_> {
            let manifest = open_regular(&path.join(MANIFEST))?;
            let bytes = read_at_most(&manifest, MAX_MANIFEST)?;
            Ok((manifest, bytes))
        };
        let (manifest_file, bytes) = open().map_err(|e| match e.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => SnapshotError::NotFound {
                directory: path.to_owned(),
            },
            _ => SnapshotError::io("read the manifest of", path)(e),
        })?;
        // The signature first: what nobody we trust has signed is not even looked into.
        let signature = optional(&path.join(MANIFEST_SIGNATURE), SIGNATURE as u64 + 1)
            .map_err(SnapshotError::io("read the signature of", path))?;
        trusted
            .check(&bytes, signature.as_deref())
            .map_err(|reason| SnapshotError::Signature {
                directory: path.to_owned(),
                reason: reason.to_owned(),
            })?;
        let hash = Hash::of(&bytes);
        let malformed = |reason: String| SnapshotError::Manifest {
            directory: path.to_owned(),
            reason,
        };
        let manifest = Manifest::decode(&bytes).map_err(|e| match e {
            ManifestError::Version { .. } => SnapshotError::Incompatible {
                directory: path.to_owned(),
                reason: e.to_string(),
            },
            ManifestError::Malformed(_) => malformed(e.to_string()),
        })?;
        let said = optional(&path.join(MANIFEST_HASH), 1024)
            .map_err(SnapshotError::io("read the manifest's hash of", path))?;
        if said.as_deref() != Some(hash_line(&hash).as_bytes()) {
            return Err(malformed(format!(
                "it does not have the hash that {MANIFEST_HASH} says"
            )));
        }
        let files = OpenFiles::open(path, &manifest, manifest_file)?;
        Ok(SnapshotDir {
            path: path.to_owned(),
            manifest,
            hash,
            files,
        })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it is.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Hash of its manifest, and by it of all it has.
    pub fn hash(&self) -> Hash {
        self.hash
    }

    pub(super) fn files(&self) -> &OpenFiles {
        &self.files
    }

    pub(super) fn into_files(self) -> (Manifest, OpenFiles) {
        (self.manifest, self.files)
    }

    /// Compares every byte of every file with the manifest.
    pub fn verify(&self) -> Result<(), SnapshotError> {
        let (files, expected) = (&self.files, &self.manifest.files);
        self.check(|| check_whole(STATE, &files.state, &expected.state))?;
        self.check(|| check_chunks(MEMORY, &files.memory, &expected.memory, None))?;
        if let (Some(file), Some(expected)) = (&files.working_set, &expected.working_set) {
            self.check(|| check_whole(WORKING_SET, file, expected))?;
        }
        for ((id, file), expected) in files.disks.iter().zip(&expected.disks) {
            self.check(|| check_chunks(&format!("{DISKS}/{id}"), file, &expected.contents, None))?;
        }
        Ok(())
    }

    /// The same, unless it was done since this boot and nothing has been touched since.
    pub fn verify_once(&self, stamps: &Stamps) -> Result<(), SnapshotError> {
        let place = fs::canonicalize(&self.path).map_err(SnapshotError::io("find", &self.path))?;
        let look = || {
            self.files
                .identities()
                .map_err(SnapshotError::io("look at", &self.path))
        };
        let before = look()?;
        if stamps.recall(&place, &before) == Some(self.hash) {
            return Ok(());
        }
        let began = SystemTime::now();
        self.verify()?;
        if look()? != before {
            return Err(SnapshotError::Damaged {
                directory: self.path.clone(),
                region: "a file that changed while it was read".into(),
            });
        }
        stamps.remember(&place, before, self.hash, began);
        Ok(())
    }

    /// Says of a check what it is of.
    pub(super) fn check<T>(&self, check: impl FnOnce() -> Result<T, CheckError>) -> Result<T, SnapshotError> {
        check().map_err(|e| match e {
            CheckError::Io(source) => SnapshotError::io("read the snapshot at", &self.path)(source),
            CheckError::Damaged(region) => SnapshotError::Damaged {
                directory: self.path.clone(),
                region,
            },
        })
    }

    /// Removes it. Machines thawed from it keep what they have mapped: their memory is freed when they end.
    pub fn remove(self, stamps: &Stamps) -> Result<(), SnapshotError> {
        remove(&self.path, stamps)
    }
}

/// Removes the snapshot at `path`, also a damaged one: renamed first, so that at no moment half of it looks whole.
pub fn remove(path: &Path, stamps: &Stamps) -> Result<(), SnapshotError> {
    let fail = |e| SnapshotError::io("remove", path)(e);
    let place = fs::canonicalize(path).map_err(fail)?;
    let parent = path.parent().unwrap_or(Path::new("."));
    let (doomed, _lock) = make_locked(parent).map_err(fail)?;
    let renamed = fs::rename(path, doomed.join("removed")).map_err(fail);
    let removed = fs::remove_dir_all(&doomed).map_err(fail);
    stamps.forget(&place);
    renamed.and(removed)
}

impl OpenFiles {
    fn open(path: &Path, manifest: &Manifest, manifest_file: File) -> Result<OpenFiles, SnapshotError> {
        let open = |name: &str| {
            open_regular(&path.join(name)).map_err(|e| match e.kind() {
                io::ErrorKind::PermissionDenied => SnapshotError::io("open", &path.join(name))(e),
                _ => SnapshotError::Damaged {
                    directory: path.to_owned(),
                    region: format!("{name} ({e})"),
                },
            })
        };
        let disk = |disk: &DiskFile| Ok((disk.id.clone(), open(&format!("{DISKS}/{}", disk.id))?));
        Ok(OpenFiles {
            state: open(STATE)?,
            memory: open(MEMORY)?,
            working_set: match manifest.files.working_set {
                Some(_) => Some(open(WORKING_SET)?),
                None => None,
            },
            disks: manifest.files.disks.iter().map(disk).collect::<Result<_, _>>()?,
            manifest: manifest_file,
        })
    }

    fn identities(&self) -> io::Result<Vec<Identity>> {
        let working_set = self.working_set.iter().map(|f| (WORKING_SET, f));
        let named = [
            (MANIFEST, &self.manifest),
            (STATE, &self.state),
            (MEMORY, &self.memory),
        ];
        let disks = self.disks.iter().map(|(id, f)| (id.as_str(), f));
        let all = named.into_iter().chain(working_set).chain(disks);
        all.map(|(name, file)| Identity::of(name, file)).collect()
    }
}

/// Opens a regular file, through no symbolic link, waiting for nobody (a FIFO).
fn open_regular(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "it is not a regular file",
        )),
    }
}

fn read_at_most(file: &File, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(most + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 <= most {
        true => Ok(bytes),
        false => Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "it is larger than any can be",
        )),
    }
}

fn optional(path: &Path, most: u64) -> io::Result<Option<Vec<u8>>> {
    match open_regular(path) {
        Ok(file) => read_at_most(&file, most).map(Some),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// Why a file is not taken.
#[derive(Debug)]
pub(super) enum CheckError {
    Io(io::Error),
    /// The region that differs.
    Damaged(String),
}

impl From<io::Error> for CheckError {
    fn from(error: io::Error) -> CheckError {
        CheckError::Io(error)
    }
}

fn check_size(name: &str, file: &File, bytes: u64) -> Result<(), CheckError> {
    match file.metadata()?.len() {
        found if found == bytes => Ok(()),
        found => Err(CheckError::Damaged(format!(
            "{name} ({found} bytes instead of {bytes})"
        ))),
    }
}

fn check_whole(name: &str, file: &File, expected: &WholeFile) -> Result<(), CheckError> {
    check_size(name, file, expected.bytes)?;
    match hash_whole(file)? == *expected {
        true => Ok(()),
        false => Err(CheckError::Damaged(name.to_owned())),
    }
}

/// Compares, and copies what was compared to `copy`, where one is wanted: only pages that are not zero.
pub(super) fn check_chunks(
    name: &str,
    file: &File,
    expected: &ChunkedFile,
    copy: Option<&File>,
) -> Result<(), CheckError> {
    check_size(name, file, expected.bytes)?;
    let hashes = expected.by_chunk();
    let compared = scan(file, expected.bytes, |number, data| {
        if data.map(Hash::of) != hashes.get(number as usize).copied().flatten() {
            let at = number * CHUNK >> 20;
            return Err(CheckError::Damaged(format!(
                "{name}: chunk {number} (at {at} MiB)"
            )));
        }
        if let (Some(copy), Some(data)) = (copy, data) {
            for range in data_pages(data) {
                copy.write_all_at(&data[range.clone()], number * CHUNK + range.start as u64)?;
            }
        }
        Ok(None::<()>)
    });
    compared.map(drop)
}

#[cfg(test)]
#[path = "directory_test.rs"]
pub(in crate::snapshot) mod tests;
