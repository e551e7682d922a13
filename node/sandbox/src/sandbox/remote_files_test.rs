//! Parts are fetched once, compared, and shared; those that are wrong are never written.

use std::ops::Range;
use std::sync::atomic::AtomicUsize;

use async_trait::async_trait;
use thaw_imagefs::digest::Digest;
use thaw_images::error::Error as ImagesError;
use tokio::time::{Instant, sleep, timeout};

use super::*;
use crate::snapshot::artifact::Packer;
use crate::snapshot::contents::hash_chunks;

/// How long a read of a pack takes.
pub(in crate::sandbox) const READ: Duration = Duration::from_millis(20);

/// Packs in memory. Counts reads, and fails as many as it is told to.
#[derive(Default)]
pub(in crate::sandbox) struct InMemory {
    packs: Mutex<Vec<(Digest, Vec<u8>)>>,
    demands: AtomicUsize,
    prefetches: AtomicUsize,
    /// Prefetches that a caller waited for in the end.
    urgent: AtomicUsize,
    failures: AtomicUsize,
}

impl InMemory {
    /// The reads so far: demands, and prefetches.
    pub(in crate::sandbox) fn reads(&self) -> (usize, usize) {
        let load = |count: &AtomicUsize| count.load(Ordering::Relaxed);
        (load(&self.demands), load(&self.prefetches))
    }
}

#[async_trait]
impl Ranges for InMemory {
    async fn read(
        &self,
        pack: &StoredBlob,
        range: Range<u64>,
        priority: Priority,
        check: Check,
    ) -> Result<bytes::Bytes, ImagesError> {
        let count = match priority {
            Priority::Demand => &self.demands,
            Priority::Prefetch => &self.prefetches,
        };
        count.fetch_add(1, Ordering::Relaxed);
        sleep(READ).await;
        let failed = self
            .failures
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        if failed.is_ok() {
            return Err(ImagesError::Cancelled);
        }
        let packs = self.packs.locked().clone();
        let (_, stored) = packs.iter().find(|(digest, _)| *digest == pack.digest).unwrap();
        let bytes = stored[range.start as usize..range.end as usize].to_vec();
        check(&bytes).map_err(|problem| ImagesError::Malformed {
            what: "a pack".into(),
            problem,
        })?;
        Ok(bytes.into())
    }

    async fn read_ahead(
        &self,
        pack: &StoredBlob,
        range: Range<u64>,
        urgency: &Urgency,
        check: Check,
    ) -> Result<bytes::Bytes, ImagesError> {
        let read = self.read(pack, range, Priority::Prefetch, check).await;
        self.urgent
            .fetch_add(urgency.is_raised().into(), Ordering::Relaxed);
        read
    }
}

/// A file of so many bytes, with these at some offsets.
pub(in crate::sandbox) fn file(bytes: u64, parts: &[(u64, &[u8])]) -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(bytes).unwrap();
    for (at, part) in parts {
        file.write_all_at(part, *at).unwrap();
    }
    file
}

/// Two parts of data, with a part of zeros between, and a disk.
pub(in crate::sandbox) fn originals() -> Vec<File> {
    let filled = [7; 10_000];
    let memory = [(300_000, &filled[..]), (2 * CHUNK + 8000, &b"the end"[..])];
    vec![
        file(2 * CHUNK + 8192, &memory),
        file(CHUNK, &[(4096, &b"a disk"[..])]),
    ]
}

/// The files in packs that a registry has; and the registry.
pub(in crate::sandbox) fn remote(
    originals: &[File],
    change: impl FnOnce(&mut Vec<u8>),
) -> (Arc<RemoteFiles>, Arc<InMemory>) {
    let copies = originals.iter().map(|file| file.try_clone().unwrap());
    let mut packer = Packer::new(copies.collect()).unwrap();
    let (mut packs, mut stored) = (Vec::new(), Vec::new());
    loop {
        let mut bytes = Vec::new();
        let Some(pack) = packer.pack(&mut bytes).unwrap() else {
            break;
        };
        stored.push(StoredBlob {
            digest: pack.digest,
            size: pack.size,
            urls: Vec::new(),
        });
        packs.push((pack.digest, bytes));
    }
    change(&mut packs[0].1);
    let registry = Arc::new(InMemory {
        packs: Mutex::new(packs),
        ..InMemory::default()
    });
    let expected: Vec<ChunkedFile> = originals.iter().map(|file| hash_chunks(file).unwrap()).collect();
    let files = expected.iter().map(|expected| {
        let file = tempfile::tempfile().unwrap();
        file.set_len(expected.bytes).unwrap();
        (file, expected)
    });
    let packs = Packs {
        reference: "registry.example/web:ready".into(),
        ranges: registry.clone(),
        packs: stored,
        table: Arc::new(Placed::new(packer.into_table())),
    };
    (Arc::new(RemoteFiles::new(packs, files.collect())), registry)
}

pub(in crate::sandbox) fn part(file: usize, number: u64) -> Part {
    Part { file, number }
}

