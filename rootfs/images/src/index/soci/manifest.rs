//! The index: an OCI manifest whose layers are ztocs.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use thaw_imagefs::digest::Digest;

use crate::index::error::IndexError;
use crate::manifest::{Descriptor, OCI_MANIFEST};

const FORM: &str = "SOCI index";

/// The annotation of an image manifest that binds it to its index.
const INDEX_DIGEST: &str = "com.amazon.soci.index-digest";
/// Annotation of a ztoc's descriptor: the layer that it describes.
const LAYER_DIGEST: &str = "com.amazon.soci.image-layer-digest";
const LAYER_MEDIA_TYPE: &str = "com.amazon.soci.image-layer-mediaType";
/// An annotation of the index: the tool that built it.
const BUILD_TOOL: &str = "com.amazon.soci.build-tool-identifier";
/// Media type of the index's config, by which an index (version 2) differs from an image.
pub const ARTIFACT_TYPE: &str = "application/vnd.amazon.soci.index.v2+json";
/// The type in version 1, whose index refers to its image instead of the reverse.
const ARTIFACT_TYPE_V1: &str = "application/vnd.amazon.soci.index.v1+json";
const ZTOC_MEDIA_TYPE: &str = "application/octet-stream";
/// The config of an index: an empty JSON object.
pub const CONFIG: &[u8] = b"{}";

/// A parsed SOCI index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Index {
    ztocs: BTreeMap<Digest, Descriptor>,
}

/// A ztoc in an index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ztoc {
    /// Digest of the stored layer.
    pub layer: Digest,
    pub layer_media_type: String,
    /// Digest of the ztoc.
    pub digest: Digest,
    /// Bytes of the ztoc.
    pub size: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Wire {
    schema_version: u32,
    #[serde(default)]
    media_type: String,
    config: Descriptor,
    layers: Vec<Descriptor>,
    #[serde(default)]
    annotations: Option<BTreeMap<String, String>>,
}

/// The digest of the index to which an image manifest with these annotations is bound.
///
/// # Errors
/// If the annotation exists but is not a digest.
pub fn bound_index<'a>(
    annotations: impl IntoIterator<Item = (&'a String, &'a String)>,
) -> Result<Option<Digest>, IndexError> {
    annotations
        .into_iter()
        .find(|(name, _)| *name == INDEX_DIGEST)
        .map(|(_, value)| value.parse::<Digest>())
        .transpose()
        .map_err(|error| {
            IndexError::malformed(FORM, format!("the image's annotation {INDEX_DIGEST}: {error}"))
        })
}

/// Whether a manifest with a config of this media type is a SOCI index and not an image.
pub fn is_index(config_media_type: &str) -> bool {
    matches!(config_media_type, ARTIFACT_TYPE | ARTIFACT_TYPE_V1)
}

impl Index {
    /// Reads an index manifest, whose digest must be `expected`.
    ///
    /// # Errors
    /// [`IndexError`] if its digest differs, or if it is not an index.
    pub fn parse(bytes: &[u8], expected: &Digest) -> Result<Index, IndexError> {
        crate::index::error::verify(FORM, bytes, expected)?;
        Index::parse_unverified(bytes)
    }

    /// Reads an index manifest.
    ///
    /// # Errors
    /// [`IndexError`] if it is not an index.
    pub fn parse_unverified(bytes: &[u8]) -> Result<Index, IndexError> {
        let wire: Wire =
            serde_json::from_slice(bytes).map_err(|error| IndexError::malformed(FORM, error.to_string()))?;
        if !is_index(&wire.config.media_type) {
            let what = format!("a config of media type {:?}", wire.config.media_type);
            return Err(IndexError::unsupported(FORM, what));
        }
        let mut ztocs = BTreeMap::new();
        for ztoc in wire.layers {
            let layer = ztoc.annotation(LAYER_DIGEST).map(str::parse::<Digest>);
            match layer {
                Some(Ok(layer)) => ztocs.insert(layer, ztoc),
                Some(Err(error)) => {
                    return Err(IndexError::malformed(FORM, format!("{LAYER_DIGEST}: {error}")));
                }
                // Not a ztoc: a later version may store other documents here.
                None => continue,
            };
        }
        Ok(Index { ztocs })
    }

    /// The ztoc of the stored layer with this digest. Small layers, which would not benefit, have none.
    pub fn ztoc_for(&self, layer: &Digest) -> Option<&Descriptor> {
        self.ztocs.get(layer)
    }

    /// How many layers have a ztoc.
    pub fn len(&self) -> usize {
        self.ztocs.len()
    }

    /// Whether no layer has one.
    pub fn is_empty(&self) -> bool {
        self.ztocs.is_empty()
    }
}

/// An index manifest of version 2. Its config is [`CONFIG`], of media type [`ARTIFACT_TYPE`]. The same ztocs give the
/// same bytes.
///
/// # Errors
/// Only if there is no memory for the encoding.
pub fn index_manifest(ztocs: &[Ztoc], build_tool: &str) -> Result<Vec<u8>, IndexError> {
    let of_ztoc = |ztoc: &Ztoc| Descriptor {
        annotations: Some(BTreeMap::from([
            (LAYER_DIGEST.into(), ztoc.layer.to_string()),
            (LAYER_MEDIA_TYPE.into(), ztoc.layer_media_type.clone()),
        ])),
        ..Descriptor::new(ZTOC_MEDIA_TYPE, ztoc.digest, ztoc.size)
    };
    let wire = Wire {
        schema_version: 2,
        media_type: OCI_MANIFEST.into(),
        config: Descriptor::of(ARTIFACT_TYPE, CONFIG),
        layers: ztocs.iter().map(of_ztoc).collect(),
        annotations: Some(BTreeMap::from([(BUILD_TOOL.into(), build_tool.into())])),
    };
    serde_json::to_vec(&wire).map_err(|error| IndexError::malformed(FORM, error.to_string()))
}
