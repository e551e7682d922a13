//! Resource usage of sandboxes and pools.

use serde::{Deserialize, Serialize};

/// Resource usage of one sandbox. A value is absent if this host does not count it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Usage {
    /// When this was measured, in nanoseconds of CLOCK_MONOTONIC. Two measurements give a rate.
    pub at_ns: u64,
    /// CPU time since it was made, in nanoseconds, summed over its CPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_ns: Option<u64>,
    /// Current memory in bytes: the charge of its cgroup, or without a cgroup the resident memory of its VMM,
    /// which includes pages shared with other clones of a template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Bytes read from the host's disks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_bytes: Option<u64>,
    /// Bytes written to the host's disks, or still to be written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub written_bytes: Option<u64>,
    /// Page faults that waited for a disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub major_faults: Option<u64>,
    /// Bytes its network interface received.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub received_bytes: Option<u64>,
    /// Packets its network interface received.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub received_packets: Option<u64>,
    /// Bytes its network interface sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sent_bytes: Option<u64>,
    /// Packets its network interface sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sent_packets: Option<u64>,
    /// Bytes of its image that were fetched for it. Absent if an earlier thawd created it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fetched_bytes: Option<u64>,
    /// DNS queries that were answered with addresses. This and the next three: since thawd started, if its network policy has domains.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub names_resolved: Option<u64>,
    /// DNS queries that its network policy refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub names_refused: Option<u64>,
    /// Addresses that were left out of answers because a name must not lead to them: private ones, and those that no policy allows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub addresses_withheld: Option<u64>,
    /// TCP connections that were refused because of the TLS server name or the HTTP `Host` that they ask for, or because they name none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connections_refused: Option<u64>,
}

/// One sandbox and its resource usage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SandboxUsage {
    pub id: String,
    pub name: Option<String>,
    pub image: String,
    /// `starting`, `running`, `paused` or `ended`.
    pub state: String,
    /// Seconds since the Unix epoch.
    pub created: u64,
    pub cpus: u8,
    pub memory_mib: u32,
    pub usage: Usage,
}

/// A pool's level, and its counters since thawd started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PoolUsage {
    /// `disk`, `network`, `cgroup`, `shell` or `parked`.
    pub pool: String,
    pub ready: usize,
    /// The level up to which the pool is filled.
    pub high: usize,
    /// Number of claims, and of claims that a ready resource satisfied.
    pub claims: u64,
    pub hits: u64,
}

/// The pools of a node, and the resource usage of its sandboxes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NodeUsage {
    pub pools: Vec<PoolUsage>,
    /// Ordered by id.
    pub sandboxes: Vec<SandboxUsage>,
}
