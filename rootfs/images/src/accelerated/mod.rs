//! Converted images: chunk-deduplicated, compressed in frames, with EROFS metadata of their own (`docs/image-format.md`).
//!
//! A converted image is an OCI artifact whose layers are documents of Thaw: the EROFS metadata; for each *blob* a chunk
//! table and the stored bytes; perhaps a load order. [`Job`] makes one of any image, referring to the blobs of *dictionary*
//! images for chunks they have; [`open`] reads one.
//!
//! Invariants: the same input and options give the same bytes. What [`open`] returns has been compared with the
//! manifest's digests and checked: no table's frames overlap or leave their blob, no address of a file leaves its blob,
//! nothing is allocated by a length a document states beyond the limits here. Every byte that is read later through a
//! blob's [`crate::index::Content`] is compared with the BLAKE3 digest of its chunk, whoever made the blob.

mod chunks;
mod convert;
mod cut;
mod dictionary;
mod frames;
mod input;
mod job;
mod manifest;
mod metadata;
mod open;
mod original;
mod publish;
mod table;
mod wire;

use crate::prefetch::LoadOrder;
use crate::store::ReadyMadeBlob;

pub use chunks::{DataFile, SourceBlob};
pub use convert::{Body, Converted, Facts, Options, Part, convert};
pub use cut::{Chunking, ChunkingError};
pub use dictionary::Dictionary;
pub use input::Input;
pub use job::{Job, Outcome};
pub use manifest::{Manifest, StoredTable};
pub use metadata::{MetadataHead, Placed, decode as decode_metadata};
pub(crate) use open::document;
pub use open::{Documents, open};
pub use original::Original;
pub use publish::{Pushed, find};
pub use table::{Chunk, Frame, Table};

/// `artifactType` of a converted image's manifest.
pub const ARTIFACT_TYPE: &str = "application/vnd.thaw.image.v1";
/// The EROFS metadata.
pub const METADATA_TYPE: &str = "application/vnd.thaw.image.metadata.v1";
/// The chunk table of the blob that follows it.
pub const TABLE_TYPE: &str = "application/vnd.thaw.image.chunks.v1";
/// File data: frames of chunks.
pub const BLOB_TYPE: &str = "application/vnd.thaw.image.blob.v1";
/// The load order.
pub const LOAD_ORDER_TYPE: &str = "application/vnd.thaw.image.load-order.v1+json";

/// An image whose metadata is had whole and whose file data can be read in pieces: of a converted image or a RAFS one.
#[derive(Clone, Debug)]
pub struct Opened {
    /// The EROFS metadata image: a multiple of 4096 bytes, checked.
    pub metadata: Vec<u8>,
    /// The ranges past the metadata, by address.
    pub blobs: Vec<ReadyMadeBlob>,
    /// What a start is known to read, in order.
    pub load_order: Option<LoadOrder>,
}

#[cfg(test)]
pub(crate) mod tests;
