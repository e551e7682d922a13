//! Files with data in several pieces.

use super::*;

/// A file whose pieces are in several blobs, in sequence and with a hole.
#[test]
fn files_may_lie_in_several_blobs() {
    let page = |number: u8| vec![number; PAGE as usize];
    let data = vec![
        [page(1), page(2), page(3)].concat(),
        [page(4), page(5), page(6), page(7)].concat(),
        [page(8), page(9)].concat(),
    ];
    let extent = |file_page: u64, blob, data_page: u64, pages: u64| BlobExtent {
        file_offset: file_page * PAGE,
        blob,
        data_offset: data_page * PAGE,
        length: pages * PAGE,
    };
    let with = |size, extents| TreeInode {
        attributes: Attributes::implied_directory(),
        kind: Kind::File { size, extents },
    };
    let tree = Tree {
        inodes: vec![
            directory(&[("fine", 1), ("coarse", 2), ("same", 3)]),
            with(
                9 * PAGE - 7,
                vec![
                    extent(0, 1, 3, 1),
                    extent(1, 0, 0, 3),
                    extent(5, 2, 1, 1),
                    extent(6, 1, 0, 3),
                ],
            ),
            with(6 * PAGE, vec![extent(0, 1, 0, 4), extent(4, 2, 0, 2)]),
            with(2 * PAGE - 1, vec![extent(0, 0, 1, 2)]),
        ],
    };
    let made = Made { tree, data };
    let (image, summary) = made.metadata();
    let reader = Reader::new(&image[..]).unwrap();
    assert_same(&made.walk(), &walk_image(&reader, &summary, &made.data));
    let read = read_tree(&reader, &summary.blobs).unwrap();
    assert_same(&made.walk(), &walk_tree(&read, &made.data));
    // Chunks as large as the boundaries allow: three of 16 KiB would be 12 bytes, nine of 4 KiB 36.
    let bits = |name: &[u8]| {
        let root = reader.inode(reader.superblock().root).unwrap();
        let entry = reader.lookup(&root, name).unwrap().unwrap();
        reader.inode(entry.nid).unwrap().chunk_bits()
    };
    assert_eq!(
        [bits(b"fine"), bits(b"coarse"), bits(b"same")],
        [Some(12), Some(14), None]
    );
    let (file, _) = made.whole();
    fsck(file.path());
    mounted(file.path(), |root| {
        assert_same(&made.walk(), &walk_directory(root))
    });
    // If a blob is shorter than the one for which the image was built, some data is in no blob.
    let mut blobs = summary.blobs.clone();
    blobs[1].length -= PAGE;
    assert!(matches!(
        read_tree(&reader, &blobs),
        Err(ReadError::Corrupt {
            what: "data address",
            ..
        })
    ));
}

#[test]
fn sparse_files_have_chunks_as_large_as_can_be() {
    const CHUNK: u64 = 1 << 20;
    let tree = Tree {
        inodes: vec![
            directory(&[("holes", 1), ("all-hole", 2), ("plain", 3), ("huge", 4)]),
            file(
                10 * CHUNK + 5,
                &[(2 * CHUNK, 0, CHUNK), (10 * CHUNK, CHUNK, PAGE)],
            ),
            file(1 << 40, &[]),
            file(2 * PAGE - 1, &[(0, CHUNK + PAGE, 2 * PAGE)]),
            file(1 << 44, &[((1 << 44) - (1 << 30), CHUNK * 2, 1 << 30)]),
        ],
    };
    let mut image = Vec::new();
    let summary = write(&tree, &[CHUNK * 2 + (1 << 30)], &mut image).unwrap();
    assert!(summary.metadata_length <= 128 << 10, "{summary:?}");
    let reader = Reader::new(&image[..]).unwrap();
    let root = reader.inode(reader.superblock().root).unwrap();
    let find = |name: &[u8]| {
        reader
            .inode(reader.lookup(&root, name).unwrap().unwrap().nid)
            .unwrap()
    };
    let mappings = |name: &[u8], offset, length| -> Vec<(u64, u64, Option<u64>)> {
        let inode = find(name);
        let pieces = reader.mappings(&inode, offset, length).map(Result::unwrap);
        pieces
            .map(|piece| (piece.offset, piece.length, piece.address))
            .collect()
    };
    let start = summary.blobs[0].address;
    assert_eq!(
        mappings(b"holes", 0, u64::MAX),
        [
            (0, 2 * CHUNK, None),
            (2 * CHUNK, CHUNK, Some(start)),
            (3 * CHUNK, 7 * CHUNK, None),
            (10 * CHUNK, 5, Some(start + CHUNK)),
        ]
    );
    assert_eq!(
        mappings(b"holes", 3 * CHUNK - 1, 2),
        [(3 * CHUNK - 1, 1, Some(start + CHUNK - 1)), (3 * CHUNK, 1, None)]
    );
    assert_eq!(mappings(b"all-hole", 0, 1 << 40), [(0, 1 << 40, None)]);
    assert_eq!(
        mappings(b"plain", 1, 1 << 20),
        [(1, 2 * PAGE - 2, Some(start + CHUNK + PAGE + 1))]
    );
    assert_eq!(mappings(b"plain", 2 * PAGE, 10), []);
    assert_eq!(mappings(b"huge", u64::MAX, 10), []);
}
