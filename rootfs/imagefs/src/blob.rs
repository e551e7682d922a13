//! A blob's cache file and the ready bitmap beside it (`docs/blob-cache.md` has the format byte by byte).
//!
//! A *blob* is the file data of one layer: each file's bytes, 4 KiB-aligned and zero-padded, divided into chunks of [`CHUNK_SIZE`]. The
//! *data* file holds the bytes; the *ready* file records which of its chunks may be served.
//!
//! Invariant: a set bit means that, since this boot, the chunk's bytes were compared with their BLAKE3 digest or were written from a layer
//! whose DiffID was verified. The writer stores the bit with release ordering after the bytes are in the data file, and readers load it
//! with acquire ordering, so a reader that sees the bit sees the bytes. While a process may hold the files, bits are only set, and neither
//! file is truncated, punched or replaced in place.

mod ready;
mod writer;

use std::fs::File;
use std::ops::Range;

pub use ready::{BootId, Digests, ReadyFile};
pub use writer::{BlobSummary, BlobWriter, RefillSummary};

use ready::{Header, Mapping};

/// log2 of [`CHUNK_SIZE`], as stored in the ready file.
pub const CHUNK_LOG2: u32 = 17;

/// Bytes that become ready together: 128 KiB, the window in which Linux reads ahead by default.
pub const CHUNK_SIZE: u64 = 1 << CHUNK_LOG2;

/// File data starts at multiples of this many bytes, which suits pages, DAX mappings and EROFS blocks.
pub const BLOCK_SIZE: u64 = 4096;

/// What can be wrong with a pair of data and ready files.
#[derive(Debug, thiserror::Error)]
pub enum BlobError {
    #[error("blob cache: the ready file is damaged: {0}; pull the image again")]
    Damaged(&'static str),
    #[error(
        "blob cache: the ready file has format version {0}, this program reads version 2; pull the image again"
    )]
    Version(u32),
    #[error(
        "blob cache: the data file has {actual} bytes, the ready file promises {promised}; pull the image again"
    )]
    ShortData { promised: u64, actual: u64 },
    #[error(
        "blob cache: the layer unpacked to other bytes than before at offset {offset}; pull the image again"
    )]
    Unrepeatable { offset: u64 },
    #[error("blob cache: {0}")]
    Io(#[from] std::io::Error),
}

/// A blob for the VMM: read-only and possibly incomplete. Another process may fill it meanwhile.
pub struct BlobFile {
    data: File,
    map: Mapping,
    header: Header,
}

impl BlobFile {
    /// Takes the descriptors of a data and a ready file, both opened for reading. Neither file is trusted: sizes are checked against each
    /// other and bounded before anything is mapped.
    ///
    /// The boot ID is not checked here, because a jailed process cannot read the host's: the process that passes the descriptors must have
    /// called [`ReadyFile::activate`].
    pub fn open(data: File, ready: File) -> Result<Self, BlobError> {
        let header = Header::read(&ready)?;
        let map = Mapping::read_only(&ready, &header)?;
        let actual = data.metadata()?.len();
        if actual < header.length {
            return Err(BlobError::ShortData {
                promised: header.length,
                actual,
            });
        }
        Ok(Self { data, map, header })
    }

    /// Bytes of the blob: a multiple of [`BLOCK_SIZE`].
    pub fn len(&self) -> u64 {
        self.header.length
    }

    /// Whether the layer has no file data.
    pub fn is_empty(&self) -> bool {
        self.header.length == 0
    }

    /// The blob's name: the layer's DiffID if the data was compared with it, otherwise a key derived from the form it came in.
    pub fn id(&self) -> [u8; 32] {
        self.header.id
    }

    /// Bytes per chunk of this file; a power of two.
    pub fn chunk_size(&self) -> u64 {
        self.header.chunk_size()
    }

    /// The data file, for reading or mapping the chunks that are ready.
    pub fn data(&self) -> &File {
        &self.data
    }

    /// Whether `offset..offset + length` lies in the blob and may be read now.
    pub fn is_ready(&self, offset: u64, length: u64) -> bool {
        offset
            .checked_add(length)
            .is_some_and(|end| end <= self.header.length)
            && self.missing(offset, length).next().is_none()
    }

    /// The parts of `offset..offset + length` that may not be read yet, in order, as byte ranges on chunk boundaries (the last one ends
    /// with the blob). Bytes beyond the end of the blob are not reported. Bytes beyond the end of a truncated data file count as missing,
    /// whatever their bits are: the node fetches them again.
    pub fn missing(&self, offset: u64, length: u64) -> impl Iterator<Item = Range<u64>> + '_ {
        let mut chunks = self.header.chunks_of(offset, length);
        // One cheap call for each read, which copies at least a page.
        let there = self.data.metadata().map_or(0, |data| data.len());
        let is_there =
            move |chunk: u64| self.map.is_set(chunk) && self.header.chunk_range(chunk).end <= there;
        std::iter::from_fn(move || {
            let first = chunks.find(|chunk| !is_there(*chunk))?;
            let last = chunks
                .by_ref()
                .take_while(|chunk| !is_there(*chunk))
                .last()
                .unwrap_or(first);
            Some(self.header.chunk_range(first).start..self.header.chunk_range(last).end)
        })
    }
}

#[cfg(test)]
#[path = "blob_test.rs"]
mod tests;
