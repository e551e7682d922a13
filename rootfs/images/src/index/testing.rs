//! Layers for the tests of every form, and the comparison with the result of unpacking them.

use crate::index::LayerIndex;
use crate::layer::testing::{END, header, padded, pax, seal};
use crate::layer::tree::{Change, LayerTree, Leaf};
use crate::layer::{LayerLimits, unpack};

/// Deterministic bytes that compress a little.
pub fn bytes(length: usize, seed: u32) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    (0..length)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 28) as u8 + b'a'
        })
        .collect()
}

fn device(name: &str, kind: u8, major: &[u8; 8], minor: &[u8; 8]) -> [u8; 512] {
    let mut block = header(name, kind, 0, "");
    block[329..337].copy_from_slice(major);
    block[337..345].copy_from_slice(minor);
    seal(&mut block);
    block
}

fn owned(name: &str, kind: u8, size: u64, link: &str) -> [u8; 512] {
    let mut block = header(name, kind, size, link);
    block[100..108].copy_from_slice(b"0004755\0");
    block[108..116].copy_from_slice(b"0001750\0");
    block[116..124].copy_from_slice(b"0000144\0");
    block[265..269].copy_from_slice(b"user");
    block[297..302].copy_from_slice(b"group");
    seal(&mut block);
    block
}

/// A layer with everything that forms are known to get wrong: its parts, each a header with its extensions, and content. `exact` adds
/// entries for forms that support fractions of seconds and names that are not text.
pub fn tricky(exact: bool) -> Vec<(Vec<u8>, Vec<u8>)> {
    let long = format!("d/{}/{}", "n".repeat(200), "m".repeat(255));
    let bare = |block: [u8; 512]| (block.to_vec(), Vec::new());
    let mut old_directory = header("old-directory/", 0, 0, "");
    seal(&mut old_directory);
    let mut parts = vec![
        bare(header("./", b'5', 0, "")),
        bare(header("d/", b'5', 0, "")),
        (owned("d/setuid", b'0', 9000, "").to_vec(), bytes(9000, 1)),
        bare(header("d/hard", b'1', 0, "./d/setuid")),
        bare(header("empty", b'0', 0, "")),
        bare(header("soft", b'2', 0, "/else/../where")),
        bare(device("null", b'3', b"0000001\0", b"0000003\0")),
        bare(device("loop", b'4', b"0000007\0", b"0000000\0")),
        bare(header("fifo", b'6', 0, "")),
        bare(header("d/.wh.gone", b'0', 0, "")),
        bare(header("opaque/.wh..wh..opq", b'0', 0, "")),
        bare(header(".wh..wh.aufs", b'0', 0, "")),
        bare(old_directory.to_owned()),
        (
            [
                &pax(&[
                    ("path", long.as_bytes()),
                    ("uid", b"4000000000"),
                    ("SCHILY.xattr.user.b", b"first"),
                    ("SCHILY.xattr.security.capability", b"\x01\0\0\x02\xff\n="),
                    ("SCHILY.xattr.trusted.overlay.opaque", b"y"),
                    ("SCHILY.xattr.user.empty", b""),
                    ("comment", b"not an attribute"),
                ])[..],
                &header("short", b'0', 5000, ""),
            ]
            .concat(),
            bytes(5000, 2),
        ),
        (
            [
                &pax(&[("mtime", b"-86399")])[..],
                &header("before-the-epoch", b'0', 100_000, ""),
            ]
            .concat(),
            [vec![0; 90_000], bytes(10_000, 3)].concat(),
        ),
        // The same name twice: the later one counts.
        (header("twice", b'0', 10, "").to_vec(), bytes(10, 4)),
        (header("twice", b'0', 4096, "").to_vec(), bytes(4096, 5)),
        bare(header("last-but-a-directory/", b'5', 0, "")),
    ];
    if exact {
        parts.push((
            [&pax(&[("mtime", b"-1.25")])[..], &header("fraction", b'0', 3, "")].concat(),
            b"abc".to_vec(),
        ));
        parts.push((
            [
                &pax(&[("path", b"not\xfftext"), ("mtime", b"1234567890.000000001")])[..],
                &header("x", b'0', 1, ""),
            ]
            .concat(),
            b"z".to_vec(),
        ));
    }
    parts
}

