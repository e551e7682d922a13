//! What nodes that answer as one ask each other, over the listener of E2B's API.
//!
//! A request of a caller that a node passes on to another is the caller's own, with the header [`MARK`]. A node also asks others for their
//! [`Room`] before it creates a sandbox.

use serde::{Deserialize, Serialize};

/// The header that proves that a node has passed a request on, by a hash of the secret that all nodes share: 64 hexadecimal digits. Which
/// hash tells the first step from the last. After the first step, only a node that does not have the sandbox passes the request on again;
/// after the last, none does.
pub const MARK: &str = "thaw-forwarded";

/// The path of a node's [`Room`], with the template as the parameter `template`. Only a request with [`MARK`] and the key of a caller gets
/// it.
pub const ROOM: &str = "/thaw/room";

/// The path at which a node says which of some sandboxes it has: the parameter `ids` has their ids in E2B's API, separated by commas, and the
/// answer is a JSON array of those that are here. Only a request with [`MARK`] gets it.
pub const HOLDER: &str = "/thaw/holder";

/// How much room a node has, and whether it has a template. A field that a node does not know is ignored, and one that it does not send is 0,
/// `false` or absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Room {
    /// Whether the caller can create sandboxes from the template on this node.
    pub has_template: bool,
    /// Whether the node makes no more sandboxes.
    pub is_draining: bool,
    /// Sandboxes with a machine.
    pub running: u64,
    /// Paused sandboxes.
    pub paused: u64,
    /// Memory that more machines may have, MiB. Absent: the node has no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub free_memory_mib: Option<u64>,
    /// CPUs that more machines may have. Absent: the node has no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub free_vcpus: Option<u64>,
}
