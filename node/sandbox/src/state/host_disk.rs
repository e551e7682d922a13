//! A block device of the host that a sandbox has, as recorded.

use serde::{Deserialize, Serialize};

/// A block device of the host, by its numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostDisk {
    pub major: u32,
    pub minor: u32,
    /// The guest cannot change it.
    pub read_only: bool,
}
