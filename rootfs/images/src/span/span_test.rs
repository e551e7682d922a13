use std::io::Write;

use proptest::prelude::*;

use super::*;

fn span(stored: Range<u64>, stream: Range<u64>, expansion: Expansion) -> Span {
    Span {
        stored,
        stream,
        digest: SpanDigest::None,
        expansion,
    }
}

fn plain(stored: Range<u64>, start: u64) -> Span {
    let end = start + (stored.end - stored.start);
    span(stored, start..end, Expansion::Plain)
}

fn one(stored: &[u8], length: u64, expansion: Expansion) -> Result<Vec<u8>, SpanError> {
    let span = span(0..stored.len() as u64, 0..length, expansion);
    SpanTable::new(vec![span], stored.len() as u64)
        .unwrap()
        .expand(0, stored)
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::new(6));
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn text(length: usize) -> Vec<u8> {
    (0..length)
        .map(|index| b"zran, once more\n"[(index * index / 7) % 16])
        .collect()
}

#[test]
fn tables_that_break_a_rule_are_refused() {
    #[expect(clippy::reversed_empty_ranges)]
    let bad = [
        vec![plain(0..101, 0)],
        vec![span(9..8, 0..1, Expansion::Gzip)],
        vec![span(0..1, 5..5, Expansion::Gzip)],
        vec![span(0..1, 5..4, Expansion::Gzip)],
        vec![plain(0..10, 0), plain(10..20, 9)],
        vec![plain(0..10, 10), plain(10..20, 0)],
        vec![span(0..1, 0..MAX_SPAN + 1, Expansion::Zstd)],
        vec![span(0..5, 0..6, Expansion::Plain)],
        vec![span(
            0..5,
            0..6,
            Expansion::Deflate {
                bits: 8,
                window: Window::default(),
            },
        )],
    ];
    for spans in bad {
        assert!(
            matches!(SpanTable::new(spans.clone(), 100), Err(SpanError::Table(_))),
            "{spans:?}"
        );
    }
    let large = span(0..MAX_SPAN + 1, 0..1, Expansion::Gzip);
    assert!(SpanTable::new(vec![large], 1 << 40).is_err());
    let chunks = SpanDigest::StreamChunksBlake3(Arc::from([(4, [0; 32]), (5, [0; 32])]));
    let mut short = plain(0..10, 0);
    short.digest = chunks;
    assert!(SpanTable::new(vec![short], 100).is_err());
}

#[test]
fn spans_are_found_by_stream_offset() {
    let table = SpanTable::new(vec![plain(50..60, 0), plain(0..10, 10), plain(10..20, 30)], 60).unwrap();
    assert_eq!(table.overlapping(0..1), 0..1);
    assert_eq!(table.overlapping(9..11), 0..2);
    assert_eq!(table.overlapping(0..100), 0..3);
    assert!(table.overlapping(20..30).is_empty() && table.overlapping(40..50).is_empty());
    assert_eq!(table.overlapping(25..31), 2..3);
    assert!(table.covers(0..20) && table.covers(30..40) && table.covers(7..7));
    assert!(!table.covers(0..21) && !table.covers(19..31) && !table.covers(39..41) && !table.covers(20..30));
    assert_eq!(table.stream_length(), 40);
}

#[test]
fn neighbours_are_fetched_at_once() {
    let deflate = |input: u64, bits, end, stream| {
        Span::deflate(input, bits, Window::default(), end, stream, SpanDigest::None)
    };
    let spans = vec![
        deflate(10, 0, 100, 0..10),
        deflate(100, 3, 200, 10..20),
        deflate(250, 1, 300, 20..30),
        plain(0..5, 30),
    ];
    let table = SpanTable::new(spans, 300).unwrap();
    assert_eq!(table.spans()[1].stored, 99..200);
    assert_eq!(table.spans()[1].checkpoint().unwrap().input, 100);
    let run = |spans, stored| Run { spans, stored };
    assert_eq!(
        table.runs(0..4, 1000, 0),
        [run(0..2, 10..200), run(2..3, 249..300), run(3..4, 0..5)]
    );
    assert_eq!(table.runs(0..4, 1000, 49), [run(0..3, 10..300), run(3..4, 0..5)]);
    assert_eq!(
        table.runs(0..3, 100, 49),
        [run(0..1, 10..100), run(1..2, 99..200), run(2..3, 249..300)]
    );
    let fetched: Vec<u8> = (0..190).collect();
    let joined = run(0..2, 10..200);
    assert_eq!(table.of_run(1, &joined, &fetched).unwrap(), &fetched[89..190]);
    assert!(table.of_run(1, &joined, &fetched[..180]).is_err());
    assert!(table.of_run(2, &joined, &fetched).is_err());
}

