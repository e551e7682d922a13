//! `[api]` and `[metrics]`: where thawd serves its API besides its unix socket and for whom, and where it serves metrics alone.

use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// `[api]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ApiConfig {
    /// Address and port. None: nowhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listen: Option<SocketAddr>,
    /// This end's certificate and those it stands on, PEM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub certificate: Option<PathBuf>,
    /// Its private key, PEM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<PathBuf>,
    /// Whose certificates callers may show, PEM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_ca: Option<PathBuf>,
    /// The file that says which role each of those certificates has. None: all are administrators'.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_roles: Option<PathBuf>,
    /// The file of bearer tokens, `NAME TOKEN` and a role a line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<PathBuf>,
    /// Whether each tenant has images, templates and forks of its own.
    pub separate_tenants: bool,
}

/// `[metrics]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MetricsConfig {
    /// Address and port where only metrics and health are served, to any client. `None`: nowhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listen: Option<SocketAddr>,
}
