//! The index a first unpacking leaves beside a layer (`docs/layer-index.md`): file `index` of its directory.
//!
//! Invariant: what [`decode`] yields is whole, or it is an error and counts as absent: a torn, foreign or hostile file is told by
//! its checksum, and whoever made one that has a right checksum still gets no more memory than its length bounds.

use crate::digest::Digest;
use crate::index::{Content, ContentError};
use crate::span::SpanError;

/// Name of the file in a layer's directory.
pub const INDEX: &str = "index";

/// The index of a layer, and the stored form it is of: the same DiffID may be stored in many ways.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// SHA-256 of the stored blob.
    pub stored: Digest,
    /// Bytes of it.
    pub stored_length: u64,
    pub content: Content,
}

/// Why a kept index cannot be read; the layer is unpacked again where it is needed.
#[derive(Debug, thiserror::Error)]
pub enum KeptError {
    #[error("the kept index is of another version or not one at all")]
    Version,
    #[error("the kept index is torn: its checksum differs")]
    Torn,
    #[error("the kept index is damaged: {0}")]
    Damaged(&'static str),
    #[error("the kept index is damaged: {0}")]
    Spans(#[from] SpanError),
    #[error("the kept index is damaged: {0}")]
    Content(#[from] ContentError),
    #[error("the kept index cannot be compressed: {0}")]
    Compression(#[from] std::io::Error),
}

/// The bytes of the file.
///
/// # Errors
/// When out of memory.
pub fn encode(kept: &Kept) -> Result<Vec<u8>, KeptError> {
    let _ = kept;
    Err(KeptError::Version)
}

/// Reads what [`encode`] made, hostile or not.
///
/// # Errors
/// [`KeptError`]; the layer then counts as without one.
pub fn decode(bytes: &[u8]) -> Result<Kept, KeptError> {
    let _ = bytes;
    Err(KeptError::Version)
}
