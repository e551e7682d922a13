//! Files come back from their packs, and packs that lie do not.

use std::os::unix::fs::{FileExt, MetadataExt};

use proptest::prelude::*;

use super::*;
use crate::snapshot::artifact::unpack::{Placed, UnpackError};

const SIZE: u64 = CHUNK as u64;

/// A file with this many bytes and these at some offsets.
fn file(bytes: u64, parts: &[(u64, Vec<u8>)]) -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(bytes).unwrap();
    for (at, part) in parts {
        file.write_all_at(part, *at).unwrap();
    }
    file
}

/// Bytes that do not compress.
fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    let mut hasher = blake3::Hasher::new();
    hasher.update(&seed.to_le_bytes());
    hasher.finalize_xof().fill(&mut bytes);
    bytes
}

fn packed(files: &[File]) -> (Vec<Vec<u8>>, Table) {
    packed_by(files, LEAST_SPAN)
}

fn packed_by(files: &[File], span: u64) -> (Vec<Vec<u8>>, Table) {
    let files = files.iter().map(|file| file.try_clone().unwrap());
    let mut packer = Packer::with_span(files.collect(), span).unwrap();
    let mut packs = Vec::new();
    loop {
        let mut bytes = Vec::new();
        let Some(pack) = packer.pack(&mut bytes).unwrap() else {
            break;
        };
        assert_eq!((pack.digest, pack.size), (Digest::of(&bytes), bytes.len() as u64));
        packs.push(bytes);
    }
    (packs, packer.into_table())
}

fn whole(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// Packs, decodes the table, unpacks into new files.
fn round_trip(files: &[File], span: u64) -> (Vec<Vec<u8>>, Vec<File>) {
    let (packs, table) = packed_by(files, span);
    let read = Table::decode(&table.encode()).unwrap();
    assert_eq!(read, table);
    let sizes = |files: &[File]| {
        let sizes = files.iter().map(|file| file.metadata().unwrap().len());
        sizes.collect::<Vec<_>>().into_iter()
    };
    read.check_sizes(packs.iter().map(|pack| pack.len() as u64), sizes(files))
        .unwrap();
    let data_bytes = read.data_bytes();
    let placed = Placed::new(read);
    let made: Vec<File> = sizes(files).map(|bytes| file(bytes, &[])).collect();
    let mut written = 0;
    for (number, pack) in (0..).zip(&packs) {
        written += placed.unpack(number, &mut &pack[..], &made).unwrap();
    }
    assert_eq!(written, data_bytes);
    (packs, made)
}

/// The parts of a file: where, which of a few contents, how long.
fn parts() -> impl Strategy<Value = Vec<(u64, u8, u16)>> {
    prop::collection::vec((0..2 * LEAST_SPAN + 3 * SIZE, 0u8..4, 1u16..6000), 0..12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6))]

    #[test]
    fn packed_files_come_back(memory in parts(), disk in parts(), tail in 0..SIZE, doubled in 0u32..7) {
        let bytes = |kind: u8, length: u16| match kind {
            0 => vec![0; length.into()],
            1 => vec![7; length.into()],
            kind => noise(kind.into(), length.into()),
        };
        let end = 2 * LEAST_SPAN + 4 * SIZE;
        let make = |parts: &[(u64, u8, u16)], tail: u64| {
            let parts: Vec<_> = parts
                .iter()
                .map(|(at, kind, length)| (*at, bytes(*kind, *length)))
                .collect();
            file(end + tail, &parts)
        };
        let files = [make(&memory, 0), make(&disk, tail), make(&memory, tail), file(0, &[])];
        let span = LEAST_SPAN << doubled;
        let (packs, made) = round_trip(&files, span);
        for (file, made) in files.iter().zip(&made) {
            prop_assert!(whole(file) == whole(made));
        }
        prop_assert_eq!(packed_by(&files, span).0, packs);
    }

    #[test]
    fn changed_table_is_refused_or_another(at in any::<prop::sample::Index>(), flip in 1u8..) {
        let files = [file(3 * SIZE + 9, &[(0, noise(1, 9)), (SIZE, vec![7; 9]), (3 * SIZE, noise(1, 9))])];
        let (_, table) = packed(&files);
        let mut bytes = table.encode();
        let at = at.index(bytes.len());
        bytes[at] ^= flip;
        if let Ok(read) = Table::decode(&bytes) {
            prop_assert_ne!(&read, &table);
            prop_assert_eq!(read.encode(), bytes);
        }
    }
}

#[test]
fn equal_chunks_are_stored_once_and_zeros_never() {
    let chunk = noise(1, CHUNK as usize);
    let twice = file(8 * SIZE, &[(0, chunk.clone()), (5 * SIZE, chunk.clone())]);
    let again = file(2 * SIZE, &[(SIZE, chunk)]);
    let zeros = file(SIZE, &[(0, vec![0; CHUNK as usize])]);
    let (packs, made) = round_trip(&[twice, again, zeros], LEAST_SPAN);
    assert_eq!(packs.len(), 1);
    assert_eq!(packs[0].len(), CHUNK as usize, "noise is stored as it is");
    assert!(
        made[0].metadata().unwrap().blocks() * 512 < 4 * SIZE,
        "holes stay"
    );
    assert_eq!(made[2].metadata().unwrap().blocks(), 0);
}

/// How many of these packs the other snapshot has not.
fn changed(before: &[Vec<u8>], after: &[Vec<u8>]) -> usize {
    after.iter().filter(|pack| !before.contains(pack)).count()
}

