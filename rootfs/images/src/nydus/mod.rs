//! Nydus images: RAFS v6, whose metadata is EROFS with a superblock extension, a device table and a chunk table.
//!
//! The bootstrap is hostile. What is read from it becomes a [`thaw_imagefs::tree::Tree`], from which Thaw's own metadata is
//! written: no offset of a bootstrap is ever followed by a guest.

mod bootstrap;

use std::collections::HashMap;
use std::io::{self, Read};

use thaw_imagefs::digest::Digest;
use thaw_imagefs::erofs;

use crate::accelerated::{Opened, document};
use crate::compression;
use crate::error::Error;
use crate::ranges::{Ranges, StoredBlob};
use crate::source::Descriptor;
use crate::store::{Form, ReadyMadeBlob};

pub use bootstrap::{Bootstrap, BootstrapError};

/// Media type of a data blob.
pub const BLOB_TYPE: &str = "application/vnd.oci.image.layer.nydus.blob.v1";
/// Annotation of the layer that is the bootstrap.
pub const BOOTSTRAP_ANNOTATION: &str = "containerd.io/snapshot/nydus-bootstrap";

/// What a Nydus image's manifest refers to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    pub config: Descriptor,
    /// A tar, perhaps gzip, with `image/image.boot`.
    pub bootstrap: Descriptor,
    pub blobs: Vec<Descriptor>,
}

#[derive(serde::Deserialize)]
struct Wire {
    config: Option<Descriptor>,
    layers: Option<Vec<Descriptor>>,
}

impl Manifest {
    /// Reads the manifest of a Nydus image; none when it is a manifest of something else.
    ///
    /// # Errors
    /// `Malformed` when it has Nydus layers and other ones, or not exactly one bootstrap.
    pub fn parse(what: &str, bytes: &[u8]) -> Result<Option<Self>, Error> {
        let wire: Wire = serde_json::from_slice(bytes).map_err(|error| Error::malformed(what, error))?;
        let (Some(config), Some(layers)) = (wire.config, wire.layers) else {
            return Ok(None);
        };
        let is_bootstrap = |layer: &Descriptor| layer.annotation(BOOTSTRAP_ANNOTATION).is_some();
        if !layers
            .iter()
            .any(|layer| is_bootstrap(layer) || layer.media_type == BLOB_TYPE)
        {
            return Ok(None);
        }
        let (mut bootstraps, blobs): (Vec<_>, Vec<_>) = layers.into_iter().partition(is_bootstrap);
        if let Some(other) = blobs.iter().find(|layer| layer.media_type != BLOB_TYPE) {
            let problem = format!("layer {} is not a Nydus blob", other.digest);
            return Err(Error::malformed(what, problem));
        }
        match (bootstraps.pop(), bootstraps.is_empty()) {
            (Some(bootstrap), true) => Ok(Some(Self {
                config,
                bootstrap,
                blobs,
            })),
            _ => Err(Error::malformed(
                what,
                "a Nydus image has exactly one bootstrap layer",
            )),
        }
    }
}

/// Most bytes of a bootstrap layer, and of the bootstrap in it.
const MAX_LAYER: u64 = 256 << 20;
const MAX_BOOTSTRAP: u64 = 512 << 20;
/// Where it is in the layer's tar.
const BOOTSTRAP_PATH: &str = "image/image.boot";

/// Reads the bootstrap; file data stays where it is.
///
/// # Errors
/// What `ranges` says; `Malformed` for a bootstrap that is damaged or of a kind that is not read.
pub async fn open(manifest: &Manifest, ranges: &dyn Ranges) -> Result<Opened, Error> {
    let layer = document(ranges, "Nydus bootstrap", &manifest.bootstrap, MAX_LAYER).await?;
    let manifest = manifest.clone();
    match tokio::task::spawn_blocking(move || read(&manifest, &layer)).await {
        Ok(opened) => opened,
        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        Err(_) => Err(Error::Cancelled),
    }
}

/// Reads a bootstrap layer whose digest has been compared.
fn read(manifest: &Manifest, layer: &[u8]) -> Result<Opened, Error> {
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
            Ok(ReadyMadeBlob {
                address: placement.address,
                form: Form::Nydus,
                document: manifest.bootstrap.digest,
                stored: StoredBlob {
                    digest: descriptor.digest,
                    size: descriptor.size,
                    urls: descriptor.urls.clone(),
                },
                content: blob.content,
                digests: None,
            })
        });
    Ok(Opened {
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
pub(crate) mod tests;
