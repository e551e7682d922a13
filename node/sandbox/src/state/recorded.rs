//! Types of the API as a record holds them, read by the rules of records.
//!
//! The API refuses unknown fields, so that no caller relies on a field that has no effect. A record ignores them: a later release
//! may have written it, and this one may have to adopt its sandboxes. Only a network policy is read strictly in both: ignoring
//! part of a rule would allow more than it says, so such a record counts as unreadable.

use std::path::PathBuf;

use serde::{Deserialize, Deserializer};
use thaw_protocol::api::{self, NetworkPolicy};

#[derive(Deserialize)]
struct Volume {
    host: PathBuf,
    guest: PathBuf,
    #[serde(default)]
    read_only: bool,
}

#[derive(Deserialize)]
struct Network {
    address: String,
    #[serde(default)]
    published: Vec<Port>,
    #[serde(default)]
    policy: NetworkPolicy,
}

#[derive(Deserialize)]
struct Port {
    #[serde(default)]
    address: Option<String>,
    host: u16,
    guest: u16,
    #[serde(default = "tcp")]
    protocol: String,
}

fn tcp() -> String {
    "tcp".into()
}

/// Volumes.
pub(super) fn volumes<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<api::Volume>, D::Error> {
    let volumes = Vec::<Volume>::deserialize(from)?.into_iter();
    let volume = |v: Volume| api::Volume {
        host: v.host,
        guest: v.guest,
        read_only: v.read_only,
    };
    Ok(volumes.map(volume).collect())
}

/// A network.
pub(super) fn network<'de, D: Deserializer<'de>>(from: D) -> Result<Option<api::SandboxNetwork>, D::Error> {
    let port = |p: Port| api::PublishedPort {
        address: p.address,
        host: p.host,
        guest: p.guest,
        protocol: p.protocol,
    };
    let network = |n: Network| api::SandboxNetwork {
        address: n.address,
        published: n.published.into_iter().map(port).collect(),
        policy: n.policy,
    };
    Ok(Option::<Network>::deserialize(from)?.map(network))
}
