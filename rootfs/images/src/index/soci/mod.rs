//! SOCI: an image made lazy by documents beside it (awslabs/soci-snapshotter's index, version 2, and ztoc, version 0.9).
//!
//! An image manifest names its index by an annotation, the index names one ztoc per layer, and a ztoc has the layer's table of contents,
//! and zran checkpoints with a SHA-256 of the stored bytes of each span. Digests bind all documents to the image; they are still treated as
//! hostile. This module fetches nothing.

mod checkpoints;
mod flat;
mod manifest;
mod schema;
mod write;
mod ztoc;

pub use manifest::{Index, Ztoc, bound_index, index_manifest, is_index};
pub use write::{Toc, index_layer, scan, write_ztoc};
pub use ztoc::read_ztoc;

/// Largest ztoc: 40 bytes of checkpoint for each KiB of a 4 TiB layer, or 4 million files.
pub const MAX_ZTOC: u64 = 1 << 30;

#[cfg(test)]
#[path = "soci_test.rs"]
mod tests;
