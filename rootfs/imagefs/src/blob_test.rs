use std::io::{Seek, Write};
use std::os::unix::fs::FileExt;

use proptest::prelude::*;

use super::*;

const BOOT: BootId = BootId([7; 16]);

fn pattern(length: usize) -> Vec<u8> {
    (0..length)
        .map(|i| (i as u32).wrapping_mul(2654435761).to_le_bytes()[2])
        .collect()
}

fn blob(bytes: &[u8]) -> (File, File, BlobSummary) {
    let (data, ready) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    let mut writer = BlobWriter::create(data.try_clone().unwrap());
    writer.write_all(bytes).unwrap();
    let summary = writer.finish().unwrap();
    BlobWriter::seal(&summary, ready.try_clone().unwrap(), [1; 32], BOOT).unwrap();
    (data, ready, summary)
}

#[test]
fn a_written_blob_reads_back_padded_and_ready() {
    let bytes = pattern(3 * CHUNK_SIZE as usize + 5000);
    let (data, ready, summary) = blob(&bytes);
    let file = BlobFile::open(data, ready).unwrap();
    assert_eq!(file.len(), 3 * CHUNK_SIZE + 8192);
    assert_eq!(summary.digests.len(), 4);
    assert_eq!(file.id(), [1; 32]);
    assert!(file.is_ready(0, file.len()));
    assert!(!file.is_ready(0, file.len() + 1));
    assert!(!file.is_ready(u64::MAX, 2));
    let mut read = vec![0; file.len() as usize];
    file.data().read_exact_at(&mut read, 0).unwrap();
    assert_eq!(&read[..bytes.len()], &bytes[..]);
    assert!(read[bytes.len()..].iter().all(|byte| *byte == 0));
}

#[test]
fn an_empty_layer_makes_an_empty_blob() {
    let (data, ready, _) = blob(&[]);
    let file = BlobFile::open(data, ready).unwrap();
    assert!(file.is_empty() && file.is_ready(0, 0));
    assert_eq!(file.missing(0, 10).count(), 0);
}

#[test]
fn zero_chunks_are_holes() {
    let (data, ready, _) = blob(&vec![0; 8 * CHUNK_SIZE as usize]);
    use std::os::unix::fs::MetadataExt;
    assert_eq!(data.metadata().unwrap().blocks(), 0);
    assert_eq!(BlobFile::open(data, ready).unwrap().len(), 8 * CHUNK_SIZE);
}

#[test]
fn another_boot_believes_nothing_until_it_has_compared() {
    let bytes = pattern(4 * CHUNK_SIZE as usize);
    let (data, ready, _) = blob(&bytes);
    let view = BlobFile::open(data.try_clone().unwrap(), ready.try_clone().unwrap()).unwrap();
    let mut owner = ReadyFile::open(ready).unwrap();
    assert!(!owner.activate(BOOT).unwrap());
    assert!(view.is_ready(0, view.len()));
    assert!(owner.activate(BootId([8; 16])).unwrap());
    assert_eq!(
        view.missing(0, view.len()).collect::<Vec<_>>(),
        vec![0..view.len()]
    );
    // A page that never reached the disk before the crash.
    data.write_all_at(&[0; 4096], 2 * CHUNK_SIZE).unwrap();
    owner.stamp(&data).unwrap();
    let mut buffer = Vec::new();
    let agree: Vec<bool> = (0..4)
        .map(|chunk| owner.verify(&data, chunk, &mut buffer).unwrap())
        .collect();
    assert_eq!(agree, [true, true, false, true]);
    assert_eq!(
        view.missing(1, view.len()).collect::<Vec<_>>(),
        vec![2 * CHUNK_SIZE..3 * CHUNK_SIZE]
    );

    let mut writer = BlobWriter::refill(data, owner);
    writer.write_all(&bytes).unwrap();
    assert_eq!(writer.finish_refill().unwrap(), RefillSummary { repaired: 1 });
    assert!(view.is_ready(0, view.len()));
    let mut read = vec![0; bytes.len()];
    view.data().read_exact_at(&mut read, 0).unwrap();
    assert_eq!(read, bytes);
}

#[test]
fn a_boot_without_an_id_is_never_believed() {
    let (_, ready, _) = blob(&pattern(5000));
    let mut owner = ReadyFile::open(ready).unwrap();
    assert!(owner.activate(BootId::NONE).unwrap());
    assert!(owner.activate(BootId::NONE).unwrap());
    assert_ne!(BootId::current(), BootId::NONE);
}

#[test]
fn a_repair_with_other_bytes_is_refused() {
    let mut bytes = pattern(2 * CHUNK_SIZE as usize);
    let (data, ready, _) = blob(&bytes);
    let mut owner = ReadyFile::open(ready).unwrap();
    owner.activate(BootId([9; 16])).unwrap();
    bytes[CHUNK_SIZE as usize] ^= 1;
    let mut writer = BlobWriter::refill(data, owner);
    assert!(writer.write_all(&bytes).is_err());
}

#[test]
fn a_repair_that_ends_early_is_refused() {
    let bytes = pattern(2 * CHUNK_SIZE as usize);
    let (data, ready, _) = blob(&bytes);
    let mut writer = BlobWriter::refill(data, ReadyFile::open(ready).unwrap());
    writer.write_all(&bytes[..CHUNK_SIZE as usize]).unwrap();
    assert!(matches!(
        writer.finish_refill(),
        Err(BlobError::Unrepeatable { offset: CHUNK_SIZE })
    ));
}

