//! Nydus images: RAFS v6, whose metadata is EROFS with a superblock extension, a device table and a chunk table.
//!
//! The bootstrap is hostile. What is read from it becomes a [`crate::tree::Tree`], from which Thaw's own metadata is
//! written: no offset of a bootstrap is ever followed by a guest.

use crate::accelerated::Opened;
use crate::error::Error;
use crate::fetch::Ranges;
use crate::source::Descriptor;

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

/// Reads the bootstrap; file data stays where it is.
///
/// # Errors
/// What `ranges` says; `Malformed` or `UnknownMediaType` for a bootstrap that is damaged or of a kind that is not read.
pub async fn open(manifest: &Manifest, ranges: &dyn Ranges) -> Result<Opened, Error> {
    let _ = ranges;
    Err(Error::malformed(
        format!("Nydus bootstrap {}", manifest.bootstrap.digest),
        "this build does not read Nydus images",
    ))
}
