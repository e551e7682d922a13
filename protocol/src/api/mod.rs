//! Types of thawd's HTTP API, which exchanges them as JSON. docs/api.md describes it.
//!
//! | method and path | body | answer |
//! |---|---|---|
//! | `GET /v1/health` | — | [`Health`] |
//! | `GET`, `POST`, `DELETE /v1/node/drain` | — | [`Drain`] |
//! | `GET /v1/node/usage` | — | [`NodeUsage`] |
//! | `GET /v1/quota` | — | [`Quota`] |
//! | `GET /v1/tenants` | — | [`QuotaList`] |
//! | `PUT`, `DELETE /v1/tenants/{tenant}/limits` | [`TenantLimits`], — | [`Quota`] |
//! | `GET /metrics` | — | Prometheus's text format |
//! | `POST /v1/sandboxes` | [`CreateSandbox`] | 201, [`CreatedSandbox`] |
//! | `GET /v1/sandboxes` | — | [`SandboxList`] |
//! | `GET /v1/sandboxes?watch=1` | — | [`WatchEvent`]s, one a line |
//! | `GET /v1/sandboxes/{id}` | — | [`Sandbox`] |
//! | `GET /v1/sandboxes/{id}/metrics` | — | [`Usage`] |
//! | `PATCH /v1/sandboxes/{id}` | [`ChangeSandbox`] | [`Sandbox`] |
//! | `DELETE /v1/sandboxes/{id}`, with `?failed=keep`, `?exited=keep` | — | 204 |
//! | `POST /v1/sandboxes/{id}/pause`, `…/resume` | [`PauseSandbox`] or —, — | 204 |
//! | `POST /v1/sandboxes/{id}/signal` | [`SignalContainer`] | 204 |
//! | `POST /v1/sandboxes/{id}/stop`, `…/restart` | [`StopContainer`] | 204 |
//! | `GET /v1/sandboxes/{id}/exit` | — | [`ContainerExit`] |
//! | `POST /v1/sandboxes/{id}/freeze` | [`FreezeSandbox`] | [`FrozenSandbox`] |
//! | `GET /v1/sandboxes/{id}/logs` | — | the output of its container, or [`LogEvent`]s, one a line |
//! | `POST /v1/sandboxes/{id}/monitor` | — | 204 |
//! | `GET`, `PUT /v1/sandboxes/{id}/files?path=…` | —, the file | the file, 204 |
//! | `GET`, `PUT /v1/sandboxes/{id}/files?path=…&archive=tar` | —, a tar stream | a tar stream, 204 |
//! | `GET /v1/sandboxes/{id}/files/stat?path=…`, `…/list?path=…` | — | [`FileInfo`], [`FileList`] |
//! | `GET /v1/sandboxes/{id}/files/watch?path=…` | — | [`FileEvent`]s, one a line |
//! | `POST /v1/sandboxes/{id}/files/mkdir`, `…/move` | [`MakeDirectory`], [`MoveFile`] | 204 |
//! | `DELETE /v1/sandboxes/{id}/files?path=…` | — | 204 |
//! | `POST /v1/sandboxes/{id}/exec` | [`ExecProcess`] | [`ExecResult`], or [`ExecEvent`]s, one a line |
//! | `GET /v1/sandboxes/{id}/exec` | — | 101, a WebSocket: [`ExecProcess`], then [`ExecInput`]s; [`ExecEvent`]s |
//! | `POST /v1/sandboxes/{id}/exec` with `keep` | [`ExecProcess`] | 201, [`KeptProcess`] |
//! | `GET /v1/sandboxes/{id}/processes`, `…/output?process=…` | — | [`ProcessList`], [`ExecEvent`]s, one a line |
//! | `POST /v1/sandboxes/{id}/processes/input`, `…/signal` | [`ProcessInput`], [`ProcessSignal`] | 204 |
//! | `POST /v1/sandboxes/{id}/fork` | [`ForkSandbox`] | 201, [`ForkedSandbox`] |
//! | `GET`, `POST /v1/images` | —, [`PullImage`] | [`ImageList`], 201 and [`Image`] |
//! | `GET`, `DELETE /v1/images/{image}` | — | [`ImageDetail`], 204 |
//! | `GET /v1/templates`, `DELETE /v1/templates/{key}` | — | [`TemplateList`], 204 |
//! | `PATCH /v1/sandboxes/{id}/network` | [`NetworkPolicy`] | [`Sandbox`] |
//! | `POST /v1/thaws` | [`ThawSandbox`] | 201, [`CreatedSandbox`] |
//! | `GET`, `POST /v1/snapshots` | —, [`PullSnapshot`] | [`SnapshotList`], 201 and [`Snapshot`] |
//! | `GET /v1/snapshots?watch=1` | — | [`SnapshotEvent`]s, one a line |
//! | `GET`, `DELETE /v1/snapshots/{id}`, with `?force=true` | — | [`Snapshot`], 204 |
//! | `PATCH /v1/snapshots/{id}` | [`ChangeSnapshot`] | [`Snapshot`] |
//! | `POST /v1/snapshots/{id}/verify` | — | [`VerifiedSnapshot`] |
//! | `POST /v1/snapshots/{id}/push` | [`PushSnapshot`] | [`PushedSnapshot`] |
//!
//! A `thaw run` that owns its sandbox serves the same requests for it at `owner.sock` in the sandbox's
//! directory, except those that create sandboxes; `DELETE` ends the machine. Every other answer is a
//! [`Problem`]. If thawd did not start the container, the caller controls it over the sandbox's vsock socket.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

