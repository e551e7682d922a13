//! Single layers, and images put together from them: what a snapshotter asks.

use std::sync::Arc;

use oci_spec::image::ImageConfiguration;
use sha2::{Digest as _, Sha256};
use thaw_imagefs::digest::Digest;
use tokio_util::sync::CancellationToken;

use crate::error::Error;
use crate::index::Content;
use crate::progress::Progress;
use crate::ranges::StoredBlob;
use crate::reference::ImageRef;
use crate::source::{self, LayerSource, Platform};

use super::assemble::Parts;
use super::form::{Origin, layer_key};
use super::lock::Lock;
use super::pull::{Pulling, absolute, blocking};
use super::record::{LayerRecord, Record};
use super::{Form, Image, PullOptions, Store};

/// A layer in the store. As long as one is held, nothing is collected: put it into an image soon.
#[derive(Clone, Debug)]
pub struct StoredLayer {
    /// What the store calls it.
    pub key: Digest,
    pub diff_id: Digest,
    pub form: Form,
    record: LayerRecord,
    _making: Arc<Lock>,
}

/// Which layer of an image is wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WhichLayer {
    /// The one its manifest names by this digest of its stored form.
    Stored(Digest),
    /// The one with this DiffID.
    Diff(Digest),
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

impl ReadyMadeBlob {
    /// What the store calls it.
    pub fn key(&self) -> Digest {
        layer_key(self.form, &self.stored.digest, &self.document)
    }
}

impl Store {
    /// Makes sure one layer of an image is in the store, lazily where possible.
    ///
    /// # Errors
    /// Those of [`Store::pull`]; `NotFound` when the image has no such layer, as one of another form than tars has none.
    pub async fn ensure_layer(
        &self,
        reference: &ImageRef,
        platform: &Platform,
        layer: &WhichLayer,
        options: &PullOptions,
        progress: Arc<dyn Progress>,
    ) -> Result<StoredLayer, Error> {
        let reference = absolute(reference)?;
        let store = self.clone();
        let making = Arc::new(blocking(move || store.lock_shared("store")).await?);
        let source = source::open(&reference, &self.source_options(options), progress.clone()).await?;
        let resolved = source::resolve(&*source, platform).await?;
        let wanted = |it: &LayerSource| match layer {
            WhichLayer::Stored(digest) => it.digest == Some(*digest),
            WhichLayer::Diff(diff_id) => it.diff_id == *diff_id,
        };
        let at = resolved.layers.iter().position(wanted).ok_or_else(|| {
            let (WhichLayer::Stored(digest) | WhichLayer::Diff(digest)) = layer;
            Error::NotFound {
                what: format!("layer {digest}"),
                place: format!("image {reference}"),
                advice: "pull the image whole".into(),
            }
        })?;
        let pulling = Pulling {
            source: &*source,
            bound: self
                .bound(&*source, &resolved, &reference, options, &progress)
                .await,
            making: making.clone(),
            progress,
        };
        // Dropped, it stops its threads.
        let cancelled = CancellationToken::new();
        let _stop = cancelled.clone().drop_guard();
        let descriptor = resolved.descriptors.get(at).cloned();
        let source = resolved.layers[at].clone();
        let diff_id = source.diff_id;
        let record = self.make_layer(&pulling, source, descriptor, &cancelled).await?;
        Ok(StoredLayer {
            key: record.key,
            diff_id,
            form: record.form,
            record,
            _making: making,
        })
    }

    /// Puts layers, bottom first, together to an image, whose digest is made from their keys and the config. `reference`
    /// is where their bytes can be had again.
    ///
    /// # Errors
    /// `Merge`, `Metadata`, `DiskFull`, `Io`.
    pub async fn assemble(
        &self,
        layers: &[StoredLayer],
        config: &ImageConfiguration,
        reference: &ImageRef,
        plain_http: bool,
    ) -> Result<Image, Error> {
        let config =
            serde_json::to_vec(config).map_err(|error| Error::malformed("the image's config", error))?;
        let mut hasher = Sha256::new();
        hasher.update(b"thaw image of layers v1\0");
        layers.iter().for_each(|layer| hasher.update(layer.key.bytes()));
        hasher.update(&config);
        let digest = Digest::from(<[u8; 32]>::from(hasher.finalize()));
        let parts = Parts {
            digest,
            reference: absolute(reference)?.to_string(),
            plain_http,
            config,
            layers: layers.iter().map(|layer| layer.record.clone()).collect(),
            ready_made: None,
            pinned: true,
        };
        let store = self.clone();
        blocking(move || {
            // The image's own reference goes on naming what was pulled by it.
            store.make_image_directory(parts)
        })
        .await
    }

    /// A layer the store has already, in some image.
    ///
    /// # Errors
    /// `Io`.
    pub fn stored_layer(&self, key: &Digest) -> Result<Option<StoredLayer>, Error> {
        let making = Arc::new(self.lock_shared("store")?);
        for digest in self.names("images")? {
            let Some(record) = Record::read(&self.image_directory(&digest))? else {
                continue;
            };
            let Some(layer) = record.layers.into_iter().find(|layer| layer.key == *key) else {
                continue;
            };
            if !self.has_layer(key)? {
                return Ok(None);
            }
            let diff_id = match &layer.origin {
                Origin::Layer(source) => source.diff_id,
                Origin::Blob(_) => layer.key,
            };
            return Ok(Some(StoredLayer {
                key: *key,
                diff_id,
                form: layer.form,
                record: layer,
                _making: making,
            }));
        }
        Ok(None)
    }
}
