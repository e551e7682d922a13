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
//! Invariant: files are opened once, through no symbolic link, and the verified descriptors are the ones passed on.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::fs::{Mode, OFlags};
use thaw_failpoint::{Failpoint, reach};

use super::check::{CheckError, check_chunks, check_whole};
use super::error::{SnapshotError, is_passing};
use super::hash::Hash;
use super::manifest::{DiskFile, MAX_MANIFEST, Manifest, ManifestError};
use super::partial::make_locked;
use super::signature::{SIGNATURE, TrustedKeys};
use super::stamp::{Identity, Stamps};

pub(crate) const MANIFEST: &str = "manifest.json";
pub(super) const MANIFEST_HASH: &str = "manifest.b3";
pub(super) const MANIFEST_SIGNATURE: &str = "manifest.sig";
pub(super) const STATE: &str = "state";
pub(super) const MEMORY: &str = "memory";
pub(super) const WORKING_SET: &str = "working-set";
pub(super) const DISKS: &str = "disks";

/// The file of a disk in a snapshot.
pub(crate) fn disk_path(snapshot: &Path, id: &str) -> PathBuf {
    snapshot.join(DISKS).join(id)
}

/// The line of `manifest.b3`.
pub(super) fn hash_line(hash: &Hash) -> String {
    format!("{hash}  {MANIFEST}\n")
}

/// An existing snapshot: its manifest was read and is valid, and its signature was checked as required.
#[derive(Debug)]
pub struct SnapshotDir {
    path: PathBuf,
    manifest: Manifest,
    hash: Hash,
    files: OpenFiles,
}

/// What a snapshot consists of.
#[derive(Debug)]
pub struct Contents {
    /// The bytes of `manifest.json`.
    pub manifest: Vec<u8>,
    /// `manifest.sig`, if it is signed.
    pub signature: Option<Vec<u8>>,
    pub state: Vec<u8>,
    pub working_set: Option<Vec<u8>>,
    /// The memory, then the disks in the order of the manifest.
    pub memory_and_disks: Vec<File>,
}

/// The snapshot's files, open for reading.
#[derive(Debug)]
pub(super) struct OpenFiles {
    pub state: File,
    pub memory: File,
    pub working_set: Option<File>,
    pub disks: Vec<(String, File)>,
    manifest: File,
}

impl SnapshotDir {
    /// Opens a snapshot and checks its manifest, but not its files.
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
        // The signature is checked first: a manifest without a trusted signature is not parsed.
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

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Hash of its manifest, which covers all its files.
    pub fn hash(&self) -> Hash {
        self.hash
    }

    pub(super) fn files(&self) -> &OpenFiles {
        &self.files
    }

    /// All of it, for a copy: its small files in memory, the others open.
    ///
    /// # Errors
    /// A file cannot be read, or the manifest has changed since it was opened.
    pub fn contents(&self) -> Result<Contents, SnapshotError> {
        let path = &self.path;
        let read = || -> io::Result<Contents> {
            let files = &self.files;
            let whole = |file: &File| {
                let mut bytes = vec![0; usize::try_from(file.metadata()?.len()).unwrap_or(usize::MAX)];
                file.read_exact_at(&mut bytes, 0).map(|()| bytes)
            };
            let disks = files.disks.iter().map(|(_, file)| file);
            let large = [&files.memory].into_iter().chain(disks).map(File::try_clone);
            Ok(Contents {
                manifest: whole(&files.manifest)?,
                signature: optional(&path.join(MANIFEST_SIGNATURE), SIGNATURE as u64 + 1)?,
                state: whole(&files.state)?,
                working_set: files.working_set.as_ref().map(whole).transpose()?,
                memory_and_disks: large.collect::<io::Result<_>>()?,
            })
        };
        let contents = read().map_err(SnapshotError::io("read the snapshot at", path))?;
        match Hash::of(&contents.manifest) == self.hash {
            true => Ok(contents),
            false => Err(SnapshotError::Damaged {
                directory: path.clone(),
                region: format!("{MANIFEST}, which changed while it was read,"),
            }),
        }
    }

    pub(super) fn into_files(self) -> (Manifest, OpenFiles) {
        (self.manifest, self.files)
    }

    /// Compares every byte of every file with the manifest, up to the first difference.
    pub fn verify(&self) -> Result<(), SnapshotError> {
        self.comparisons().try_for_each(|compare| self.check(compare))
    }

    /// The damage of every file: the first part of it that is not what the manifest says. Empty if the snapshot is whole.
    pub fn damage(&self) -> Result<Vec<String>, SnapshotError> {
        let mut damage = Vec::new();
        for compare in self.comparisons() {
            match compare() {
                Ok(()) => {}
                Err(CheckError::Damaged(region)) => damage.push(region),
                Err(CheckError::Io(source)) => {
                    return Err(SnapshotError::io("read the snapshot at", &self.path)(source));
                }
            }
        }
        Ok(damage)
    }

