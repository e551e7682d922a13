//! A data file can be rebuilt from pieces of its stored form, for any tar and any form.

use std::io::{BufReader, Read, Write};

use flate2::Compression;
use flate2::write::GzEncoder;
use proptest::prelude::*;
use thaw_imagefs::digest::Digest;
use thaw_imagefs::tree::PAGE;

use crate::compression::Indexing;
use crate::layer::testing::{END, header, padded, pax};
use crate::layer::{LayerLimits, unpack_indexed};
use crate::span::Expansion;

use super::kept::{self, Kept};
use super::{Content, Pieces};

/// A part of a file: its kind and its number of bytes.
type Part = (u8, usize);

#[derive(Clone, Debug)]
struct File {
    parts: Vec<Part>,
    /// As a GNU sparse file (PAX 0.1), whose zeros are not in the tar.
    is_sparse: bool,
}

fn bytes_of(part: Part, seed: u64) -> Vec<u8> {
    let (kind, length) = part;
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    match kind {
        0 => vec![0; length],
        1 => (0..length).map(|_| random() as u8).collect(),
        _ => (0..length).map(|_| b"abcdefgh"[random() as usize % 3]).collect(),
    }
}

fn tar_of(files: &[File]) -> Vec<u8> {
    let mut tar = header("directory/", b'5', 0, "").to_vec();
    for (number, file) in files.iter().enumerate() {
        let name = format!("directory/{number}");
        let parts = file.parts.iter().enumerate();
        let parts: Vec<Vec<u8>> = parts
            .map(|(index, part)| bytes_of(*part, (number * 100 + index) as u64 + 1))
            .collect();
        if !file.is_sparse {
            let content = parts.concat();
            tar.extend_from_slice(&header(&name, b'0', content.len() as u64, ""));
            tar.extend_from_slice(&padded(&content));
            continue;
        }
        let (mut map, mut stored, mut end) = (Vec::new(), Vec::new(), 0);
        for (part, (kind, _)) in parts.iter().zip(&file.parts) {
            if *kind != 0 {
                map.push(format!("{end},{}", part.len()));
                stored.extend_from_slice(part);
            }
            end += part.len();
        }
        // GNU tar ends every map in this way.
        map.push(format!("{end},0"));
        tar.extend(pax(&[
            ("GNU.sparse.size", end.to_string().as_bytes()),
            ("GNU.sparse.numblocks", map.len().to_string().as_bytes()),
            ("GNU.sparse.name", name.as_bytes()),
            ("GNU.sparse.map", map.join(",").as_bytes()),
        ]));
        tar.extend_from_slice(&header("GNUSparseFile.0", b'0', stored.len() as u64, ""));
        tar.extend(padded(&stored));
    }
    tar.extend_from_slice(&END);
    tar
}

#[derive(Clone, Copy, Debug)]
enum Codec {
    Plain,
    Gzip { level: u32, member: usize },
    Zstd { frame: usize },
}

fn store(tar: &[u8], codec: Codec) -> Vec<u8> {
    match codec {
        Codec::Plain => tar.to_vec(),
        Codec::Gzip { level, member } => tar
            .chunks(member)
            .flat_map(|member| {
                let mut encoder = GzEncoder::new(Vec::new(), Compression::new(level));
                // Each flush also ends a block.
                for part in member.chunks(700_000) {
                    encoder.write_all(part).unwrap();
                    encoder.flush().unwrap();
                }
                encoder.finish().unwrap()
            })
            .collect(),
        Codec::Zstd { frame } => tar
            .chunks(frame)
            .flat_map(|frame| zstd::bulk::compress(frame, 1).unwrap())
            .collect(),
    }
}

