use std::sync::Arc;

use proptest::prelude::*;

use crate::index::{Piece, Pieces};
use crate::span::{Expansion, MAX_SPAN, Span, SpanDigest, SpanTable, StreamPart, Window};

use super::*;

/// One span of each kind, with each digest, some of the stored blob twice and out of order.
fn kept() -> Kept {
    let digest = [7; 32];
    let span = |stored, stream, digest, expansion| Span {
        stored,
        stream,
        digest,
        expansion,
    };
    let window = Window::new(&[9; 40_000]);
    let chunks = SpanDigest::StreamChunksBlake3(Arc::from([(3000, [1; 32]), (1000, [2; 32])]));
    let part = |skip, length| StreamPart {
        skip,
        length,
        sha256: digest,
    };
    let parts = SpanDigest::StreamPartsSha256(Arc::from([part(5, 1000), part(0, MAX_SPAN as u32 - 1005)]));
    let spans = vec![
        span(
            10..500,
            0..1000,
            SpanDigest::StoredSha256(digest),
            Expansion::Deflate {
                bits: 0,
                window: Window::default(),
            },
        ),
        span(
            499..900,
            1000..2000,
            SpanDigest::StreamSha256(digest),
            Expansion::Deflate { bits: 3, window },
        ),
        span(
            5000..6000,
            2000..3000,
            SpanDigest::StreamBlake3(digest),
            Expansion::Plain,
        ),
        span(4000..4100, 5000..9000, chunks, Expansion::Zstd),
        span(4000..4100, 9000..9001, SpanDigest::None, Expansion::Lz4),
        span(0..10_000, 9001..9001 + MAX_SPAN, parts, Expansion::Gzip),
    ];
    let piece = |data_offset, length, stream_offset| Piece {
        data_offset,
        length,
        stream_offset,
    };
    let pieces = Pieces::Map(vec![
        piece(0, 3000, 0),
        piece(4096, 4000, 5000),
        piece(8192, 2000, 1000),
    ]);
    Kept {
        stored: Digest::of(b"stored"),
        stored_length: 10_000,
        content: Content::new(12288, pieces, SpanTable::new(spans, 10_000).unwrap()).unwrap(),
    }
}

/// Corrects the checksum, as an attacker would.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    if bytes.len() >= HEADER {
        let checksum = *blake3::hash(&bytes[HEADER..]).as_bytes();
        bytes[12..HEADER].copy_from_slice(&checksum);
    }
    bytes
}

#[test]
fn every_kind_comes_back() {
    let kept = kept();
    assert_eq!(decode(&encode(&kept)).unwrap(), kept);
    let mut identity = kept;
    let spans = vec![Span {
        stored: 0..4096,
        stream: 0..4096,
        digest: SpanDigest::None,
        expansion: Expansion::Plain,
    }];
    let spans = SpanTable::new(spans, 10_000).unwrap();
    identity.content = Content::new(4096, Pieces::Identity, spans).unwrap();
    assert_eq!(decode(&encode(&identity)).unwrap(), identity);
}

#[test]
fn what_is_torn_or_foreign_is_absent() {
    let whole = encode(&kept());
    for length in 0..whole.len() {
        assert!(decode(&whole[..length]).is_err());
        // The same damage with a correct checksum.
        assert!(decode(&sealed(whole[..length].to_vec())).is_err());
    }
    for place in 0..whole.len() {
        let mut flipped = whole.clone();
        flipped[place] ^= 0x10;
        let error = decode(&flipped).unwrap_err();
        assert!(
            matches!(error, KeptError::Version | KeptError::Torn),
            "{place}: {error}"
        );
    }
    assert!(matches!(
        decode(&sealed([&whole[..], &[0]].concat())),
        Err(KeptError::Damaged(_))
    ));
    let mut next = whole;
    next[8] += 1;
    assert!(matches!(decode(&next), Err(KeptError::Version)));
}

proptest! {
    /// Any bytes with a correct checksum are accepted or refused, and accepted ones satisfy the invariants.
    #[test]
    fn hostile_indexes_are_refused_or_whole(flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
        let mut bytes = encode(&kept());
        for (place, value) in flips {
            let place = HEADER + place.index(bytes.len() - HEADER);
            bytes[place] = value;
        }
        if let Ok(kept) = decode(&sealed(bytes)) {
            for (index, span) in kept.content.spans.spans().iter().enumerate() {
                prop_assert!(span.stored.end <= kept.stored_length);
                let stored = vec![0x55; (span.stored.end - span.stored.start) as usize];
                let _ = kept.content.spans.expand(index, &stored);
            }
            let _ = kept.content.pieces.within(0..kept.content.data_length);
        }
    }
}
