//! The image a conversion starts from.

use std::fs::File;

use serde::Deserialize;
use thaw_imagefs::blob::BlobFile;
use thaw_imagefs::digest::Digest;
use thaw_imagefs::erofs::{self, BlobPlacement, Reader};

use crate::error::Error;
use crate::prefetch::LoadOrder;
use crate::reference::ImageRef;
use crate::source::{Descriptor, Resolved};
use crate::store::Image;

use super::chunks::SourceBlob;
use super::convert::Input;
use super::manifest::descriptor;

/// What a converted image says of the image it was made of.
#[derive(Clone, Debug)]
pub struct Original {
    /// Of its manifest.
    pub image: Digest,
    /// Its manifest, where there is one that others can ask for.
    pub subject: Option<Descriptor>,
    /// Its config, unchanged.
    pub config: Vec<u8>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Head {
    media_type: Option<String>,
}

impl Original {
    /// Of an image as it was resolved. An archive's manifest is Thaw's own and nobody can ask for it.
    pub fn of(resolved: &Resolved, reference: &ImageRef) -> Self {
        let head: Option<Head> = serde_json::from_slice(&resolved.manifest).ok();
        let media_type = head
            .and_then(|head| head.media_type)
            .unwrap_or_else(|| crate::source::OCI_MANIFEST.into());
        let subject = match reference {
            ImageRef::Archive { .. } => None,
            ImageRef::Layout { .. } | ImageRef::Registry(_) => {
                Some(descriptor(&media_type, &resolved.manifest))
            }
        };
        Self {
            image: resolved.digest,
            subject,
            config: resolved.config_bytes.clone(),
        }
    }

    /// An OCI config, whatever the original called it: Docker's has the same fields.
    pub(super) fn config_descriptor(&self) -> Descriptor {
        descriptor(crate::source::OCI_CONFIG, &self.config)
    }
}

impl Input {
    /// An image of the store, of which every byte is there.
    ///
    /// # Errors
    /// `NotFound` when file data is missing: pull the image whole first. `Malformed`, `Io`.
    pub fn of_image(image: &Image, load_order: Option<LoadOrder>) -> Result<Self, Error> {
        let metadata = std::fs::read(&image.metadata).map_err(|error| Error::io(&image.metadata, error))?;
        let mut placements = Vec::with_capacity(image.blobs.len());
        let mut blobs = Vec::with_capacity(image.blobs.len());
        for blob in &image.blobs {
            let open = |path: &std::path::Path| File::open(path).map_err(|error| Error::io(path, error));
            let cached = BlobFile::open(open(&blob.data)?, open(&blob.ready)?)
                .map_err(|error| Error::blob(blob.id, &blob.ready, error))?;
            if !cached.is_ready(0, blob.length) {
                return Err(Error::NotFound {
                    what: format!("a part of the file data of layer {}", blob.id),
                    place: "the store".into(),
                    advice: "pull the image whole before it is converted".into(),
                });
            }
            placements.push(BlobPlacement {
                address: blob.address,
                length: blob.length,
            });
            blobs.push(SourceBlob {
                id: blob.id,
                layer: None,
                length: blob.length,
                data: Box::new(open(&blob.data)?),
            });
        }
        let tree = Reader::new(&metadata[..])
            .and_then(|reader| erofs::read_tree(&reader, &placements))
            .map_err(|error| Error::malformed(image.metadata.display().to_string(), error))?;
        Ok(Self {
            tree,
            blobs,
            load_order,
        })
    }
}
