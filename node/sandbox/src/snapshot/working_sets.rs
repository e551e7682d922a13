//! The working sets that this node recorded at the first thaw of each snapshot: `THAW_DATA/working-sets/HASH`, by the manifest's hash.
//!
//! A snapshot's own files never change after the freeze, and its signature covers them. What a thawed application touches first is known
//! only later, so each node keeps it beside. Invariants: a VMM gets only a file that is whole and of the known format, because it refuses
//! any other, and there are at most [`MOST`]. What the file says is a hint: a wrong one costs time and never changes a guest
//! (`vmm/src/snapshot/working_set.rs`).

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::fs::{AtFlags, CWD, Mode, OFlags};

use super::hash::Hash;

/// Maximum number of working sets kept. Each has at most 1 MiB (docs/snapshot-format.md).
const MOST: usize = 256;

/// Maximum number of bytes of a file: its header, and 65536 runs of 16 bytes.
pub(super) const MOST_BYTES: u64 = HEADER as u64 + (1 << 20);
/// Bytes of the header.
const HEADER: usize = 64;
/// Bytes of a run of pages.
const RUN: usize = 16;
/// The end of all pages.
const END: u64 = 1 << 50;
/// The magic, version 1 of the format, and zeros.
const BEGINNING: &[u8] = b"THAWWSET\x01\0\0\0\0\0\0\0";

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

    /// The working set of a snapshot, if this node recorded one. One that a VMM would refuse is removed, and the next thaw records another.
    pub fn find(&self, manifest: Hash) -> Option<File> {
        let path = self.path(manifest);
        let file = File::open(&path).ok()?;
        match is_whole(&file) {
            Ok(true) => Some(file),
            Ok(false) => {
                tracing::warn!("removed {}: it is damaged, or of another release", path.display());
                let _ = fs::remove_file(&path);
                None
            }
            Err(e) => {
                tracing::warn!("cannot read {}: {e}", path.display());
                None
            }
        }
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

/// Whether it has the header that docs/snapshot-format.md describes, and the body that the header says.
fn is_whole(file: &File) -> io::Result<bool> {
    let bytes = file.metadata()?.len();
    if !(HEADER as u64..=MOST_BYTES).contains(&bytes) {
        return Ok(false);
    }
    let mut whole = vec![0; usize::try_from(bytes).unwrap_or(HEADER)];
    file.read_exact_at(&mut whole, 0)?;
    let (header, body) = whole.split_at(HEADER);
    let length = (body.len() as u64).to_le_bytes();
    Ok(header.starts_with(BEGINNING)
        && header[16..24] == length
        && header[24..32] == [0; 8]
        && header[32..] == *blake3::hash(body).as_bytes())
}

/// The runs of pages in the bytes of a working set: the first page of the memory file, and how many. Ends before the first run that the
/// format does not allow there, so no page comes twice.
pub fn page_runs(bytes: &[u8]) -> impl Iterator<Item = (u64, u64)> {
    let body = bytes.get(HEADER..).filter(|_| bytes.starts_with(BEGINNING));
    let runs = body.unwrap_or_default().as_chunks::<RUN>().0.iter();
    let little = |bytes: &[u8]| {
        bytes
            .iter()
            .rev()
            .fold(0u64, |sum, byte| sum << 8 | u64::from(*byte))
    };
    let runs = runs.map(move |run| (little(&run[..8]), little(&run[8..12])));
    let mut next = 0;
    runs.take_while(move |(first, pages)| {
        let is_allowed = (next..END).contains(first) && *pages > 0;
        next = first.saturating_add(*pages);
        is_allowed
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// A whole file with this body.
    fn whole(body: &[u8]) -> Vec<u8> {
        let mut bytes = [BEGINNING, &(body.len() as u64).to_le_bytes(), &[0; 8]].concat();
        bytes.extend(blake3::hash(body).as_bytes());
        bytes.extend(body);
        bytes
    }

    #[test]
    fn damaged_working_set_is_removed_and_recorded_again() {
        let place = tempfile::tempdir().unwrap();
        let sets = WorkingSets::of(place.path());
        let (snapshot, good) = (Hash::of(b"manifest"), whole(b"pages"));
        let mut bad: Vec<Vec<u8>> = (0..good.len())
            .map(|at| {
                let mut bytes = good.clone();
                bytes[at] ^= 1;
                bytes
            })
            .collect();
        bad.extend([Vec::new(), good[..40].to_vec(), good[..good.len() - 1].to_vec()]);
        for bytes in bad {
            let mut draft = sets.draft().unwrap();
            draft.write_all(&bytes).unwrap();
            sets.keep(snapshot, &draft).unwrap();
            assert!(sets.find(snapshot).is_none(), "{bytes:?}");
            assert!(!sets.path(snapshot).exists());
        }
    }

    #[test]
    fn working_set_is_found_once_it_is_complete() {
        let place = tempfile::tempdir().unwrap();
        let sets = WorkingSets::of(place.path());
        let snapshot = Hash::of(b"manifest");
        assert!(sets.find(snapshot).is_none());
        let mut draft = sets.draft().unwrap();
        draft.write_all(&whole(b"pages")).unwrap();
        assert!(sets.find(snapshot).is_none());
        sets.keep(snapshot, &draft).unwrap();
        let mut other = sets.draft().unwrap();
        other.write_all(b"others").unwrap();
        sets.keep(snapshot, &other).unwrap();
        let found = fs::read(sets.path(snapshot)).unwrap();
        assert!(sets.find(snapshot).is_some());
        assert_eq!(found, whole(b"pages"), "the first stays");
        assert!(sets.find(Hash::of(b"another")).is_none());
    }

    #[test]
    fn page_runs_end_at_the_first_that_none_can_be() {
        let run = |first: u64, pages: u32| {
            let first = first.to_le_bytes();
            [&first[..], &pages.to_le_bytes(), &[1, 0, 0, 0]].concat()
        };
        let runs = |body: &[u8]| page_runs(&whole(body)).collect::<Vec<_>>();
        let (a, b) = (run(7, 2), run(9, u32::MAX));
        assert_eq!(runs(&[&a[..], &b].concat()), [(7, 2), (9, u32::MAX.into())]);
        for wrong in [run(8, 1), run(0, 1), run(9, 0), run(1 << 50, 1), run(u64::MAX, 1)] {
            assert_eq!(
                runs(&[&a[..], &wrong, &run(20, 1)].concat()),
                [(7, 2)],
                "{wrong:?}"
            );
        }
        assert!(runs(&a[..15]).is_empty());
        assert_eq!(page_runs(&a).count(), 0, "no header");
    }

    #[test]
    fn oldest_working_sets_are_removed() {
        let place = tempfile::tempdir().unwrap();
        let sets = WorkingSets::of(place.path());
        let snapshots: Vec<Hash> = (0..=MOST).map(|n| Hash::of(&n.to_le_bytes())).collect();
        for (age, snapshot) in snapshots.iter().rev().enumerate() {
            let mut draft = sets.draft().unwrap();
            draft.write_all(&whole(b"pages")).unwrap();
            let then = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000 - age as u64);
            draft.set_modified(then).unwrap();
            sets.keep(*snapshot, &draft).unwrap();
        }
        assert_eq!(fs::read_dir(&sets.root).unwrap().count(), MOST);
        assert!(sets.find(snapshots[0]).is_none() && sets.find(snapshots[MOST]).is_some());
    }
}
