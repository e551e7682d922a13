//! Network policy and published ports of a sandbox.

use serde::{Deserialize, Serialize};

/// Where a sandbox may connect to. No policy permits connections to the host, to other sandboxes or to
/// link-local addresses (which include cloud metadata services).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct NetworkPolicy {
    /// The first rule that matches decides.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub egress: Vec<EgressRule>,
    /// Applies if no rule matches.
    #[serde(default)]
    pub default: Egress,
    /// Domains that the sandbox may resolve. With a domain here, the sandbox reaches, beside what a rule allows, only addresses that
    /// the node resolved for it, and only for TLS server names and HTTP hosts that are allowed.
    #[serde(default, skip_serializing_if = "DomainLists::is_empty")]
    pub domains: DomainLists,
}

/// Domains: a name (`example.com`), or all names below one (`*.example.com`). The longest that matches a name decides; of two of
/// equal length, the denying one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct DomainLists {
    /// Domains to allow. If there are some, all others are denied.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub allow: Vec<String>,
    /// Domains to deny. Without `allow`, the policy's `default` applies to all others.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub deny: Vec<String>,
}

impl DomainLists {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.allow.is_empty() && self.deny.is_empty()
    }
}

/// Whether a connection is permitted.
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
    /// IPv4 network to allow, such as `192.0.2.0/24`, or one address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allow: Option<String>,
    /// IPv4 network to deny, or one address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deny: Option<String>,
    /// Ports, such as `443` or `8000-8999`. All if empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<String>,
    /// `tcp`, `udp` or `icmp`. If absent: any, or TCP and UDP if there are ports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol: Option<String>,
}

/// A port of the host that is forwarded to one of the sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct PublishedPort {
    /// The host's IPv4 address. All its addresses if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// The host's port. 0 chooses a free one, which the answer contains.
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

/// A sandbox's network, if it reaches beyond the host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SandboxNetwork {
    /// The address at which the host reaches the sandbox, on any port.
    pub address: String,
    #[serde(default)]
    pub published: Vec<PublishedPort>,
    #[serde(default)]
    pub policy: NetworkPolicy,
}

fn tcp() -> String {
    "tcp".into()
}
