//! The address of a registry, and whether it speaks TLS.

use crate::error::Error;
use crate::reference::{DEFAULT_REGISTRY, is_loopback};

use super::wire::Failure;

/// Where Docker Hub answers.
const HUB_HOST: &str = "registry-1.docker.io";

/// Where a registry is.
pub struct Address {
    /// Without TLS.
    pub plain: bool,
    /// `https://host[:port]`.
    pub base: String,
}

impl Address {
    pub fn of(registry: &str, plain_http: bool) -> Self {
        let host = if registry == DEFAULT_REGISTRY {
            HUB_HOST
        } else {
            registry
        };
        let plain = plain_http || is_loopback(host) || listed(host);
        let base = format!("{}://{host}", if plain { "http" } else { "https" });
        Self { plain, base }
    }
}

/// Without an HTTP client no request is possible.
pub fn no_client(registry: &str, failure: &Failure) -> Error {
    Error::RegistryUnreachable {
        registry: registry.into(),
        reason: failure.reason.clone(),
        advice: "check the certificates of this host (SSL_CERT_FILE)".into(),
    }
}

fn listed(host: &str) -> bool {
    std::env::var("THAW_PLAIN_HTTP").is_ok_and(|list| list.split(',').any(|it| it.trim() == host))
}
