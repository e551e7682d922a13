//! Remembers which files were verified since this boot and have not changed since.
//!
//! A stamp holds the boot id and, for each file, device, inode, size, mtime and ctime (ctime cannot be set back). If any differs, the file
//! is read again. These times have the granularity of the kernel's tick, so a file changed within [`MARGIN`] of the check gets no stamp.
//! Only their owner can write to the directory of stamps: a process that can write there could replace this program anyway.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use thaw_failpoint::{Failpoint, reach};
use thaw_pools::process::ProcessRecord;
use thaw_sys::lock::Lock;

use super::contents::hash_whole;
use super::error::SnapshotError;
use super::hash::Hash;

/// Longer than any tick (10 ms with HZ=100), and than the difference of two CPUs' clocks.
const MARGIN: Duration = Duration::from_millis(50);
/// Hashes kept in memory: a node has one kernel, one guest image and one VMM, and some kept ones.
const MOST_IN_MEMORY: usize = 64;

/// The identity of a file when it was examined.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Identity {
    name: String,
    device: u64,
    inode: u64,
    bytes: u64,
    modified_ns: i128,
    changed_ns: i128,
}

impl Identity {
    pub(super) fn of(name: &str, file: &File) -> io::Result<Identity> {
        Ok(Identity::of_metadata(name, &file.metadata()?))
    }

