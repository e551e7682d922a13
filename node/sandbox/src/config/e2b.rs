//! `[e2b]`: where thawd serves E2B's API, and what its templates are.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

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
    /// The nodes that answer as one. `None`: this node answers alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster: Option<ClusterConfig>,
}

/// `[e2b.cluster]`: the nodes that answer as one, from a list or from Kubernetes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterConfig {
    /// The name of this node among them. `None`: the host's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// The file with the secret that all nodes share. It proves that a request comes from one of them, and access tokens are derived from it.
    pub key: PathBuf,
    /// The authorities that sign the nodes' certificates, PEM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca: Option<PathBuf>,
    /// The registry's repository to which paused sandboxes are copied, so that another node can take them over. `None`: they stay on the
    /// disk of their node alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused_registry: Option<String>,
    /// The URL of each node's listener, by the node's name. This node is among them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub nodes: BTreeMap<String, String>,
    /// Instead of `nodes`: the ready endpoints of a Service of Kubernetes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint_slices: Option<EndpointSlicesConfig>,
}

/// `[e2b.cluster.endpoint_slices]`: which Service's endpoints are the nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EndpointSlicesConfig {
    /// The Service's name.
    pub service: String,
    /// Its namespace. `None`: that of this process's service account.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// The name of its port.
    pub port: String,
    /// The name in the certificates of all nodes: their addresses change.
    pub server_name: String,
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
