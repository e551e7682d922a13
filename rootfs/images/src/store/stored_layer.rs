//! Single layers in the store, and images put together from them, for snapshotters.

use std::sync::Arc;

use oci_spec::image::ImageConfiguration;
use sha2::{Digest as _, Sha256};
use thaw_imagefs::digest::Digest;

use crate::error::Error;
use crate::form::Form;
use crate::reference::ImageRef;

use super::assemble::Parts;
use super::lock::Lock;
use super::record::{LayerRecord, Origin, Record};
use super::{Image, Store};
use crate::blocking::blocking;

/// A layer in the store. While a value exists, nothing is collected, so make the layer part of an image soon.
#[derive(Clone, Debug)]
pub struct StoredLayer {
    /// Its name in the store.
    pub key: Digest,
    pub diff_id: Digest,
    pub form: Form,
    record: LayerRecord,
    _making: Arc<Lock>,
}

impl StoredLayer {
    /// The layer of a record. `making` keeps the store from being collected.
    pub(crate) fn new(diff_id: Digest, record: LayerRecord, making: Arc<Lock>) -> Self {
        Self {
            key: record.key,
            diff_id,
            form: record.form,
            record,
            _making: making,
        }
    }
}

impl Store {
    /// Assembles layers, bottom first, into an image, whose digest is computed from their keys and the config. Their bytes can be fetched
    /// again from `reference`.
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
            reference: reference.absolute()?.to_string(),
            plain_http,
            config,
            layers: layers.iter().map(|layer| layer.record.clone()).collect(),
            ready_made: None,
            pinned: true,
        };
        let store = self.clone();
        blocking(move || {
            // The image's own reference still points to the image that was pulled by it.
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
            return Ok(Some(StoredLayer::new(diff_id, layer, making)));
        }
        Ok(None)
    }
}
