//! thawd's HTTP API: JSON bodies of these types. docs/api.md describes it.
//!
//! | method and path | body | answer |
//! |---|---|---|
//! | `GET /v1/health` | — | [`Health`] |
//! | `GET`, `POST`, `DELETE /v1/node/drain` | — | [`Drain`] |
//! | `GET /v1/node/usage` | — | [`NodeUsage`] |
//! | `GET /metrics` | — | Prometheus's text format |
//! | `POST /v1/sandboxes` | [`CreateSandbox`] | 201, [`CreatedSandbox`] |
//! | `GET /v1/sandboxes` | — | [`SandboxList`] |
//! | `GET /v1/sandboxes?watch=1` | — | [`WatchEvent`]s, one a line |
//! | `GET /v1/sandboxes/{id}` | — | [`Sandbox`] |
//! | `GET /v1/sandboxes/{id}/metrics` | — | [`Usage`] |
//! | `PATCH /v1/sandboxes/{id}` | [`ChangeSandbox`] | [`Sandbox`] |
//! | `DELETE /v1/sandboxes/{id}`, with `?failed=keep` | — | 204 |
//! | `POST /v1/sandboxes/{id}/pause`, `…/resume` | — | 204 |
//! | `POST /v1/sandboxes/{id}/freeze` | [`FreezeSandbox`] | [`FrozenSandbox`] |
//! | `GET /v1/sandboxes/{id}/logs` | — | what its container wrote |
//! | `GET`, `PUT /v1/sandboxes/{id}/files?path=…` | —, the file | the file, 204 |
//! | `POST /v1/sandboxes/{id}/exec` | [`ExecProcess`] | [`ExecResult`], or [`ExecEvent`]s, one a line |
//! | `GET /v1/sandboxes/{id}/exec` | — | 101, a WebSocket: [`ExecProcess`], then [`ExecInput`]s; [`ExecEvent`]s |
//! | `POST /v1/sandboxes/{id}/fork` | [`ForkSandbox`] | 201, [`ForkedSandbox`] |
//! | `GET`, `POST /v1/images` | —, [`PullImage`] | [`ImageList`], 201 and [`Image`] |
//! | `GET`, `DELETE /v1/images/{image}` | — | [`ImageDetail`], 204 |
//! | `GET /v1/templates`, `DELETE /v1/templates/{key}` | — | [`TemplateList`], 204 |
//! | `PATCH /v1/sandboxes/{id}/network` | [`NetworkPolicy`] | [`Sandbox`] |
//! | `POST /v1/thaws` | [`ThawSandbox`] | 201, [`CreatedSandbox`] |
//!
//! A `thaw run` in its own process serves the same for its one sandbox at `owner.sock` in the sandbox's directory, but
//! for what makes a sandbox; `DELETE` ends the machine. Every other answer is a [`Problem`]. A container thawd did not start is
//! driven by the caller, over the sandbox's vsock socket.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::control::MemoryMode;

mod exec;
mod failure;
mod limits;
mod list;
mod network;
mod problem;
mod readiness;
mod store;
mod usage;

pub use exec::{
    Encoding, ExecEvent, ExecInput, ExecProcess, ExecResult, Exit, Piece, STDERR_CHANNEL, STDOUT_CHANNEL,
    TerminalSize,
};
pub use failure::{FAILED, SandboxFailure};
pub use limits::{ChangeSandbox, RATE_BYTES, RATE_OPS, RateLimit, RateLimits};
pub use list::{Bookmark, SandboxList, WatchEvent};
pub use network::{Egress, EgressRule, NetworkPolicy, PublishedPort, SandboxNetwork};
pub use problem::{PROBLEM_TYPE, PROBLEM_URN, Problem};
pub use readiness::{
    HttpProbe, MOST_PROBE_HOST, MOST_PROBE_PATH, READY_PERIOD_MS, READY_TIMEOUT_S, Readiness, ReadinessProbe,
    TcpProbe,
};
pub use store::{Image, ImageDetail, ImageLayer, ImageList, LoadOrder, PullImage, Template, TemplateList};
pub use usage::{NodeUsage, PoolUsage, SandboxUsage, Usage};

/// Largest body either side reads, in bytes.
pub const MAX_BODY: usize = 1 << 20;
/// What a writable layer may have, MiB.
pub const DISK_MIB: RangeInclusive<u32> = 64..=1 << 20;
/// What a CPU limit may be, thousandths of a CPU: the kernel gives no less than a millisecond in each 100 ms.
pub const CPU_LIMIT_MILLIS: RangeInclusive<u32> = 10..=64_000;
/// What it has where nobody says, MiB.
pub const DEFAULT_DISK_MIB: u32 = 8 << 10;
/// Largest file that is read or written in a container, bytes.
pub const MAX_FILE: u64 = 1 << 30;
/// The header with a file's permission bits, octal.
pub const FILE_MODE: &str = "thaw-file-mode";
/// The header that makes a creation happen once, however often it is asked for.
pub const IDEMPOTENCY_KEY: &str = "idempotency-key";

