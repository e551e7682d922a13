use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;
use proptest::prelude::*;

use crate::compression::decoder;
use crate::span::SpanDigest;

use super::*;

/// Bytes that compress moderately, like files, with stretches that compress badly or well.
fn content(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut bytes = Vec::with_capacity(length + 64);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        match (bytes.len() / 300_000) % 3 {
            0 => {
                bytes.extend_from_slice(format!("{:x} is a word of {}\n", state % 5000, state % 7).as_bytes())
            }
            1 => bytes.extend_from_slice(&state.to_le_bytes()),
            _ => bytes.extend_from_slice(&[(state % 3) as u8; 64]),
        }
    }
    bytes.truncate(length);
    bytes
}

fn gzip(bytes: &[u8], level: u32) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::new(level));
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zstd_frames(bytes: &[u8], frame: usize) -> Vec<u8> {
    bytes
        .chunks(frame)
        .flat_map(|frame| zstd::bulk::compress(frame, 3).unwrap())
        .collect()
}

/// Reads in uneven steps, from a source that yields few bytes at a time.
fn index(stored: &[u8], step: usize) -> io::Result<(Vec<u8>, Option<SpanTable>)> {
    let mut indexing = Indexing::new(io::BufReader::with_capacity(step.max(1), stored))?;
    let mut bytes = Vec::new();
    let mut buffer = vec![0; step * 3 + 1];
    loop {
        match indexing.read(&mut buffer)? {
            0 => break,
            length => bytes.extend_from_slice(&buffer[..length]),
        }
    }
    Ok((bytes, indexing.into_spans()))
}

/// Every span yields its part of the stream and refuses its bytes if one is changed, and neighbours touch.
fn check(stored: &[u8], bytes: &[u8], table: &SpanTable) {
    let mut end = 0;
    for (number, span) in table.spans().iter().enumerate() {
        assert_eq!(span.stream.start, end);
        end = span.stream.end;
        let mut of_span = stored[span.stored.start as usize..span.stored.end as usize].to_vec();
        let expected = &bytes[span.stream.start as usize..span.stream.end as usize];
        assert!(
            table.expand(number, &of_span).unwrap() == expected,
            "span {number}"
        );
        assert!(matches!(span.digest, SpanDigest::StoredSha256(_)));
        let middle = of_span.len() / 2;
        of_span[middle] ^= 4;
        assert!(table.check(number, &of_span).is_err());
        assert!(table.check(number, &of_span[1..]).is_err());
    }
    assert_eq!(end, bytes.len() as u64);
    assert!(table.covers(0..end) && !table.covers(0..end + 1));
    assert!(
        table
            .spans()
            .last()
            .is_none_or(|span| span.stored.end == stored.len() as u64)
    );
}

#[test]
fn gzip_of_every_level_is_indexed() {
    let bytes = content(7_300_000, 1);
    // At level 1 the library makes few and large blocks.
    for (level, spans) in [(0, 6..=7), (1, 2..=7), (6, 6..=7), (9, 6..=7)] {
        let stored = gzip(&bytes, level);
        let (read, table) = index(&stored, 70_000).unwrap();
        let table = table.unwrap();
        assert!(read == bytes);
        check(&stored, &bytes, &table);
        assert!(
            spans.contains(&table.spans().len()),
            "level {level}: {}",
            table.spans().len()
        );
        // As in SOCI: the first right after the header, the others more than a span apart.
        let first = table.spans()[0].checkpoint().unwrap();
        assert_eq!((first.input, first.output, first.bits), (10, 0, 0));
        assert!(first.window.bytes().unwrap().is_empty());
        for pair in table.spans().windows(2) {
            let checkpoint = pair[1].checkpoint().unwrap();
            assert!(checkpoint.output - pair[0].stream.start > SPAN);
            let window = &bytes[checkpoint.output as usize - (32 << 10)..checkpoint.output as usize];
            assert!(checkpoint.window.bytes().unwrap() == window);
            assert_eq!(checkpoint.input, pair[0].stored.end);
        }
    }
}

