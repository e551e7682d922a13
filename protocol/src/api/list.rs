//! Lists of sandboxes and their changes.

use serde::{Deserialize, Serialize};

use super::Sandbox;
use super::problem::Problem;

/// Sandboxes as they were at one resource version, by id.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SandboxList {
    /// A watch from here misses nothing that happened since.
    pub resource_version: u64,
    pub items: Vec<Sandbox>,
    /// There are more: ask again with `continue` set to this, and the same selectors.
    #[serde(rename = "continue", default, skip_serializing_if = "Option::is_none")]
    pub continue_token: Option<String>,
}

/// One line of a watch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "type", content = "object", rename_all = "UPPERCASE")]
pub enum WatchEvent {
    /// It is new, or began to match the selectors.
    Added(Sandbox),
    /// It changed.
    Modified(Sandbox),
    /// It is gone, or matches no longer: as it was last.
    Deleted(Sandbox),
    /// Nothing that matches happened up to this version.
    Bookmark(Bookmark),
    /// The watch ends, and why; the last line.
    Error(Problem),
}

/// How far a watch is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Bookmark {
    pub resource_version: u64,
}