#[test]
fn every_form_yields_exactly_its_length() {
    let bytes = text(100_000);
    let length = bytes.len() as u64;
    let members = [gzip(&bytes[..30_000]), gzip(&[]), gzip(&bytes[30_000..])].concat();
    let frame = |bytes: &[u8]| zstd::bulk::compress(bytes, 3).unwrap();
    let frames = [frame(&bytes[..1000]), frame(&bytes[1000..])].concat();
    let lz4 = lz4_flex::block::compress(&bytes);
    let raw = Expansion::Deflate {
        bits: 0,
        window: Window::default(),
    };
    for (stored, expansion, may_be_less) in [
        (&bytes[..], Expansion::Plain, false),
        (&members, Expansion::Gzip, true),
        // From the first member's data on, through trailers and headers.
        (&members[10..], raw, true),
        (&frames, Expansion::Zstd, true),
        (&lz4, Expansion::Lz4, false),
    ] {
        if expansion != Expansion::Plain {
            assert!(
                one(stored, length, expansion.clone()).unwrap() == bytes,
                "{expansion:?}"
            );
            assert!(
                one(stored, length + 1, expansion.clone()).is_err(),
                "{expansion:?}"
            );
            let less = one(stored, length - 1, expansion.clone());
            assert_eq!(less.is_ok(), may_be_less, "{expansion:?}");
            for cut in [0, 1, stored.len() / 2, stored.len() - 20] {
                assert!(
                    one(&stored[..cut], length, expansion.clone()).is_err(),
                    "{expansion:?} {cut}"
                );
            }
        } else {
            assert!(one(stored, length, expansion).unwrap() == bytes);
        }
    }
}

#[test]
fn digests_are_of_what_they_say() {
    use sha2::{Digest as _, Sha256};
    let bytes = text(10_000);
    let stored = gzip(&bytes);
    let blake3 = |bytes: &[u8]| *blake3::hash(bytes).as_bytes();
    let chunks = [(4000, blake3(&bytes[..4000])), (6000, blake3(&bytes[4000..]))];
    for digest in [
        SpanDigest::StoredSha256(Sha256::digest(&stored).into()),
        SpanDigest::StreamSha256(Sha256::digest(&bytes).into()),
        SpanDigest::StreamBlake3(blake3(&bytes)),
        SpanDigest::StreamChunksBlake3(Arc::from(chunks)),
    ] {
        let span = Span {
            stored: 0..stored.len() as u64,
            stream: 0..bytes.len() as u64,
            digest: digest.clone(),
            expansion: Expansion::Gzip,
        };
        let table = Arc::new(SpanTable::new(vec![span], stored.len() as u64).unwrap());
        table.check(0, &stored).unwrap();
        assert!(table.expand(0, &stored).unwrap() == bytes);
        let run = table.runs(0..1, 1 << 20, 0).remove(0);
        assert!(table.run_check(&run)(&stored).is_ok());
        // Other bytes of the same length: of the stream, or of the header, which only a stored digest knows.
        let mut other = gzip(&[b"?", &bytes[1..]].concat());
        other.resize(stored.len(), 0);
        assert!(
            table.check(0, &other).is_err() && table.expand(0, &other).is_err(),
            "{digest:?}"
        );
        assert!(table.run_check(&run)(&other).is_err());
        let mut header = stored.clone();
        header[4] ^= 1;
        let is_stored = matches!(digest, SpanDigest::StoredSha256(_));
        assert_eq!(table.check(0, &header).is_err(), is_stored);
    }
}

#[test]
fn a_window_is_the_last_32_kib() {
    let bytes = text(50_000);
    assert!(Window::new(&bytes).bytes().unwrap() == bytes[50_000 - WINDOW..]);
    assert_eq!(Window::new(&[]).bytes().unwrap(), b"");
    let large = zstd::bulk::compress(&[0; WINDOW + 1], 1).unwrap();
    for damaged in [&large[..], &[1, 2, 3], &large[..10]] {
        let window = Window::from_compressed(damaged);
        assert!(window.bytes().is_err());
        assert!(one(&[3, 0], 1, Expansion::Deflate { bits: 0, window }).is_err());
    }
}

proptest! {
    /// A span, damaged or not, yields exactly its length or an error.
    #[test]
    fn hostile_spans_are_refused_or_whole(
        kind in 0..4,
        length in 0u64..5000,
        bits in 0u8..8,
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
    ) {
        let bytes = text(3000);
        let (mut stored, expansion) = match kind {
            0 => (gzip(&bytes), Expansion::Gzip),
            1 => (gzip(&bytes)[9..].to_vec(), Expansion::Deflate { bits, window: Window::new(&bytes[..100]) }),
            2 => (zstd::bulk::compress(&bytes, 3).unwrap(), Expansion::Zstd),
            _ => (lz4_flex::block::compress(&bytes), Expansion::Lz4),
        };
        for (place, value) in flips {
            let place = place.index(stored.len());
            stored[place] = value;
        }
        if let Ok(stream) = one(&stored, length + 1, expansion) {
            prop_assert_eq!(stream.len() as u64, length + 1);
        }
    }
}
