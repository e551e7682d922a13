//! What a node has to make sandboxes of: images and templates.

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
    /// Its manifest's, `sha256:` and 64 digits.
    pub digest: String,
    /// What it was pulled by.
    pub reference: String,
    /// It is the lowest layers of an image, put together for one of containerd's snapshots.
    pub for_snapshot: bool,
    /// Bytes its files take on the disk.
    pub bytes: u64,
    pub layers: u32,
    /// `full`, or `lazy:` and how its missing file data can be read.
    pub form: String,
    /// Bytes of file data that are there.
    pub present_bytes: u64,
    /// Bytes of file data it has.
    pub total_bytes: u64,
    /// A sandbox uses it.
    pub in_use: bool,
}

/// An image, layer by layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ImageDetail {
    pub digest: String,
    pub reference: String,
    pub for_snapshot: bool,
    pub form: String,
    pub in_use: bool,
    /// Bytes of its tree.
    pub metadata_bytes: u64,
    pub present_bytes: u64,
    pub total_bytes: u64,
    pub layers: Vec<ImageLayer>,
    /// What starts read ahead.
    pub load_order: Option<LoadOrder>,
    /// JSON as the OCI image specification has it.
    pub image_config: String,
}

/// A layer of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ImageLayer {
    /// Its name in the store.
    pub key: String,
    pub form: String,
    /// As the registry has it.
    pub stored_digest: Option<String>,
    pub stored_bytes: Option<u64>,
    /// Of file data.
    pub bytes: u64,
    pub present_bytes: u64,
    pub chunks: u64,
    pub ready_chunks: u64,
    pub index_bytes: Option<u64>,
    /// From how many places it can be read.
    pub spans: Option<u64>,
    pub disk_bytes: u64,
}

/// What is read ahead of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LoadOrder {
    /// `recorded` here, or `shipped` with the image.
    pub source: String,
    pub runs: u64,
    pub bytes: u64,
    /// Accesses that were not recorded.
    pub dropped: u64,
}

/// An image to pull.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct PullImage {
    /// As `thaw image pull` takes it, paths absolute.
    #[cfg_attr(
        feature = "openapi",
        schema(max_length = 1024, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")
    )]
    pub image: String,
    /// Fetch everything now, also of an image that could be read as needed.
    #[serde(default)]
    pub full: bool,
    /// Speak to the registry in clear.
    #[serde(default)]
    pub plain_http: bool,
}

/// The templates of the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TemplateList {
    pub items: Vec<Template>,
}

/// A guest that was booted once, which sandboxes are thawed from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Template {
    pub key: String,
    /// Seconds since the Unix epoch; none of one that cannot be read, as all below but `disk_bytes`.
    pub created: Option<u64>,
    /// The version of Thaw that made it.
    pub thaw: Option<String>,
    /// CPUs a sandbox of it has at most.
    pub cpus_max: Option<u8>,
    /// Memory a sandbox of it has at least.
    pub memory_mib: Option<u32>,
    /// What its CPUs are.
    pub baseline: Option<String>,
    /// Bytes of memory that are no zeros.
    pub memory_data_bytes: Option<u64>,
    pub disk_bytes: u64,
    /// Why no sandbox would be thawed from it now.
    pub stale: Option<String>,
    /// Why it cannot be read, or which of its files is damaged.
    pub error: Option<String>,
}
