//! A span's stored bytes, in every form: it expands to exactly its length, or is refused.

use thaw_images::span::{Expansion, Span, SpanDigest, SpanTable, Window};

pub fn run(bytes: &[u8]) {
    let Some(([kind, bits, low, high, window], rest)) = bytes.split_first_chunk::<5>() else {
        return;
    };
    let (window, stored) = rest.split_at(usize::from(*window).min(rest.len()));
    let length = u64::from(u16::from_le_bytes([*low, *high]));
    let expansion = match kind % 5 {
        0 => Expansion::Plain,
        1 => Expansion::Deflate {
            bits: *bits,
            window: Window::new(window),
        },
        2 => Expansion::Gzip,
        3 => Expansion::Zstd,
        _ => Expansion::Lz4,
    };
    let span = Span {
        stored: 0..stored.len() as u64,
        stream: 0..length,
        digest: SpanDigest::None,
        expansion,
    };
    let Ok(table) = SpanTable::new(vec![span], stored.len() as u64) else {
        return;
    };
    if let Ok(stream) = table.expand(0, stored) {
        assert_eq!(stream.len() as u64, length);
    }
}
