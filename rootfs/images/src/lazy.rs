//! Results of a format: images and layers whose metadata is complete and whose file data can be read in pieces.
//!
//! Formats create these types and the store keeps them, so that the two do not depend on each other.

use async_trait::async_trait;
use thaw_imagefs::digest::Digest;

use crate::error::Error;
use crate::form::{Form, layer_key};
use crate::index::{Content, LayerIndex};
use crate::load_order::LoadOrder;
use crate::ranges::{Ranges, StoredBlob};
use crate::source::Descriptor;

/// A format of whole images. A value is one image's manifest in this format.
#[async_trait]
pub trait ImageFormat: Send + Sync {
    fn form(&self) -> Form;

    /// Bytes of the documents that [`Self::open`] reads.
    fn document_bytes(&self) -> u64;

    /// Reads and checks the documents, but no file data.
    ///
    /// # Errors
    /// Those of `ranges`; `DigestMismatch` or `Malformed` for documents that contradict the manifest.
    async fn open(&self, ranges: &dyn Ranges) -> Result<LazyImage, Error>;
}

/// A format of single layers, each described by a document to which the image is bound. A value is what binds one image.
#[async_trait]
pub trait LayerFormat: Send + Sync {
    /// Reads and checks the document of the layer `stored`, which the manifest describes by `descriptor`. `None` if the image is not bound
    /// to one in this format.
    ///
    /// # Errors
    /// Those of `ranges`; `DigestMismatch` or `Malformed` for a document that contradicts what binds it.
    async fn open(
        &self,
        stored: &StoredBlob,
        descriptor: &Descriptor,
        ranges: &dyn Ranges,
    ) -> Result<Option<LazyLayer>, Error>;
}

/// An image whose metadata is complete and whose file data can be read in pieces.
#[derive(Clone, Debug)]
pub struct LazyImage {
    /// The EROFS metadata image: a multiple of 4096 bytes, checked.
    pub metadata: Vec<u8>,
    /// The ranges past the metadata, by address.
    pub blobs: Vec<LazyBlob>,
    /// The reads expected of a start, in order.
    pub load_order: Option<LoadOrder>,
}

/// A data blob of a lazy image.
#[derive(Clone, Debug)]
pub struct LazyBlob {
    /// First byte in the synthesized address space.
    pub address: u64,
    pub form: Form,
    /// The document from which the content was read. With the stored blob it determines the layer's key.
    pub document: Digest,
    pub stored: StoredBlob,
    pub content: Content,
    /// BLAKE3 of each 128 KiB of the data file, if all are known in advance.
    pub digests: Option<Vec<[u8; 32]>>,
}

impl LazyBlob {
    /// The store's name for it.
    pub fn key(&self) -> Digest {
        layer_key(self.form, &self.stored.digest, &self.document)
    }
}

/// A layer whose tree is known from a document and whose file data can be read in pieces.
pub struct LazyLayer {
    pub form: Form,
    /// The document from which the index was read.
    pub document: Digest,
    /// The layer as its source stores it.
    pub stored: StoredBlob,
    pub index: LayerIndex,
    /// Bytes fetched for it.
    pub fetched: u64,
}

impl LazyLayer {
    /// The store's name for it.
    pub fn key(&self) -> Digest {
        layer_key(self.form, &self.stored.digest, &self.document)
    }
}