/// That thawd lives, and which it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Health {
    pub version: String,
    pub pid: u32,
    /// It makes no more sandboxes.
    #[serde(default)]
    pub draining: bool,
}

/// Whether thawd makes sandboxes, and what it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Drain {
    /// It makes no more.
    pub draining: bool,
    /// Sandboxes being made.
    pub making: usize,
    /// Sandboxes it has; they go on.
    pub sandboxes: usize,
}

/// One process: its number and when it started, clock ticks since boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ProcessIdentity {
    pub pid: i32,
    pub start_time: u64,
}

/// A sandbox to make.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CreateSandbox {
    /// As `thaw run` takes it, paths absolute; a path is for the role admin.
    #[cfg_attr(
        feature = "openapi",
        schema(max_length = 1024, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")
    )]
    pub image: String,
    /// `missing`, `always` or `never`.
    #[serde(default = "missing")]
    #[cfg_attr(feature = "openapi", schema(pattern = "^(missing|always|never)$"))]
    pub pull: String,
    /// Speak to the registry in clear. Takes the role admin.
    #[serde(default)]
    pub plain_http: bool,
    /// [`crate::control::VCPUS`].
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 16))]
    pub cpus: u8,
    /// [`crate::control::MEMORY_MIB`].
    #[cfg_attr(feature = "openapi", schema(minimum = 64, maximum = 65536))]
    pub memory_mib: u32,
    /// Of the writable layer, [`DISK_MIB`]; the host stores what is written.
    #[serde(default = "disk_mib")]
    #[cfg_attr(feature = "openapi", schema(minimum = 64, maximum = 1048576))]
    pub disk_mib: u32,
    #[serde(default)]
    #[cfg_attr(
        feature = "openapi",
        schema(max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")
    )]
    pub hostname: Option<String>,
    #[serde(default)]
    #[cfg_attr(
        feature = "openapi",
        schema(max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")
    )]
    pub name: Option<String>,
    /// `none` or `private`.
    #[serde(default = "private")]
    #[cfg_attr(feature = "openapi", schema(pattern = "^(none|private)$"))]
    pub network: String,
    /// Ports of the host that lead to it; to choose one is for the role admin, others have the host choose (0).
    #[serde(default)]
    pub publish: Vec<PublishedPort>,
    /// Where it may connect to; without: anywhere outside.
    #[serde(default)]
    pub network_policy: Option<NetworkPolicy>,
    /// What will run in it, to be shown to people, where the caller starts that itself.
    #[serde(default)]
    pub command: Vec<String>,
    /// The container to start in it. None: the caller makes one, over the sandbox's vsock socket.
    #[serde(default)]
    pub container: Option<StartContainer>,
    /// Delete the sandbox when this process of the host ends. Takes the role admin.
    #[serde(default)]
    pub client: Option<ProcessIdentity>,
    /// Boot the guest instead of thawing one.
    #[serde(default)]
    pub cold: bool,
    /// How a thawed guest gets its memory; `uffd` is refused.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = String, pattern = "^(cow|populate)$"))]
    pub memory_mode: MemoryMode,
    /// Keep what the run reads of its image, for later starts to read ahead. Takes the role admin.
    #[serde(default)]
    pub record: bool,
    /// Write it to this file too, absolute. Takes the role admin.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, max_length = 1024, pattern = r"^/[^\x00]*$"))]
    pub record_to: Option<PathBuf>,
    /// Read ahead what a recorded run of the image read.
    #[serde(default = "yes")]
    pub prefetch: bool,
    /// How the image is served: `virtiofs` or `erofs`.
    #[serde(default = "virtiofs")]
    #[cfg_attr(feature = "openapi", schema(pattern = "^(virtiofs|erofs)$"))]
    pub root: String,
    /// What callers find it by, docs/api.md has the syntax.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(schema_with = labels))]
    pub labels: BTreeMap<String, String>,
    /// Delete it after this many seconds, at least one.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(minimum = 1))]
    pub timeout_s: Option<u32>,
    /// Directories and files of the host its container has. A sandbox that has any is neither frozen nor forked. Takes the role admin.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(max_items = 128))]
    pub volumes: Vec<Volume>,
    /// Most of the host's CPU time it may take, its VMM included, thousandths of a CPU: [`CPU_LIMIT_MILLIS`]. Without: as much as its
    /// CPUs take.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(minimum = 10, maximum = 64000))]
    pub cpu_limit_millis: Option<u32>,
    /// How much its disks and its network may do.
    #[serde(default, skip_serializing_if = "RateLimits::is_none")]
    pub rate_limits: RateLimits,
}

