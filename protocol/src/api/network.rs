//! What a sandbox's network lets through.

use serde::{Deserialize, Serialize};

/// Where a sandbox may connect to. Whatever this says, it reaches neither the host nor other sandboxes, nor link-local
/// addresses (those of cloud metadata among them).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct NetworkPolicy {
    /// The first rule that matches decides.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub egress: Vec<EgressRule>,
    /// What holds where none does.
    #[serde(default)]
    pub default: Egress,
}

/// What becomes of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Egress {
    #[default]
    Allow,
    Deny,
}

/// One rule: either `allow` or `deny`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct EgressRule {
    /// An IPv4 network to be reached, `192.0.2.0/24`, or one address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allow: Option<String>,
    /// One that is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deny: Option<String>,
    /// Ports, `443` or `8000-8999`; none: all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<String>,
    /// `tcp`, `udp` or `icmp`; without: any, or with ports TCP and UDP.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol: Option<String>,
}

/// A port of the host that leads to one of the sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct PublishedPort {
    /// The host's IPv4 address; without: any it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// The host's port; 0: one that is free, told in the answer.
    #[cfg_attr(feature = "openapi", schema(minimum = 0, maximum = 65535))]
    pub host: u16,
    /// The sandbox's port, at least 1.
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 65535))]
    pub guest: u16,
    /// `tcp` or `udp`.
    #[serde(default = "tcp")]
    #[cfg_attr(feature = "openapi", schema(pattern = "^(tcp|udp)$"))]
    pub protocol: String,
}

/// A sandbox's network, where it has one that leads outside.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SandboxNetwork {
    /// Where this host reaches it, on any port.
    pub address: String,
    #[serde(default)]
    pub published: Vec<PublishedPort>,
    #[serde(default)]
    pub policy: NetworkPolicy,
}

fn tcp() -> String {
    "tcp".into()
}
