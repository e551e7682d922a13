//! Nydus images: RAFS v6, whose metadata is EROFS with a superblock extension, a device table and a chunk table.
//!
//! The bootstrap is hostile. It is read into a [`thaw_imagefs::tree::Tree`], from which Thaw's own metadata is written:
//! a guest never follows an offset of a bootstrap.

mod bootstrap;

use std::collections::HashMap;
use std::io::{self, Read};

use async_trait::async_trait;
use thaw_imagefs::digest::Digest;
use thaw_imagefs::erofs;

use crate::blocking::blocking;
use crate::compression;
use crate::error::Error;
use crate::fetch::document;
use crate::form::Form;
use crate::lazy::{ImageFormat, LazyBlob, LazyImage};
use crate::manifest::{Descriptor, NydusManifest};
use crate::ranges::Ranges;

pub use bootstrap::{Bootstrap, BootstrapError};

/// Most bytes of a bootstrap layer, and of the bootstrap in it.
const MAX_LAYER: u64 = 256 << 20;
const MAX_BOOTSTRAP: u64 = 512 << 20;
/// Its path in the layer's tar.
const BOOTSTRAP_PATH: &str = "image/image.boot";

/// Reads the bootstrap, but no file data.
///
/// # Errors
/// Those of `ranges`; `Malformed` for a bootstrap that is damaged or of an unsupported kind.
pub async fn open(manifest: &NydusManifest, ranges: &dyn Ranges) -> Result<LazyImage, Error> {
    let layer = document(ranges, "Nydus bootstrap", &manifest.bootstrap, MAX_LAYER).await?;
    let manifest = manifest.clone();
    blocking(move || read(&manifest, &layer)).await
}

#[async_trait]
impl ImageFormat for NydusManifest {
    fn form(&self) -> Form {
        Form::Nydus
    }

    fn document_bytes(&self) -> u64 {
        self.bootstrap.size
    }

    async fn open(&self, ranges: &dyn Ranges) -> Result<LazyImage, Error> {
        open(self, ranges).await
    }
}

/// Reads a bootstrap layer whose digest has been compared.
fn read(manifest: &NydusManifest, layer: &[u8]) -> Result<LazyImage, Error> {
    let what = format!("Nydus bootstrap {}", manifest.bootstrap.digest);
    let malformed = |problem: &dyn std::fmt::Display| Error::malformed(&what, problem);
    let bytes = extract(layer)
        .map_err(|error| malformed(&error))?
        .ok_or_else(|| malformed(&"its layer has no image/image.boot"))?;
    let stored: HashMap<Digest, &Descriptor> =
        manifest.blobs.iter().map(|blob| (blob.digest, blob)).collect();
    let bootstrap = Bootstrap::decode(&bytes, |digest| stored.get(digest).map(|blob| blob.size))
        .map_err(|error| malformed(&error))?;
    drop(bytes);
    let lengths: Vec<u64> = bootstrap
        .blobs
        .iter()
        .map(|blob| blob.content.data_length)
        .collect();
    let mut metadata = Vec::new();
    let summary = erofs::write(&bootstrap.tree, &lengths, &mut metadata).map_err(Error::Metadata)?;
    let blobs = bootstrap
        .blobs
        .into_iter()
        .zip(&summary.blobs)
        .map(|(blob, placement)| {
            let descriptor = stored
                .get(&blob.id)
                .ok_or_else(|| malformed(&"a blob is not among the image's layers"))?;
            Ok(LazyBlob {
                address: placement.address,
                form: Form::Nydus,
                document: manifest.bootstrap.digest,
                stored: descriptor.stored(),
                content: blob.content,
                digests: None,
            })
        });
    Ok(LazyImage {
        blobs: blobs.collect::<Result<_, Error>>()?,
        metadata,
        load_order: None,
    })
}

/// The bootstrap in a layer, which is a tar, plain or compressed.
fn extract(layer: &[u8]) -> io::Result<Option<Vec<u8>>> {
    let mut archive = tar::Archive::new(compression::decoder(layer)?.take(2 * MAX_BOOTSTRAP));
    for entry in archive.entries()? {
        let entry = entry?;
        let path = entry.path_bytes();
        if path.strip_prefix(b"./").unwrap_or(&path) != BOOTSTRAP_PATH.as_bytes() {
            continue;
        }
        let mut bytes = Vec::new();
        entry.take(MAX_BOOTSTRAP + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > MAX_BOOTSTRAP {
            return Err(io::Error::other("its image.boot is larger than 512 MiB"));
        }
        return Ok(Some(bytes));
    }
    Ok(None)
}

#[cfg(test)]
#[path = "nydus_test.rs"]
pub(crate) mod tests;
