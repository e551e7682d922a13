//! Why a sandbox failed, that is, ended without a request to end it.

use serde::{Deserialize, Serialize};

/// [`Sandbox::state`](super::Sandbox::state) of a sandbox that failed.
pub const FAILED: &str = "failed";

/// [`Sandbox::state`](super::Sandbox::state) of a sandbox whose container's process has ended.
pub const EXITED: &str = "exited";

/// How a sandbox failed, and its last output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SandboxFailure {
    /// A stable code for programs: `out-of-memory`, `signal`, `forbidden-call`, `vmm-error`, `vmm-lost`,
    /// `memory-lost`, `guest-panic`, `agent-died`, `guest-reset`, `guest-power-off`, `cpu-fault` or `unknown`.
    /// docs/operations.md explains each.
    pub reason: String,
    /// A sentence for people.
    pub message: String,
    /// When thawd detected the failure, in seconds since the Unix epoch.
    pub at: u64,
    /// The VMM's exit status, if it exited and the status is known.
    #[serde(default)]
    pub exit_status: Option<i32>,
    /// The signal that killed the VMM, if one did and it is known.
    #[serde(default)]
    pub signal: Option<i32>,
    /// The last lines of the guest's console, oldest first.
    #[serde(default)]
    pub console: Vec<String>,
    /// The last lines of the VMM's log, oldest first.
    #[serde(default)]
    pub log: Vec<String>,
    /// The last lines of its container's output, oldest first, if thawd keeps that output.
    #[serde(default)]
    pub output: Vec<String>,
}