/// The tar stream of such parts.
pub fn tar(parts: &[(Vec<u8>, Vec<u8>)]) -> Vec<u8> {
    let mut tar = Vec::new();
    for (head, content) in parts {
        tar.extend_from_slice(head);
        tar.extend(padded(content));
    }
    tar.extend(END);
    tar
}

/// The tree without the places of its data.
pub fn placeless(tree: &LayerTree) -> LayerTree {
    let mut tree = tree.clone();
    tree.data_length = 0;
    for entry in &mut tree.entries {
        if let Change::Leaf(_, Leaf::File { extents, .. }) = &mut entry.change {
            extents.clear();
        }
    }
    tree
}

/// Paths and contents of all files, read from a data file.
pub fn files(tree: &LayerTree, read: impl Fn(u64, usize) -> Vec<u8>) -> Vec<(Vec<u8>, Vec<u8>)> {
    let content = |entry: &crate::layer::tree::LayerEntry| {
        let Change::Leaf(_, Leaf::File { size, extents }) = &entry.change else {
            return None;
        };
        let mut content = vec![0; size.next_multiple_of(thaw_imagefs::tree::PAGE) as usize];
        for extent in extents {
            let from = extent.file_offset as usize;
            let bytes = read(extent.data_offset, extent.length as usize);
            content[from..from + bytes.len()].copy_from_slice(&bytes);
        }
        content.truncate(*size as usize);
        Some((entry.path.clone(), content))
    };
    tree.entries.iter().filter_map(content).collect()
}

/// The stream bytes of every span of `index`, expanded from its stored blob.
pub fn expanded(index: &LayerIndex, stored: &[u8]) -> Vec<Vec<u8>> {
    let spans = &index.content.spans;
    let expand = |(number, span): (usize, &crate::span::Span)| {
        let range = span.stored.start as usize..span.stored.end as usize;
        spans.expand(number, &stored[range]).unwrap()
    };
    spans.spans().iter().enumerate().map(expand).collect()
}

/// A range of the data file of `index`, filled from its spans like a cache file.
pub fn read(index: &LayerIndex, expanded: &[Vec<u8>], offset: u64, length: usize) -> Vec<u8> {
    let (content, spans) = (&index.content, &index.content.spans);
    let mut data = vec![0; length];
    for piece in content.pieces.within(offset..offset + length as u64) {
        let stream = piece.stream_offset..piece.stream_offset + piece.length;
        for number in spans.overlapping(stream.clone()) {
            let span = &spans.spans()[number].stream;
            let (from, to) = (stream.start.max(span.start), stream.end.min(span.end));
            let source = &expanded[number][(from - span.start) as usize..(to - span.start) as usize];
            let at = (piece.data_offset - offset + (from - stream.start)) as usize;
            data[at..at + source.len()].copy_from_slice(source);
        }
    }
    data
}

/// Compares tree and files with the result of unpacking `tar`. Entries are compared in the order of the stream.
#[track_caller]
pub fn assert_like_unpacked(index: &LayerIndex, stored: &[u8], tar: &[u8]) {
    let mut data = Vec::new();
    let tree = unpack(tar, &mut data, &LayerLimits::default()).unwrap();
    assert_eq!(placeless(&index.tree), placeless(&tree));
    let expected = files(&tree, |offset, length| {
        data[offset as usize..offset as usize + length].to_vec()
    });
    let expanded = expanded(index, stored);
    let found = files(&index.tree, |offset, length| {
        read(index, &expanded, offset, length)
    });
    assert!(found == expected, "files differ");
}
