//! Manifests and indexes: OCI image-spec v1 and Docker's image manifest version 2, schema 2.
//!
//! Parsing accepts harmless deviations (unknown fields, missing media types) and is strict otherwise.

mod converted;
mod nydus;

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use thaw_imagefs::digest::Digest;

use crate::error::Error;
use crate::ranges::StoredBlob;

pub use converted::{
    ARTIFACT_TYPE, BLOB_TYPE, ConvertedManifest, LOAD_ORDER_TYPE, MAX_BLOBS, METADATA_TYPE, StoredTable,
    TABLE_TYPE,
};
pub use nydus::{BOOTSTRAP_ANNOTATION, NYDUS_BLOB_TYPE, NydusManifest};

/// Largest manifest or index (the distribution specification's limit).
pub const MAX_MANIFEST: u64 = 4 << 20;
/// Largest config.
pub const MAX_CONFIG: u64 = 8 << 20;
/// Most layers of an image.
pub const MAX_LAYERS: usize = 4096;

pub const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub const OCI_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
pub const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
pub const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
pub const DOCKER_CONFIG: &str = "application/vnd.docker.container.image.v1+json";
/// Start of both media types of Docker's schema 1.
const DOCKER_SCHEMA1: &str = "application/vnd.docker.distribution.manifest.v1+";

/// Media types of layers that can be unpacked. The bytes determine the compression, because registries are known to mislabel it.
const LAYERS: [&str; 10] = [
    "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.oci.image.layer.v1.tar+gzip",
    "application/vnd.oci.image.layer.v1.tar+zstd",
    "application/vnd.oci.image.layer.nondistributable.v1.tar",
    "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip",
    "application/vnd.oci.image.layer.nondistributable.v1.tar+zstd",
    "application/vnd.docker.image.rootfs.diff.tar",
    "application/vnd.docker.image.rootfs.diff.tar.gzip",
    "application/vnd.docker.image.rootfs.diff.tar.zstd",
    "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip",
];

/// The machine for which an image is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Platform {
    pub os: String,
    /// Go's name of it: `amd64`.
    pub architecture: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub variant: Option<String>,
}

impl Platform {
    /// The platform of Thaw's guests.
    pub fn linux_amd64() -> Self {
        Self {
            os: "linux".into(),
            architecture: "amd64".into(),
            variant: None,
        }
    }

    /// Whether an image for `self` runs on `wanted`: same system and architecture, and only the baseline variant.
    pub fn fits(&self, wanted: &Self) -> bool {
        self.os == wanted.os
            && self.architecture == wanted.architecture
            && (self.variant.is_none()
                || self.variant == wanted.variant
                || (self.architecture == "amd64" && self.variant.as_deref() == Some("v1")))
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.os, self.architecture)?;
        self.variant
            .iter()
            .try_for_each(|variant| write!(f, "/{variant}"))
    }
}

/// A reference to a blob by its content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    #[serde(default)]
    pub media_type: String,
    pub digest: Digest,
    pub size: u64,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub urls: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<Platform>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub annotations: Option<BTreeMap<String, String>>,
}

impl Descriptor {
    /// Describes these bytes.
    pub fn of(media_type: &str, bytes: &[u8]) -> Self {
        Self::new(media_type, Digest::of(bytes), bytes.len() as u64)
    }

    /// Describes a blob, without optional fields.
    pub fn new(media_type: &str, digest: Digest, size: u64) -> Self {
        Self {
            media_type: media_type.into(),
            digest,
            size,
            urls: Vec::new(),
            platform: None,
            annotations: None,
        }
    }

    /// The blob to which it refers, for reading ranges of it.
    pub fn stored(&self) -> StoredBlob {
        StoredBlob {
            digest: self.digest,
            size: self.size,
            urls: self.urls.clone(),
        }
    }

    /// The annotation's value.
    pub fn annotation(&self, name: &str) -> Option<&str> {
        self.annotations.as_ref()?.get(name).map(String::as_str)
    }
}

/// An image manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    pub config: Descriptor,
    pub layers: Vec<Descriptor>,
    pub kind: Kind,
    /// The manifest it refers to.
    pub subject: Option<Descriptor>,
    pub annotations: BTreeMap<String, String>,
}

/// The kind of a manifest's layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Changes of a file tree, as tar.
    Layers,
    /// The documents of a converted image.
    Converted(Box<ConvertedManifest>),
    /// A RAFS bootstrap and its blobs.
    Nydus(Box<NydusManifest>),
}

