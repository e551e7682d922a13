//! A SOCI ztoc: any bytes, of a layer of any size.
#![no_main]

use libfuzzer_sys::fuzz_target;
use thaw_rootfs::index::soci;
use thaw_rootfs::layer::Limits;

fuzz_target!(|input: (u32, &[u8])| {
    let (stored_size, bytes) = input;
    let limits = Limits {
        entries: 10_000,
        tree_bytes: 1 << 20,
        ..Limits::default()
    };
    let Ok(index) = soci::read_ztoc(bytes, u64::from(stored_size), &limits) else {
        return;
    };
    for entry in &index.tree.entries {
        let is_clean = |part: &[u8]| !part.is_empty() && part != b"." && part != b".." && !part.contains(&0);
        assert!(entry.path.is_empty() || entry.path.split(|byte| *byte == b'/').all(is_clean));
    }
    for span in index.content.spans.spans() {
        assert!(span.stored.end <= u64::from(stored_size));
    }
});
