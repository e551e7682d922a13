//! Quotas of tenants, and the capacity of the node.

use std::fmt;
use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

/// Valid numbers of creations per minute.
pub const CREATIONS_PER_MINUTE: RangeInclusive<u32> = 1..=10_000;

/// A quantity that can be limited.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Quantity {
    Running,
    Paused,
    Vcpus,
    MemoryMib,
    DiskMib,
    SnapshotBytes,
    CreationsPerMinute,
}

impl Quantity {
    /// All quantities.
    pub const ALL: [Quantity; 7] = [
        Quantity::Running,
        Quantity::Paused,
        Quantity::Vcpus,
        Quantity::MemoryMib,
        Quantity::DiskMib,
        Quantity::SnapshotBytes,
        Quantity::CreationsPerMinute,
    ];

    /// The name of its field in [`TenantLimits`].
    pub fn name(self) -> &'static str {
        match self {
            Quantity::Running => "running",
            Quantity::Paused => "paused",
            Quantity::Vcpus => "vcpus",
            Quantity::MemoryMib => "memory_mib",
            Quantity::DiskMib => "disk_mib",
            Quantity::SnapshotBytes => "snapshot_bytes",
            Quantity::CreationsPerMinute => "creations_per_minute",
        }
    }
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a tenant may have at once. An absent limit is unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct TenantLimits {
    /// Sandboxes with a machine, also paused ones that keep their memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub running: Option<u32>,
    /// Paused sandboxes whose memory is released.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paused: Option<u32>,
    /// CPUs of the machines.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vcpus: Option<u32>,
    /// Memory of the machines, MiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
    /// Sizes of the writable layers, MiB, also those of paused sandboxes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_mib: Option<u64>,
    /// Bytes on disk of stored snapshots.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot_bytes: Option<u64>,
    /// Creations, thaws, clones and resumes of released memory within any 60 seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 10000))]
    pub creations_per_minute: Option<u32>,
}

impl TenantLimits {
    /// The limit of a quantity, in the unit of its field.
    pub fn of(&self, quantity: Quantity) -> Option<u64> {
        match quantity {
            Quantity::Running => self.running.map(u64::from),
            Quantity::Paused => self.paused.map(u64::from),
            Quantity::Vcpus => self.vcpus.map(u64::from),
            Quantity::MemoryMib => self.memory_mib,
            Quantity::DiskMib => self.disk_mib,
            Quantity::SnapshotBytes => self.snapshot_bytes,
            Quantity::CreationsPerMinute => self.creations_per_minute.map(u64::from),
        }
    }
}

/// What a tenant has, in the units of [`TenantLimits`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TenantUse {
    pub running: u64,
    pub paused: u64,
    pub vcpus: u64,
    pub memory_mib: u64,
    pub disk_mib: u64,
    /// Those that are being written count with the most that they can take.
    pub snapshot_bytes: u64,
    /// In the last 60 seconds. 0 if there is no limit.
    pub creations_per_minute: u64,
}

impl TenantUse {
    /// What the tenant has of a quantity, in the unit of its field.
    pub fn of(&self, quantity: Quantity) -> u64 {
        match quantity {
            Quantity::Running => self.running,
            Quantity::Paused => self.paused,
            Quantity::Vcpus => self.vcpus,
            Quantity::MemoryMib => self.memory_mib,
            Quantity::DiskMib => self.disk_mib,
            Quantity::SnapshotBytes => self.snapshot_bytes,
            Quantity::CreationsPerMinute => self.creations_per_minute,
        }
    }
}

/// The limits of a tenant, and what it has of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Quota {
    /// `null`: the sandboxes without a tenant, which have no limits.
    pub tenant: Option<String>,
    /// The limits in force.
    pub limits: TenantLimits,
    /// Whether they were set by the API, and not by the configuration.
    pub is_set: bool,
    pub used: TenantUse,
    /// What the node has for sandboxes of all tenants. For the role admin only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeCapacity>,
}

/// What the machines of a node may have together, and what they have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NodeCapacity {
    /// The host's CPUs times the configured ratio. Unlimited if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vcpus: Option<u64>,
    pub used_vcpus: u64,
    /// The host's memory times the configured ratio, MiB. Unlimited if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
    pub used_memory_mib: u64,
}

/// The quotas of all tenants.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct QuotaList {
    /// Ordered by tenant: those with limits of their own, and those that have something.
    pub items: Vec<Quota>,
}
