//! Indexes that an image is bound to: a SOCI index by an annotation of its manifest, tables of contents by annotations
//! of its layers.
//!
//! Invariant: a document is used only if it has the digest that the manifest states. If it cannot be fetched or read, a
//! warning is logged and counted, and its layer is streamed.
//!
//! Bounds: a SOCI index is a manifest, of at most 4 MiB. A ztoc and a layer's table of contents have at most 256 MiB each
//! ([`MAX_DOCUMENT`]), and a table expands to at most 256 MiB ([`estargz::MAX_TOC`]). A size is checked before the document is requested.
//! What a document says of its layer is bounded as the layer itself is ([`LayerLimits`]): 4 Mi entries, 1 GiB of names and attributes,
//! 1 TiB of file data. A layer has one document.

use std::future::Future;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use thaw_imagefs::digest::Digest;
use thaw_sys::lock::Lock;

use crate::error::Error;
use crate::form::Form;
use crate::index::LayerIndex;
use crate::index::error::IndexError;
use crate::index::estargz;
use crate::index::soci;
use crate::layer::LayerLimits;
use crate::lazy::LazyLayer;
use crate::ranges::{Check, Priority, Ranges, StoredBlob};
use crate::source::{Descriptor, LayerSource, Resolved, Source};

use crate::blocking::blocking;

/// Most bytes of a document, which bounds the cost of reading it.
const MAX_DOCUMENT: u64 = 256 << 20;

static UNUSABLE: AtomicU64 = AtomicU64::new(0);

/// Indexes this process could not use, and streamed whole layers instead.
pub fn unusable_indexes() -> u64 {
    UNUSABLE.load(Ordering::Relaxed)
}

pub(super) fn warn_unusable(what: &Digest, error: &Error) {
    UNUSABLE.fetch_add(1, Ordering::Relaxed);
    tracing::warn!(%what, %error, "an index cannot be used; what it describes is read whole");
}

/// The indexes to which one image is bound.
pub(super) struct Indexes {
    ranges: Arc<dyn Ranges>,
    soci: Option<soci::Index>,
}

impl Indexes {
    /// Looks for the image's bindings to indexes. `ranges` is opened only if there are any.
    pub async fn of<F>(
        source: &dyn Source,
        resolved: &Resolved,
        ranges: impl FnOnce() -> F,
    ) -> Result<Option<Self>, Error>
    where
        F: Future<Output = Result<Arc<dyn Ranges>, Error>>,
    {
        let index = soci::bound_index(&resolved.annotations).map_err(form)?;
        let table = |layer: &Descriptor| {
            let bound = estargz::bound(layer.annotations.iter().flatten(), layer.size);
            // A broken annotation is reported when its layer is processed.
            !matches!(bound, Ok(None))
        };
        if index.is_none() && !resolved.descriptors.iter().any(table) {
            return Ok(None);
        }
        let soci = match index {
            None => None,
            Some(digest) => match soci_index(source, digest).await {
                Ok(index) => Some(index),
                Err(error) => {
                    warn_unusable(&resolved.digest, &error);
                    None
                }
            },
        };
        Ok(Some(Self {
            ranges: ranges().await?,
            soci,
        }))
    }

    /// The index of a layer; `None` if the layer is not bound to one.
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
        if let Some(ztoc) = self.soci.as_ref().and_then(|index| index.ztoc_for(&digest)) {
            let bytes = self.document(ztoc).await?;
            let index =
                blocking(move || soci::read_ztoc(&bytes, size, &LayerLimits::default()).map_err(form));
            return Ok(Some(LazyLayer {
                form: Form::Soci,
                document: ztoc.digest,
                stored,
                index: index.await?,
                fetched: ztoc.size,
            }));
        }
        let annotations = descriptor.annotations.iter().flatten();
        let (document, index, fetched) = match estargz::bound(annotations, size).map_err(form)? {
            None => return Ok(None),
            Some(estargz::Bound::Gzip { toc }) => {
                let (index, fetched) = self.table(&stored, toc).await?;
                (toc, index, fetched)
            }
            Some(estargz::Bound::Zstd {
                stored: digest,
                location,
            }) => {
                let (range, fetched) = (location.clone(), location.end - location.start);
                let read = move |bytes: &[u8]| {
                    estargz::read_zstd_toc(bytes, &digest, location.clone(), &LayerLimits::default())
                };
                (digest, self.read_as(&stored, range, read).await?, fetched)
            }
        };
        Ok(Some(LazyLayer {
            form: Form::Estargz,
            document,
            stored,
            index,
            fetched,
        }))
    }

    async fn document(&self, descriptor: &Descriptor) -> Result<bytes::Bytes, Error> {
        let what = format!("document {}", descriptor.digest);
        if descriptor.size == 0 || descriptor.size > MAX_DOCUMENT.min(soci::MAX_ZTOC) {
            return Err(Error::malformed(
                what,
                format!("a size of {} bytes is out of bounds", descriptor.size),
            ));
        }
        let blob = StoredBlob {
            digest: descriptor.digest,
            size: descriptor.size,
            urls: Vec::new(),
        };
        let expected = descriptor.digest;
        let check: Check = Arc::new(move |bytes| match Digest::of(bytes) {
            got if got == expected => Ok(()),
            got => Err(format!("it has digest {got} instead of {expected}")),
        });
        self.ranges
            .read(&blob, 0..descriptor.size, Priority::Demand, check)
            .await
    }

    /// The table of contents at the end of an eStargz layer.
    async fn table(&self, stored: &StoredBlob, expected: Digest) -> Result<(LayerIndex, u64), Error> {
        let size = stored.size;
        let what = || format!("layer {}", stored.digest);
        if size <= estargz::FOOTER {
            return Err(Error::malformed(what(), "it is too short for an eStargz footer"));
        }
        let location: Range<u64> = self
            .read_as(stored, size - estargz::FOOTER..size, move |footer| {
                estargz::toc_location(footer, size)
            })
            .await?;
        if location.start >= location.end
            || location.end > size
            || location.end - location.start > MAX_DOCUMENT
        {
            return Err(Error::malformed(what(), "its table of contents is out of bounds"));
        }
        let (range, fetched) = (location.clone(), location.end - location.start + estargz::FOOTER);
        let index = self.read_as(stored, range, move |bytes| {
            estargz::read_toc(bytes, &expected, location.clone(), &LayerLimits::default())
        });
        Ok((index.await?, fetched))
    }

    /// Reads a range. The check is that the bytes can be parsed.
    async fn read_as<T: Send + 'static>(
        &self,
        stored: &StoredBlob,
        range: Range<u64>,
        parse: impl Fn(&[u8]) -> Result<T, IndexError> + Send + Sync + 'static,
    ) -> Result<T, Error> {
        let slot = Arc::new(Mutex::new(None));
        let filled = slot.clone();
        let check: Check = Arc::new(move |bytes| {
            let parsed = parse(bytes).map_err(|error| error.to_string())?;
            *filled.locked() = Some(parsed);
            Ok(())
        });
        self.ranges.read(stored, range, Priority::Demand, check).await?;
        let parsed = slot.locked().take();
        parsed.ok_or_else(|| Error::malformed(format!("layer {}", stored.digest), "it was not checked"))
    }
}

async fn soci_index(source: &dyn Source, digest: Digest) -> Result<soci::Index, Error> {
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
    soci::Index::parse(&bytes, &digest).map_err(form)
}

fn form(error: IndexError) -> Error {
    Error::malformed("an index the image is bound to", error)
}
