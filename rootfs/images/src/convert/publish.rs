//! Writing a converted image to a registry or a layout.

use std::io::{Cursor, Seek, Write};
use std::path::Path;
use std::sync::Arc;

use serde::Serialize;

use crate::error::Error;
use crate::ranges::{Check, Priority, Ranges};
use crate::source::{Descriptor, Document, OCI_MANIFEST, Push, Root, Source};

use super::body::Body;
use super::dictionary::Dictionary;
use super::parts::Converted;
use crate::manifest::ConvertedManifest;

/// Bytes of a blob copied at a time.
const STEP: u64 = 8 << 20;

/// The result of a push.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Pushed {
    /// Bytes sent: of missing blobs, and of the manifest.
    pub bytes: u64,
    /// Numbers of blobs: sent, already present, and mounted from another repository of the registry.
    pub sent: u64,
    pub present: u64,
    pub mounted: u64,
}

impl Converted {
    /// Writes all missing parts, then the manifest. A dictionary's blob is mounted within its registry if possible, or else copied through
    /// an unnamed file in `scratch`.
    ///
    /// # Errors
    /// Those of [`Push`], and of the dictionary's place.
    pub async fn push(
        self,
        to: &Push,
        tag: Option<&str>,
        dictionaries: &[Dictionary],
        scratch: &Path,
    ) -> Result<Pushed, Error> {
        let mut pushed = Pushed::default();
        for part in self.parts {
            let Descriptor { digest, size, .. } = part.descriptor;
            if to.blob_exists(&digest).await? == Some(size) {
                pushed.present += 1;
                continue;
            }
            match part.body {
                Body::Bytes(bytes) => to.upload(&digest, size, Cursor::new(bytes)).await?,
                Body::File(file) => to.upload(&digest, size, file).await?,
                Body::Dictionary(index) => {
                    let dictionary = dictionaries.get(index).ok_or_else(|| {
                        Error::malformed("the converted image", "its dictionaries are not those given")
                    })?;
                    if let Some(repository) = &dictionary.repository
                        && to.mount(&digest, repository).await?
                    {
                        pushed.mounted += 1;
                        continue;
                    }
                    let copy = copy(&*dictionary.ranges, &part.descriptor, scratch).await?;
                    to.upload(&digest, size, copy).await?;
                }
            }
            pushed.sent += 1;
            pushed.bytes += size;
        }
        to.manifest(tag, OCI_MANIFEST, &self.manifest).await?;
        pushed.bytes += self.manifest.len() as u64;
        Ok(pushed)
    }
}

/// The complete stored form of a blob. The destination compares its digest.
async fn copy(ranges: &dyn Ranges, descriptor: &Descriptor, scratch: &Path) -> Result<std::fs::File, Error> {
    let io = |error| Error::io(scratch, error);
    let mut file = tempfile::tempfile_in(scratch).map_err(io)?;
    let blob = descriptor.stored();
    let check: Check = Arc::new(|_: &[u8]| Ok(()));
    let mut at = 0;
    while at < blob.size {
        let range = at..blob.size.min(at + STEP);
        let bytes = ranges
            .read(&blob, range.clone(), Priority::Demand, check.clone())
            .await?;
        file.write_all(&bytes).map_err(io)?;
        at = range.end;
    }
    file.rewind().map_err(io)?;
    Ok(file)
}

/// The converted image to which a source's reference points, for use as a dictionary.
///
/// # Errors
/// Those of the source; `UnknownMediaType` if the image is not a converted one.
pub async fn find(source: &dyn Source, what: &str) -> Result<ConvertedManifest, Error> {
    let candidates = match source.root().await? {
        Root::Document { bytes, media_type } => match ConvertedManifest::parse(what, &bytes)? {
            Some(manifest) => return Ok(manifest),
            None => match Document::parse(what, &bytes, media_type.as_deref()) {
                Ok(Document::Index(descriptors)) => descriptors,
                _ => Vec::new(),
            },
        },
        Root::Choice(descriptors) => descriptors,
        Root::Parts { .. } => Vec::new(),
    };
    for descriptor in candidates.iter().take(MAX_CANDIDATES) {
        let bytes = source.manifest(descriptor).await?;
        if let Some(manifest) = ConvertedManifest::parse(what, &bytes)? {
            return Ok(manifest);
        }
    }
    Err(Error::UnknownMediaType {
        what: what.into(),
        media_type: "an ordinary image's".into(),
        advice: "convert it first (thaw image convert), then name the converted image".into(),
    })
}

/// Manifests looked at.
const MAX_CANDIDATES: usize = 64;
