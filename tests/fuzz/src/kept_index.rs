//! The body of a kept index behind a right checksum. What decodes keeps its rules, encodes to what decodes to the same, and
//! its spans expand or are refused.

use thaw_images::index::Pieces;
use thaw_images::index::kept::{decode, encode};

pub fn run(body: &[u8]) {
    let mut file = b"THAWINDX\x01\0\0\0".to_vec();
    file.extend_from_slice(blake3::hash(body).as_bytes());
    file.extend_from_slice(body);
    let Ok(kept) = decode(&file) else {
        return;
    };
    assert_eq!(decode(&encode(&kept)).expect("what was decoded is whole"), kept);
    let content = &kept.content;
    if let Pieces::Map(pieces) = &content.pieces {
        for piece in pieces {
            let stream = piece.stream_offset..piece.stream_offset + piece.length;
            assert!(!content.spans.overlapping(stream).is_empty());
        }
    }
    assert!(
        content
            .pieces
            .within(0..content.data_length)
            .iter()
            .all(|piece| piece.length > 0)
    );
    let stored = [0x55; 4096];
    for (index, span) in content.spans.spans().iter().enumerate().take(64) {
        let length = (span.stored.end - span.stored.start) as usize;
        // Only those that are cheap to claim.
        if span.stream.end - span.stream.start <= 1 << 20 {
            let _ = content.spans.expand(index, &stored[..length.min(stored.len())]);
        }
    }
}
