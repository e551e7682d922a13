//! The documents and packs of a snapshot in a registry or a layout directory, verified as they arrive.
//!
//! Invariants: of a blob, at most the bytes that its descriptor says are read, which [`Listing::decode`] has bounded; what is returned
//! has the descriptor's digest. A mirror that sends other bytes is passed over, as for images.

use std::io::{self, Read};
use std::sync::Arc;

use thaw_imagefs::digest::Digest;
use thaw_images::manifest::Descriptor;
use thaw_images::progress::Progress;
use thaw_images::reference::ImageRef;
use thaw_images::source::{self, AbortOnDrop, Fallback, LayerSource, Root, Source, SourceOptions};

use crate::error::{Error, ErrorKind};
use crate::image::destination::verified;
use crate::images::{Images, failure};
use crate::snapshot::artifact::{ArtifactError, Listing};

/// A snapshot in a registry.
pub(super) struct ArtifactSource {
    source: Box<dyn Source>,
    /// The reference, for messages.
    pub reference: String,
}

/// The options for a registry that a snapshot is pushed to or pulled from: the connections of image pulls.
pub(super) fn options(images: &Images, plain_http: bool) -> SourceOptions {
    SourceOptions {
        client: Some(images.client.clone()),
        ..images.source_options(plain_http)
    }
}

impl ArtifactSource {
    /// Opens a reference. Transfers nothing yet.
    ///
    /// # Errors
    /// Those of [`source::open`].
    pub async fn open(
        from: &ImageRef,
        options: &SourceOptions,
        progress: Arc<dyn Progress>,
    ) -> Result<ArtifactSource, Error> {
        let source = source::open(from, options, progress).await.map_err(failure)?;
        Ok(ArtifactSource {
            source,
            reference: from.to_string(),
        })
    }

    /// The OCI manifest, checked, and its digest.
    ///
    /// # Errors
    /// [`ErrorKind::NotASnapshot`], [`ErrorKind::SnapshotMalformed`], and those of the registry.
    pub async fn listing(&self) -> Result<(Digest, Listing), Error> {
        let bytes = self.manifest().await?;
        let listing = Listing::decode(&bytes).map_err(|e| self.refuse(e))?;
        Ok((Digest::of(&bytes), listing))
    }

    /// The bytes of the OCI manifest, whatever it is of.
    ///
    /// # Errors
    /// [`ErrorKind::NotASnapshot`]: there are several, or none. Those of the registry.
    pub async fn manifest(&self) -> Result<Vec<u8>, Error> {
        match self.source.root().await.map_err(failure)? {
            Root::Document { bytes, .. } => Ok(bytes),
            Root::Choice(all) => match all.as_slice() {
                [one] => self.source.manifest(one).await.map_err(failure),
                _ => {
                    let what = format!("{} names {} manifests", self.reference, all.len());
                    Err(Error::new(ErrorKind::NotASnapshot, what).remedy("name a tag"))
                }
            },
            Root::Parts { .. } => Err(self.refuse(ArtifactError::OtherType(String::new()))),
        }
    }

    /// A document, whole.
    ///
    /// # Errors
    /// [`ErrorKind::DigestMismatch`], [`ErrorKind::LayerTruncated`], and those of the registry.
    pub async fn document(&self, descriptor: &Descriptor) -> Result<Vec<u8>, Error> {
        let read = |reader: &mut dyn Read| {
            let mut bytes = Vec::new();
            reader.read_to_end(&mut bytes).map(|_| bytes)
        };
        let read = self.read(descriptor, read).await?;
        read.map_err(|e| Error::system(format!("cannot read {}", self.reference), &e))
    }

    /// Passes a blob to `read`, on a thread that may block; again from its start if a mirror sent wrong bytes. Dropping the future stops
    /// the transfer.
    ///
    /// # Errors
    /// Those of [`ArtifactSource::document`].
    pub async fn read<T: Send + 'static>(
        &self,
        descriptor: &Descriptor,
        read: impl Fn(&mut dyn Read) -> T + Clone + Send + 'static,
    ) -> Result<T, Error> {
        let layer = LayerSource {
            diff_id: descriptor.digest,
            digest: Some(descriptor.digest),
            size: Some(descriptor.size),
            urls: Vec::new(),
            member: None,
        };
        let mut fallback = Fallback::new(&*self.source, &layer);
        loop {
            let body = fallback.open().await.map_err(failure)?;
            let transfer = AbortOnDrop(body.transfer);
            // One byte more, so that a longer blob has another digest.
            let reader = Box::new(body.reader.take(descriptor.size.saturating_add(1)));
            let (layer, read) = (layer.clone(), read.clone());
            let done = tokio::task::spawn_blocking(move || verified(reader, &layer, read)).await;
            drop(transfer);
            match done.map_err(|e| Error::system("cannot read a blob", &io::Error::other(e)))? {
                Ok(done) => return Ok(done),
                Err(error) => fallback.failed(error).map_err(failure)?,
            };
        }
    }

    /// The error for a document that is refused.
    pub fn refuse(&self, error: ArtifactError) -> Error {
        error.of(&self.reference)
    }
}
