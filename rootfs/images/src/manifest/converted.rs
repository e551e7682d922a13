//! The manifest of a converted image (`docs/image-format.md`): an OCI image manifest with `artifactType` and `subject`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::Error;

use super::{Descriptor, OCI_MANIFEST};

/// `artifactType` of a converted image's manifest.
pub const ARTIFACT_TYPE: &str = "application/vnd.thaw.image.v1";
/// The EROFS metadata.
pub const METADATA_TYPE: &str = "application/vnd.thaw.image.metadata.v1";
/// The chunk table of the blob that follows it.
pub const TABLE_TYPE: &str = "application/vnd.thaw.image.chunks.v1";
/// File data: frames of chunks.
pub const BLOB_TYPE: &str = "application/vnd.thaw.image.blob.v1";
/// The load order.
pub const LOAD_ORDER_TYPE: &str = "application/vnd.thaw.image.load-order.v1+json";

/// How files were cut.
pub const CHUNKING_ANNOTATION: &str = "vnd.thaw.image.chunking";
/// The compression of the frames.
pub const COMPRESSION_ANNOTATION: &str = "vnd.thaw.image.compression";

/// Most blobs of one image, including those of dictionaries.
pub const MAX_BLOBS: usize = 256;

/// The documents and blobs of a converted image's manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConvertedManifest {
    /// The config of the original, unchanged.
    pub config: Descriptor,
    /// The original's manifest.
    pub subject: Option<Descriptor>,
    pub metadata: Descriptor,
    /// In the order of their addresses.
    pub blobs: Vec<StoredTable>,
    pub load_order: Option<Descriptor>,
    /// How files were cut, if the manifest contains it.
    pub chunking: Option<String>,
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
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

/// In the order in which the image specification lists the fields.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Written<'a> {
    schema_version: u32,
    media_type: &'a str,
    artifact_type: &'a str,
    config: &'a Descriptor,
    layers: Vec<&'a Descriptor>,
    #[serde(skip_serializing_if = "Option::is_none")]
    subject: Option<&'a Descriptor>,
    annotations: BTreeMap<&'a str, String>,
}

impl ConvertedManifest {
    /// Reads the manifest of a converted image; `None` if it is another kind of manifest.
    ///
    /// # Errors
    /// `Malformed` if it claims to be a converted image and is not; `UnknownMediaType` for a layer of a kind that only a later version has.
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
            chunking: wire.annotations.get(CHUNKING_ANNOTATION).cloned(),
        }))
    }

    /// The manifest's bytes, which depend only on the parts. `level` is the compression level of the frames.
    ///
    /// # Errors
    /// `Malformed`, in theory: all parts can be written as JSON.
    pub fn encode(&self, level: i32) -> Result<Vec<u8>, Error> {
        let mut annotations = BTreeMap::from([(COMPRESSION_ANNOTATION, format!("zstd:{level}"))]);
        annotations.extend(
            self.chunking
                .iter()
                .map(|chunking| (CHUNKING_ANNOTATION, chunking.clone())),
        );
        let blobs = self.blobs.iter().flat_map(|blob| [&blob.table, &blob.data]);
        let written = Written {
            schema_version: 2,
            media_type: OCI_MANIFEST,
            artifact_type: ARTIFACT_TYPE,
            config: &self.config,
            layers: std::iter::once(&self.metadata)
                .chain(blobs)
                .chain(&self.load_order)
                .collect(),
            subject: self.subject.as_ref(),
            annotations,
        };
        serde_json::to_vec(&written).map_err(|error| Error::malformed("the converted manifest", error))
    }
}
