//! `[api]` and `[metrics]`: where thawd serves its API besides its unix socket, which callers it accepts there, and where it serves only
//! metrics.

use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// `[api]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ApiConfig {
    /// Address and port. `None`: thawd does not serve the API over TCP.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listen: Option<SocketAddr>,
    /// thawd's certificate and its chain, PEM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub certificate: Option<PathBuf>,
    /// The certificate's private key, PEM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<PathBuf>,
    /// The authority whose client certificates are accepted, PEM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_ca: Option<PathBuf>,
    /// The file with the roles of client certificates. `None`: every certificate has the role of an administrator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_roles: Option<PathBuf>,
    /// The file of bearer tokens: `NAME TOKEN` and a role per line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<PathBuf>,
    /// Whether each tenant has separate images, templates and forks.
    pub separate_tenants: bool,
}

/// `[metrics]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MetricsConfig {
    /// Address and port where only metrics and health are served, to any client. `None`: not served.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listen: Option<SocketAddr>,
}
