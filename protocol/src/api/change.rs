//! Changes of a running sandbox.

use serde::{Deserialize, Serialize};

use super::snapshot::given;
use super::{OnExit, OnTimeout, RateLimits};

/// Changes to a running sandbox. What is absent stays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ChangeSandbox {
    /// New rate limits of its disks and its network.
    #[serde(default, skip_serializing_if = "RateLimits::is_none")]
    pub rate_limits: RateLimits,
    /// Its timeout in seconds, which starts again now; at least one. `null` removes the timeout.
    #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<u32>, minimum = 1))]
    pub timeout_s: Option<Option<u32>>,
    /// Its idle timeout in seconds; at least one. `null` removes it. docs/api.md says when a sandbox is idle.
    #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<u32>, minimum = 1))]
    pub idle_timeout_s: Option<Option<u32>>,
    /// What happens when either timeout is over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_timeout: Option<OnTimeout>,
    /// What happens to it when its container's process ends, if thawd keeps its output. From then on it does not end with its `client`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_exit: Option<OnExit>,
}

impl ChangeSandbox {
    /// Whether it changes a timeout, or what happens then.
    pub fn has_timeout(&self) -> bool {
        self.timeout_s.is_some() || self.idle_timeout_s.is_some() || self.on_timeout.is_some()
    }
}
