//! Ztocs compared with the result of unpacking the same layer, and malformed ztocs.

use std::collections::BTreeMap;
use std::io::Write;

use proptest::prelude::*;
use thaw_imagefs::digest::Digest;

use crate::index::LayerIndex;
use crate::index::error::IndexError;
use crate::index::testing::{assert_like_unpacked, bytes, tar, tricky};
use crate::layer::LayerLimits;
use crate::layer::testing::{END, header, padded, pax};
use crate::span::{Expansion, Span, SpanDigest, SpanTable};

use super::*;

const TOOL: &str = "a tool";

fn plain_spans(stored: &[u8], size: usize) -> SpanTable {
    let spans = stored.chunks(size).zip(0u64..).map(|(chunk, index)| {
        let start = index * size as u64;
        let range = start..start + chunk.len() as u64;
        Span {
            stored: range.clone(),
            stream: range,
            digest: SpanDigest::StoredSha256(*Digest::of(chunk).bytes()),
            expansion: Expansion::Plain,
        }
    });
    SpanTable::new(spans.collect(), stored.len() as u64).unwrap()
}

fn plain_ztoc(tar: &[u8], span: usize) -> Vec<u8> {
    let toc = scan(tar, &LayerLimits::default()).unwrap();
    write_ztoc(&toc, &plain_spans(tar, span), span as u64, tar.len() as u64, TOOL).unwrap()
}

fn read_all(ztoc: &[u8], stored: &[u8]) -> Result<LayerIndex, IndexError> {
    read_ztoc(ztoc, stored.len() as u64, &LayerLimits::default())
}

#[test]
fn a_plain_layer_is_as_unpacked() {
    let tar = tar(&tricky(true));
    let ztoc = plain_ztoc(&tar, 5000);
    assert_eq!(ztoc, plain_ztoc(&tar, 5000), "reproducible");
    let index = read_all(&ztoc, &tar).unwrap();
    assert_eq!(index.content.spans, plain_spans(&tar, 5000));
    assert_like_unpacked(&index, &tar, &tar);
}

fn gzip(bytes: &[u8], level: u32) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::new(level));
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn a_gzip_layer_is_as_unpacked() {
    let mut parts = tricky(true);
    for (name, seed) in [("large", 9), ("larger", 10)] {
        let content = bytes(1_200_000 + 1000 * seed as usize, seed);
        let head = header(name, b'0', content.len() as u64, "").to_vec();
        parts.push((head, content));
    }
    let tar = tar(&parts);
    for level in [1, 6] {
        let stored = gzip(&tar, level);
        let ztoc = index_layer(&stored[..], &LayerLimits::default(), crate::span::SPAN, TOOL)
            .unwrap()
            .unwrap();
        let index = read_all(&ztoc, &stored).unwrap();
        // The fastest level makes blocks of megabytes, and a checkpoint is only between blocks.
        assert!(level == 1 || index.content.spans.spans().len() > 2);
        assert_like_unpacked(&index, &stored, &tar);
        // The ztoc reads back unchanged, including checkpoints.
        let toc = scan(&tar[..], &LayerLimits::default()).unwrap();
        let again = write_ztoc(&toc, &index.content.spans, 1 << 20, stored.len() as u64, TOOL).unwrap();
        assert!(again == ztoc);
    }
}

#[test]
fn a_zstd_layer_has_no_ztoc() {
    let stored = zstd::stream::encode_all(&tar(&tricky(true))[..], 3).unwrap();
    assert_eq!(
        index_layer(&stored[..], &LayerLimits::default(), crate::span::SPAN, TOOL).unwrap(),
        None
    );
}

fn tar_checkpoints(span: i64, size: i64) -> Vec<u8> {
    let mut buffer = flatbuffers::FlatBufferBuilder::new();
    let table = buffer.start_table();
    buffer.push_slot(4, 2i32, 0);
    buffer.push_slot(6, span, 0);
    buffer.push_slot(8, size, 0);
    let table = buffer.end_table(table);
    buffer.finish_minimal(table);
    buffer.finished_data().to_vec()
}

