//! Requests to thaw, freeze and fork a sandbox, and their results.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

#[cfg(feature = "openapi")]
use super::labels::labels;
use super::{CreatedSandbox, NetworkPolicy, ProcessIdentity, PublishedPort, RateLimits};
use crate::control::MemoryMode;

/// A sandbox to thaw from a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ThawSandbox {
    /// Absolute path of the snapshot's directory.
    #[cfg_attr(feature = "openapi", schema(value_type = String, max_length = 1024, pattern = r"^/[^\x00]*$"))]
    pub directory: PathBuf,
    #[serde(default)]
    #[cfg_attr(
        feature = "openapi",
        schema(max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")
    )]
    pub hostname: Option<String>,
    #[serde(default)]
    #[cfg_attr(
        feature = "openapi",
        schema(max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")
    )]
    pub name: Option<String>,
    /// Delete the sandbox when this process ends.
    #[serde(default)]
    pub client: Option<ProcessIdentity>,
    /// How its memory is loaded; `uffd` is refused.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = String, pattern = "^(cow|populate)$"))]
    pub memory_mode: MemoryMode,
    /// Ports of the host that are forwarded to it.
    #[serde(default)]
    pub publish: Vec<PublishedPort>,
    /// Where it may connect to. The policy of the frozen sandbox if absent.
    #[serde(default)]
    pub network_policy: Option<NetworkPolicy>,
    /// Rate limits of its disks and its network. Those of the frozen sandbox if absent.
    #[serde(default, skip_serializing_if = "RateLimits::is_none")]
    pub rate_limits: RateLimits,
    /// Labels by which callers select it; docs/api.md describes the syntax.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(schema_with = labels))]
    pub labels: BTreeMap<String, String>,
    /// Delete it after this many seconds; at least one.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(minimum = 1))]
    pub timeout_s: Option<u32>,
}

/// How to freeze a running sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct FreezeSandbox {
    /// Absolute path of the snapshot's directory, which must not exist.
    #[cfg_attr(feature = "openapi", schema(value_type = String, max_length = 1024, pattern = r"^/[^\x00]*$"))]
    pub directory: PathBuf,
    /// Write only what changed since the sandbox was thawed. The snapshot then refers to the one it was
    /// thawed from.
    #[serde(default)]
    pub delta: bool,
    /// Leave the sandbox paused, its workloads stopped.
    #[serde(default)]
    pub stop: bool,
    /// Absolute path of the private key to sign the snapshot with. The sandbox's owner reads it.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, max_length = 1024, pattern = r"^/[^\x00]*$"))]
    pub sign: Option<PathBuf>,
}

/// How to clone a running sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ForkSandbox {
    /// Number of clones, 1 to 32.
    #[serde(default = "one")]
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 32))]
    pub count: u8,
    /// How their memory is loaded; `uffd` is refused.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = String, pattern = "^(cow|populate)$"))]
    pub memory_mode: MemoryMode,
    /// The clones' labels; docs/api.md describes the syntax.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(schema_with = labels))]
    pub labels: BTreeMap<String, String>,
    /// Delete the clones after this many seconds; at least one.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(minimum = 1))]
    pub timeout_s: Option<u32>,
    /// Absolute path of the private key to sign the intermediate snapshot with, on nodes that thaw only
    /// signed snapshots. Requires the role admin.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, max_length = 1024, pattern = r"^/[^\x00]*$"))]
    pub sign: Option<PathBuf>,
}

/// The result of a fork.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ForkedSandbox {
    /// How the original was frozen. It keeps running.
    pub frozen: FrozenSandbox,
    /// The clones.
    pub items: Vec<CreatedSandbox>,
}

/// The result of a freeze.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FrozenSandbox {
    /// Bytes of memory written.
    pub memory_bytes: u64,
    /// How long the machine was paused, in nanoseconds.
    pub paused_ns: u64,
}

fn one() -> u8 {
    1
}
