//! The manifest of a converted image: an OCI image manifest with `artifactType` and `subject`.

use serde::Deserialize;

use crate::error::Error;
use crate::source::Descriptor;

use super::{ARTIFACT_TYPE, BLOB_TYPE, LOAD_ORDER_TYPE, METADATA_TYPE, TABLE_TYPE};

/// Blobs of one image, its dictionaries' included.
pub const MAX_BLOBS: usize = 256;

/// What a converted image's manifest refers to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// The config of the original, unchanged.
    pub config: Descriptor,
    /// The original's manifest.
    pub subject: Option<Descriptor>,
    pub metadata: Descriptor,
    /// In the order of their addresses.
    pub blobs: Vec<StoredTable>,
    pub load_order: Option<Descriptor>,
}

/// A blob and its chunk table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTable {
    pub table: Descriptor,
    pub data: Descriptor,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Head {
    artifact_type: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Wire {
    schema_version: u32,
    config: Descriptor,
    layers: Vec<Descriptor>,
    subject: Option<Descriptor>,
}

impl Manifest {
    /// Reads the manifest of a converted image; none when it is a manifest of something else.
    ///
    /// # Errors
    /// `Malformed` when it calls itself a converted image and is none; `UnknownMediaType` for a layer of another kind,
    /// as a later version may have.
    pub fn parse(what: &str, bytes: &[u8]) -> Result<Option<Self>, Error> {
        let head: Head = serde_json::from_slice(bytes).map_err(|error| Error::malformed(what, error))?;
        if head.artifact_type.as_deref() != Some(ARTIFACT_TYPE) {
            return Ok(None);
        }
        let wire: Wire = serde_json::from_slice(bytes).map_err(|error| Error::malformed(what, error))?;
        let malformed = |problem: &str| Error::malformed(what, problem);
        if wire.schema_version != 2 {
            return Err(malformed("its schemaVersion is not 2"));
        }
        let mut layers = wire.layers.into_iter();
        let metadata = layers
            .next()
            .filter(|layer| layer.media_type == METADATA_TYPE)
            .ok_or(malformed("its first layer is not the image's metadata"))?;
        let mut blobs = Vec::new();
        let mut load_order = None;
        while let Some(layer) = layers.next() {
            match layer.media_type.as_str() {
                TABLE_TYPE => {
                    let data = layers
                        .next()
                        .filter(|data| data.media_type == BLOB_TYPE)
                        .ok_or(malformed("a chunk table is not followed by its blob"))?;
                    blobs.push(StoredTable { table: layer, data });
                }
                LOAD_ORDER_TYPE if load_order.is_none() => load_order = Some(layer),
                other => {
                    return Err(Error::UnknownMediaType {
                        what: format!("layer {} of {what}", layer.digest),
                        media_type: other.into(),
                        advice: "it was converted by a later version of Thaw: use that, or convert it again"
                            .into(),
                    });
                }
            }
        }
        if blobs.len() > MAX_BLOBS {
            return Err(malformed("it has more than 256 blobs"));
        }
        Ok(Some(Self {
            config: wire.config,
            subject: wire.subject,
            metadata,
            blobs,
            load_order,
        }))
    }
}