/// The checkpoints' blob with one number changed.
#[test]
fn checkpoints_that_lie_are_refused() {
    let stored_length = 1000;
    let blob = |points: &[(i64, i64, u8)], count: i32| {
        let mut blob = count.to_le_bytes().to_vec();
        blob.extend((1i64 << 20).to_le_bytes());
        for (input, output, bits) in points {
            blob.extend(input.to_le_bytes());
            blob.extend(output.to_le_bytes());
            blob.push(*bits);
            blob.extend([0; 32768]);
        }
        blob
    };
    let digests = [
        SpanDigest::StoredSha256([0; 32]),
        SpanDigest::StoredSha256([0; 32]),
    ];
    let read = |points: &[(i64, i64, u8)], count| {
        let spans = checkpoints::read_gzip(&blob(points, count), &digests, stored_length, 5000)?;
        SpanTable::new(spans, stored_length).map_err(|source| IndexError::Spans { form: "ztoc", source })
    };
    let good = read(&[(10, 0, 0), (500, 2000, 3)], 2).unwrap();
    assert_eq!(good.spans()[0].stored, 10..500);
    assert_eq!(good.spans()[1].stored, 499..1000);
    // The first version omits the first checkpoint.
    assert_eq!(read(&[(500, 2000, 3)], 2).unwrap(), good);
    // A checkpoint after the archive's end yields nothing.
    assert_eq!(
        read(&[(10, 0, 0), (500, 6000, 3)], 2).unwrap().stream_length(),
        5000
    );
    for (points, count) in [
        (&[(10, 0, 0), (500, 2000, 8)][..], 2),
        (&[(10, 0, 0), (1001, 2000, 0)], 2),
        (&[(600, 0, 0), (500, 2000, 0)], 2),
        (&[(10, 3000, 0), (500, 2000, 0)], 2),
        (&[(-1, 0, 0), (500, 2000, 0)], 2),
        (&[(10, -1, 0), (500, 2000, 0)], 2),
        (&[(0, 0, 1), (500, 2000, 0)], 2),
        (&[(10, 0, 0), (500, 2000, 0)], 3),
        (&[(10, 0, 0), (500, 2000, 0)], -2),
        (&[(10, 0, 0), (500, 2000, 0)], 1),
        (&[(10, 0, 0), (500, 2000, 0)], i32::MAX),
        (&[], 2),
        (&[], 0),
    ] {
        assert!(read(points, count).is_err(), "{points:?} {count}");
    }
    assert!(checkpoints::read_gzip(&[], &digests, 1000, 5000).is_err());
    let plain =
        |span: i64, size: i64| checkpoints::read_tar(&tar_checkpoints(span, size), &digests, stored_length);
    // As written by SOCI's tool (0.4.1).
    let theirs = b"\x14\0\0\0\0\0\0\0\0\0\x0a\0\x1c\0\x18\0\x0c\0\x04\0\x0a\0\0\0\
        \xe8\x03\0\0\0\0\0\0\x58\x02\0\0\0\0\0\0\0\0\0\0\x02\0\0\0";
    let read = checkpoints::read_tar(theirs, &digests, stored_length).unwrap();
    assert_eq!(read, plain(600, 1000).unwrap());
    assert!(checkpoints::read_tar(&[], &digests, stored_length).is_err());
    assert_eq!(plain(600, 1000).unwrap()[1].stored, 600..1000);
    for (span, size) in [(0, 1000), (600, 999), (300, 1000), (-1, 1000), (i64::MAX, 1000)] {
        assert!(plain(span, size).is_err(), "{span} {size}");
    }
}

#[test]
fn several_gzip_members_get_no_ztoc() {
    let tar = tar(&tricky(true));
    let (one, other) = tar.split_at(1000);
    let stored = [gzip(one, 6), gzip(other, 6)].concat();
    let error = index_layer(&stored[..], &LayerLimits::default(), crate::span::SPAN, TOOL).unwrap_err();
    assert!(matches!(error, IndexError::Unsupported { .. }), "{error}");
}

#[test]
fn what_a_ztoc_cannot_say_is_not_written() {
    let sparse = [
        &pax(&[
            ("GNU.sparse.size", b"200"),
            ("GNU.sparse.numblocks", b"1"),
            ("GNU.sparse.map", b"0,10"),
        ])[..],
        &header("f", b'0', 10, ""),
        &padded(&[1; 10]),
        &END,
    ]
    .concat();
    let late = [
        &pax(&[("mtime", b"253402300800")])[..],
        &header("f", b'0', 0, ""),
        &END,
    ]
    .concat();
    for tar in [sparse, late] {
        let error = scan(&tar[..], &LayerLimits::default()).unwrap_err();
        assert!(matches!(error, IndexError::Unsupported { .. }), "{error}");
    }
    let tar = tar(&tricky(true));
    let toc = scan(&tar[..], &LayerLimits::default()).unwrap();
    let mut spans = plain_spans(&tar, 4096).spans().to_vec();
    spans[0].digest = SpanDigest::None;
    let spans = SpanTable::new(spans, tar.len() as u64).unwrap();
    assert!(write_ztoc(&toc, &spans, 4096, tar.len() as u64, TOOL).is_err());
    assert!(write_ztoc(&toc, &plain_spans(&tar, 4096), 5000, tar.len() as u64, TOOL).is_err());
    assert!(write_ztoc(&toc, &plain_spans(&tar, 4096), 4096, tar.len() as u64 + 1, TOOL).is_err());
}

#[test]
fn a_ztoc_of_another_layer_is_refused() {
    let tar = tar(&tricky(true));
    let ztoc = plain_ztoc(&tar, 4096);
    assert!(read_ztoc(&ztoc, tar.len() as u64 + 512, &LayerLimits::default()).is_err());
    let few = LayerLimits {
        entries: 3,
        ..LayerLimits::default()
    };
    assert!(matches!(
        read_ztoc(&ztoc, tar.len() as u64, &few),
        Err(IndexError::Layer { .. })
    ));
    let little = LayerLimits {
        data_bytes: 8192,
        ..LayerLimits::default()
    };
    assert!(matches!(
        read_ztoc(&ztoc, tar.len() as u64, &little),
        Err(IndexError::Layer { .. })
    ));
}