#[test]
fn members_are_one_stream() {
    let bytes = content(4_000_000, 2);
    for cut in [1, 10_000, 900_000, 1 << 20, 3_000_000] {
        let stored: Vec<u8> = bytes
            .chunks(cut.max(5000))
            .flat_map(|member| gzip(member, 6))
            .collect();
        let stored = [gzip(&[], 6), stored, gzip(&[], 6)].concat();
        let (read, table) = index(&stored, 4096).unwrap();
        let table = table.unwrap();
        assert!(read == bytes);
        check(&stored, &bytes, &table);
        assert!(
            (2..=4).contains(&table.spans().len()),
            "{cut}: {}",
            table.spans().len()
        );
    }
}

#[test]
fn zstd_is_indexed_where_it_has_frames() {
    let bytes = content(5_000_000, 3);
    for (frame, spans) in [(100_000, 4..=5), (1 << 20, 5..=5), (2_000_000, 3..=3)] {
        let seek_table = [0x5e, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3];
        let stored = [&zstd_frames(&bytes, frame)[..], &seek_table].concat();
        let (read, table) = index(&stored, 9000).unwrap();
        let table = table.unwrap();
        assert!(read == bytes);
        check(&stored, &bytes, &table);
        assert!(
            spans.contains(&table.spans().len()),
            "{frame}: {}",
            table.spans().len()
        );
    }
    let bytes = content(20 << 20, 3);
    let (read, table) = index(&zstd_frames(&bytes, bytes.len()), 100_000).unwrap();
    assert!(read == bytes && table.is_none());
}

#[test]
fn plain_is_cut_at_multiples() {
    let bytes = content(2_500_000, 4);
    let (read, table) = index(&bytes, 3_000_000).unwrap();
    let table = table.unwrap();
    assert!(read == bytes);
    check(&bytes, &bytes, &table);
    let ends: Vec<u64> = table.spans().iter().map(|span| span.stream.end).collect();
    assert_eq!(ends, [1 << 20, 2 << 20, 2_500_000]);
    assert_eq!(index(&[], 10).unwrap(), (Vec::new(), Some(SpanTable::default())));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Both decoders refuse damage, and yield the same bytes before it.
    #[test]
    fn damage_is_what_it_was(
        kind in 0..3,
        cut in any::<prop::sample::Index>(),
        flip in prop::option::of((any::<prop::sample::Index>(), 1u8..)),
        tail in prop::collection::vec(any::<u8>(), 0..20),
        zeros in any::<bool>(),
    ) {
        let bytes = content(60_000, 5);
        let mut stored = match kind {
            0 => gzip(&bytes, 6),
            1 => [gzip(&bytes[..10_000], 1), gzip(&bytes[10_000..], 0)].concat(),
            _ => zstd_frames(&bytes, 25_000),
        };
        match flip {
            Some((place, mask)) => {
                let place = place.index(stored.len());
                stored[place] ^= mask;
            }
            None => stored.truncate(cut.index(stored.len()) + 1),
        }
        stored.extend_from_slice(if zeros { &[0; 12] } else { &tail });
        let mut before = Vec::new();
        let expected = decoder(&stored[..]).and_then(|mut decoder| decoder.read_to_end(&mut before));
        let got = index(&stored, 1000);
        prop_assert_eq!(got.is_err(), expected.is_err(), "{:?} {:?}", got.map(drop), expected);
        if let (Ok((read, _)), Ok(_)) = (got, expected) {
            prop_assert!(read == before);
        }
    }
}

/// RFC 8878 forbids an empty compressed block, but the streaming decoder reads past it, and so must what expands the span.
#[test]
fn a_frame_with_a_large_window_and_an_empty_block_expands() {
    let header = [0x28, 0xb5, 0x2f, 0xfd, 0];
    // 64 MiB, and the largest.
    for window in [0x80, 0x88] {
        let empty = [4, 0, 0];
        let last_of_273_nines = [0x8b, 0x08, 0, 9];
        let stored = [&header[..], &[window], &empty, &last_of_273_nines].concat();
        let (bytes, table) = index(&stored, 100).unwrap();
        assert_eq!(bytes, [9; 273]);
        check(&stored, &bytes, &table.unwrap());
    }
}
