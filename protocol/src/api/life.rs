//! The life of a container: when its program is started again, and how it is stopped.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

/// Valid times between a stop signal and SIGKILL, in seconds; -1: no SIGKILL.
pub const STOP_TIMEOUT_S: RangeInclusive<i32> = -1..=86_400;

/// When a container's program is started again after it has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum RestartMode {
    /// Never.
    #[default]
    No,
    /// If its exit code is not 0.
    OnFailure,
    /// Always, until it is stopped.
    UnlessStopped,
    /// The same: no container exists after it was stopped.
    Always,
}

/// When a container's program is started again. The first restart comes after 100 ms, and each further one after
/// twice the time, at most 60 s. After 10 s of running the time is 100 ms again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct RestartPolicy {
    pub mode: RestartMode,
    /// Most restarts with `on-failure`. Unlimited if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(minimum = 1))]
    pub max_restarts: Option<u32>,
}

impl RestartPolicy {
    pub(super) fn is_no(&self) -> bool {
        *self == RestartPolicy::default()
    }

    /// Checks the limit of restarts.
    ///
    /// # Errors
    /// What is invalid, in words.
    pub fn check(&self) -> Result<(), String> {
        match (self.mode, self.max_restarts) {
            (_, None) => Ok(()),
            (RestartMode::OnFailure, Some(1..)) => Ok(()),
            (RestartMode::OnFailure, Some(_)) => Err("max_restarts is 0; it may be 1 or more".into()),
            _ => Err("max_restarts goes with the mode on-failure only".into()),
        }
    }
}

/// How to stop the process of a container. An absent field has the container's own value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct StopContainer {
    /// The number of the signal, as Linux numbers it on x86-64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 64))]
    pub signal: Option<u8>,
    /// Seconds until SIGKILL; -1: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(minimum = -1, maximum = 86400))]
    pub timeout_s: Option<i32>,
}

/// How a container has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ContainerExit {
    /// The exit code of its process, or 128 plus the number of the signal that ended it.
    pub exit_code: i32,
}
