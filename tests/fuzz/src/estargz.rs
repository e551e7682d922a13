//! eStargz and zstd:chunked: a footer, annotations, and a table of contents (the digest is made right).

use std::collections::BTreeMap;

use thaw_imagefs::Digest;
use thaw_images::index::estargz;
use thaw_images::layer::LayerLimits;

/// Four bytes are the layer's size, two the length of the footer and annotation that follow; the rest is the table.
pub fn run(input: &[u8]) {
    let Some(([a, b, c, d, low, high], rest)) = input.split_first_chunk() else {
        return;
    };
    let size = u64::from(u32::from_le_bytes([*a, *b, *c, *d]));
    let length = usize::from(u16::from_le_bytes([*low, *high]));
    let (bytes, json) = rest.split_at(length.min(rest.len()));
    if let Ok(location) = estargz::toc_location(bytes, size) {
        assert!(location.start < location.end && location.end <= size);
    }
    let digest = Digest::of(bytes).to_string();
    let annotations = BTreeMap::from([
        ("io.github.containers.zstd-chunked.manifest-checksum".to_owned(), digest),
        (
            "io.github.containers.zstd-chunked.manifest-position".to_owned(),
            String::from_utf8_lossy(bytes).into_owned(),
        ),
    ]);
    let _ = estargz::bound(&annotations, size);
    let limits = LayerLimits {
        entries: 10_000,
        tree_bytes: 1 << 20,
        ..LayerLimits::default()
    };
    // What a decompressor makes of noise, and what the reader makes of JSON.
    let _ = estargz::read_toc(bytes, &Digest::of(json), 0..size, &limits);
    let _ = estargz::read_zstd_toc(bytes, &Digest::of(bytes), 0..size, &limits);
    if let Ok(index) = estargz::read_json(json, size, &limits) {
        for span in index.content.spans.spans() {
            assert!(span.stored.end <= size);
        }
    }
}