/// A directory or file of the host, in a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Volume {
    /// What to share, absolute. It must be there.
    #[cfg_attr(feature = "openapi", schema(value_type = String, max_length = 4095, pattern = r"^/[^\x00]*$"))]
    pub host: PathBuf,
    /// Where the container has it, absolute; made where it is missing.
    #[cfg_attr(feature = "openapi", schema(value_type = String, max_length = 4095, pattern = r"^/[^\x00]+$"))]
    pub guest: PathBuf,
    /// Nothing of it can be changed.
    #[serde(default)]
    pub read_only: bool,
}

/// A container to start in a new sandbox. Its input is empty; what it writes is kept (`GET …/logs`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct StartContainer {
    /// Replaces the image's entry point; the image's command is then not used. Empty: no entry point.
    #[serde(default)]
    pub entrypoint: Option<String>,
    /// Replaces the image's command.
    #[serde(default)]
    pub command: Vec<String>,
    /// `NAME=VALUE`, over the image's.
    #[serde(default)]
    pub env: Vec<String>,
    /// Absolute. None: the image's.
    #[serde(default)]
    pub workdir: Option<String>,
    /// `USER[:GROUP]`, names or numbers. None: the image's.
    #[serde(default)]
    pub user: Option<String>,
    /// Give its process a terminal: what it writes is all stdout.
    #[serde(default)]
    pub tty: bool,
    /// Let it not write to its root file system.
    #[serde(default)]
    pub read_only: bool,
    /// Which system calls it may make.
    #[serde(default, skip_serializing_if = "SeccompProfile::is_default")]
    pub seccomp: SeccompProfile,
    /// What becomes of the sandbox when its process has ended.
    #[serde(default)]
    pub on_exit: OnExit,
    /// When it is ready. None: when its process was started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub readiness: Option<ReadinessProbe>,
}

/// Which system calls a container may make.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum SeccompProfile {
    /// Those that `docker run` allows.
    #[default]
    Default,
    /// All of its guest's.
    Unconfined,
}

impl SeccompProfile {
    fn is_default(&self) -> bool {
        *self == SeccompProfile::Default
    }
}

/// What becomes of a sandbox whose container's process has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum OnExit {
    /// It stays, its state `exited`, until it is deleted.
    #[default]
    Keep,
    Delete,
}

/// A sandbox to make of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ThawSandbox {
    /// The snapshot's directory, absolute.
    #[cfg_attr(feature = "openapi", schema(value_type = String, max_length = 1024, pattern = r"^/[^\x00]*$"))]
    pub directory: PathBuf,
    #[serde(default)]
    #[cfg_attr(
        feature = "openapi",
        schema(max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")
    )]
    pub hostname: Option<String>,
    #[serde(default)]
    #[cfg_attr(
        feature = "openapi",
        schema(max_length = 253, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")
    )]
    pub name: Option<String>,
    /// Delete the sandbox when this process ends.
    #[serde(default)]
    pub client: Option<ProcessIdentity>,
    /// How it gets its memory; `uffd` is refused.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = String, pattern = "^(cow|populate)$"))]
    pub memory_mode: MemoryMode,
    /// Ports of the host that lead to it.
    #[serde(default)]
    pub publish: Vec<PublishedPort>,
    /// Where it may connect to; without: where the frozen one might.
    #[serde(default)]
    pub network_policy: Option<NetworkPolicy>,
    /// How much its disks and its network may do, where that is not what the frozen one's might.
    #[serde(default, skip_serializing_if = "RateLimits::is_none")]
    pub rate_limits: RateLimits,
    /// What callers find it by, docs/api.md has the syntax.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(schema_with = labels))]
    pub labels: BTreeMap<String, String>,
    /// Delete it after this many seconds, at least one.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(minimum = 1))]
    pub timeout_s: Option<u32>,
}

/// The schema of labels.
#[cfg(feature = "openapi")]
fn labels() -> utoipa::openapi::schema::Object {
    use utoipa::openapi::schema::{ObjectBuilder, Type};
    let text = |pattern: &str| {
        ObjectBuilder::new()
            .schema_type(Type::String)
            .pattern(Some(pattern))
    };
    ObjectBuilder::new()
        .schema_type(Type::Object)
        .description(Some("What callers find it by, docs/api.md has the syntax."))
        .max_properties(Some(64))
        .property_names(Some(text(
            r"^([A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$",
        )))
        .additional_properties(Some(text(r"^([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?$")))
        .build()
}

