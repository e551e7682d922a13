//! Lists of sandboxes, and the changes of sandboxes and of stored snapshots.

use serde::{Deserialize, Serialize};

use super::problem::Problem;
use super::{Sandbox, Snapshot};

/// All matching sandboxes at one resource version, ordered by id.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SandboxList {
    /// A watch from this version reports every later change.
    pub resource_version: u64,
    pub items: Vec<Sandbox>,
    /// Present if there are more: repeat the request with `continue` set to this and the same selectors.
    #[serde(rename = "continue", default, skip_serializing_if = "Option::is_none")]
    pub continue_token: Option<String>,
}

/// One line of a watch of sandboxes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "type", content = "object", rename_all = "UPPERCASE")]
pub enum WatchEvent {
    /// The sandbox is new, or now matches the selectors.
    Added(Sandbox),
    /// The sandbox changed.
    Modified(Sandbox),
    /// The sandbox is gone or no longer matches the selectors. Its last state.
    Deleted(Sandbox),
    /// No matching change happened up to this version.
    Bookmark(Bookmark),
    /// The reason why the watch ends. The last line.
    Error(Problem),
}

/// One line of a watch of stored snapshots.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "type", content = "object", rename_all = "UPPERCASE")]
pub enum SnapshotEvent {
    /// The snapshot is new, or now matches the selectors.
    Added(Snapshot),
    /// Its name, its labels or its last use changed, or it was found damaged.
    Modified(Snapshot),
    /// The snapshot is gone or no longer matches the selectors. Its last state.
    Deleted(Snapshot),
    /// No matching change happened up to this version.
    Bookmark(Bookmark),
    /// The reason why the watch ends. The last line.
    Error(Problem),
}

/// Progress of a watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Bookmark {
    pub resource_version: u64,
}
