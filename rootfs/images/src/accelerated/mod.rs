//! Converted images, also called accelerated (`docs/image-format.md`): reading their documents.
//!
//! A converted image is an OCI artifact. Its layers are Thaw's documents: the EROFS metadata; for each *blob* a chunk
//! table and the stored bytes; perhaps a load order. [`open`] reads them; [`crate::convert`] writes them.
//!
//! Invariants: [`open`] compares every document with the manifest's digests and checks that no table's frames overlap or leave their blob,
//! and that no address of a file leaves its blob. It never allocates more than the limits here, whatever lengths a document states. Every
//! byte that is read later through a blob's [`crate::index::Content`] is compared with the BLAKE3 digest of its chunk, whoever made the
//! blob.

pub(crate) mod metadata;
pub(crate) mod open;
pub(crate) mod table;
#[cfg(test)]
pub(crate) mod testing;
pub(crate) mod wire;

pub use metadata::{MetadataHead, Placed, decode as decode_metadata};
pub use open::{Documents, open};
pub use table::{Chunk, Frame, Table};
