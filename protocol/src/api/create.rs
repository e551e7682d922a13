//! Requests to create a sandbox and its container.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

#[cfg(feature = "openapi")]
use super::labels::labels;
use super::{
    ContainerSettings, DEFAULT_DISK_MIB, HealthCheck, Hooks, NetworkPolicy, OnTimeout, ProcessIdentity,
    PublishedPort, RateLimits, ReadinessProbe, RestartPolicy,
};
use crate::control::MemoryMode;

/// A sandbox to create.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CreateSandbox {
    /// An image as `thaw run` takes it; paths are absolute. A path requires the role admin.
    #[cfg_attr(
        feature = "openapi",
        schema(max_length = 1024, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")
    )]
    pub image: String,
    /// When to pull the image: `missing`, `always` or `never`.
    #[serde(default = "missing")]
    #[cfg_attr(feature = "openapi", schema(pattern = "^(missing|always|never)$"))]
    pub pull: String,
    /// Use HTTP without TLS for the registry. Requires the role admin.
    #[serde(default)]
    pub plain_http: bool,
    /// Number of CPUs, 1 to 16.
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 16))]
    pub cpus: u8,
    /// Memory in MiB, 64 to 65536.
    #[cfg_attr(feature = "openapi", schema(minimum = 64, maximum = 65536))]
    pub memory_mib: u32,
    /// Size of the writable layer in MiB, 64 to 1048576. Only what is written occupies the host's disk.
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
    /// Ports of the host that are forwarded to it. Choosing a host port requires the role admin; with 0 the
    /// host chooses.
    #[serde(default)]
    pub publish: Vec<PublishedPort>,
    /// Where it may connect to. Anywhere outside the host if absent.
    #[serde(default)]
    pub network_policy: Option<NetworkPolicy>,
    /// The command that the caller itself will start in it. For display only.
    #[serde(default)]
    pub command: Vec<String>,
    /// The container to start in it. If absent, the caller creates one over the sandbox's vsock socket.
    #[serde(default)]
    pub container: Option<StartContainer>,
    /// Delete the sandbox when this process of the host ends. Requires the role admin.
    #[serde(default)]
    pub client: Option<ProcessIdentity>,
    /// Boot the guest instead of thawing a template.
    #[serde(default)]
    pub cold: bool,
    /// How a thawed guest's memory is loaded; `uffd` is refused.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = String, pattern = "^(cow|populate)$"))]
    pub memory_mode: MemoryMode,
    /// Record which bytes of the image this run reads, so that later starts prefetch them.
    /// Requires the role admin.
    #[serde(default)]
    pub record: bool,
    /// Also write the record to this file; an absolute path. Requires the role admin.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, max_length = 1024, pattern = r"^/[^\x00]*$"))]
    pub record_to: Option<PathBuf>,
    /// Prefetch what a recorded run of the image read.
    #[serde(default = "yes")]
    pub prefetch: bool,
    /// How the image is served: `virtiofs` or `erofs`.
    #[serde(default = "virtiofs")]
    #[cfg_attr(feature = "openapi", schema(pattern = "^(virtiofs|erofs)$"))]
    pub root: String,
    /// Labels by which callers select it; docs/api.md describes the syntax.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(schema_with = labels))]
    pub labels: BTreeMap<String, String>,
    /// Its timeout in seconds; at least one.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(minimum = 1))]
    pub timeout_s: Option<u32>,
    /// Its idle timeout in seconds; at least one. docs/api.md says when a sandbox is idle.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(minimum = 1))]
    pub idle_timeout_s: Option<u32>,
    /// What happens when either timeout is over.
    #[serde(default, skip_serializing_if = "OnTimeout::is_default")]
    pub on_timeout: OnTimeout,
    /// Directories and files of the host for its container. A sandbox with volumes cannot be frozen or
    /// forked. Requires the role admin.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(max_items = 128))]
    pub volumes: Vec<Volume>,
    /// CPU limit in thousandths of a CPU, 10 to 64000. It includes the CPU time of the VMM. If absent, only the
    /// number of CPUs limits the sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(minimum = 10, maximum = 64000))]
    pub cpu_limit_millis: Option<u32>,
    /// Rate limits of its disks and its network.
    #[serde(default, skip_serializing_if = "RateLimits::is_none")]
    pub rate_limits: RateLimits,
    /// Wait for what only the machine knows of its start, which takes a moment: the stage `entry`, page faults, and whether pages came
    /// from the disk.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub timings: bool,
}

