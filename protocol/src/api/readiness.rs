//! Readiness of a container.

use serde::{Deserialize, Serialize};

/// Valid timeouts of readiness, in seconds.
pub const READY_TIMEOUT_S: std::ops::RangeInclusive<u32> = 1..=3600;
/// Valid periods between HTTP requests, in milliseconds.
pub const READY_PERIOD_MS: std::ops::RangeInclusive<u32> = 10..=60_000;
/// Longest path and longest `Host` header of an HTTP probe, in characters.
pub const MOST_PROBE_PATH: usize = 1024;
pub const MOST_PROBE_HOST: usize = 253;

/// When a container is ready: exactly one of `tcp` and `http`. The answer to the creation comes once the
/// container is ready. If it does not become ready in time, the creation fails and the sandbox is deleted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ReadinessProbe {
    /// Ready when a port accepts a connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tcp: Option<TcpProbe>,
    /// Ready when a GET is answered with a status of 200 to 399.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http: Option<HttpProbe>,
    /// Timeout in seconds, from the start of the container's process.
    #[serde(default = "timeout_s")]
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 3600))]
    pub timeout_s: u32,
    /// Delay in milliseconds before another HTTP request, after another status or a connection without an
    /// answer. Other failures are not polled.
    #[serde(default = "period_ms")]
    #[cfg_attr(feature = "openapi", schema(minimum = 10, maximum = 60000))]
    pub period_ms: u32,
}

/// A TCP port of the container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct TcpProbe {
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 65535))]
    pub port: u16,
}

/// An HTTP request to the container, without TLS.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct HttpProbe {
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 65535))]
    pub port: u16,
    /// Path, with the query if there is one.
    #[serde(default = "path")]
    #[cfg_attr(feature = "openapi", schema(max_length = 1024, pattern = "^/[!-~]*$"))]
    pub path: String,
    /// The `Host` header. `localhost` and the port if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(max_length = 253, pattern = "^[!-~]+$"))]
    pub host: Option<String>,
}

/// Whether a container is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Readiness {
    Waiting,
    Ready,
    /// It did not become ready; the sandbox is deleted.
    Failed,
}

impl ReadinessProbe {
    /// Default timeout in seconds.
    pub const TIMEOUT_S: u32 = 30;
    /// Default period in milliseconds.
    pub const PERIOD_MS: u32 = 100;
}

fn timeout_s() -> u32 {
    ReadinessProbe::TIMEOUT_S
}

fn period_ms() -> u32 {
    ReadinessProbe::PERIOD_MS
}

fn path() -> String {
    "/".into()
}