#[test]
fn changed_page_changes_one_pack_and_no_other() {
    let memory = |page: u64| {
        let parts = [(0, noise(1, 6 << 20)), (9 * SIZE + 8192, noise(page, 4096))];
        packed(&[file(8 << 20, &parts)]).0
    };
    let (before, after) = (memory(2), memory(9));
    assert_eq!((before.len(), after.len()), (6, 6), "a hole has no pack");
    assert!(before.iter().all(|pack| pack.len() as u64 == LEAST_SPAN));
    assert_eq!(changed(&before, &after), 1);
}

#[test]
fn change_of_the_first_of_two_equal_chunks_changes_two_packs() {
    let memory = |first: u64| {
        let chunk = |number: u64| noise(number, CHUNK as usize);
        let parts = [
            (0, chunk(first)),
            (LEAST_SPAN, chunk(2)),
            (3 * LEAST_SPAN, chunk(1)),
            (3 * LEAST_SPAN + SIZE, chunk(3)),
        ];
        packed(&[file(4 * LEAST_SPAN, &parts)]).0
    };
    let (before, after) = (memory(1), memory(9));
    assert_eq!((before.len(), after.len()), (3, 3));
    assert_eq!(changed(&before, &after), 2);
}

#[test]
fn spans_are_doubled_until_there_are_few_with_data() {
    // Files with a byte in each of so many MiB.
    let files = |counts: &[u64]| -> Vec<File> {
        let parts = |count: u64| {
            (0..count)
                .map(|number| (number << 20, vec![7u8]))
                .collect::<Vec<_>>()
        };
        counts
            .iter()
            .map(|count| file(count << 20, &parts(*count)))
            .collect()
    };
    let enough = ENOUGH_PACKS as u64;
    for (counts, span) in [
        (vec![512, 64], LEAST_SPAN),
        (vec![enough], LEAST_SPAN),
        (vec![enough - 100, 101], 2 * LEAST_SPAN),
        (vec![2 * enough + 1], 4 * LEAST_SPAN),
    ] {
        let packer = Packer::new(files(&counts)).unwrap();
        assert_eq!(packer.span(), span, "{counts:?}");
    }
    // A large disk that is a hole but for some bytes.
    let disk = file(100 << 30, &[(50 << 30, vec![7; 100])]);
    assert_eq!(span_for(&[disk]).unwrap(), LEAST_SPAN);
    assert_eq!(span_for(&[]).unwrap(), LEAST_SPAN);
}

#[test]
fn lying_packs_are_refused_and_nothing_is_written() {
    let (packs, table) = packed(&[file(
        2 * SIZE,
        &[(0, vec![7; 100]), (SIZE, noise(1, CHUNK as usize))],
    )]);
    let unpacked = |table: &Table, bytes: &[u8]| {
        let into = file(2 * SIZE, &[]);
        let files = [into];
        let failed = Placed::new(table.clone())
            .unpack(0, &mut &*bytes, &files)
            .unwrap_err();
        (failed, whole(&files[0]))
    };
    let zeros = vec![0; 2 * CHUNK as usize];
    let (failed, left) = unpacked(&table, &packs[0][..table.chunks[0].stored as usize - 1]);
    assert!(
        matches!(failed, UnpackError::Read(_)) && left == zeros,
        "{failed}"
    );
    let mut flipped = packs[0].clone();
    flipped[table.chunks[0].stored as usize] ^= 1;
    assert!(matches!(unpacked(&table, &flipped).0, UnpackError::Wrong(1)));
    // A frame of more bytes than the table says, as one that would fill memory has.
    let bomb = zstd::bulk::compress(&vec![7; 64 << 20], 19).unwrap();
    let mut lying = table;
    lying.chunks[0].stored = bomb.len() as u32;
    let (failed, left) = unpacked(&lying, &bomb);
    assert!(
        matches!(failed, UnpackError::Compressed(0)) && left == zeros,
        "{failed}"
    );
    let (failed, left) = unpacked(&lying, &vec![7; bomb.len()]);
    assert!(
        matches!(failed, UnpackError::Compressed(0)) && left == zeros,
        "{failed}"
    );
}

#[test]
fn parts_of_files_come_from_the_fewest_reads() {
    let part = crate::snapshot::manifest::CHUNK;
    // Of the second part: a chunk of the first, a hole, three chunks of its own, of which two are equal, and the end of the file.
    let own = noise(3, 2 * CHUNK as usize);
    let files = [
        file(
            2 * part - 4096,
            &[
                (SIZE, noise(1, CHUNK as usize)),
                (2 * SIZE, noise(2, CHUNK as usize)),
                (part, noise(2, CHUNK as usize)),
                (part + 2 * SIZE, own.clone()),
                (part + 5 * SIZE, own[..CHUNK as usize].to_vec()),
            ],
        ),
        file(part, &[(0, vec![7; CHUNK as usize])]),
    ];
    let (packs, table) = packed(&files);
    let mut counts = Vec::new();
    for (number, file) in files.iter().enumerate() {
        let bytes = whole(file);
        for (part, expected) in (0..).zip(bytes.chunks(part as usize)) {
            let mut found = vec![0; expected.len()];
            let reads = table.reads(number, part);
            for read in &reads {
                let stored = read.stored.start as usize..read.stored.end as usize;
                let stored = &packs[read.pack as usize][stored];
                for (at, chunk) in read.chunks(stored).unwrap() {
                    found[at..at + chunk.len()].copy_from_slice(&chunk);
                }
                let mut lie = stored.to_vec();
                lie[stored.len() - 1] ^= 1;
                assert!(read.chunks(&lie).is_err() && read.chunks(&stored[1..]).is_err());
            }
            assert!(found == expected, "part {part} of file {number}");
            counts.push(reads.len());
        }
    }
    // The second part has chunks of two packs.
    assert_eq!(counts, [1, 2, 1]);
    assert!(table.reads(0, 2).is_empty() && table.reads(2, 0).is_empty());
    assert!(table.reads(0, u64::MAX).is_empty());
}