/// The steps of a miss: range of the data file, pieces, spans, stored bytes, expanded, in place.
fn rebuild(content: &Content, stored: &[u8], range: std::ops::Range<u64>) -> Vec<u8> {
    let mut data = vec![0; (range.end - range.start) as usize];
    for piece in content.pieces.within(range.clone()) {
        let stream = piece.stream_offset..piece.stream_offset + piece.length;
        let spans = content.spans.overlapping(stream.clone());
        for run in content.spans.runs(spans, 3 << 20, 0) {
            let fetched = &stored[run.stored.start as usize..run.stored.end as usize];
            for index in run.spans.clone() {
                let of_span = content.spans.of_run(index, &run, fetched).unwrap();
                content.spans.check(index, of_span).unwrap();
                let expanded = content.spans.expand(index, of_span).unwrap();
                let span = &content.spans.spans()[index].stream;
                let (from, to) = (span.start.max(stream.start), span.end.min(stream.end));
                let place = (piece.data_offset + (from - stream.start) - range.start) as usize;
                let part = &expanded[(from - span.start) as usize..(to - span.start) as usize];
                data[place..place + part.len()].copy_from_slice(part);
            }
        }
    }
    data
}

/// The data file and the index of a stored layer, the latter read back from its kept form.
fn index(stored: &[u8]) -> (Vec<u8>, Content) {
    let mut decoder = Indexing::new(BufReader::with_capacity(50_000, stored)).unwrap();
    let mut data = Vec::new();
    let unpacked = unpack_indexed(&mut decoder, &mut data, &LayerLimits::default()).unwrap();
    assert_eq!(decoder.read(&mut [0; 10]).unwrap(), 0);
    let spans = decoder.into_spans().unwrap();
    let content = Content::new(unpacked.tree.data_length, Pieces::Map(unpacked.pieces), spans).unwrap();
    let before = Kept {
        stored: Digest::of(stored),
        stored_length: stored.len() as u64,
        content,
    };
    let after = kept::decode(&kept::encode(&before)).unwrap();
    assert_eq!(before, after);
    (data, after.content)
}

fn file() -> impl Strategy<Value = File> {
    let length = prop_oneof![0usize..10, 0usize..6000, 0usize..70_000, 60_000usize..300_000];
    let part = (
        0u8..3,
        prop_oneof![4 => length.clone(), 1 => length.prop_map(|length| length / 4096 * 4096)],
    );
    (prop::collection::vec(part, 0..6), any::<bool>())
        .prop_map(|(parts, is_sparse)| File { parts, is_sparse })
}

fn codec() -> impl Strategy<Value = Codec> {
    prop_oneof![
        Just(Codec::Plain),
        (
            prop_oneof![Just(0u32), Just(1), Just(6)],
            prop_oneof![Just(usize::MAX), 20_000usize..2_000_000]
        )
            .prop_map(|(level, member)| Codec::Gzip { level, member }),
        (20_000usize..2_000_000).prop_map(|frame| Codec::Zstd { frame }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_part_of_the_data_is_made_again(
        files in prop::collection::vec(file(), 1..8),
        codec in codec(),
        ranges in prop::collection::vec((any::<prop::sample::Index>(), 1u64..600_000), 4),
    ) {
        let stored = store(&tar_of(&files), codec);
        let (data, content) = index(&stored);
        prop_assert_eq!(data.len() as u64, content.data_length);
        prop_assert!(rebuild(&content, &stored, 0..content.data_length) == data);
        for (start, length) in ranges {
            if data.is_empty() {
                break;
            }
            let start = start.index(data.len()) as u64 / PAGE * PAGE;
            let end = (start + length).next_multiple_of(PAGE).min(content.data_length);
            prop_assert!(rebuild(&content, &stored, start..end) == data[start as usize..end as usize]);
        }
    }
}

#[test]
fn holes_are_no_pieces() {
    let files = [
        File {
            parts: vec![(1, 5000), (0, 1 << 20), (1, 10)],
            is_sparse: false,
        },
        File {
            parts: vec![(2, 5000), (0, 1 << 20), (2, 10)],
            is_sparse: true,
        },
        File {
            parts: vec![(0, 1 << 20)],
            is_sparse: false,
        },
    ];
    let (data, content) = index(&tar_of(&files));
    let Pieces::Map(pieces) = &content.pieces else {
        panic!()
    };
    // Two parts of each file. Zeros between data within 64 KiB are stored, if the tar has them.
    assert_eq!(pieces.len(), 4);
    assert!(pieces.iter().map(|piece| piece.length).sum::<u64>() <= 2 * 5010 + (128 << 10));
    assert!(data.len() < 300 << 10);
    assert!(matches!(content.spans.spans()[0].expansion, Expansion::Plain));
}