#[test]
fn an_index_comes_back() {
    let ztoc = |layer: &[u8], size| Ztoc {
        layer: Digest::of(layer),
        layer_media_type: "application/vnd.oci.image.layer.v1.tar+gzip".into(),
        digest: Digest::of(&[layer, b"z"].concat()),
        size,
    };
    let manifest = index_manifest(&[ztoc(b"one", 10), ztoc(b"two", 20)], TOOL).unwrap();
    let digest = Digest::of(&manifest);
    let index = Index::parse(&manifest, &digest).unwrap();
    assert_eq!(index.len(), 2);
    let found = index.ztoc_for(&Digest::of(b"two")).unwrap();
    assert_eq!((found.digest, found.size), (Digest::of(b"twoz"), 20));
    assert_eq!(index.ztoc_for(&Digest::of(b"three")), None);
    assert!(matches!(
        Index::parse(&manifest, &Digest::of(b"")),
        Err(IndexError::Digest { .. })
    ));
    let text = String::from_utf8(manifest).unwrap();
    for (from, to) in [
        ("vnd.amazon.soci.index.v2", "vnd.oci.image.config.v1"),
        (
            "com.amazon.soci.image-layer-digest\":\"sha256:",
            "com.amazon.soci.image-layer-digest\":\"md5:",
        ),
        ("\"layers\"", "\"blobs\""),
    ] {
        assert!(text.contains(from));
        assert!(
            Index::parse_unverified(text.replace(from, to).as_bytes()).is_err(),
            "{from}"
        );
    }
}

#[test]
fn an_image_names_its_index() {
    let of = |value: &str| {
        let annotations = BTreeMap::from([("com.amazon.soci.index-digest".to_owned(), value.to_owned())]);
        bound_index(&annotations)
    };
    let digest = Digest::of(b"index");
    assert_eq!(of(&digest.to_string()).unwrap(), Some(digest));
    assert!(of("sha256:x").is_err());
    assert_eq!(bound_index(&BTreeMap::new()).unwrap(), None);
}

/// Entries with content whose names do not conflict.
fn layers() -> impl Strategy<Value = Vec<u8>> {
    let entry = (0usize..6, 0usize..20_000, any::<u32>(), "[a-z]{1,40}");
    prop::collection::vec(entry, 0..12).prop_map(|entries| {
        let mut tar = Vec::new();
        for (kind, length, seed, name) in entries {
            let name = format!("{seed:08x}{name}");
            let mtime = format!("{}.{:09}", seed, seed % 1_000_000_000);
            let records = [
                ("mtime", mtime.as_bytes()),
                ("SCHILY.xattr.user.x", name.as_bytes()),
            ];
            tar.extend(pax(&records[..kind % 3]));
            match kind {
                0 => tar.extend(header(&name, b'5', 0, "")),
                1 => tar.extend(header(&name, b'2', 0, "target")),
                2 => tar.extend(header(&name, b'1', 0, "target")),
                _ => {
                    tar.extend(header(&name, b'0', length as u64, ""));
                    tar.extend(padded(&bytes(length, seed)));
                }
            }
        }
        tar.extend(END);
        tar
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// A written ztoc reads back unchanged.
    #[test]
    fn a_layer_comes_back(tar in layers(), span in 1000usize..30_000) {
        let ztoc = plain_ztoc(&tar, span);
        let index = read_all(&ztoc, &tar).unwrap();
        prop_assert_eq!(&index.content.spans, &plain_spans(&tar, span));
        assert_like_unpacked(&index, &tar, &tar);
    }

    /// Arbitrary bytes are accepted or refused, and accepted ones satisfy the invariants.
    #[test]
    fn damaged_ztocs_never_panic(flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..16)) {
        let tar = tar(&tricky(true));
        let mut ztoc = plain_ztoc(&tar, 30_000);
        for (place, value) in flips {
            let place = place.index(ztoc.len());
            ztoc[place] = value;
        }
        if let Ok(index) = read_all(&ztoc, &tar) {
            prop_assert!(index.tree.entries.iter().all(|entry| !entry.path.starts_with(b"/")));
        }
    }

    #[test]
    fn noise_is_refused(noise in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(read_ztoc(&noise, 1000, &LayerLimits::default()).is_err());
    }
}

#[test]
fn cut_ztocs_are_refused() {
    let tar = tar(&tricky(true));
    let ztoc = plain_ztoc(&tar, 30_000);
    // Only the NUL of the last string and the padding after it can be missing.
    for length in 0..ztoc.len() - 8 {
        assert!(read_all(&ztoc[..length], &tar).is_err(), "cut at {length}");
    }
}
