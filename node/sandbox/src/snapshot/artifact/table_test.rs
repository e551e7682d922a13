//! Which tables are refused.

use super::*;

fn chunk(hash: u8, offset: u32, stored: u32, bytes: u32) -> Chunk {
    Chunk {
        hash: Hash::of(&[hash]),
        pack: 0,
        offset,
        stored,
        bytes,
        is_zstd: stored < bytes,
    }
}

/// Two packs; the first chunk is in both files.
fn table() -> Table {
    let second = Chunk {
        pack: 1,
        ..chunk(3, 0, 90, 90)
    };
    Table {
        packs: 2,
        chunks: vec![chunk(1, 0, 500, CHUNK), chunk(2, 500, CHUNK, CHUNK), second],
        files: vec![
            FileChunks {
                bytes: 4 * u64::from(CHUNK),
                placed: vec![(0, 0), (1, 1), (3, 0)],
            },
            FileChunks {
                bytes: u64::from(CHUNK) + 90,
                placed: vec![(0, 0), (1, 2)],
            },
        ],
    }
}

fn refused(change: impl FnOnce(&mut Table)) -> String {
    let mut lying = table();
    change(&mut lying);
    Table::decode(&lying.encode()).unwrap_err().to_string()
}

#[test]
fn table_is_read_as_it_was_written() {
    let table = table();
    let read = Table::decode(&table.encode()).unwrap();
    assert_eq!(read, table);
    assert_eq!(read.data_bytes(), 4 * u64::from(CHUNK) + 90);
    assert_eq!(
        read.of_pack(0).map(|(number, _)| number).collect::<Vec<_>>(),
        [0, 1]
    );
    let places: Vec<_> = read
        .places()
        .iter()
        .map(|it| (it.chunk, it.file, it.number))
        .collect();
    assert_eq!(places, [(0, 0, 0), (0, 0, 3), (0, 1, 0), (1, 0, 1), (2, 1, 1)]);
    assert_eq!(Table::decode(&Table::default().encode()), Ok(Table::default()));
}

#[test]
fn chunks_that_overlap_or_leave_gaps_are_refused() {
    for offset in [0, 499, 501, u32::MAX] {
        assert!(!refused(|it| it.chunks[1].offset = offset).is_empty(), "{offset}");
    }
    assert!(refused(|it| it.chunks[0].offset = 1).contains("begin where"));
    assert!(refused(|it| it.chunks[2].pack = 2).contains("begin where"));
    assert!(refused(|it| it.chunks[0].pack = 1).contains("begin where"));
    assert!(refused(|it| it.packs = 3).contains("a pack has no chunks"));
    assert!(refused(|it| it.chunks[1].hash = it.chunks[0].hash).contains("one hash"));
}

#[test]
fn lengths_that_no_chunk_can_have_are_refused() {
    let lengths = |stored: u32, bytes: u32, is_zstd: bool| {
        refused(move |it| {
            it.chunks[0] = Chunk {
                is_zstd,
                ..chunk(1, 0, stored, bytes)
            }
        })
    };
    for (stored, bytes, is_zstd) in [
        (0, CHUNK, true),
        (0, 0, false),
        (CHUNK, CHUNK, true),
        (CHUNK + 1, CHUNK, true),
        (CHUNK - 1, CHUNK, false),
        (CHUNK + 1, CHUNK + 1, false),
        (500, u32::MAX >> 1, true),
    ] {
        assert!(
            lengths(stored, bytes, is_zstd).contains("lengths"),
            "{stored} {bytes}"
        );
    }
}

#[test]
fn places_outside_their_file_are_refused() {
    for number in [4, 1000, u32::MAX] {
        assert!(
            refused(|it| it.files[0].placed[2].0 = number).contains("outside"),
            "{number}"
        );
    }
    assert!(refused(|it| it.files[0].placed[0].0 = 1).contains("ascend"));
    assert!(refused(|it| it.files[1].placed[1].1 = 1).contains("not as long"));
    assert!(refused(|it| it.files[0].placed[2].1 = 3).contains("outside"));
    assert!(refused(|it| it.files[0].placed.swap(1, 2)).contains("ascend"));
    assert!(refused(|it| it.files[1].placed.truncate(1)).contains("no place"));
    assert!(refused(|it| it.files[0].placed[0].1 = 1).contains("turn"));
    assert!(refused(|it| it.files[0].bytes = u64::MAX).contains("larger"));
}

#[test]
fn cut_or_extended_table_is_refused() {
    let bytes = table().encode();
    for cut in 0..bytes.len() {
        assert!(Table::decode(&bytes[..cut]).is_err(), "{cut}");
    }
    assert!(Table::decode(&[&bytes[..], &[0]].concat()).is_err());
    // Counts that would take gigabytes if they were believed.
    for at in [16, 20, 24] {
        let mut bytes = bytes.clone();
        bytes[at..at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(Table::decode(&bytes).is_err(), "{at}");
    }
    let mut newer = bytes;
    newer[8] = 2;
    assert_eq!(Table::decode(&newer), Err(ArtifactError::Version { found: 2 }));
}

#[test]
fn sizes_of_other_documents_are_compared() {
    let (packs, files) = (
        [500 + u64::from(CHUNK), 90],
        [4 * u64::from(CHUNK), u64::from(CHUNK) + 90],
    );
    let check =
        |packs: &[u64], files: &[u64]| table().check_sizes(packs.iter().copied(), files.iter().copied());
    assert_eq!(check(&packs, &files), Ok(()));
    for wrong in [&packs[..1], &[packs[0], 91], &[packs[0], 90, 1]] {
        assert!(check(wrong, &files).is_err());
    }
    for wrong in [&files[..1], &[files[0], 1], &[files[0], files[1], 1]] {
        assert!(check(&packs, wrong).is_err());
    }
}
