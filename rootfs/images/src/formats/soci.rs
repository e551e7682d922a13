//! A SOCI index, to which an annotation of the image's manifest binds it.

use async_trait::async_trait;
use thaw_imagefs::digest::Digest;

use super::documents::{document, malformed, warn_unusable};
use crate::blocking::blocking;
use crate::error::Error;
use crate::form::Form;
use crate::index::soci::{self, Index};
use crate::layer::LayerLimits;
use crate::lazy::{LayerFormat, LazyLayer};
use crate::ranges::{Ranges, StoredBlob};
use crate::source::{Descriptor, Resolved, Source};

/// The index of one image.
pub(super) struct BoundIndex(Index);

impl BoundIndex {
    /// The index of an image; `None` if the image is not bound to one, or, with a warning, if it cannot be read.
    ///
    /// # Errors
    /// If the annotation is malformed.
    pub(super) async fn of(source: &dyn Source, resolved: &Resolved) -> Result<Option<BoundIndex>, Error> {
        let Some(digest) = soci::bound_index(&resolved.annotations).map_err(malformed)? else {
            return Ok(None);
        };
        match fetch(source, digest).await {
            Ok(index) => Ok(Some(BoundIndex(index))),
            Err(error) => {
                warn_unusable(&resolved.digest, &error);
                Ok(None)
            }
        }
    }
}

async fn fetch(source: &dyn Source, digest: Digest) -> Result<Index, Error> {
    // Its size is not known: the annotation has only the digest.
    let descriptor = Descriptor {
        media_type: crate::manifest::OCI_MANIFEST.into(),
        digest,
        size: 0,
        urls: Vec::new(),
        platform: None,
        annotations: None,
    };
    let bytes = source.manifest(&descriptor).await?;
    Index::parse(&bytes, &digest).map_err(malformed)
}

#[async_trait]
impl LayerFormat for BoundIndex {
    async fn open(
        &self,
        stored: &StoredBlob,
        _descriptor: &Descriptor,
        ranges: &dyn Ranges,
    ) -> Result<Option<LazyLayer>, Error> {
        let Some(ztoc) = self.0.ztoc_for(&stored.digest) else {
            return Ok(None);
        };
        let bytes = document(ranges, ztoc, soci::MAX_ZTOC).await?;
        let size = stored.size;
        let index =
            blocking(move || soci::read_ztoc(&bytes, size, &LayerLimits::default()).map_err(malformed));
        Ok(Some(LazyLayer {
            form: Form::Soci,
            document: ztoc.digest,
            stored: stored.clone(),
            index: index.await?,
            fetched: ztoc.size,
        }))
    }
}