/// How to freeze a running sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct FreezeSandbox {
    /// The snapshot's directory, absolute; nothing may be there.
    #[cfg_attr(feature = "openapi", schema(value_type = String, max_length = 1024, pattern = r"^/[^\x00]*$"))]
    pub directory: PathBuf,
    /// Only what was written since the sandbox was thawed, to lie on what it was thawed from.
    #[serde(default)]
    pub delta: bool,
    /// Leave the sandbox paused afterwards, its workloads stopped.
    #[serde(default)]
    pub stop: bool,
    /// The private key's file to sign the snapshot with, absolute; whoever owns the sandbox reads it.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, max_length = 1024, pattern = r"^/[^\x00]*$"))]
    pub sign: Option<PathBuf>,
}

/// How to make clones of a running sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ForkSandbox {
    /// How many: 1 to 32.
    #[serde(default = "one")]
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 32))]
    pub count: u8,
    /// How they get their memory; `uffd` is refused.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = String, pattern = "^(cow|populate)$"))]
    pub memory_mode: MemoryMode,
    /// The clones'; docs/api.md has the syntax.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(schema_with = labels))]
    pub labels: BTreeMap<String, String>,
    /// Delete the clones after this many seconds, at least one.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(minimum = 1))]
    pub timeout_s: Option<u32>,
    /// The private key's file to sign the snapshot between with, absolute: where only signed ones are thawed. Takes the role admin.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, max_length = 1024, pattern = r"^/[^\x00]*$"))]
    pub sign: Option<PathBuf>,
}

/// What a fork did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ForkedSandbox {
    /// How the original was frozen: it runs on.
    pub frozen: FrozenSandbox,
    /// The clones, as many as were asked for.
    pub items: Vec<CreatedSandbox>,
}

/// What a freeze did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FrozenSandbox {
    /// Bytes of memory written.
    pub memory_bytes: u64,
    /// How long the machine stood still, nanoseconds.
    pub paused_ns: u64,
}

fn yes() -> bool {
    true
}

fn one() -> u8 {
    1
}

fn missing() -> String {
    "missing".into()
}

fn disk_mib() -> u32 {
    DEFAULT_DISK_MIB
}

fn virtiofs() -> String {
    "virtiofs".into()
}

fn private() -> String {
    "private".into()
}

/// A sandbox that was made: its agent takes containers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CreatedSandbox {
    pub sandbox: Sandbox,
    /// The image's configuration, JSON as the OCI image specification has it; `null` where it is not known.
    pub image_config: String,
    /// Where the time went.
    pub account: Account,
}

/// Where the time of a start went.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Account {
    /// By start.
    pub stages: Vec<Stage>,
    /// Why it was slower than it could be.
    pub reasons: Vec<Reason>,
    /// What was counted, by name: `faults`, `populated_pages`.
    pub counts: BTreeMap<String, u64>,
    /// What was done in a stage, by its name, in words: how the image was had.
    #[serde(default)]
    pub notes: BTreeMap<String, String>,
}

/// One stage of a start, nanoseconds since its beginning.
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
    /// A stable name for programs.
    pub code: String,
    /// A sentence for people.
    pub text: String,
}

/// A sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Sandbox {
    pub id: String,
    /// Whose it is, if it is a tenant's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    pub name: Option<String>,
    pub image: String,
    pub command: Vec<String>,
    /// Seconds since the Unix epoch.
    pub created: u64,
    pub cpus: u8,
    pub memory_mib: u32,
    /// `running`, `paused`, `exited` (its container's process has ended), `ended` (its machine has, and what it has on the
    /// host is being removed) or `failed` (it ended unasked, and this record alone is left of it).
    pub state: String,
    /// Why it ended.
    pub reason: Option<String>,
    /// How it failed, if it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<SandboxFailure>,
    /// What its container's process ended with, where thawd started or thawed that: the exit code, or 128 and the number of
    /// the signal that ended it.
    #[serde(default)]
    pub exit_code: Option<i32>,
    /// Whether its container is ready, where that was asked for.
    #[serde(default)]
    pub readiness: Option<Readiness>,
    /// Its vsock socket: a peer says `CONNECT <port>\n`.
    pub vsock: String,
    /// The VMM's process.
    pub vmm_pid: Option<i32>,
    #[serde(default)]
    pub network: Option<SandboxNetwork>,
    /// How much its disks and its network may do.
    #[serde(default)]
    pub rate_limits: RateLimits,
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// It is deleted this many seconds after it was made.
    #[serde(default)]
    pub timeout_s: Option<u32>,
    /// The change that made it so: grows with every change of any sandbox, and never comes again.
    #[serde(default)]
    pub resource_version: u64,
    /// Why its volumes answer errors for good: the process that served them died, and no other is started.
    #[serde(default)]
    pub volumes_error: Option<String>,
}
