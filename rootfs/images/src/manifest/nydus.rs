//! The manifest of a Nydus image: an OCI image manifest whose layers are a RAFS bootstrap and its data blobs.

use crate::error::Error;

use super::Descriptor;

/// Media type of a data blob.
pub const NYDUS_BLOB_TYPE: &str = "application/vnd.oci.image.layer.nydus.blob.v1";
/// Annotation of the layer that is the bootstrap.
pub const BOOTSTRAP_ANNOTATION: &str = "containerd.io/snapshot/nydus-bootstrap";

/// The documents and blobs of a Nydus image's manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NydusManifest {
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

impl NydusManifest {
    /// Reads the manifest of a Nydus image; `None` if it is another kind of manifest.
    ///
    /// # Errors
    /// `Malformed` if it mixes Nydus layers with others, or does not have exactly one bootstrap.
    pub fn parse(what: &str, bytes: &[u8]) -> Result<Option<Self>, Error> {
        let wire: Wire = serde_json::from_slice(bytes).map_err(|error| Error::malformed(what, error))?;
        let (Some(config), Some(layers)) = (wire.config, wire.layers) else {
            return Ok(None);
        };
        let is_bootstrap = |layer: &Descriptor| layer.annotation(BOOTSTRAP_ANNOTATION).is_some();
        if !layers
            .iter()
            .any(|layer| is_bootstrap(layer) || layer.media_type == NYDUS_BLOB_TYPE)
        {
            return Ok(None);
        }
        let (mut bootstraps, blobs): (Vec<_>, Vec<_>) = layers.into_iter().partition(is_bootstrap);
        if let Some(other) = blobs.iter().find(|layer| layer.media_type != NYDUS_BLOB_TYPE) {
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
