//! The components of guests, kept by hash: the guest images, kernels and thaw-vmms of snapshots and running sandboxes.
//!
//! An upgrade replaces the node's own components. A guest frozen before the upgrade has the old guest image mapped, and thaws with no
//! other.
//!
//! | in `THAW_DATA/components` | what |
//! |---|---|
//! | `HASH` | a copy of a file, by its BLAKE3 |
//! | `references/HASH` | a snapshot somewhere on this host, by the hash of its path: its path and the components it needs |
//!
//! Invariants: a file has its name's hash when it is opened for a caller; a file that is needed, or may be, is kept. Templates, running
//! sandboxes and references name the needed files. A reference lives while its snapshot is in its place, and [`KEPT_UNSEEN`] longer,
//! because its disk may be mounted again.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::contents::hash_whole;
use super::directory::MANIFEST;
use super::error::SnapshotError;
use super::hash::Hash;
use super::manifest::Subject;
use super::stamp::{Stamps, tempfile_in, writer};

/// How long the components of a snapshot are kept after the snapshot was last seen in its place.
pub const KEPT_UNSEEN: Duration = Duration::from_secs(30 * 24 * 60 * 60);
/// How long an unreferenced component is kept, because its reference may be about to be written.
const KEPT_UNNAMED: Duration = Duration::from_secs(24 * 60 * 60);

const REFERENCES: &str = "references";

/// The store.
#[derive(Clone, Debug)]
pub struct Components {
    root: PathBuf,
    stamps: Stamps,
}

/// A snapshot that needs some of the components.
#[derive(Debug, Serialize, Deserialize)]
struct Reference {
    /// The snapshot's directory.
    directory: PathBuf,
    /// Hash of its manifest: distinguishes it from another snapshot at the same path.
    manifest: Hash,
    needs: Vec<Hash>,
    /// When the snapshot was last seen there, seconds since the Unix epoch.
    seen: u64,
}

impl Subject {
    /// The hashes of the files that it was made from.
    pub fn components(&self) -> impl Iterator<Item = Hash> {
        [self.guest_image, self.kernel, self.vmm].into_iter().flatten()
    }
}

impl Components {
    /// The components under a data directory. Creates nothing yet.
    pub(super) fn of(data: &Path, stamps: Stamps) -> Components {
        Components {
            root: data.join("components"),
            stamps,
        }
    }

    /// The path of the file with this hash, whether it exists or not.
    pub fn path(&self, hash: Hash) -> PathBuf {
        self.root.join(hash.to_string())
    }

    /// Keeps a copy of a file. Returns false if the file does not have this hash. Blocks until the copy is on disk.
    pub fn keep(&self, file: &Path, hash: Hash) -> Result<bool, SnapshotError> {
        let place = self.path(hash);
        if place.exists() {
            return Ok(true);
        }
        if self.stamps.hash_file(file)? != hash {
            return Ok(false);
        }
        let copy = || -> io::Result<bool> {
            make_directory(&self.root)?;
            let (path, mut new) = tempfile_in(&self.root)?;
            // Cloned by the kernel if the file system supports it.
            let copied = io::copy(&mut File::open(file)?, &mut new)
                .and_then(|_| hash_whole(&new))
                .and_then(|copied| match copied.blake3 == hash {
                    true => {
                        new.set_permissions(fs::Permissions::from_mode(0o500))?;
                        new.sync_all()?;
                        fs::rename(&path, &place)?;
                        File::open(&self.root)?.sync_all()?;
                        Ok(true)
                    }
                    // The file was replaced meanwhile.
                    false => Ok(false),
                });
            if !matches!(copied, Ok(true)) {
                let _ = fs::remove_file(&path);
            }
            copied
        };
        copy().map_err(SnapshotError::io("keep", file))
    }

    /// The file with this hash, open. `None` if it is not kept or has changed.
    pub fn find(&self, hash: Hash) -> Result<Option<File>, SnapshotError> {
        let path = self.path(hash);
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(SnapshotError::io("open", &path)(e)),
        };
        let found = self.stamps.hash_file(&path)?;
        if found != hash {
            tracing::error!("{} is damaged: its hash is {found}", path.display());
            return Ok(None);
        }
        Ok(Some(file))
    }

    /// Records that the snapshot in `directory`, with this manifest, needs these components.
    pub fn refer(
        &self,
        directory: &Path,
        manifest: Hash,
        needs: impl Iterator<Item = Hash>,
    ) -> Result<(), SnapshotError> {
        let directory = fs::canonicalize(directory).map_err(SnapshotError::io("find", directory))?;
        let reference = Reference {
            manifest,
            needs: needs.collect(),
            seen: seconds(SystemTime::now()),
            directory,
        };
        self.write(&reference)
            .map_err(SnapshotError::io("note what is needed by", &reference.directory))
    }

    fn write(&self, reference: &Reference) -> io::Result<()> {
        let references = self.root.join(REFERENCES);
        make_directory(&references)?;
        let (path, mut new) = tempfile_in(&references)?;
        let name = Hash::of(reference.directory.as_os_str().as_bytes()).to_string();
        let written = thaw_records::encode(reference)
            .and_then(|text| io::Write::write_all(&mut new, &text))
            .and_then(|()| fs::rename(&path, references.join(name)));
        written.inspect_err(|_| {
            let _ = fs::remove_file(&path);
        })
    }

    /// Removes the files that are neither in `needed` nor in a reference. Returns how many.
    ///
    /// # Errors
    /// A reference cannot be read, so what it needs is unknown: nothing is removed then.
    pub fn collect(&self, mut needed: HashSet<Hash>, now: SystemTime) -> io::Result<usize> {
        for entry in entries(&self.root.join(REFERENCES))? {
            let path = entry.path();
            if let Some(maker) = entry.file_name().to_str().and_then(writer) {
                if !maker.lives() {
                    fs::remove_file(&path)?;
                }
                continue;
            }
            let read: Result<Reference, _> = thaw_records::read(&path);
            let mut reference = read.map_err(|e| io::Error::other(format!("{}: {e}", path.display())))?;
            if reference.is_there() {
                reference.seen = seconds(now);
                self.write(&reference)?;
            } else if seconds(now).saturating_sub(reference.seen) > KEPT_UNSEEN.as_secs() {
                fs::remove_file(&path)?;
                continue;
            }
            needed.extend(reference.needs);
        }
        let mut removed = 0;
        for entry in entries(&self.root)? {
            let name = entry.file_name();
            let is_left = name.to_str().and_then(writer).is_some_and(|maker| !maker.lives());
            let hash: Option<Hash> = name.to_str().and_then(|name| name.parse().ok());
            let age = || -> io::Result<Duration> {
                let changed = entry.metadata()?.modified()?;
                Ok(now.duration_since(changed).unwrap_or_default())
            };
            let is_unneeded = hash.is_some_and(|hash| !needed.contains(&hash));
            if is_left || (is_unneeded && age()? > KEPT_UNNAMED) {
                fs::remove_file(entry.path())?;
                self.stamps.forget(&entry.path());
                removed += usize::from(!is_left);
            }
        }
        Ok(removed)
    }
}

