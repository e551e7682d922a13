//! What an operator asks of the store: what takes its space, whether it is sound, and giving space back.

use crate::digest::Digest;
use crate::error::Error;

use super::{Form, Store};

/// What one image takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageUsage {
    pub digest: Digest,
    pub reference: String,
    /// Bytes of file data a guest sees, holes included.
    pub logical: u64,
    /// Bytes on the disk: metadata, indexes and what is stored of its layers.
    pub stored: u64,
    /// Of those, in layers other images have too.
    pub shared: u64,
    /// Whether a sandbox uses it.
    pub leased: bool,
}

/// What the whole store takes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub images: Vec<ImageUsage>,
    /// Bytes of file data, each layer counted once.
    pub logical: u64,
    /// Bytes on the disk, each layer counted once.
    pub stored: u64,
}

/// What was given back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pruned {
    /// Images removed altogether.
    pub images: u64,
    /// Layers emptied or removed.
    pub layers: u64,
    /// Bytes on the disk.
    pub bytes: u64,
}

/// How one layer of an image stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerInspection {
    pub key: Digest,
    pub form: Form,
    /// The blob in the registry, where known.
    pub stored_digest: Option<Digest>,
    pub stored_size: Option<u64>,
    /// Bytes of file data.
    pub length: u64,
    pub chunks: u64,
    /// Chunks that may be served now.
    pub ready_chunks: u64,
    /// Bytes of its index; none without one.
    pub index_bytes: Option<u64>,
    /// Spans of its index.
    pub spans: Option<u64>,
    /// Bytes of the cache file on the disk.
    pub disk: u64,
}

/// How an image stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inspection {
    pub digest: Digest,
    pub reference: String,
    /// Bytes of the EROFS metadata.
    pub metadata: u64,
    pub leased: bool,
    /// Bottom first.
    pub layers: Vec<LayerInspection>,
}

/// What verifying an image found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VerifyReport {
    /// Chunks compared with their digests.
    pub checked: u64,
    /// Chunks that were ready and are not what they were: layer and chunk.
    pub bad: Vec<(Digest, u64)>,
    /// Layers whose files are damaged beyond their chunks (torn or truncated).
    pub damaged: Vec<Digest>,
    /// Of the bad chunks, those that are missing now and will be fetched again, because no sandbox uses the image.
    pub cleared: u64,
}

impl VerifyReport {
    /// Whether nothing was wrong.
    pub fn is_sound(&self) -> bool {
        self.bad.is_empty() && self.damaged.is_empty()
    }
}

fn unavailable(what: &str) -> Error {
    Error::malformed(what, "this build cannot do that yet")
}

impl Store {
    /// Gives back the data of an image's layers and keeps their trees and indexes: the next start reads lazily. Layers
    /// that an image in use has too are left alone.
    ///
    /// # Errors
    /// `InUse` while a sandbox holds a lease, `NotFound`, `Io`. Waits for running pulls.
    pub fn evict(&self, _digest: &Digest) -> Result<Pruned, Error> {
        Err(unavailable("evicting"))
    }

    /// Gives back what no sandbox uses: with `keep_indexes` the data of the layers, without it the images altogether.
    ///
    /// # Errors
    /// `Io`. Waits for running pulls.
    pub fn prune(&self, _keep_indexes: bool) -> Result<Pruned, Error> {
        Err(unavailable("pruning"))
    }

    /// Evicts images, those leased longest ago first, then removes them in the same order, until the store takes no more
    /// than `limit` bytes of disk or all that is left is in use. Does nothing while a pull runs.
    ///
    /// # Errors
    /// `Io`.
    pub fn collect_to(&self, _limit: u64) -> Result<Pruned, Error> {
        Err(unavailable("collecting"))
    }

    /// What the store and each image take.
    ///
    /// # Errors
    /// `Io`.
    pub fn usage(&self) -> Result<Usage, Error> {
        Err(unavailable("usage"))
    }

    /// How an image stands.
    ///
    /// # Errors
    /// `NotFound`, `Io`.
    pub fn inspect(&self, _digest: &Digest) -> Result<Inspection, Error> {
        Err(unavailable("inspecting"))
    }

    /// Compares every ready chunk of an image with its digest. Bad ones of layers no sandbox uses are made missing, so
    /// that they are fetched again at their next use; [`crate::fill::Filler::refetch`] replaces them at once.
    ///
    /// # Errors
    /// `NotFound`, `Io`.
    pub fn verify(&self, _digest: &Digest) -> Result<VerifyReport, Error> {
        Err(unavailable("verifying"))
    }
}