    fn of_metadata(name: &str, metadata: &fs::Metadata) -> Identity {
        let ns = |seconds: i64, ns: i64| i128::from(seconds) * 1_000_000_000 + i128::from(ns);
        Identity {
            name: name.to_owned(),
            device: metadata.dev(),
            inode: metadata.ino(),
            bytes: metadata.len(),
            modified_ns: ns(metadata.mtime(), metadata.mtime_nsec()),
            changed_ns: ns(metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    /// Whether a change from now on would show in the times.
    fn settled(&self, now: SystemTime) -> bool {
        let now = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as i128;
        self.changed_ns.max(self.modified_ns) + (MARGIN.as_nanos() as i128) < now
    }
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Stamp {
    boot: String,
    files: Vec<Identity>,
    /// Hash of what was verified: a manifest, or the file itself.
    hash: Hash,
}

/// The damage found in files with these identities.
#[derive(Debug, Serialize, Deserialize)]
struct Damage {
    files: Vec<Identity>,
    region: String,
}

/// The directory of stamps. Clones share what they keep in memory.
#[derive(Clone, Debug)]
pub struct Stamps {
    directory: PathBuf,
    boot: String,
    /// The hashes of the files that this process asked for last, so that asking again costs one `stat`.
    hashed: Arc<Mutex<HashMap<PathBuf, (Identity, Hash)>>>,
}

impl Stamps {
    /// Opens the directory, and creates it if it is missing. If other users can write to it, its contents are ignored.
    pub fn open(directory: &Path) -> Result<Stamps, SnapshotError> {
        let io = SnapshotError::io("create", directory);
        let made = fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory);
        made.map_err(io)?;
        let metadata = fs::metadata(directory).map_err(SnapshotError::io("look at", directory))?;
        let ours = metadata.uid() == rustix::process::geteuid().as_raw() && metadata.mode() & 0o022 == 0;
        // Without a boot id no stamp is valid: an empty one matches none.
        let boot = match ours {
            true => fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default(),
            false => String::new(),
        };
        Ok(Stamps {
            directory: directory.to_owned(),
            boot: boot.trim().to_owned(),
            hashed: Arc::default(),
        })
    }

    /// The hash remembered for `place`, if it was computed from these files.
    pub(super) fn recall(&self, place: &Path, files: &[Identity]) -> Option<Hash> {
        let text = fs::read(self.path(place)).ok()?;
        let stamp: Stamp = thaw_records::decode(&text).ok()?;
        (!self.boot.is_empty() && stamp.boot == self.boot && stamp.files == files).then_some(stamp.hash)
    }

    /// Remembers a hash, unless a file is so new that a change might not show. `began` is when the reading began, after the files were
    /// examined. If a stamp cannot be written, the files are read again next time.
    pub(super) fn remember(&self, place: &Path, files: Vec<Identity>, hash: Hash, began: SystemTime) {
        if self.boot.is_empty() || !files.iter().all(|f| f.settled(began)) {
            return;
        }
        let stamp = Stamp {
            boot: self.boot.clone(),
            files,
            hash,
        };
        if let Err(e) = self.write(&self.path(place), &stamp) {
            tracing::warn!("cannot remember that {} was verified: {e}", place.display());
        }
    }

    /// Remembers damage. It is only shown to people: every use of `place` compares the files again.
    pub(super) fn remember_damage(&self, place: &Path, files: Vec<Identity>, region: &str) {
        let damage = Damage {
            files,
            region: region.to_owned(),
        };
        if let Err(e) = self.write(&self.damage_path(place), &damage) {
            tracing::warn!("cannot remember that {} is damaged: {e}", place.display());
        }
    }

    /// The damage found in `place`, if it was found in these files.
    pub(super) fn known_damage(&self, place: &Path, files: &[Identity]) -> Option<String> {
        let text = fs::read(self.damage_path(place)).ok()?;
        let damage: Damage = serde_json::from_slice(&text).ok()?;
        (damage.files == files).then_some(damage.region)
    }

    fn write(&self, path: &Path, stamp: &impl Serialize) -> io::Result<()> {
        let mut new = tempfile_in(&self.directory)?;
        reach(Failpoint::StampMade);
        let written = new.1.write_all(&thaw_records::encode(stamp)?);
        written
            .inspect(|()| reach(Failpoint::StampWritten))
            .and_then(|()| fs::rename(&new.0, path))
            .inspect(|()| reach(Failpoint::StampPlaced))
            .inspect_err(|_| {
                let _ = fs::remove_file(&new.0);
            })
    }

    /// Removes the partial files of dead writers.
    pub fn sweep(&self) {
        for entry in fs::read_dir(&self.directory).into_iter().flatten().flatten() {
            let writer = entry.file_name().to_str().and_then(writer);
            if writer.is_some_and(|writer| !writer.lives()) && fs::remove_file(entry.path()).is_ok() {
                reach(Failpoint::StampSwept);
            }
        }
    }

    /// Removes the stamps of `place`.
    pub fn forget(&self, place: &Path) {
        let _ = fs::remove_file(self.path(place));
        let _ = fs::remove_file(self.damage_path(place));
    }

    /// The BLAKE3 of a whole file. Reads the file only if it has changed since the last call.
    pub fn hash_file(&self, path: &Path) -> Result<Hash, SnapshotError> {
        self.hash_file_at(path, SystemTime::now())
    }

    /// The same. `began` is a time before the file is examined.
    fn hash_file_at(&self, path: &Path, began: SystemTime) -> Result<Hash, SnapshotError> {
        if let Some(hash) = self.remembered_hash(path) {
            return Ok(hash);
        }
        let file = &fs::canonicalize(path).map_err(SnapshotError::io("find", path))?;
        let (identity, hash) = self.hash_opened(file).map_err(SnapshotError::io("hash", file))?;
        if identity.settled(began) {
            let mut hashed = self.hashed.locked();
            if hashed.len() >= MOST_IN_MEMORY {
                hashed.clear();
            }
            hashed.insert(path.to_owned(), (identity, hash));
        }
        Ok(hash)
    }

    /// The hash of a file that has not changed since this process asked for it. Reads no file.
    pub(crate) fn remembered_hash(&self, path: &Path) -> Option<Hash> {
        let now = Identity::of_metadata("", &fs::metadata(path).ok()?);
        let hashed = self.hashed.locked();
        let (identity, hash) = hashed.get(path)?;
        (*identity == now).then_some(*hash)
    }

    /// The file's identity when its reading began, and its hash.
    fn hash_opened(&self, path: &Path) -> io::Result<(Identity, Hash)> {
        let file = File::open(path)?;
        let identity = Identity::of("", &file)?;
        if let Some(hash) = self.recall(path, std::slice::from_ref(&identity)) {
            return Ok((identity, hash));
        }
        let began = SystemTime::now();
        let hash = hash_whole(&file)?.blake3;
        if Identity::of("", &file)? == identity {
            self.remember(path, vec![identity.clone()], hash, began);
        }
        Ok((identity, hash))
    }

    fn damage_path(&self, place: &Path) -> PathBuf {
        self.path(place).with_extension(DAMAGE)
    }

    fn path(&self, place: &Path) -> PathBuf {
        use std::os::unix::ffi::OsStrExt;
        self.directory
            .join(Hash::of(place.as_os_str().as_bytes()).to_string())
    }
}

/// Name of the file beside a stamp that describes the damage.
const DAMAGE: &str = "damaged";

/// The process that is writing the file of this name. `None` for a complete file.
pub(super) fn writer(name: &str) -> Option<ProcessRecord> {
    let mut parts = name.strip_prefix('.')?.strip_suffix(".new")?.split('.');
    Some(ProcessRecord {
        pid: parts.next()?.parse().ok()?,
        start_time: parts.next()?.parse().ok()?,
    })
}

/// A new file, accessible to its owner alone, and its path. The name contains the writing process, so that a sweep can tell whether that
/// lives.
pub(super) fn tempfile_in(directory: &Path) -> io::Result<(PathBuf, File)> {
    use std::os::unix::fs::OpenOptionsExt;
    let unique: String = crate::random::<8>()?.iter().map(|b| format!("{b:02x}")).collect();
    let us = ProcessRecord::myself().ok_or(io::ErrorKind::NotFound)?;
    let path = directory.join(format!(".{}.{}.{unique}.new", us.pid, us.start_time));
    let file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&path)?;
    Ok((path, file))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileExt, PermissionsExt};

    #[test]
    fn stamps_of_the_previous_release_are_read() {
        let stamp: Stamp = thaw_record_fixtures::check("stamp.json");
        assert_eq!(stamp.files[0].name, "manifest.json");
    }

    fn settled(path: &Path) -> (File, Identity) {
        let file = File::options().read(true).write(true).open(path).unwrap();
        let identity = Identity::of("f", &file).unwrap();
        (file, identity)
    }

    /// A moment at which everything written so far is old enough.
    fn later() -> SystemTime {
        SystemTime::now() + 2 * MARGIN
    }

    #[test]
    fn what_a_dead_writer_left_is_swept_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let stamps = Stamps::open(directory.path()).unwrap();
        let (ours, _) = tempfile_in(directory.path()).unwrap();
        let us = ProcessRecord::myself().unwrap();
        let dead = format!(".{}.{}.00.new", us.pid, us.start_time + 1);
        for name in [dead.as_str(), "stamp", ".x.new", ".1.new"] {
            fs::write(directory.path().join(name), "").unwrap();
        }
        stamps.sweep();
        assert!(ours.exists());
        assert!(!directory.path().join(dead).exists());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 4);
    }

    #[test]
    fn any_change_of_a_file_voids_its_stamp() {
        let directory = tempfile::tempdir().unwrap();
        let stamps = Stamps::open(&directory.path().join("stamps")).unwrap();
        let path = directory.path().join("f");
        type Change = fn(&File, &Path);
        let changes: [(&str, Change); 6] = [
            ("a byte", |f, _| f.write_all_at(b"x", 3).unwrap()),
            ("its length", |f, _| f.set_len(3).unwrap()),
            ("its mode", |f, _| {
                f.set_permissions(fs::Permissions::from_mode(0o640)).unwrap()
            }),
            ("a byte, its time put back", |f, _| {
                let was = f.metadata().unwrap().modified().unwrap();
                f.write_all_at(b"y", 4).unwrap();
                f.set_modified(was).unwrap();
            }),
            ("another file of the name", |_, path| {
                fs::remove_file(path).unwrap();
                fs::write(path, b"contents").unwrap();
            }),
            ("a second name", |_, path| {
                fs::hard_link(path, path.with_extension("link")).unwrap()
            }),
        ];
        for (what, change) in changes {
            fs::write(&path, b"contents").unwrap();
            // Times are coarse: a change shows only in a file from an earlier tick.
            std::thread::sleep(MARGIN);
            let (file, identity) = settled(&path);
            let hash = Hash::of(b"contents");
            stamps.remember(&path, vec![identity.clone()], hash, later());
            assert_eq!(
                stamps.recall(&path, std::slice::from_ref(&identity)),
                Some(hash),
                "{what}"
            );
            change(&file, &path);
            let (_, changed) = settled(&path);
            assert_eq!(stamps.recall(&path, &[changed]), None, "{what}");
        }
    }

    #[test]
    fn a_new_file_and_another_boot_have_no_stamp() {
        let directory = tempfile::tempdir().unwrap();
        let mut stamps = Stamps::open(&directory.path().join("stamps")).unwrap();
        let path = directory.path().join("f");
        fs::write(&path, b"contents").unwrap();
        let (_, identity) = settled(&path);
        let files = [identity.clone()];
        let as_of = UNIX_EPOCH + Duration::from_nanos(identity.changed_ns as u64);
        stamps.remember(&path, files.to_vec(), Hash::of(b""), as_of + MARGIN / 2);
        assert_eq!(stamps.recall(&path, &files), None, "too new");
        stamps.remember(&path, files.to_vec(), Hash::of(b""), later());
        assert!(stamps.recall(&path, &files).is_some());
        stamps.boot = "another".into();
        assert_eq!(stamps.recall(&path, &files), None);
        stamps.boot = String::new();
        stamps.remember(&path, files.to_vec(), Hash::of(b""), later());
        assert_eq!(stamps.recall(&path, &files), None, "no boot id, no stamp");
    }

    #[test]
    fn stamps_others_could_write_are_not_believed() {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().join("stamps");
        let path = directory.path().join("f");
        fs::write(&path, b"contents").unwrap();
        let (_, identity) = settled(&path);
        Stamps::open(&place)
            .unwrap()
            .remember(&path, vec![identity.clone()], Hash::of(b""), later());
        fs::set_permissions(&place, fs::Permissions::from_mode(0o777)).unwrap();
        assert_eq!(Stamps::open(&place).unwrap().recall(&path, &[identity]), None);
    }

    #[test]
    fn remembered_hash_is_of_the_file_as_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let stamps = Stamps::open(&directory.path().join("stamps")).unwrap();
        let path = directory.path().join("f");
        fs::write(&path, b"one").unwrap();
        let (_, identity) = settled(&path);
        let as_of = UNIX_EPOCH + Duration::from_nanos(identity.changed_ns as u64);
        stamps.hash_file_at(&path, as_of + MARGIN / 2).unwrap();
        assert_eq!(stamps.remembered_hash(&path), None, "a change might not show");
        std::thread::sleep(2 * MARGIN);
        stamps.hash_file(&path).unwrap();
        assert_eq!(stamps.remembered_hash(&path), Some(Hash::of(b"one")));
        fs::write(&path, b"two").unwrap();
        assert_eq!(stamps.remembered_hash(&path), None);
        fs::remove_file(&path).unwrap();
        assert_eq!(stamps.remembered_hash(&path), None);
    }

    #[test]
    fn a_files_hash_follows_its_contents() {
        let directory = tempfile::tempdir().unwrap();
        let stamps = Stamps::open(&directory.path().join("stamps")).unwrap();
        let path = directory.path().join("f");
        for contents in [&b"one"[..], b"two", b"three"] {
            fs::write(&path, contents).unwrap();
            assert_eq!(stamps.hash_file(&path).unwrap(), Hash::of(contents));
            assert_eq!(stamps.hash_file(&path).unwrap(), Hash::of(contents));
        }
        assert!(stamps.hash_file(&directory.path().join("none")).is_err());
    }
}
