//! The working sets that this node recorded at the first thaw of each snapshot: `THAW_DATA/working-sets/HASH`, by the manifest's hash.
//!
//! A snapshot's own files never change after the freeze, and its signature covers them. What a thawed application touches first is known
//! only later, so each node keeps it beside. Invariants: a file under its final name is complete, and there are at most [`MOST`].
//! It is a hint: a wrong one costs time and never changes a guest (`vmm/src/snapshot/working_set.rs`).

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::fs::{AtFlags, CWD, Mode, OFlags};

use super::hash::Hash;

/// Maximum number of working sets kept. Each has at most 1 MiB (docs/snapshot-format.md).
const MOST: usize = 256;

/// The store of working sets.
#[derive(Clone, Debug)]
pub struct WorkingSets {
    root: PathBuf,
}

impl WorkingSets {
    /// Those under a data directory.
    pub fn of(data: &Path) -> WorkingSets {
        WorkingSets {
            root: data.join("working-sets"),
        }
    }

    /// The working set of a snapshot, if this node recorded one.
    pub fn find(&self, manifest: Hash) -> Option<File> {
        File::open(self.path(manifest)).ok()
    }

    /// A file without a name, for [`Self::keep`].
    pub fn draft(&self) -> io::Result<File> {
        fs::DirBuilder::new()
            .mode(0o700)
            .recursive(true)
            .create(&self.root)?;
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        Ok(rustix::fs::open(&self.root, flags, Mode::RUSR)?.into())
    }

    /// Gives a complete draft its name. Does nothing if the snapshot has one already. Removes the oldest if there are too many.
    pub fn keep(&self, manifest: Hash, draft: &File) -> io::Result<()> {
        draft.sync_all()?;
        let from = format!("/proc/self/fd/{}", draft.as_raw_fd());
        match rustix::fs::linkat(CWD, from, CWD, self.path(manifest), AtFlags::SYMLINK_FOLLOW) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(e) => return Err(e.into()),
        }
        self.remove_oldest()
    }

    fn remove_oldest(&self) -> io::Result<()> {
        let mut all: Vec<(SystemTime, PathBuf)> = fs::read_dir(&self.root)?
            .map(|entry| entry.and_then(|e| Ok((e.metadata()?.modified()?, e.path()))))
            .collect::<io::Result<_>>()?;
        all.sort();
        let surplus = all.len().saturating_sub(MOST);
        all.iter()
            .take(surplus)
            .try_for_each(|(_, path)| fs::remove_file(path))
    }

    fn path(&self, manifest: Hash) -> PathBuf {
        self.root.join(manifest.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn working_set_is_found_once_it_is_complete() {
        let place = tempfile::tempdir().unwrap();
        let sets = WorkingSets::of(place.path());
        let snapshot = Hash::of(b"manifest");
        assert!(sets.find(snapshot).is_none());
        let mut draft = sets.draft().unwrap();
        draft.write_all(b"pages").unwrap();
        assert!(sets.find(snapshot).is_none());
        sets.keep(snapshot, &draft).unwrap();
        let mut other = sets.draft().unwrap();
        other.write_all(b"others").unwrap();
        sets.keep(snapshot, &other).unwrap();
        let found = io::read_to_string(sets.find(snapshot).unwrap()).unwrap();
        assert_eq!(found, "pages", "the first stays");
        assert!(sets.find(Hash::of(b"another")).is_none());
    }

    #[test]
    fn oldest_working_sets_are_removed() {
        let place = tempfile::tempdir().unwrap();
        let sets = WorkingSets::of(place.path());
        let snapshots: Vec<Hash> = (0..=MOST).map(|n| Hash::of(&n.to_le_bytes())).collect();
        for (age, snapshot) in snapshots.iter().rev().enumerate() {
            let draft = sets.draft().unwrap();
            let then = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000 - age as u64);
            draft.set_modified(then).unwrap();
            sets.keep(*snapshot, &draft).unwrap();
        }
        assert_eq!(fs::read_dir(&sets.root).unwrap().count(), MOST);
        assert!(sets.find(snapshots[0]).is_none() && sets.find(snapshots[MOST]).is_some());
    }
}
