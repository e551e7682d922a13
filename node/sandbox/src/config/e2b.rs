//! `[e2b]`: where thawd serves E2B's API, and what its templates are.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

/// `[e2b]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct E2bConfig {
    /// Address and port. `None`: thawd does not serve E2B's API.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listen: Option<SocketAddr>,
    /// The domain below which each port of a sandbox has a host name: `PORT-ID.DOMAIN`. It may end with the port that callers connect to.
    /// `None`: callers name a sandbox in headers only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// By the name that callers use.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub templates: BTreeMap<String, E2bTemplate>,
}

/// `[e2b.templates.NAME]`: what sandboxes of this template are made from, either an image or a stored snapshot. The other keys are for an
/// image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct E2bTemplate {
    /// An image, as `thaw run` takes it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Number of CPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpus: Option<u8>,
    /// Memory in MiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u32>,
    /// Size of the writable layer in MiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_mib: Option<u32>,
    /// The program that the container runs. It must not end by itself, because the sandbox ends with it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<Vec<String>>,
    /// The id or the name of a stored snapshot without a tenant. Every tenant can make sandboxes from it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
}