mod change;
mod container_settings;
mod create;
mod event;
mod exec;
mod failure;
mod files;
mod health_check;
mod hooks;
#[cfg(feature = "openapi")]
mod labels;
mod life;
mod list;
mod logs;
mod network;
mod on_timeout;
mod pause;
mod problem;
mod quota;
mod rate_limits;
mod readiness;
mod sandbox;
mod snapshot;
mod store;
mod usage;

pub use change::ChangeSandbox;
pub use container_settings::ContainerSettings;
pub use create::{CreateSandbox, OnExit, SeccompProfile, StartContainer, Volume};
pub use event::{SandboxAction, SandboxEvent};
pub use exec::{
    Encoding, ExecEvent, ExecInput, ExecProcess, ExecResult, Exit, KeptProcess, Piece, ProcessInput,
    ProcessList, ProcessSignal, STDERR_CHANNEL, STDOUT_CHANNEL, SignalContainer, TerminalSize,
};
pub use failure::{EXITED, FAILED, SandboxFailure};
pub use files::{
    ChangedFile, FILES_PAGE, FileEvent, FileInfo, FileKind, FileList, MakeDirectory, MoveFile, WatchEnd,
};
pub use health_check::{
    ContainerHealth, HEALTH_MS, HealthCheck, HealthResult, HealthStatus, MOST_HEALTH_COMMAND,
};
pub use hooks::{HOOK_MS, Hook, HookRequest, HookResult, Hooks, MOST_HOOK_COMMAND, OnHookFailure};
pub use life::{ContainerExit, RestartMode, RestartPolicy, STOP_TIMEOUT_S, StopContainer};
pub use list::{Bookmark, SandboxList, SnapshotEvent, WatchEvent};
pub use logs::{LogEvent, LogStream};
pub use network::{DomainLists, Egress, EgressRule, NetworkPolicy, PublishedPort, SandboxNetwork};
pub use on_timeout::OnTimeout;
pub use pause::{PauseSandbox, PausedMemory};
pub use problem::{PROBLEM_TYPE, PROBLEM_URN, Problem};
pub use quota::{CREATIONS_PER_MINUTE, NodeCapacity, Quantity, Quota, QuotaList, TenantLimits, TenantUse};
pub use rate_limits::{RATE_BYTES, RATE_OPS, RateLimit, RateLimits};
pub use readiness::{
    HttpProbe, MOST_PROBE_HOST, MOST_PROBE_PATH, READY_PERIOD_MS, READY_TIMEOUT_S, Readiness, ReadinessProbe,
    TcpProbe,
};
pub use sandbox::{Account, CreatedSandbox, ProcessIdentity, Reason, Sandbox, Stage};
pub use snapshot::{
    ChangeSnapshot, ForkSandbox, ForkedSandbox, FreezeSandbox, FrozenSandbox, PullSnapshot, PushSnapshot,
    PushedSnapshot, Snapshot, SnapshotBase, SnapshotList, SnapshotManifest, ThawSandbox, VerifiedSnapshot,
};
pub use store::{Image, ImageDetail, ImageLayer, ImageList, LoadOrder, PullImage, Template, TemplateList};
pub use usage::{NodeUsage, PoolUsage, SandboxUsage, Usage};

/// Largest request or response body, in bytes.
pub const MAX_BODY: usize = 1 << 20;
/// Valid sizes of the writable layer, in MiB.
pub const DISK_MIB: RangeInclusive<u32> = 64..=1 << 20;
/// Valid CPU limits, in thousandths of a CPU. The kernel's minimum is 1 ms per 100 ms.
pub const CPU_LIMIT_MILLIS: RangeInclusive<u32> = 10..=64_000;
/// Default size of the writable layer, in MiB.
pub const DEFAULT_DISK_MIB: u32 = 8 << 10;
/// Largest file that can be read or written in a container, in bytes.
pub const MAX_FILE: u64 = 1 << 30;
/// Header with a file's permission bits, in octal.
pub const FILE_MODE: &str = "thaw-file-mode";
/// Header that makes a repeated creation request return the first one's sandbox.
pub const IDEMPOTENCY_KEY: &str = "idempotency-key";

/// State of thawd.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Health {
    pub version: String,
    pub pid: u32,
    /// It refuses new sandboxes.
    #[serde(default)]
    pub draining: bool,
}

/// Whether thawd accepts new sandboxes, and how many it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Drain {
    /// It refuses new sandboxes.
    pub draining: bool,
    /// Sandboxes in creation.
    pub making: usize,
    /// Existing sandboxes; they keep running.
    pub sandboxes: usize,
}
