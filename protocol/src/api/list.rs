//! Lists of sandboxes and their changes.

use serde::{Deserialize, Serialize};

use super::Sandbox;
use super::problem::Problem;

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

/// One line of a watch.
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

/// Progress of a watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Bookmark {
    pub resource_version: u64,
}
