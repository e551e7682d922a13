//! `[snapshots]`: which snapshots are trusted, which are held in memory, and which stored ones are kept.

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};

use super::Size;

/// `[snapshots]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SnapshotsConfig {
    /// Whether a snapshot without a signature by a trusted key is refused. `None`: only if there is a trusted key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub require_signature: Option<bool>,
    /// Maximum number of bytes of memory in which thawd holds recently thawed snapshots that no sandbox uses.
    pub held: Size,
    /// Days after which a stored snapshot that no sandbox was thawed from is removed. `None`: never.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep_days: Option<NonZeroU32>,
    /// Most stored snapshots of a tenant. `None`: unlimited.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep_count: Option<NonZeroU32>,
    /// Most bytes on disk of a tenant's stored snapshots. `None`: unlimited.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep_bytes: Option<Size>,
}

impl Default for SnapshotsConfig {
    fn default() -> Self {
        Self {
            require_signature: None,
            held: Size(1 << 30),
            keep_days: None,
            keep_count: None,
            keep_bytes: None,
        }
    }
}
