//! The destination of a new image: a repository of a registry, or a layout directory.

use std::fs::File;
use std::io::{self, Cursor, Read, Seek};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sha2::{Digest as _, Sha256};
use thaw_imagefs::digest::Digest;
use thaw_images::progress::{Event, Progress};
use thaw_images::reference::ImageRef;
use thaw_images::source::{Fallback, LayerSource, Push, Resolved, Source};

use crate::error::{Error, ErrorKind};
use crate::images::{Images, failure};

/// Parses a reference, and makes its path absolute.
pub fn parse(reference: &str) -> Result<ImageRef, Error> {
    crate::images::absolute(reference.parse().map_err(failure)?)
}

/// Refuses a destination that cannot be written to, before any work is done.
pub fn check_writable(to: &ImageRef) -> Result<(), Error> {
    let why = match to {
        ImageRef::Archive { .. } => "an archive cannot be written to",
        ImageRef::Registry(registry) if registry.digest.is_some() => {
            "a digest cannot be written to, only a tag"
        }
        _ => return Ok(()),
    };
    Err(Error::new(ErrorKind::PushRefused, format!("{to}: {why}")))
}

/// The tag of the new image.
pub fn tag(to: &ImageRef) -> Option<&str> {
    match to {
        ImageRef::Layout { tag, .. } => Some(tag.as_deref().unwrap_or("latest")),
        ImageRef::Registry(registry) => Some(registry.tag.as_deref().unwrap_or("latest")),
        ImageRef::Archive { .. } => None,
    }
}

/// The repository to mount blobs from, if source and destination are in one registry.
pub fn mountable(from: &ImageRef, to: &ImageRef) -> Option<String> {
    match (from, to) {
        (ImageRef::Registry(from), ImageRef::Registry(to)) if from.registry == to.registry => {
            Some(from.repository.clone())
        }
        _ => None,
    }
}

/// A destination, and the source of the image.
pub struct Destination<'a> {
    push: &'a Push,
    repository: Option<String>,
    progress: Arc<dyn Progress>,
    scratch: PathBuf,
}

impl<'a> Destination<'a> {
    pub fn new(
        push: &'a Push,
        from: &ImageRef,
        to: &ImageRef,
        progress: Arc<dyn Progress>,
        images: &Images,
    ) -> Destination<'a> {
        Destination {
            push,
            repository: mountable(from, to),
            progress,
            scratch: images.store.root().to_owned(),
        }
    }

    /// Uploads the image's config and layers, unless they are there. Returns the number of bytes sent.
    pub async fn copy_image(&self, source: &dyn Source, resolved: &Resolved) -> Result<u64, Error> {
        let config = &resolved.config_bytes;
        let mut sent = self.blob(&Digest::of(config), config.clone()).await?;
        for (layer, descriptor) in resolved.layers.iter().zip(&resolved.descriptors) {
            let (digest, size) = (&descriptor.digest, descriptor.size);
            if self.is_there(digest, size).await? {
                continue;
            }
            let file = self.fetch(source, layer).await?;
            self.push.upload(digest, size, file).await.map_err(failure)?;
            self.sent(digest, size);
            sent += size;
        }
        Ok(sent)
    }

    /// Uploads a blob, unless it is there. Returns the number of bytes sent.
    pub async fn blob(&self, digest: &Digest, bytes: Vec<u8>) -> Result<u64, Error> {
        let size = bytes.len() as u64;
        if self.push.blob_exists(digest).await.map_err(failure)? == Some(size) {
            return Ok(0);
        }
        self.push
            .upload(digest, size, Cursor::new(bytes))
            .await
            .map_err(failure)?;
        self.sent(digest, size);
        Ok(size)
    }

    /// Whether the blob is at the destination, or could be mounted from another repository.
    async fn is_there(&self, digest: &Digest, size: u64) -> Result<bool, Error> {
        if self.push.blob_exists(digest).await.map_err(failure)? == Some(size) {
            return Ok(true);
        }
        match &self.repository {
            Some(repository) => self.push.mount(digest, repository).await.map_err(failure),
            None => Ok(false),
        }
    }

    /// Fetches a layer in its stored form, verified, into an unnamed file.
    async fn fetch(&self, source: &dyn Source, layer: &LayerSource) -> Result<File, Error> {
        let mut fallback = Fallback::new(source, layer);
        loop {
            let body = fallback.open().await.map_err(failure)?;
            let (layer, scratch) = (layer.clone(), self.scratch.clone());
            let copy = move || -> Result<File, thaw_images::Error> {
                let io = |e| thaw_images::Error::io(&scratch, e);
                let mut file = tempfile::tempfile_in(&scratch).map_err(io)?;
                verified(body.reader, &layer, |reader| io::copy(reader, &mut file))?.map_err(io)?;
                file.rewind().map_err(io)?;
                Ok(file)
            };
            let copied = tokio::task::spawn_blocking(copy).await;
            match copied.map_err(|e| Error::new(ErrorKind::Runtime, e.to_string()))? {
                Ok(file) => return Ok(file),
                Err(error) => fallback.failed(error).map_err(failure)?,
            };
        }
    }

    fn sent(&self, blob: &Digest, total: u64) {
        self.progress.event(Event::Pushing {
            blob: *blob,
            sent: total,
            total,
        });
    }
}

/// Passes a layer in its stored form to `read`, reads the rest, and compares the digest.
///
/// # Errors
/// Errors of the layer's source, and `DigestMismatch`.
pub fn verified<T>(
    reader: Box<dyn Read + Send>,
    layer: &LayerSource,
    read: impl FnOnce(&mut dyn Read) -> T,
) -> Result<T, thaw_images::Error> {
    let mut hashing = Hashing {
        reader,
        hasher: Sha256::new(),
        failed: None,
    };
    let done = read(&mut hashing);
    let rest = io::copy(&mut hashing, &mut io::sink());
    if let Some(error) = hashing.failed {
        return Err(error);
    }
    rest.map_err(|e| thaw_images::Error::io(Path::new("the layer's source"), e))?;
    let got = Digest::from(<[u8; 32]>::from(hashing.hasher.finalize()));
    match layer.digest {
        Some(expected) if expected != got => Err(thaw_images::Error::DigestMismatch {
            what: layer.name(),
            expected,
            got,
        }),
        _ => Ok(done),
    }
}

/// Hashes a layer as it arrives. Keeps the error that ended it, whose type would otherwise be lost on the way.
struct Hashing {
    reader: Box<dyn Read + Send>,
    hasher: Sha256,
    failed: Option<thaw_images::Error>,
}

impl Read for Hashing {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self.reader.read(buffer) {
            Ok(length) => {
                self.hasher.update(&buffer[..length]);
                Ok(length)
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Err(error),
            Err(error) => {
                let error = error
                    .downcast()
                    .unwrap_or_else(|e| thaw_images::Error::io(Path::new("the layer's source"), e));
                self.failed.get_or_insert(error);
                Err(io::Error::other("the layer's source failed"))
            }
        }
    }
}
