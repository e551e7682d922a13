//! `[quotas]` and `[capacity]`: what each tenant may have, and what the machines of a node may have together.

use std::collections::BTreeMap;

use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize};
use thaw_protocol::api::{CREATIONS_PER_MINUTE, TenantLimits};

use super::Size;
use crate::tenant::Tenant;

const MIB: u64 = 1 << 20;

/// `[quotas]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct QuotasConfig {
    /// The limits of every tenant without limits of its own.
    pub default: QuotaConfig,
    /// Limits of single tenants, which replace all of the default ones.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub tenants: BTreeMap<Tenant, QuotaConfig>,
}

/// `[quotas.default]`, `[quotas.tenants.NAME]`. `None`: unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct QuotaConfig {
    /// Sandboxes with a machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub running: Option<u32>,
    /// Paused sandboxes whose memory is released.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paused: Option<u32>,
    /// CPUs of the machines.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vcpus: Option<u32>,
    /// Memory of the machines, whole MiB.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "whole_mib")]
    pub memory: Option<Size>,
    /// Sizes of the writable layers, whole MiB.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "whole_mib")]
    pub disk: Option<Size>,
    /// Bytes on disk of stored snapshots.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshots: Option<Size>,
    /// Creations within 60 seconds.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "creations")]
    pub creations_per_minute: Option<u32>,
}

impl QuotaConfig {
    /// The same, as the API has it.
    pub fn limits(&self) -> TenantLimits {
        let mib = |size: Size| size.0 / MIB;
        TenantLimits {
            running: self.running,
            paused: self.paused,
            vcpus: self.vcpus,
            memory_mib: self.memory.map(mib),
            disk_mib: self.disk.map(mib),
            snapshot_bytes: self.snapshots.map(|size| size.0),
            creations_per_minute: self.creations_per_minute,
        }
    }
}

/// `[capacity]`. `None`: unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CapacityConfig {
    /// How many times the host's memory the machines may have together.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "ratio")]
    pub memory_overcommit: Option<f64>,
    /// How many times the host's CPUs they may have together.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "ratio")]
    pub vcpu_overcommit: Option<f64>,
}

fn whole_mib<'de, D: Deserializer<'de>>(given: D) -> Result<Option<Size>, D::Error> {
    let size = Size::deserialize(given)?;
    match size.0.is_multiple_of(MIB) {
        true => Ok(Some(size)),
        false => Err(de::Error::custom(format!("{size} is not a whole number of MiB"))),
    }
}

fn creations<'de, D: Deserializer<'de>>(given: D) -> Result<Option<u32>, D::Error> {
    let creations = u32::deserialize(given)?;
    let (least, most) = (CREATIONS_PER_MINUTE.start(), CREATIONS_PER_MINUTE.end());
    match CREATIONS_PER_MINUTE.contains(&creations) {
        true => Ok(Some(creations)),
        false => Err(de::Error::custom(format!("it is {least} to {most}"))),
    }
}

fn ratio<'de, D: Deserializer<'de>>(given: D) -> Result<Option<f64>, D::Error> {
    let ratio = f64::deserialize(given)?;
    match (0.1..=1000.0).contains(&ratio) {
        true => Ok(Some(ratio)),
        false => Err(de::Error::custom("a ratio is 0.1 to 1000")),
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    #[test]
    fn tenant_limits_replace_the_default_ones() {
        let config = Config::parse(
            "[quotas.default]\nrunning = 2\nmemory = \"1g\"\n[quotas.tenants.acme]\nvcpus = 4\n[capacity]\nvcpu_overcommit = 2\n",
        )
        .unwrap();
        let default = config.quotas.default.limits();
        assert_eq!((default.running, default.memory_mib), (Some(2), Some(1024)));
        let acme = config.quotas.tenants[&"acme".parse().unwrap()].limits();
        assert_eq!((acme.running, acme.vcpus), (None, Some(4)));
        assert_eq!(config.capacity.vcpu_overcommit, Some(2.0));
        assert_eq!(config.capacity.memory_overcommit, None);
    }

    #[test]
    fn errors_name_line_and_key() {
        for (text, line, key) in [
            ("[quotas.default]\nruning = 1", "line 2", "runing"),
            ("[quotas.default]\nrunning = -1", "line 2", "running"),
            ("[quotas.default]\nmemory = \"1k\"", "line 2", "memory"),
            ("[quotas.default]\ndisk = \"much\"", "line 2", "disk"),
            (
                "[quotas.default]\n\ncreations_per_minute = 0",
                "line 3",
                "creations_per_minute",
            ),
            (
                "[quotas.tenants.a]\ncreations_per_minute = 10001",
                "line 2",
                "creations_per_minute",
            ),
            ("[quotas.tenants.\"a/b\"]\nrunning = 1", "line 1", "a/b"),
            ("[quotas]\ntenant = 1", "line 2", "tenant"),
            (
                "[capacity]\nmemory_overcommit = 0.0",
                "line 2",
                "memory_overcommit",
            ),
            ("[capacity]\nvcpu_overcommit = nan", "line 2", "vcpu_overcommit"),
            ("[capacity]\nvcpu_overcommit = \"2\"", "line 2", "vcpu_overcommit"),
        ] {
            let error = Config::parse(text).unwrap_err();
            assert!(error.contains(line) && error.contains(key), "{text}: {error}");
        }
    }
}
