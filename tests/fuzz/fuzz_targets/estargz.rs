//! eStargz and zstd:chunked: a footer, annotations, and a table of contents (the digest is made right).
#![no_main]

use std::collections::BTreeMap;

use libfuzzer_sys::fuzz_target;
use thaw_rootfs::Digest;
use thaw_rootfs::index::estargz;
use thaw_rootfs::layer::Limits;

fuzz_target!(|input: (u32, &[u8], &[u8])| {
    let (size, bytes, json) = input;
    let size = u64::from(size);
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
    let limits = Limits {
        entries: 10_000,
        tree_bytes: 1 << 20,
        ..Limits::default()
    };
    // What a decompressor makes of noise, and what the reader makes of JSON.
    let _ = estargz::read_toc(bytes, &Digest::of(json), 0..size, &limits);
    let _ = estargz::read_zstd_toc(bytes, &Digest::of(bytes), 0..size, &limits);
    if let Ok(index) = estargz::read_json(json, size, &limits) {
        for span in index.content.spans.spans() {
            assert!(span.stored.end <= size);
        }
    }
});
