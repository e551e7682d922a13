//! Tables of contents of eStargz and zstd:chunked layers, to which annotations of the layers' descriptors bind them.

use std::ops::Range;

use async_trait::async_trait;
use thaw_imagefs::digest::Digest;

use super::documents::{MAX_DOCUMENT, malformed, read_as};
use crate::error::Error;
use crate::form::Form;
use crate::index::LayerIndex;
use crate::index::estargz::{self, Bound};
use crate::layer::LayerLimits;
use crate::lazy::{LayerFormat, LazyLayer};
use crate::ranges::{Ranges, StoredBlob};
use crate::source::{Descriptor, Resolved};

/// The tables of one image; each is at the end of its layer.
pub(super) struct BoundTables;

impl BoundTables {
    /// Whether an image has a layer with a table.
    pub(super) fn has(resolved: &Resolved) -> bool {
        resolved.descriptors.iter().any(|layer| {
            let bound = estargz::bound(layer.annotations.iter().flatten(), layer.size);
            // A broken annotation is reported when its layer is processed.
            !matches!(bound, Ok(None))
        })
    }
}

#[async_trait]
impl LayerFormat for BoundTables {
    async fn open(
        &self,
        stored: &StoredBlob,
        descriptor: &Descriptor,
        ranges: &dyn Ranges,
    ) -> Result<Option<LazyLayer>, Error> {
        let annotations = descriptor.annotations.iter().flatten();
        let bound = estargz::bound(annotations, stored.size).map_err(malformed)?;
        let (document, index, fetched) = match bound {
            None => return Ok(None),
            Some(Bound::Gzip { toc }) => {
                let (index, fetched) = table(ranges, stored, toc).await?;
                (toc, index, fetched)
            }
            Some(Bound::Zstd {
                stored: digest,
                location,
            }) => {
                let (range, fetched) = (location.clone(), location.end - location.start);
                let read = move |bytes: &[u8]| {
                    estargz::read_zstd_toc(bytes, &digest, location.clone(), &LayerLimits::default())
                };
                (digest, read_as(ranges, stored, range, read).await?, fetched)
            }
        };
        Ok(Some(LazyLayer {
            form: Form::Estargz,
            document,
            stored: stored.clone(),
            index,
            fetched,
        }))
    }
}

/// The table at the end of an eStargz layer, and the bytes fetched for it.
async fn table(
    ranges: &dyn Ranges,
    stored: &StoredBlob,
    expected: Digest,
) -> Result<(LayerIndex, u64), Error> {
    let size = stored.size;
    let what = || format!("layer {}", stored.digest);
    if size <= estargz::FOOTER {
        return Err(Error::malformed(what(), "it is too short for an eStargz footer"));
    }
    let footer = size - estargz::FOOTER..size;
    let location: Range<u64> = read_as(ranges, stored, footer, move |footer| {
        estargz::toc_location(footer, size)
    })
    .await?;
    if location.start >= location.end || location.end > size || location.end - location.start > MAX_DOCUMENT {
        return Err(Error::malformed(what(), "its table of contents is out of bounds"));
    }
    let (range, fetched) = (location.clone(), location.end - location.start + estargz::FOOTER);
    let index = read_as(ranges, stored, range, move |bytes| {
        estargz::read_toc(bytes, &expected, location.clone(), &LayerLimits::default())
    });
    Ok((index.await?, fetched))
}