#[tokio::test]
async fn parts_come_when_they_are_wanted_and_are_the_originals() {
    let originals = originals();
    let (files, registry) = remote(&originals, |_| {});
    let all: Vec<Part> = (0..files.count()).flat_map(|file| files.parts(file)).collect();
    assert_eq!(all, [part(0, 0), part(0, 2), part(1, 0)]);
    assert!(files.is_present(part(0, 1)), "zeros are");
    for part in all {
        assert!(!files.is_present(part) && files.read(part, &mut [0; 10]).is_err());
        files.fetch(part).await.unwrap();
        files.fetch(part).await.unwrap();
        files.prefetch(part).await.unwrap();
        let original = &originals[part.file];
        let length = CHUNK.min(original.metadata().unwrap().len() - part.number * CHUNK) as usize;
        let (mut found, mut expected) = (vec![1; length], vec![2; length]);
        files.read(part, &mut found).unwrap();
        original
            .read_exact_at(&mut expected, part.number * CHUNK)
            .unwrap();
        assert!(found == expected, "{part:?}");
    }
    assert_eq!(registry.reads(), (3, 0));
    assert!(!files.is_present(part(0, 3)) && !files.is_present(part(7, 0)));
    assert!(files.fetch(part(7, 0)).await.is_err());
}

#[tokio::test]
async fn callers_share_a_fetch_and_its_failure() {
    let (files, registry) = remote(&originals(), |_| {});
    registry.failures.store(1, Ordering::Relaxed);
    let wanted = part(0, 0);
    let (first, second) = tokio::join!(files.fetch(wanted), files.fetch(wanted));
    assert!(first.is_err() && second.is_err());
    assert_eq!(registry.reads(), (1, 0));
    assert!(files.in_flight.locked().is_empty());
}

#[tokio::test]
async fn callers_join_a_prefetch_which_is_urgent_then() {
    let (files, registry) = remote(&originals(), |_| {});
    let (wanted, other) = (part(0, 0), part(0, 2));
    let (ahead, alone, first, second) = tokio::join!(
        files.prefetch(wanted),
        files.prefetch(other),
        files.fetch(wanted),
        files.fetch(wanted)
    );
    ahead.unwrap();
    alone.unwrap();
    first.unwrap();
    second.unwrap();
    assert_eq!(registry.reads(), (0, 2), "each part is read once");
    assert_eq!(registry.urgent.load(Ordering::Relaxed), 1);
    assert!(files.in_flight.locked().is_empty());
}

#[tokio::test]
async fn caller_that_joined_a_failed_prefetch_reads_itself() {
    let (files, registry) = remote(&originals(), |_| {});
    registry.failures.store(1, Ordering::Relaxed);
    let wanted = part(0, 0);
    let (ahead, fetched) = tokio::join!(files.prefetch(wanted), files.fetch(wanted));
    assert!(ahead.is_err());
    fetched.unwrap();
    assert_eq!(registry.reads(), (1, 1));
}

#[tokio::test]
async fn fetch_goes_on_for_others_if_its_caller_leaves() {
    let (files, registry) = remote(&originals(), |_| {});
    let wanted = part(0, 2);
    let left = timeout(Duration::from_millis(1), files.fetch(wanted)).await;
    assert!(left.is_err());
    assert!(files.in_flight.locked().is_empty(), "nobody is left");
    files.fetch(wanted).await.unwrap();
    assert!(files.is_present(wanted) && registry.reads().0 <= 2);
}

#[tokio::test]
async fn caller_goes_on_if_the_prefetch_that_it_joined_is_dropped() {
    let (files, registry) = remote(&originals(), |_| {});
    let wanted = part(0, 0);
    let ahead = timeout(Duration::from_millis(1), files.prefetch(wanted));
    let (ahead, fetched) = tokio::join!(ahead, files.fetch(wanted));
    assert!(ahead.is_err());
    fetched.unwrap();
    assert_eq!(registry.reads(), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn packs_of_a_part_are_read_at_once_only_for_a_caller() {
    let memory = [(0, &b"one pack"[..]), (CHUNK / 2, &b"another"[..])];
    let memory = || vec![file(CHUNK, &memory)];
    let (files, registry) = remote(&memory(), |_| {});
    let start = Instant::now();
    files.fetch(part(0, 0)).await.unwrap();
    assert_eq!((registry.reads(), start.elapsed() / 2 < READ), ((2, 0), true));
    let (files, registry) = remote(&memory(), |_| {});
    let start = Instant::now();
    files.prefetch(part(0, 0)).await.unwrap();
    assert_eq!((registry.reads(), start.elapsed() / 2 < READ), ((0, 2), false));
}

#[tokio::test]
async fn wrong_bytes_are_never_written() {
    let originals = originals();
    let (files, _) = remote(&originals, |pack| pack[0] ^= 1);
    let error = files.fetch(part(0, 0)).await.unwrap_err();
    assert!(error.what.contains("chunk 0"), "{error}");
    assert!(!files.is_present(part(0, 0)));
    // A table that agrees with its packs, and not with the manifest.
    let (mut files, _) = remote(&originals, |_| {});
    let inner = Arc::get_mut(&mut files).unwrap();
    inner.files[MEMORY].hashes[2] = Some(Hash::of(b"another"));
    let error = files.fetch(part(0, 2)).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::SnapshotMalformed);
    assert!(error.what.contains("manifest.json"), "{error}");
    let memory = &files.files[MEMORY].file;
    let mut bytes = vec![1; 8192];
    memory.read_exact_at(&mut bytes, 2 * CHUNK).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0));
}
