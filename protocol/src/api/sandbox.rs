//! A sandbox, and how its start went.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{
    ContainerHealth, HookResult, OnTimeout, RateLimits, Readiness, SandboxEvent, SandboxFailure,
    SandboxNetwork,
};

/// One process: its PID, and its start time in clock ticks since boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ProcessIdentity {
    pub pid: i32,
    pub start_time: u64,
}

/// A created sandbox, whose agent accepts containers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CreatedSandbox {
    pub sandbox: Sandbox,
    /// The image's configuration, JSON of the OCI image specification; `null` if unknown.
    pub image_config: String,
    /// How long each step took.
    pub account: Account,
}

/// How long each step of a start took.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Account {
    /// Ordered by start time.
    pub stages: Vec<Stage>,
    /// Why the start was slower than it could be.
    pub reasons: Vec<Reason>,
    /// Counters by name: `faults`, `populated_pages`.
    pub counts: BTreeMap<String, u64>,
    /// Remarks by stage name, such as how the image was obtained.
    #[serde(default)]
    pub notes: BTreeMap<String, String>,
}

/// One stage of a start; times are nanoseconds since the start's beginning.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Stage {
    pub name: String,
    pub start_ns: u64,
    pub duration_ns: u64,
}

/// Why a start was slower than it could be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Reason {
    /// A stable code for programs.
    pub code: String,
    /// A sentence for people.
    pub text: String,
}

/// A sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Sandbox {
    pub id: String,
    /// The tenant that owns it, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    pub name: Option<String>,
    pub image: String,
    pub command: Vec<String>,
    /// Seconds since the Unix epoch.
    pub created: u64,
    pub cpus: u8,
    pub memory_mib: u32,
    /// `running`, `paused`, `restarting` (its container's process ended and is started again), `exited` (its container's process ended; with `ended`, only this record and the
    /// output are left), `ended` (its machine ended, and its resources on the host are being removed) or
    /// `failed` (it ended without a request, and only this record and the output are left).
    pub state: String,
    /// Whether it is paused with its memory released: it has no machine until it is resumed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub memory_released: bool,
    /// Why it ended, or, if its memory is released, why it could not be resumed.
    pub reason: Option<String>,
    /// How it failed, if it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<SandboxFailure>,
    /// The exit code of its container's process, or 128 plus the number of the signal that ended it, if thawd
    /// started or thawed that container.
    #[serde(default)]
    pub exit_code: Option<i32>,
    /// How often its container's program was started again by its restart policy.
    #[serde(default)]
    pub restarts: u32,
    /// Whether its container is healthy, if its health is checked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health: Option<ContainerHealth>,
    /// How the `after_thaw` hook of its container ended when it was thawed, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_thaw: Option<HookResult>,
    /// When its container's process ended, in seconds since the Unix epoch, if the sandbox was then removed and
    /// its record kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<u64>,
    /// Whether its container is ready, if the request had a readiness probe.
    #[serde(default)]
    pub readiness: Option<Readiness>,
    /// Path of its vsock socket, to which a client sends `CONNECT <port>\n`. Empty if its memory is released.
    pub vsock: String,
    /// PID of the VMM.
    pub vmm_pid: Option<i32>,
    #[serde(default)]
    pub network: Option<SandboxNetwork>,
    /// Rate limits of its disks and its network.
    #[serde(default)]
    pub rate_limits: RateLimits,
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Its timeout in seconds, from its creation or the last change of the timeout.
    #[serde(default)]
    pub timeout_s: Option<u32>,
    /// Its idle timeout in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_timeout_s: Option<u32>,
    /// What happens when either timeout is over.
    #[serde(default, skip_serializing_if = "OnTimeout::is_default")]
    pub on_timeout: OnTimeout,
    /// When the timeout is over, in seconds since the Unix epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ends_at: Option<u64>,
    /// The version of its last change. Each change of any sandbox gets a higher number.
    #[serde(default)]
    pub resource_version: u64,
    /// What happened at the last change, if that was an event. Each event is in one change of a watch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub event: Option<SandboxEvent>,
    /// Why its volumes no longer work: the process that served them died and is not restarted.
    #[serde(default)]
    pub volumes_error: Option<String>,
}

impl Sandbox {
    /// When it ended or failed, in seconds since the Unix epoch, if only its record and its output are left.
    pub fn ended_at(&self) -> Option<u64> {
        self.ended.or(self.failure.as_ref().map(|failure| failure.at))
    }
}
