//! What sandboxes take of their host.

use serde::{Deserialize, Serialize};

/// What one sandbox takes. Numbers nobody counts on this host are absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Usage {
    /// When this was so, CLOCK_MONOTONIC nanoseconds: two of these make a rate.
    pub at_ns: u64,
    /// Time on CPUs since it was made, nanoseconds; of a sandbox of many CPUs it grows faster than time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_ns: Option<u64>,
    /// Memory now, bytes: what its cgroup is charged with, or else what is resident of its VMM, which counts what it shares
    /// with other clones of a template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Bytes that came from the host's disks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_bytes: Option<u64>,
    /// Bytes that went to the host's disks, or will.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub written_bytes: Option<u64>,
    /// Page faults that waited for a disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub major_faults: Option<u64>,
    /// Bytes its network interface received.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub received_bytes: Option<u64>,
    /// Packets it received.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub received_packets: Option<u64>,
    /// Bytes it sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sent_bytes: Option<u64>,
    /// Packets it sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sent_packets: Option<u64>,
    /// Bytes of its image that were fetched for it. Not known of one that was taken over from an earlier thawd.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fetched_bytes: Option<u64>,
}

/// One sandbox and what it takes.
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

/// One pool: what it has, and what it did since thawd began.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PoolUsage {
    /// `disk`, `network`, `cgroup`, `shell` or `parked`.
    pub pool: String,
    pub ready: usize,
    /// It is filled until so many are ready.
    pub high: usize,
    /// Claims, and those of them that found one ready.
    pub claims: u64,
    pub hits: u64,
}

/// What a node has and its sandboxes take.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NodeUsage {
    pub pools: Vec<PoolUsage>,
    /// By id.
    pub sandboxes: Vec<SandboxUsage>,
}