impl Reference {
    fn is_there(&self) -> bool {
        fs::read(self.directory.join(MANIFEST)).is_ok_and(|manifest| Hash::of(&manifest) == self.manifest)
    }
}

fn make_directory(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

fn entries(directory: &Path) -> io::Result<Vec<fs::DirEntry>> {
    match fs::read_dir(directory) {
        Ok(entries) => entries.collect(),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(e),
    }
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 60 * 60);

    fn store(root: &Path) -> Components {
        Components::of(root, Stamps::open(&root.join("verified")).unwrap())
    }

    fn file(root: &Path, text: &str) -> (PathBuf, Hash) {
        let path = root.join(text);
        fs::write(&path, text).unwrap();
        (path, Hash::of(text.as_bytes()))
    }

    #[test]
    fn kept_file_outlives_its_original_and_is_verified() {
        let root = tempfile::tempdir().unwrap();
        let store = store(root.path());
        let (image, hash) = file(root.path(), "image");
        assert!(store.find(hash).unwrap().is_none());
        assert!(!store.keep(&image, Hash::of(b"another")).unwrap());
        assert!(store.keep(&image, hash).unwrap());
        // Replaced in place, as an installer does it.
        fs::write(&image, "newer").unwrap();
        assert!(store.keep(&image, hash).unwrap(), "it is there already");
        let kept = store.find(hash).unwrap().unwrap();
        assert_eq!(io::read_to_string(kept).unwrap(), "image");
        let place = store.path(hash);
        fs::set_permissions(&place, fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(&place, "imagE").unwrap();
        assert!(store.find(hash).unwrap().is_none(), "damaged");
    }

    #[test]
    fn file_is_kept_while_a_snapshot_or_a_sandbox_needs_it() {
        let root = tempfile::tempdir().unwrap();
        let store = store(root.path());
        let files = ["snapshot's", "sandbox's", "unneeded"].map(|text| file(root.path(), text));
        for (path, hash) in &files {
            assert!(store.keep(path, *hash).unwrap());
        }
        let [referred, running, unneeded] = files.map(|(_, hash)| hash);
        let snapshot = root.path().join("frozen");
        fs::create_dir(&snapshot).unwrap();
        fs::write(snapshot.join(MANIFEST), "manifest").unwrap();
        let manifest = Hash::of(b"manifest");
        store.refer(&snapshot, manifest, [referred].into_iter()).unwrap();
        let has = |hash: Hash| store.path(hash).exists();
        let needed = || HashSet::from([running]);

        let now = SystemTime::now();
        assert_eq!(store.collect(needed(), now).unwrap(), 0, "none is a day old");
        assert_eq!(store.collect(needed(), now + 2 * DAY).unwrap(), 1);
        assert!(has(referred) && has(running) && !has(unneeded));
        // The snapshot was seen recently, and its disk may be mounted again.
        assert_eq!(store.collect(needed(), now + 90 * DAY).unwrap(), 0);
        fs::rename(&snapshot, root.path().join("away")).unwrap();
        assert_eq!(store.collect(needed(), now + 119 * DAY).unwrap(), 0);
        assert!(has(referred));
        fs::create_dir(&snapshot).unwrap();
        fs::write(snapshot.join(MANIFEST), "another").unwrap();
        assert_eq!(store.collect(needed(), now + 121 * DAY).unwrap(), 1);
        assert!(!has(referred) && has(running));
    }

    #[test]
    fn unreadable_reference_keeps_every_file() {
        let root = tempfile::tempdir().unwrap();
        let store = store(root.path());
        let (path, hash) = file(root.path(), "image");
        store.keep(&path, hash).unwrap();
        store.refer(root.path(), hash, [hash].into_iter()).unwrap();
        let references = root.path().join("components").join(REFERENCES);
        let reference = entries(&references).unwrap().remove(0).path();
        fs::write(&reference, "{torn").unwrap();
        let later = SystemTime::now() + 365 * DAY;
        let error = store.collect(HashSet::new(), later).unwrap_err().to_string();
        assert!(error.contains(&reference.display().to_string()), "{error}");
        assert!(store.path(hash).exists());
    }
}