/// A manifest or an index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Document {
    Manifest(Box<Manifest>),
    Index(Vec<Descriptor>),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Wire {
    #[serde(default)]
    schema_version: u32,
    config: Option<Descriptor>,
    layers: Option<Vec<Descriptor>>,
    manifests: Option<Vec<Descriptor>>,
    subject: Option<Descriptor>,
    /// Tools write null too.
    annotations: Option<BTreeMap<String, String>>,
}

impl Document {
    /// Reads a manifest or index. `labelled` is the media type from its descriptor or the registry.
    ///
    /// # Errors
    /// `UnknownMediaType` for schema 1 and other types, `Malformed`.
    pub fn parse(what: &str, bytes: &[u8], labelled: Option<&str>) -> Result<Self, Error> {
        let head: Head = serde_json::from_slice(bytes).map_err(|error| Error::malformed(what, error))?;
        let label = labelled.filter(|label| label.starts_with("application/vnd."));
        let media_type = head.media_type.as_deref().or(label);
        if head.schema_version == Some(1) || media_type.is_some_and(|it| it.starts_with(DOCKER_SCHEMA1)) {
            return Err(Error::UnknownMediaType {
                what: what.into(),
                media_type: media_type
                    .unwrap_or("application/vnd.docker.distribution.manifest.v1+json")
                    .into(),
                advice: "Docker's schema 1 was retired in 2017: push the image again with a current tool"
                    .into(),
            });
        }
        let wire: Wire = serde_json::from_slice(bytes).map_err(|error| Error::malformed(what, error))?;
        // The type in the document must equal the one outside, or one of them misrepresents the signed content.
        match media_type {
            None | Some(OCI_MANIFEST | OCI_INDEX | DOCKER_MANIFEST | DOCKER_LIST) => {}
            Some(other) => {
                return Err(unknown(
                    what,
                    other,
                    "it is neither an image manifest nor an image index",
                ));
            }
        }
        if wire.schema_version != 2 {
            return Err(Error::malformed(
                what,
                format!("schemaVersion is {}, not 2", wire.schema_version),
            ));
        }
        let index = matches!(media_type, Some(OCI_INDEX | DOCKER_LIST));
        match wire {
            Wire {
                manifests: Some(manifests),
                config: None,
                layers: None,
                ..
            } if index || media_type.is_none() => Ok(Self::Index(manifests)),
            Wire {
                manifests: None,
                config: Some(config),
                layers,
                subject,
                annotations,
                ..
            } if !index => {
                let manifest = Manifest {
                    config,
                    layers: layers.unwrap_or_default(),
                    kind: Kind::of(what, bytes)?,
                    subject,
                    annotations: annotations.unwrap_or_default(),
                };
                manifest.check(what)?;
                Ok(Self::Manifest(Box::new(manifest)))
            }
            _ => Err(Error::malformed(
                what,
                "it has neither config and layers, nor manifests, as its type wants",
            )),
        }
    }
}

/// Read before the rest, so that the error for a document of another kind names the kind.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Head {
    schema_version: Option<u32>,
    media_type: Option<String>,
}

impl Kind {
    fn of(what: &str, bytes: &[u8]) -> Result<Self, Error> {
        if let Some(manifest) = ConvertedManifest::parse(what, bytes)? {
            return Ok(Self::Converted(Box::new(manifest)));
        }
        Ok(NydusManifest::parse(what, bytes)?
            .map_or(Self::Layers, |manifest| Self::Nydus(Box::new(manifest))))
    }
}

impl Manifest {
    fn check(&self, what: &str) -> Result<(), Error> {
        if self.layers.len() > MAX_LAYERS {
            return Err(Error::malformed(
                what,
                format!("it has more than {MAX_LAYERS} layers"),
            ));
        }
        if !matches!(self.config.media_type.as_str(), OCI_CONFIG | DOCKER_CONFIG | "") {
            let what = format!("the config of {what}");
            return Err(unknown(
                &what,
                &self.config.media_type,
                "this is an artifact, not a container image",
            ));
        }
        // The parsers of the other kinds have already checked their layers.
        let layers = match self.kind {
            Kind::Layers => &self.layers[..],
            _ => &[],
        };
        for layer in layers {
            if !LAYERS.contains(&layer.media_type.as_str()) {
                let what = format!("layer {}", layer.digest);
                return Err(unknown(
                    &what,
                    &layer.media_type,
                    "layers are tar, tar+gzip or tar+zstd",
                ));
            }
        }
        Ok(())
    }
}

fn unknown(what: &str, media_type: &str, advice: &str) -> Error {
    Error::UnknownMediaType {
        what: what.into(),
        media_type: media_type.into(),
        advice: advice.into(),
    }
}
