//! Changes of the data file by the store and by others.

use std::time::{Duration, SystemTime};

use super::*;
use crate::blob::{BlobFile, BlobWriter, BootId, CHUNK_SIZE, Digests};
use std::io::Write;

const BOOT: BootId = BootId([7; 16]);

struct Blob {
    data: File,
    file: File,
    ready: ReadyFile,
}

impl Blob {
    /// Four chunks, all ready and stamped.
    fn new() -> Blob {
        let (data, file) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let mut writer = BlobWriter::create(data.try_clone().unwrap());
        for chunk in 1..=4 {
            writer.write_all(&[chunk; CHUNK_SIZE as usize]).unwrap();
        }
        let summary = writer.finish().unwrap();
        let ready = BlobWriter::seal(&summary, file.try_clone().unwrap(), [1; 32], BOOT).unwrap();
        ready.stamp(&data).unwrap();
        Blob { data, file, ready }
    }

    fn is_voided(&self) -> bool {
        self.ready.void_if_changed(|| self.data.metadata()).unwrap()
    }

    /// Writes without the store, in a later tick than the writes before.
    fn flip(&self, at: u64) {
        std::thread::sleep(Duration::from_millis(30));
        self.data.write_all_at(&[0xEE], at).unwrap();
    }

    /// Which chunks match their digests, checked as before their first use.
    fn verified(&self) -> Vec<bool> {
        let chunks = 0..self.ready.chunk_count();
        chunks
            .map(|chunk| self.ready.verify(&self.data, chunk, &mut Vec::new()).unwrap())
            .collect()
    }
}

#[test]
fn a_byte_changed_behind_our_back_is_found_at_the_next_open() {
    let blob = Blob::new();
    assert!(!blob.is_voided() && blob.ready.ready_count() == 4);
    blob.flip(2 * CHUNK_SIZE + 5);
    let view = BlobFile::open(blob.data.try_clone().unwrap(), blob.file.try_clone().unwrap()).unwrap();
    assert!(view.is_ready(0, view.len()), "nobody has looked");
    assert!(blob.is_voided());
    assert_eq!(
        view.missing(0, view.len()).collect::<Vec<_>>(),
        vec![0..view.len()]
    );
    assert_eq!(blob.verified(), [true, true, false, true]);
    assert!(!blob.is_voided(), "what was compared stays ready");
    assert_eq!(blob.ready.ready_count(), 3);
}

#[test]
fn times_that_were_set_back_hide_nothing() {
    let blob = Blob::new();
    let modified = blob.data.metadata().unwrap().modified().unwrap();
    blob.flip(0);
    blob.data.set_modified(modified).unwrap();
    assert!(blob.is_voided());
    // After a change of the time alone the bytes are the same, so all match.
    blob.data.write_all_at(&[1], 0).unwrap();
    std::thread::sleep(Duration::from_millis(30));
    blob.data.set_modified(SystemTime::UNIX_EPOCH).unwrap();
    blob.is_voided();
    assert_eq!(blob.verified(), [true; 4]);
}

#[test]
fn a_write_of_ours_does_not_cover_up_one_that_is_not() {
    let blob = Blob::new();
    blob.flip(5);
    let filled = || blob.data.write_all_at(&[2; CHUNK_SIZE as usize], CHUNK_SIZE);
    blob.ready.fill(&blob.data, 1, filled).unwrap();
    assert!(!blob.is_voided(), "it was found by who wrote");
    assert!(blob.ready.is_ready(1) && blob.ready.ready_count() == 1);
    assert_eq!(blob.verified(), [false, true, true, true]);
}

#[test]
fn a_write_that_fails_makes_nothing_ready_and_voids_nothing() {
    let blob = Blob::new();
    blob.ready.clear(3..4);
    let torn = || {
        std::thread::sleep(Duration::from_millis(30));
        blob.data.write_all_at(b"torn", 3 * CHUNK_SIZE)?;
        Err(io::ErrorKind::StorageFull.into())
    };
    let failed = blob.ready.fill(&blob.data, 3, torn).unwrap_err();
    assert!(matches!(failed, BlobError::Io(e) if e.kind() == io::ErrorKind::StorageFull));
    assert!(!blob.is_voided());
    assert_eq!(blob.verified(), [true, true, true, false]);
}

#[test]
fn a_cut_file_gets_its_length_and_loses_its_bits() {
    let blob = Blob::new();
    assert!(!blob.ready.restore_length(&blob.data).unwrap());
    std::thread::sleep(Duration::from_millis(30));
    blob.data.set_len(CHUNK_SIZE + 4096).unwrap();
    assert!(blob.ready.restore_length(&blob.data).unwrap());
    assert!(!blob.is_voided());
    assert_eq!(blob.data.metadata().unwrap().len(), 4 * CHUNK_SIZE);
    assert_eq!(blob.verified(), [true, false, false, false]);
}

#[test]
fn a_file_without_a_stamp_is_compared_once() {
    let blob = Blob::new();
    // The state that a release without stamps leaves.
    blob.file.write_all_at(&[0; BYTES], AT).unwrap();
    assert!(blob.is_voided());
    assert_eq!(blob.verified(), [true; 4]);
    assert!(!blob.is_voided());
}

#[test]
fn opens_while_others_fill_void_nothing() {
    const CHUNKS: u64 = 64;
    let folder = tempfile::tempdir().unwrap();
    let (data, ready) = (folder.path().join("data"), folder.path().join("ready"));
    let open = |path| {
        let mut how = File::options();
        how.read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .unwrap()
    };
    let made = open(&data);
    made.set_len(CHUNKS * CHUNK_SIZE).unwrap();
    let digest = *blake3::hash(&[9; CHUNK_SIZE as usize]).as_bytes();
    let digests = vec![digest; CHUNKS as usize];
    ReadyFile::create(
        open(&ready),
        [1; 32],
        CHUNKS * CHUNK_SIZE,
        Digests::Sealed(&digests),
        false,
        BOOT,
    )
    .unwrap()
    .stamp(&made)
    .unwrap();
    // As in separate processes: each has its own description of the file, and threads share some.
    let shared = (open(&data), ReadyFile::open(open(&ready)).unwrap());
    let fill = |(data, ready): &(File, ReadyFile), chunks: std::ops::Range<u64>| {
        for chunk in chunks {
            let write = || data.write_all_at(&[9; CHUNK_SIZE as usize], chunk * CHUNK_SIZE);
            ready.fill(data, chunk, write).unwrap();
        }
    };
    std::thread::scope(|scope| {
        let filling: Vec<_> = (0..4u64)
            .map(|part| {
                let chunks = part * CHUNKS / 4..(part + 1) * CHUNKS / 4;
                let (shared, fill) = (&shared, &fill);
                let own = (part % 2 == 0).then(|| (open(&data), ReadyFile::open(open(&ready)).unwrap()));
                scope.spawn(move || fill(own.as_ref().unwrap_or(shared), chunks))
            })
            .collect();
        let opener = ReadyFile::open(open(&ready)).unwrap();
        while !filling.iter().all(|thread| thread.is_finished()) {
            assert!(!opener.void_if_changed(|| std::fs::metadata(&data)).unwrap());
        }
    });
    assert_eq!(shared.1.ready_count(), CHUNKS);
}
