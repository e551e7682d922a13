//! When a container is ready, and whether it is.

use serde::{Deserialize, Serialize};

/// Longest a container may take to become ready, seconds; and the shortest.
pub const READY_TIMEOUT_S: std::ops::RangeInclusive<u32> = 1..=3600;
/// Milliseconds between two questions over HTTP.
pub const READY_PERIOD_MS: std::ops::RangeInclusive<u32> = 10..=60_000;
/// Longest path that is asked for over HTTP, and longest host, characters.
pub const MOST_PROBE_PATH: usize = 1024;
pub const MOST_PROBE_HOST: usize = 253;

/// When a container is ready: exactly one of `tcp` and `http`. The creation is answered when it is; if it does not become
/// ready, the creation fails and the sandbox is gone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ReadinessProbe {
    /// A port that takes a connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tcp: Option<TcpProbe>,
    /// A GET that is answered with a status of 200 to 399.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http: Option<HttpProbe>,
    /// How long that may take, seconds from the start of the container's process.
    #[serde(default = "timeout_s")]
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 3600))]
    pub timeout_s: u32,
    /// How long after another status, or a connection without an answer, HTTP is asked again, milliseconds. For nothing else is
    /// there a period.
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

/// What is asked of the container over HTTP, without TLS.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct HttpProbe {
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 65535))]
    pub port: u16,
    /// With the query, if there is one.
    #[serde(default = "path")]
    #[cfg_attr(feature = "openapi", schema(max_length = 1024, pattern = "^/[!-~]*$"))]
    pub path: String,
    /// The `Host` header; without: `localhost` and the port.
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
    /// It did not become so: the sandbox goes.
    Failed,
}

impl ReadinessProbe {
    /// How long it may take where nobody says, seconds.
    pub const TIMEOUT_S: u32 = 30;
    /// The period where nobody says, milliseconds.
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
