//! What happened to a sandbox, beside the state it has since.

use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::HealthStatus;

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum SandboxAction {
    /// It was created or thawed.
    Create,
    /// Its container's program was started.
    Start,
    /// The guest's kernel killed a process of its container because memory ran out. Shown when the container's process ends, before `die`.
    Oom,
    /// Its container's process has ended.
    Die,
    /// A caller sent a signal to its container's process.
    Kill,
    /// A caller stopped its container.
    Stop,
    /// A caller restarted its container.
    Restart,
    Pause,
    Unpause,
    /// Whether its container is healthy has changed.
    HealthStatus,
    /// It is no longer listed.
    Destroy,
}

impl SandboxAction {
    /// All of them.
    pub const ALL: [SandboxAction; 11] = [
        SandboxAction::Create,
        SandboxAction::Start,
        SandboxAction::Oom,
        SandboxAction::Die,
        SandboxAction::Kill,
        SandboxAction::Stop,
        SandboxAction::Restart,
        SandboxAction::Pause,
        SandboxAction::Unpause,
        SandboxAction::HealthStatus,
        SandboxAction::Destroy,
    ];

    /// Its name, as docker's events have it.
    pub fn name(self) -> &'static str {
        match self {
            SandboxAction::Create => "create",
            SandboxAction::Start => "start",
            SandboxAction::Oom => "oom",
            SandboxAction::Die => "die",
            SandboxAction::Kill => "kill",
            SandboxAction::Stop => "stop",
            SandboxAction::Restart => "restart",
            SandboxAction::Pause => "pause",
            SandboxAction::Unpause => "unpause",
            SandboxAction::HealthStatus => "health_status",
            SandboxAction::Destroy => "destroy",
        }
    }
}

/// An event of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SandboxEvent {
    pub action: SandboxAction,
    /// Nanoseconds since the Unix epoch.
    pub at_ns: u64,
    /// Of `die`: the exit code.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// Of `kill`: the number of the signal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<u8>,
    /// Of `health_status`: the new status.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health: Option<HealthStatus>,
}

impl SandboxEvent {
    /// One that happens now.
    pub fn now(action: SandboxAction) -> SandboxEvent {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        SandboxEvent {
            action,
            at_ns: now.map_or(0, |now| u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)),
            exit_code: None,
            signal: None,
            health: None,
        }
    }
}
