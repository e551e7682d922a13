//! Parts are fetched once, compared, and shared; those that are wrong are never written.

use std::ops::Range;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use async_trait::async_trait;

use super::*;
use crate::snapshot::artifact::Packer;
use crate::snapshot::contents::hash_chunks;

/// Packs in memory. Counts reads, and fails as many as it is told to.
#[derive(Default)]
struct InMemory {
    packs: Mutex<Vec<Vec<u8>>>,
    demands: AtomicUsize,
    prefetches: AtomicUsize,
    failures: AtomicUsize,
}

#[async_trait]
impl Ranges for InMemory {
    async fn read(
        &self,
        pack: &StoredBlob,
        range: Range<u64>,
        priority: Priority,
        check: Check,
    ) -> Result<bytes::Bytes, thaw_images::error::Error> {
        let count = match priority {
            Priority::Demand => &self.demands,
            Priority::Prefetch => &self.prefetches,
        };
        count.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(Duration::from_millis(20)).await;
        let failed = self
            .failures
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        if failed.is_ok() {
            return Err(thaw_images::error::Error::Cancelled);
        }
        let packs = self.packs.locked().clone();
        let stored = packs.iter().find(|it| it.len() as u64 == pack.size).unwrap();
        let bytes = stored[range.start as usize..range.end as usize].to_vec();
        check(&bytes).map_err(|problem| thaw_images::error::Error::Malformed {
            what: "a pack".into(),
            problem,
        })?;
        Ok(bytes.into())
    }
}

/// Two parts of data, with a part of zeros between, and a disk.
fn originals() -> Vec<File> {
    let memory = tempfile::tempfile().unwrap();
    memory.set_len(2 * CHUNK + 8192).unwrap();
    memory.write_all_at(&[7; 10_000], 300_000).unwrap();
    memory.write_all_at(b"the end", 2 * CHUNK + 8000).unwrap();
    let disk = tempfile::tempfile().unwrap();
    disk.set_len(CHUNK).unwrap();
    disk.write_all_at(b"a disk", 4096).unwrap();
    vec![memory, disk]
}

/// The files in packs that a registry has; and the registry.
fn remote(originals: &[File], change: impl FnOnce(&mut Vec<u8>)) -> (Arc<RemoteFiles>, Arc<InMemory>) {
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
        packs.push(bytes);
    }
    change(&mut packs[0]);
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

fn part(file: usize, number: u64) -> Part {
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
    let reads = (
        registry.demands.load(Ordering::Relaxed),
        registry.prefetches.load(Ordering::Relaxed),
    );
    assert_eq!(reads, (3, 0));
    assert!(!files.is_present(part(0, 3)) && !files.is_present(part(7, 0)));
    assert!(files.fetch(part(7, 0)).await.is_err());
}

#[tokio::test]
async fn callers_share_a_fetch_and_its_failure_but_no_prefetch() {
    let (files, registry) = remote(&originals(), |_| {});
    registry.failures.store(1, Ordering::Relaxed);
    let wanted = part(0, 0);
    let (first, second) = tokio::join!(files.fetch(wanted), files.fetch(wanted));
    assert!(first.is_err() && second.is_err());
    assert_eq!(registry.demands.load(Ordering::Relaxed), 1);
    let (ahead, first, second) =
        tokio::join!(files.prefetch(wanted), files.fetch(wanted), files.fetch(wanted));
    ahead.unwrap();
    first.unwrap();
    second.unwrap();
    assert_eq!(registry.demands.load(Ordering::Relaxed), 2);
    assert!(files.in_flight.locked().is_empty());
}

#[tokio::test]
async fn fetch_goes_on_for_others_if_its_caller_leaves() {
    let (files, registry) = remote(&originals(), |_| {});
    let wanted = part(0, 2);
    let left = tokio::time::timeout(Duration::from_millis(1), files.fetch(wanted)).await;
    assert!(left.is_err());
    files.fetch(wanted).await.unwrap();
    assert!(files.is_present(wanted) && registry.demands.load(Ordering::Relaxed) <= 2);
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
