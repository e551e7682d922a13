//! EROFS.

use std::io::{self, Write};

use crate::tree::Tree;

/// Where a blob is in the synthesized address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlobPlacement {
    /// First byte; a multiple of 2 MiB, past the metadata.
    pub address: u64,
    /// Bytes, a multiple of 4096.
    pub length: u64,
}

/// What was laid out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Bytes of the metadata image, a multiple of 4096.
    pub metadata_length: u64,
    /// One for each length given, in that order.
    pub blobs: Vec<BlobPlacement>,
    /// Inodes.
    pub inodes: u64,
}

/// Why a tree cannot be an EROFS image.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    #[error("cannot write the EROFS image: {0}")]
    Io(#[from] io::Error),
}

/// Writes the metadata of `tree`; `blob_lengths` are the lengths of the layers' data files, bottom first.
///
/// # Errors
/// See [`WriteError`].
pub fn write(_tree: &Tree, _blob_lengths: &[u64], _out: &mut impl Write) -> Result<Summary, WriteError> {
    unimplemented!()
}
