//! The index that a layer's directory stores (`docs/layer-index.md`): file `index`, beside `tree`.
//!
//! Invariant: [`decode`] yields an index that is complete and has passed every check of [`Content`], or an error; the index then counts as
//! absent. A checksum finds torn files. A hostile file with a correct checksum causes allocations of at most a small multiple of its
//! length.

mod codec;

use thaw_imagefs::digest::Digest;

use crate::index::{Content, ContentError};
use crate::span::SpanError;

use codec::{Reader, Writer};

/// Name of the file in a layer's directory.
pub const INDEX: &str = "index";

const MAGIC: &[u8; 8] = b"THAWINDX";
const VERSION: u32 = 1;
/// Magic, version, and the checksum of everything after it.
const HEADER: usize = 8 + 4 + 32;

/// The index of a layer, and the stored form that it describes, because the same DiffID may be stored in many ways.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// SHA-256 of the stored blob.
    pub stored: Digest,
    /// Length of the stored blob in bytes.
    pub stored_length: u64,
    pub content: Content,
}

/// Why a kept index cannot be read. The layer is then unpacked again when it is needed.
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
}

/// The bytes of the file.
pub fn encode(kept: &Kept) -> Vec<u8> {
    let mut writer = Writer::new(HEADER);
    writer.fixed(kept.stored.bytes());
    writer.number(kept.stored_length);
    writer.content(&kept.content);
    let mut bytes = writer.finish();
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
    let checksum = *blake3::hash(&bytes[HEADER..]).as_bytes();
    bytes[12..HEADER].copy_from_slice(&checksum);
    bytes
}

/// Reads the output of [`encode`]; the bytes may be hostile.
///
/// # Errors
/// [`KeptError`]; the layer then counts as one without an index.
pub fn decode(bytes: &[u8]) -> Result<Kept, KeptError> {
    let (header, body) = bytes.split_at_checked(HEADER).ok_or(KeptError::Version)?;
    if header[..8] != *MAGIC || header[8..12] != VERSION.to_le_bytes() {
        return Err(KeptError::Version);
    }
    if *blake3::hash(body).as_bytes() != header[12..] {
        return Err(KeptError::Torn);
    }
    let mut reader = Reader::new(body);
    let stored = Digest::from(reader.fixed()?);
    let stored_length = reader.number()?;
    let content = reader.content(stored_length)?;
    reader.end()?;
    Ok(Kept {
        stored,
        stored_length,
        content,
    })
}

#[cfg(test)]
#[path = "kept_test.rs"]
mod tests;