/// A directory or file of the host that a container mounts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Volume {
    /// Absolute path on the host. It must exist.
    #[cfg_attr(feature = "openapi", schema(value_type = String, max_length = 4095, pattern = r"^/[^\x00]*$"))]
    pub host: PathBuf,
    /// Absolute path in the container. It is created if it does not exist.
    #[cfg_attr(feature = "openapi", schema(value_type = String, max_length = 4095, pattern = r"^/[^\x00]+$"))]
    pub guest: PathBuf,
    /// The container cannot change it.
    #[serde(default)]
    pub read_only: bool,
}

/// A container to start in a new sandbox. Its input is empty; its output is kept (`GET …/logs`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct StartContainer {
    /// Replaces the image's entry point, and the image's command is ignored. An empty string means no entry
    /// point.
    #[serde(default)]
    pub entrypoint: Option<String>,
    /// Replaces the image's command.
    #[serde(default)]
    pub command: Vec<String>,
    /// `NAME=VALUE`, added to the image's environment.
    #[serde(default)]
    pub env: Vec<String>,
    /// Absolute path. The image's if absent.
    #[serde(default)]
    pub workdir: Option<String>,
    /// `USER[:GROUP]`, names or numbers. The image's if absent.
    #[serde(default)]
    pub user: Option<String>,
    /// Run its process on a terminal; all its output is then stdout.
    #[serde(default)]
    pub tty: bool,
    /// Make its root file system read-only.
    #[serde(default)]
    pub read_only: bool,
    /// The system calls it may make.
    #[serde(default, skip_serializing_if = "SeccompProfile::is_default")]
    pub seccomp: SeccompProfile,
    /// Its mounts, limits, privileges and names.
    #[serde(default, skip_serializing_if = "ContainerSettings::is_default")]
    pub settings: ContainerSettings,
    /// What happens to the sandbox when its process ends.
    #[serde(default)]
    pub on_exit: OnExit,
    /// When it is ready. If absent, it is ready once its process has started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub readiness: Option<ReadinessProbe>,
    /// When its program is started again after it has ended.
    #[serde(default, skip_serializing_if = "RestartPolicy::is_no")]
    pub restart: RestartPolicy,
    /// Number of the signal that stops it. The image's if absent, or else SIGTERM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 64))]
    pub stop_signal: Option<u8>,
    /// Seconds from that signal to SIGKILL; -1: no SIGKILL. 10 if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(minimum = -1, maximum = 86400))]
    pub stop_timeout_s: Option<i32>,
    /// How its health is checked. The image's check if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health_check: Option<HealthCheck>,
    /// Do not check its health, even if the image has a check.
    #[serde(default)]
    pub no_health_check: bool,
    /// What is run in it before a freeze and after a thaw. Each that is absent is the image's: docs/snapshots.md.
    #[serde(default, skip_serializing_if = "Hooks::is_none")]
    pub hooks: Hooks,
    /// Do not run the hooks of the image.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub no_image_hooks: bool,
}

/// The system calls a container may make.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum SeccompProfile {
    /// Those of Docker's default profile.
    #[default]
    Default,
    /// All system calls of its guest.
    Unconfined,
}

impl SeccompProfile {
    fn is_default(&self) -> bool {
        *self == SeccompProfile::Default
    }
}

/// What happens to a sandbox when its container's process ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum OnExit {
    /// The sandbox stays in state `exited` until it is deleted.
    #[default]
    Keep,
    Delete,
    /// Its machine ends. The sandbox stays listed as `exited`, with its output, until it is deleted or its retention is over.
    End,
}

fn yes() -> bool {
    true
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
