//! How a sandbox is paused.

use serde::{Deserialize, Serialize};

/// How to pause a sandbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct PauseSandbox {
    /// What happens to its memory.
    #[serde(default)]
    pub memory: PausedMemory,
}

/// What happens to the memory of a paused sandbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum PausedMemory {
    /// It stays in the memory of the node. Only its CPUs stop.
    #[default]
    Keep,
    /// It is written to the disk of the node, and its machine is ended. A resume thaws it under the same id.
    Release,
}
