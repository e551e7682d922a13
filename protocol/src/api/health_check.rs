//! The health check of a container, and what it found.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

/// Valid intervals and timeouts of health checks, in milliseconds.
pub const HEALTH_MS: RangeInclusive<u64> = 1..=86_400_000;
/// Longest command of a health check, in bytes.
pub const MOST_HEALTH_COMMAND: usize = 32 << 10;

/// A command that is run in a container again and again. It is healthy while the command exits with 0.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct HealthCheck {
    /// A program and its arguments.
    pub command: Vec<String>,
    /// Milliseconds from the end of a check to the next; 30 s if absent.
    #[serde(default = "thirty_seconds")]
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 86400000))]
    pub interval_ms: u64,
    /// How long a check may take, in milliseconds; 30 s if absent.
    #[serde(default = "thirty_seconds")]
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 86400000))]
    pub timeout_ms: u64,
    /// For this many milliseconds after a start, failures do not count, until the first success. Checks are then at
    /// most 5 s apart.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(minimum = 0, maximum = 86400000))]
    pub start_period_ms: u64,
    /// Number of failures in a row after which it is unhealthy; 3 if absent.
    #[serde(default = "three")]
    #[cfg_attr(feature = "openapi", schema(minimum = 1))]
    pub retries: u32,
}

impl HealthCheck {
    /// Checks that its command and times are valid.
    ///
    /// # Errors
    /// What is invalid, in words.
    pub fn check(&self) -> Result<(), String> {
        let length: usize = self.command.iter().map(String::len).sum();
        if self.command.first().is_none_or(String::is_empty) || self.command.iter().any(|c| c.contains('\0'))
        {
            return Err("command is not a program and its arguments, without NUL".into());
        }
        if length > MOST_HEALTH_COMMAND {
            return Err(format!("command is at most {MOST_HEALTH_COMMAND} bytes"));
        }
        let (least, most) = (HEALTH_MS.start(), HEALTH_MS.end());
        for (name, value) in [("interval_ms", self.interval_ms), ("timeout_ms", self.timeout_ms)] {
            if !HEALTH_MS.contains(&value) {
                return Err(format!("{name} is {value}; it may be {least} to {most}"));
            }
        }
        match (self.start_period_ms <= *most, self.retries) {
            (false, _) => Err(format!(
                "start_period_ms is {}; it may be 0 to {most}",
                self.start_period_ms
            )),
            (true, 0) => Err("retries is 0; it may be 1 or more".into()),
            (true, _) => Ok(()),
        }
    }
}

/// Whether a container is healthy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum HealthStatus {
    /// No check has decided yet.
    #[default]
    Starting,
    Healthy,
    Unhealthy,
}

impl HealthStatus {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            HealthStatus::Starting => "starting",
            HealthStatus::Healthy => "healthy",
            HealthStatus::Unhealthy => "unhealthy",
        }
    }
}

/// The health of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ContainerHealth {
    pub status: HealthStatus,
    /// How many checks in a row have failed.
    pub failing_streak: u32,
    /// The last five checks, oldest first. Lists and watches have none.
    #[serde(default)]
    pub log: Vec<HealthResult>,
}

/// A health check that was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct HealthResult {
    /// Nanoseconds since the Unix epoch.
    pub start_ns: u64,
    /// Nanoseconds since the Unix epoch.
    pub end_ns: u64,
    /// The exit code of the command; -1 if it did not end in time or could not be run.
    pub exit_code: i32,
    /// The first 4096 bytes of what it wrote.
    pub output: String,
}

fn thirty_seconds() -> u64 {
    30_000
}

fn three() -> u32 {
    3
}
