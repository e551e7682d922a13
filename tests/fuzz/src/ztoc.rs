//! A SOCI ztoc: any bytes, of a layer of any size.

use thaw_images::index::soci;
use thaw_images::layer::LayerLimits;

/// Four bytes are the layer's size.
pub fn run(input: &[u8]) {
    let Some((size, bytes)) = input.split_first_chunk() else {
        return;
    };
    let stored_size = u32::from_le_bytes(*size);
    let limits = LayerLimits {
        entries: 10_000,
        tree_bytes: 1 << 20,
        ..LayerLimits::default()
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
}
