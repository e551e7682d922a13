//! Why a sandbox failed: it ended though no request had ended it.

use serde::{Deserialize, Serialize};

/// [`Sandbox::state`](super::Sandbox::state) of a sandbox that failed.
pub const FAILED: &str = "failed";

/// How a sandbox failed, and what was last seen of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SandboxFailure {
    /// A stable name for programs: `out-of-memory`, `signal`, `forbidden-call`, `vmm-error`, `vmm-lost`, `guest-panic`,
    /// `agent-died`, `guest-reset`, `guest-power-off`, `cpu-fault` or `unknown`. docs/operations.md says what each means.
    pub reason: String,
    /// A sentence for people.
    pub message: String,
    /// When thawd noticed, seconds since the Unix epoch.
    pub at: u64,
    /// What the VMM exited with, if it did and that is known.
    #[serde(default)]
    pub exit_status: Option<i32>,
    /// The signal that ended the VMM, if one did and that is known.
    #[serde(default)]
    pub signal: Option<i32>,
    /// The last lines of the guest's console, oldest first.
    #[serde(default)]
    pub console: Vec<String>,
    /// The last lines of the VMM's log, oldest first.
    #[serde(default)]
    pub log: Vec<String>,
    /// The last lines its container's process wrote, oldest first, where thawd keeps those.
    #[serde(default)]
    pub output: Vec<String>,
}
