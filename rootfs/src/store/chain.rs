//! Single layers, and images put together from them: what a snapshotter asks.

use std::sync::Arc;

use oci_spec::image::ImageConfiguration;

use crate::digest::Digest;
use crate::error::Error;
use crate::fetch::StoredBlob;
use crate::index::Content;
use crate::progress::Progress;
use crate::reference::ImageRef;
use crate::source::Platform;

use super::lock::Lock;
use super::{Form, Image, PullOptions, Store};

/// A layer in the store. As long as one is held, nothing is collected: put it into an image soon.
#[derive(Clone, Debug)]
pub struct StoredLayer {
    /// What the store calls it.
    pub key: Digest,
    pub diff_id: Digest,
    pub form: Form,
    pub(super) _making: Arc<Lock>,
}

/// Which layer of an image is wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WhichLayer {
    /// The one its manifest names by this digest of its stored form.
    Stored(Digest),
    /// The one with this DiffID.
    Diff(Digest),
}

/// An image whose EROFS metadata is ready-made, as a converted image's is.
pub struct ReadyMade {
    /// The metadata; addresses past it are those of `blobs`.
    pub metadata: Vec<u8>,
    pub blobs: Vec<ReadyMadeBlob>,
}

/// A data blob of a ready-made image.
#[derive(Clone, Debug)]
pub struct ReadyMadeBlob {
    /// First byte in the synthesized address space.
    pub address: u64,
    pub form: Form,
    /// What the content was read from: with the stored blob it makes the layer's key.
    pub document: Digest,
    pub stored: StoredBlob,
    pub content: Content,
    /// BLAKE3 of each 128 KiB of the data file, where all are known in advance.
    pub digests: Option<Vec<[u8; 32]>>,
}

impl Store {
    /// Makes sure one layer of an image is in the store, lazily where possible.
    ///
    /// # Errors
    /// Those of [`Store::pull`]; `NotFound` when the image has no such layer.
    pub async fn ensure_layer(
        &self,
        _reference: &ImageRef,
        _platform: &Platform,
        _layer: &WhichLayer,
        _options: &PullOptions,
        _progress: Arc<dyn Progress>,
    ) -> Result<StoredLayer, Error> {
        Err(Error::malformed("a layer alone", "this build cannot do that yet"))
    }

    /// Puts layers, bottom first, together to an image, whose digest is made from their keys and the config. `reference`
    /// is where their bytes can be had again.
    ///
    /// # Errors
    /// `Merge`, `Metadata`, `DiskFull`, `Io`.
    pub async fn assemble(
        &self,
        _layers: &[StoredLayer],
        _config: &ImageConfiguration,
        _reference: &ImageRef,
        _plain_http: bool,
    ) -> Result<Image, Error> {
        Err(Error::malformed(
            "an image of layers",
            "this build cannot do that yet",
        ))
    }

    /// A layer the store has already.
    ///
    /// # Errors
    /// `Io`.
    pub fn stored_layer(&self, _key: &Digest) -> Result<Option<StoredLayer>, Error> {
        Ok(None)
    }
}