    /// The comparisons of all files with the manifest.
    fn comparisons(&self) -> impl Iterator<Item = Box<dyn FnOnce() -> Result<(), CheckError> + '_>> {
        type Compare<'a> = Box<dyn FnOnce() -> Result<(), CheckError> + 'a>;
        let (files, expected) = (&self.files, &self.manifest.files);
        let state: Compare<'_> = Box::new(|| check_whole(STATE, &files.state, &expected.state));
        let memory: Compare<'_> = Box::new(|| check_chunks(MEMORY, &files.memory, &expected.memory, None));
        let working_set = files.working_set.as_ref().zip(expected.working_set.as_ref());
        let working_set = working_set
            .map(|(file, expected)| Box::new(|| check_whole(WORKING_SET, file, expected)) as Compare<'_>);
        let disks = files
            .disks
            .iter()
            .zip(&expected.disks)
            .map(|((id, file), expected)| {
                Box::new(move || check_chunks(&format!("{DISKS}/{id}"), file, &expected.contents, None))
                    as Compare<'_>
            });
        [state, memory].into_iter().chain(working_set).chain(disks)
    }

    /// Verifies it, unless that was done since this boot and no file has changed since. Returns whether it was done now.
    pub fn verify_once(&self, stamps: &Stamps) -> Result<bool, SnapshotError> {
        let place = fs::canonicalize(&self.path).map_err(SnapshotError::io("find", &self.path))?;
        let look = || {
            self.files
                .identities()
                .map_err(SnapshotError::io("look at", &self.path))
        };
        let before = look()?;
        if stamps.recall(&place, &before) == Some(self.hash) {
            return Ok(false);
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
        Ok(true)
    }

    /// Remembers damage for [`SnapshotDir::known_damage`], until a file changes.
    pub fn remember_damage(&self, stamps: &Stamps, region: &str) {
        let place = fs::canonicalize(&self.path);
        if let (Ok(place), Ok(files)) = (place, self.files.identities()) {
            stamps.remember_damage(&place, files, region);
        }
    }

    /// The damage found in its files as they are now.
    pub fn known_damage(&self, stamps: &Stamps) -> Option<String> {
        let place = fs::canonicalize(&self.path).ok()?;
        stamps.known_damage(&place, &self.files.identities().ok()?)
    }

    /// Adds the snapshot's path to the error of a check.
    pub(super) fn check<T>(&self, check: impl FnOnce() -> Result<T, CheckError>) -> Result<T, SnapshotError> {
        check().map_err(|e| match e {
            CheckError::Io(source) => SnapshotError::io("read the snapshot at", &self.path)(source),
            CheckError::Damaged(region) => SnapshotError::Damaged {
                directory: self.path.clone(),
                region,
            },
        })
    }

    /// Removes the snapshot. Machines thawed from it keep what they have mapped: their memory is freed when they end.
    pub fn remove(self, stamps: &Stamps) -> Result<(), SnapshotError> {
        remove(&self.path, stamps)
    }
}

/// Removes the snapshot at `path`, even if it is damaged. It is renamed first, so that a partial one never looks complete.
pub fn remove(path: &Path, stamps: &Stamps) -> Result<(), SnapshotError> {
    let fail = |e| SnapshotError::io("remove", path)(e);
    let place = fs::canonicalize(path).map_err(fail)?;
    let parent = path.parent().unwrap_or(Path::new("."));
    let (doomed, _lock) = make_locked(parent).map_err(fail)?;
    let renamed = fs::rename(path, doomed.join("removed")).map_err(fail);
    reach(Failpoint::SnapshotDoomed);
    let removed = fs::remove_dir_all(&doomed).map_err(fail);
    reach(Failpoint::SnapshotRemoved);
    stamps.forget(&place);
    reach(Failpoint::SnapshotForgotten);
    renamed.and(removed)
}

impl OpenFiles {
    fn open(path: &Path, manifest: &Manifest, manifest_file: File) -> Result<OpenFiles, SnapshotError> {
        let open = |name: &str| {
            open_regular(&path.join(name)).map_err(|e| match is_passing(&e) {
                true => SnapshotError::io("open", &path.join(name))(e),
                false => SnapshotError::Damaged {
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

/// The hash of the manifest that a snapshot lies on, whether its other files are there or not. `None`: it lies on nothing.
///
/// # Errors
/// There is no manifest, or it cannot be read.
pub(crate) fn base_of(snapshot: &Path) -> io::Result<Option<Hash>> {
    let bytes = read_at_most(&open_regular(&snapshot.join(MANIFEST))?, MAX_MANIFEST)?;
    let manifest = Manifest::decode(&bytes).map_err(io::Error::other)?;
    Ok(manifest.subject.base.map(|base| base.manifest))
}

/// Opens a regular file, through no symbolic link. Does not block on a FIFO.
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

/// A separate read-only descriptor, even if the file has no name any more.
pub(super) fn read_only(file: &File) -> io::Result<OwnedFd> {
    Ok(fs::OpenOptions::new()
        .read(true)
        .open(format!("/proc/self/fd/{}", file.as_raw_fd()))?
        .into())
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

/// Bytes that the files of a snapshot occupy on their disk: a directory of directories one deep.
pub fn disk_bytes(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory)
        .into_iter()
        .flatten()
        .filter_map(io::Result::ok);
    entries
        .filter_map(|entry| Some((entry.path(), entry.metadata().ok()?)))
        .map(|(path, metadata)| match metadata.is_dir() {
            true => disk_bytes(&path),
            false => metadata.blocks() * 512,
        })
        .fold(0, u64::saturating_add)
}

#[cfg(test)]
#[path = "directory_test.rs"]
pub(crate) mod tests;
