//! The formats in which an image can be read in pieces: one for the whole image, or documents to which the image is bound and that describe
//! single layers. Nothing else chooses by format: pulls and the store know [`ImageFormat`] and [`LayerFormat`] alone.
//!
//! Invariant: a document is used only if it has the digest that the manifest states. If it cannot be fetched or read, a
//! warning is logged and counted, and its layer is streamed.
//!
//! Bounds: a SOCI index is a manifest, of at most 4 MiB. A ztoc and a layer's table of contents have at most 256 MiB each
//! (`MAX_DOCUMENT`), and a table expands to at most 256 MiB (`MAX_TOC`). A size is checked before the document is requested.
//! What a document says of its layer is bounded as the layer itself is (`LayerLimits`): 4 Mi entries, 1 GiB of names and attributes,
//! 1 TiB of file data. A layer has one document.

mod documents;
mod estargz;
mod soci;

use std::sync::Arc;

use crate::error::Error;
use crate::lazy::{ImageFormat, LayerFormat, LazyLayer};
use crate::manifest::Kind;
use crate::ranges::{Ranges, StoredBlob};
use crate::source::{Descriptor, LayerSource, Resolved, Source};

pub use documents::{unusable_indexes, warn_unusable};

/// The format of an image without tar layers; `None` if it has tar layers.
pub fn image_format(kind: &Kind) -> Option<&dyn ImageFormat> {
    match kind {
        Kind::Layers => None,
        Kind::Converted(manifest) => Some(&**manifest),
        Kind::Nydus(manifest) => Some(&**manifest),
    }
}

/// The formats to which the layers of one image are bound, the preferred first. Empty if it has none.
///
/// # Errors
/// If an annotation that binds the image is malformed.
pub async fn layer_formats(
    source: &dyn Source,
    resolved: &Resolved,
) -> Result<Vec<Box<dyn LayerFormat>>, Error> {
    let mut formats: Vec<Box<dyn LayerFormat>> = Vec::new();
    if let Some(index) = soci::BoundIndex::of(source, resolved).await? {
        formats.push(Box::new(index));
    }
    if estargz::BoundTables::has(resolved) {
        formats.push(Box::new(estargz::BoundTables));
    }
    Ok(formats)
}

/// What describes the layers of one image, and where it is read.
pub struct BoundLayers {
    pub formats: Vec<Box<dyn LayerFormat>>,
    pub ranges: Arc<dyn Ranges>,
}

impl BoundLayers {
    /// A layer by the first format that has a document of it; `None` if none has.
    ///
    /// # Errors
    /// Those of [`LayerFormat::open`].
    pub async fn layer(
        &self,
        layer: &LayerSource,
        descriptor: &Descriptor,
    ) -> Result<Option<LazyLayer>, Error> {
        let (Some(digest), Some(size)) = (layer.digest, layer.size) else {
            return Ok(None);
        };
        let stored = StoredBlob {
            digest,
            size,
            urls: layer.urls.clone(),
        };
        for format in &self.formats {
            if let Some(found) = format.open(&stored, descriptor, &*self.ranges).await? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }
}