#[test]
fn chunk_digests_are_learned_and_torn_chunks_do_not_match() {
    let bytes = pattern(3 * CHUNK_SIZE as usize);
    let data = tempfile::tempfile().unwrap();
    data.set_len(3 * CHUNK_SIZE).unwrap();
    let file = tempfile::tempfile().unwrap();
    let create = |complete| {
        let file = file.try_clone().unwrap();
        ReadyFile::create(file, [3; 32], 3 * CHUNK_SIZE, Digests::Learned, complete, BOOT)
    };
    assert!(create(true).is_err(), "nobody has seen the chunks");
    let ready = create(false).unwrap();
    assert!(ready.is_learned() && ready.digest(0).unwrap().is_none());
    let mut buffer = Vec::new();
    // Zeros do not match an unknown digest.
    assert!(!ready.verify(&data, 0, &mut buffer).unwrap());
    data.write_all_at(&bytes, 0).unwrap();
    for chunk in 0..2 {
        let range = ready.chunk_range(chunk);
        let digest = blake3::hash(&bytes[range.start as usize..range.end as usize]);
        ready.record(chunk, digest.as_bytes()).unwrap();
        ready.set_ready(chunk);
    }
    assert!(ready.record(3, &[1; 32]).is_err());
    assert_eq!(ready.ready_count(), 2);
    drop(ready);

    // Another boot; one digest was written only in part.
    let mut ready = ReadyFile::open(file.try_clone().unwrap()).unwrap();
    let torn = ready.digest(1).unwrap().unwrap();
    let half = [&torn[..16], &[0; 16]].concat();
    ready.record(1, &half.try_into().unwrap()).unwrap();
    assert!(ready.activate(BootId([8; 16])).unwrap());
    let agree: Vec<bool> = (0..3)
        .map(|chunk| ready.verify(&data, chunk, &mut buffer).unwrap())
        .collect();
    assert_eq!(agree, [true, false, false]);

    // Emptied: digests are kept, bits are not. A sealed file refuses new digests.
    let emptied = tempfile::tempfile().unwrap();
    let emptied = ready.write_emptied(emptied, BOOT).unwrap();
    assert!(emptied.is_learned() && emptied.ready_count() == 0);
    assert_eq!(emptied.digest(0).unwrap(), ready.digest(0).unwrap());
    let (_, sealed, _) = blob(&bytes);
    assert!(ReadyFile::open(sealed).unwrap().record(0, &[1; 32]).is_err());
}

#[test]
fn torn_and_hostile_files_are_errors() {
    let (data, ready, _) = blob(&pattern(3 * CHUNK_SIZE as usize));
    let whole = ready.metadata().unwrap().len();
    let mut bytes = vec![0; whole as usize];
    ready.read_exact_at(&mut bytes, 0).unwrap();
    let with = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut copy = bytes.clone();
        change(&mut copy);
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&copy).unwrap();
        file.rewind().unwrap();
        file
    };
    let open = |ready: File| {
        BlobFile::open(data.try_clone().unwrap(), ready)
            .err()
            .map(|error| error.to_string())
    };
    for length in [0, 100, 4095, 4096, 8192, whole as usize - 1] {
        assert!(
            open(with(&|bytes| bytes.truncate(length))).is_some(),
            "length {length}"
        );
    }
    for (at, value) in [
        (0, b'X'),
        (8, 3),
        (8, 1),
        (112, 2),
        (115, 1),
        (12, 3),
        (12, 60),
        (16, 1),
        (22, 255),
        (24, 9),
    ] {
        assert!(open(with(&|bytes| bytes[at] = value)).is_some(), "byte {at}");
    }
    // A digest changed. The reader does not check that; the owner must.
    let torn = with(&|bytes| *bytes.last_mut().unwrap() ^= 1);
    assert!(matches!(ReadyFile::open(torn), Err(BlobError::Damaged(_))));
    data.set_len(CHUNK_SIZE).unwrap();
    assert!(matches!(
        BlobFile::open(data.try_clone().unwrap(), ready),
        Err(BlobError::ShortData {
            actual: CHUNK_SIZE,
            ..
        })
    ));
}

proptest! {
    /// `missing` returns exactly the chunks whose bit is unset, merged and in order, and agrees with `is_ready`.
    #[test]
    fn missing_is_the_complement_of_the_bits(set in proptest::collection::vec(any::<bool>(), 1..40),
                                             offset in 0u64..6_000_000, length in 0u64..6_000_000, cut in 0u64..32) {
        let size = set.len() as u64 * CHUNK_SIZE - cut.min(31) * BLOCK_SIZE;
        let data = tempfile::tempfile().unwrap();
        data.set_len(size).unwrap();
        let ready = tempfile::tempfile().unwrap();
        let digests = vec![[0; 32]; set.len()];
        let owner =
            ReadyFile::create(
                ready.try_clone().unwrap(), [0; 32], size, Digests::Sealed(&digests), false, BOOT).unwrap();
        for (chunk, _) in set.iter().enumerate().filter(|(_, set)| **set) {
            owner.set_ready(chunk as u64);
        }
        let file = BlobFile::open(data, ready).unwrap();
        let missing: Vec<_> = file.missing(offset, length).collect();
        for pair in missing.windows(2) {
            prop_assert!(pair[0].end < pair[1].start);
        }
        let end = (offset + length).min(size);
        for (chunk, set) in set.iter().enumerate() {
            let range = chunk as u64 * CHUNK_SIZE..((chunk as u64 + 1) * CHUNK_SIZE).min(size);
            let touched = range.start < end && offset < range.end && offset < end;
            let reported = missing.iter().any(|gap| gap.start <= range.start && range.end <= gap.end);
            prop_assert_eq!(reported, touched && !set);
        }
        prop_assert_eq!(file.is_ready(offset, length), missing.is_empty() && offset + length <= size);
    }
}
