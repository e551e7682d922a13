//! Images and templates of a node.

use serde::{Deserialize, Serialize};

/// The images in the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ImageList {
    pub items: Vec<Image>,
}

/// An image in the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Image {
    /// Digest of its manifest: `sha256:` and 64 hexadecimal digits.
    pub digest: String,
    /// The reference it was pulled by.
    pub reference: String,
    /// It consists of the lowest layers of an image, assembled for a containerd snapshot.
    pub for_snapshot: bool,
    /// Bytes its files occupy on the disk.
    pub bytes: u64,
    pub layers: u32,
    /// `full`, or `lazy:` and the format through which missing file data is fetched.
    pub form: String,
    /// Bytes of file data in the store.
    pub present_bytes: u64,
    /// Bytes of file data in the image.
    pub total_bytes: u64,
    /// A sandbox uses it.
    pub in_use: bool,
}

/// An image and its layers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ImageDetail {
    pub digest: String,
    pub reference: String,
    pub for_snapshot: bool,
    pub form: String,
    pub in_use: bool,
    /// Bytes of its file system metadata.
    pub metadata_bytes: u64,
    pub present_bytes: u64,
    pub total_bytes: u64,
    pub layers: Vec<ImageLayer>,
    /// The file data that is prefetched at a start.
    pub load_order: Option<LoadOrder>,
    /// The image's configuration: JSON of the OCI image specification.
    pub image_config: String,
}

/// A layer of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ImageLayer {
    /// Its key in the store.
    pub key: String,
    pub form: String,
    /// Its digest in the registry.
    pub stored_digest: Option<String>,
    pub stored_bytes: Option<u64>,
    /// Bytes of file data.
    pub bytes: u64,
    pub present_bytes: u64,
    pub chunks: u64,
    pub ready_chunks: u64,
    pub index_bytes: Option<u64>,
    /// Number of ranges from which it can be read independently.
    pub spans: Option<u64>,
    pub disk_bytes: u64,
}

/// The file data that is prefetched from an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LoadOrder {
    /// `recorded` on this node, or `shipped` with the image.
    pub source: String,
    pub runs: u64,
    pub bytes: u64,
    /// Accesses that were not recorded because they came too fast.
    pub dropped: u64,
}

/// An image to pull.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct PullImage {
    /// An image as `thaw image pull` takes it; paths are absolute.
    #[cfg_attr(
        feature = "openapi",
        schema(max_length = 1024, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")
    )]
    pub image: String,
    /// Fetch all data now, even if the image could be fetched lazily.
    #[serde(default)]
    pub full: bool,
    /// Use HTTP without TLS.
    #[serde(default)]
    pub plain_http: bool,
}

/// The templates of the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TemplateList {
    pub items: Vec<Template>,
}

/// A guest that was booted once and from which sandboxes are thawed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Template {
    pub key: String,
    /// Seconds since the Unix epoch. If the template cannot be read, this and all fields below except
    /// `disk_bytes` are absent.
    pub created: Option<u64>,
    /// The version of Thaw that made it.
    pub thaw: Option<String>,
    /// Most CPUs of its sandboxes.
    pub cpus_max: Option<u8>,
    /// Least memory of its sandboxes, in MiB.
    pub memory_mib: Option<u32>,
    /// The CPU baseline.
    pub baseline: Option<String>,
    /// Bytes of memory that are not zero.
    pub memory_data_bytes: Option<u64>,
    pub disk_bytes: u64,
    /// Why new sandboxes do not use this template.
    pub stale: Option<String>,
    /// Why it cannot be read, or which of its files is damaged.
    pub error: Option<String>,
}
