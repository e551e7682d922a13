//! Snapshots: requests to thaw, freeze and fork a sandbox, their results, and the snapshots that a node stores.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

#[cfg(feature = "openapi")]
use super::labels::{changed_labels, labels};
use super::{CreatedSandbox, Hooks, NetworkPolicy, OnTimeout, ProcessIdentity, PublishedPort, RateLimits};
use crate::control::MemoryMode;

/// A sandbox to thaw from a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ThawSandbox {
    /// Absolute path of the snapshot's directory. Requires the role admin. Either this or `snapshot`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, max_length = 1024, pattern = r"^/[^\x00]*$"))]
    pub directory: Option<PathBuf>,
    /// A stored snapshot: its id, its name, or an unambiguous beginning of its id. With a slash: what a snapshot was pushed to, or the
    /// same with `@` and a digest; it is fetched while the sandbox runs, and then stored. A layout directory, and a registry on the
    /// host's loopback, require the role admin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(
        feature = "openapi",
        schema(max_length = 1024, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")
    )]
    pub snapshot: Option<String>,
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
    /// Delete the sandbox when this process ends. Requires the role admin.
    #[serde(default)]
    pub client: Option<ProcessIdentity>,
    /// How its memory is loaded; `uffd` is refused, and `populate` if `snapshot` has a slash.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = String, pattern = "^(cow|populate)$"))]
    pub memory_mode: MemoryMode,
    /// Ports of the host that are forwarded to it. Choosing a host port requires the role admin; with 0 the
    /// host chooses.
    #[serde(default)]
    pub publish: Vec<PublishedPort>,
    /// Where it may connect to. The policy of the frozen sandbox if absent.
    #[serde(default)]
    pub network_policy: Option<NetworkPolicy>,
    /// Rate limits of its disks and its network. Those of the frozen sandbox if absent.
    #[serde(default, skip_serializing_if = "RateLimits::is_none")]
    pub rate_limits: RateLimits,
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
    /// Fail unless the snapshot has an `after_thaw` hook and this succeeds. Then nothing is left of the sandbox.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub require_hook: bool,
    /// Wait for what only the machine knows of its start, which takes a moment: the stage `entry`, page faults, and whether pages came
    /// from the disk.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub timings: bool,
}

/// How to freeze a running sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct FreezeSandbox {
    /// Absolute path of the snapshot's directory, which must not exist. If absent, the node stores the snapshot.
    /// Requires the role admin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, max_length = 1024, pattern = r"^/[^\x00]*$"))]
    pub directory: Option<PathBuf>,
    /// A name for the stored snapshot, unique among those of the sandbox's tenant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(
        feature = "openapi",
        schema(max_length = 253, pattern = r"^[^/\x00-\x1f\x7f-\x9f]+$")
    )]
    pub name: Option<String>,
    /// Labels of the stored snapshot; docs/api.md describes the syntax.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[cfg_attr(feature = "openapi", schema(schema_with = labels))]
    pub labels: BTreeMap<String, String>,
    /// Write only what changed since the sandbox was thawed. The snapshot then refers to the one it was
    /// thawed from.
    #[serde(default)]
    pub delta: bool,
    /// Leave the sandbox paused, its workloads stopped.
    #[serde(default)]
    pub stop: bool,
    /// Absolute path of the private key to sign the snapshot with. The sandbox's owner reads it.
    /// Requires the role admin.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, max_length = 1024, pattern = r"^/[^\x00]*$"))]
    pub sign: Option<PathBuf>,
    /// Fail unless the sandbox has an `after_thaw` hook.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub require_hook: bool,
}

/// How to clone a running sandbox. A clone of a running process has everything that is in its memory: keys, tokens, sessions, the state of its
/// own random generators, caches and locks that it holds elsewhere. The kernel's random generator, the clock, the host name and the network
/// are new; connections end. docs/snapshots.md says what a program must renew, and how a hook does it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ForkSandbox {
    /// Number of clones, 1 to 32.
    #[serde(default = "one")]
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 32))]
    pub count: u8,
    /// How their memory is loaded; `uffd` is refused.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = String, pattern = "^(cow|populate)$"))]
    pub memory_mode: MemoryMode,
    /// The clones' labels; docs/api.md describes the syntax.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(schema_with = labels))]
    pub labels: BTreeMap<String, String>,
    /// The clones' timeout in seconds; at least one.
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
    /// Absolute path of the private key to sign the intermediate snapshot with, on nodes that thaw only
    /// signed snapshots. Requires the role admin.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, max_length = 1024, pattern = r"^/[^\x00]*$"))]
    pub sign: Option<PathBuf>,
    /// Fail unless the sandbox has an `after_thaw` hook, and this succeeds in each clone. Then no clone is left.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub require_hook: bool,
}

/// The result of a fork.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ForkedSandbox {
    /// How the original was frozen. It keeps running.
    pub frozen: FrozenSandbox,
    /// The clones.
    pub items: Vec<CreatedSandbox>,
}

/// The result of a freeze.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FrozenSandbox {
    /// Bytes of memory written.
    pub memory_bytes: u64,
    /// How long the machine was paused, in nanoseconds.
    pub paused_ns: u64,
    /// How long the workloads were stopped, in nanoseconds: while the guest's agent stopped them, while the
    /// machine was paused, and until the agent let them run on. 0 from a thawd that does not report it.
    #[serde(default)]
    pub stopped_ns: u64,
    /// The id of the stored snapshot, if the node stores it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
}

/// A snapshot that the node stores.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Snapshot {
    pub id: String,
    /// The tenant that owns it, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    pub name: Option<String>,
    pub labels: BTreeMap<String, String>,
    /// The sandbox that was frozen.
    pub sandbox: String,
    /// The stored snapshot that this sandbox was thawed from, if any. It may have been removed since.
    pub parent: Option<String>,
    /// Seconds since the Unix epoch.
    pub created: u64,
    /// When a sandbox was last thawed from it, or else when it was created, in seconds since the Unix epoch.
    pub last_used: u64,
    /// Bytes that its files occupy on the disk.
    pub disk_bytes: u64,
    /// What its manifest says. Absent if the manifest cannot be read.
    pub manifest: Option<SnapshotManifest>,
    /// Why it cannot be read, or which of its files are damaged.
    pub error: Option<String>,
    /// The version of its last change, in lists and watches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resource_version: Option<u64>,
}

/// What the manifest of a snapshot says. docs/snapshot-format.md describes it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SnapshotManifest {
    /// BLAKE3 of the manifest, which identifies the snapshot.
    pub hash: String,
    /// The version of Thaw that wrote it.
    pub thaw: String,
    /// The image of the frozen sandbox, as it was named.
    pub image: String,
    pub command: Vec<String>,
    /// Digests of the images that a thaw needs.
    pub images: Vec<String>,
    /// CPUs of the frozen sandbox.
    pub cpus: u8,
    /// Its memory, in MiB.
    pub memory_mib: u32,
    /// The CPU baseline, and the processor it was frozen on.
    pub baseline: String,
    pub processor: String,
    /// Hashes of the thaw-vmm, the kernel and the guest image it was frozen with.
    pub vmm: Option<String>,
    pub kernel: Option<String>,
    pub guest_image: Option<String>,
    /// Bytes of its memory and its disks that are not holes.
    pub memory_data_bytes: u64,
    pub disk_data_bytes: u64,
    /// Of a delta: what it lies on.
    pub base: Option<SnapshotBase>,
    /// The hooks of the container.
    #[serde(default, skip_serializing_if = "Hooks::is_none")]
    pub hooks: Hooks,
}

/// What a delta lies on: a template, or another snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SnapshotBase {
    /// Hash of its manifest.
    pub hash: String,
    /// Its id, if it is stored.
    pub snapshot: Option<String>,
}

/// The stored snapshots that match, ordered by id.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SnapshotList {
    /// A watch from this version reports every later change.
    #[serde(default)]
    pub resource_version: u64,
    pub items: Vec<Snapshot>,
    /// Present if there are more: repeat the request with `continue` set to this and the same selectors.
    #[serde(rename = "continue", default, skip_serializing_if = "Option::is_none")]
    pub continue_token: Option<String>,
}

/// Changes of a stored snapshot. What is absent stays.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ChangeSnapshot {
    /// Its new name; `null` removes it.
    #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, max_length = 253, pattern = r"^[^/\x00-\x1f\x7f-\x9f]+$"))]
    pub name: Option<Option<String>>,
    /// Labels to set; a label that is `null` is removed. `null` removes all.
    #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(schema_with = changed_labels))]
    pub labels: Option<Option<BTreeMap<String, Option<String>>>>,
}

/// Where to push a stored snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct PushSnapshot {
    /// A repository of a registry with a tag, or `oci:` and the absolute path of a layout directory. A directory, and a registry on the
    /// host's loopback, require the role admin.
    #[cfg_attr(
        feature = "openapi",
        schema(max_length = 1024, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")
    )]
    pub reference: String,
    /// Use HTTP without TLS. Requires the role admin.
    #[serde(default)]
    pub plain_http: bool,
}

/// The result of a push.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PushedSnapshot {
    pub reference: String,
    /// Digest of the OCI manifest, by which the snapshot can be pulled whatever the tag becomes.
    pub digest: String,
    /// Bytes that were sent, and bytes that the registry had already.
    pub sent_bytes: u64,
    pub present_bytes: u64,
}

/// A snapshot to pull into the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct PullSnapshot {
    /// What a snapshot was pushed to, or the same with `@` and a digest. A layout directory, and a registry on the host's loopback,
    /// require the role admin.
    #[cfg_attr(
        feature = "openapi",
        schema(max_length = 1024, pattern = r"^[^\x00-\x1f\x7f-\x9f]+$")
    )]
    pub reference: String,
    /// A name for the stored snapshot, unique among those of the caller's tenant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(
        feature = "openapi",
        schema(max_length = 253, pattern = r"^[^/\x00-\x1f\x7f-\x9f]+$")
    )]
    pub name: Option<String>,
    /// Labels of the stored snapshot; docs/api.md describes the syntax.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[cfg_attr(feature = "openapi", schema(schema_with = labels))]
    pub labels: BTreeMap<String, String>,
    /// Use HTTP without TLS, also for the images that the snapshot needs. Requires the role admin.
    #[serde(default)]
    pub plain_http: bool,
}

/// The result of a comparison of a stored snapshot with its manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct VerifiedSnapshot {
    pub id: String,
    /// The files and parts of files that are not what the manifest says; none if it is whole.
    pub damaged: Vec<String>,
}

/// A field that was given, also if it is `null`.
pub(super) fn given<'de, D: serde::Deserializer<'de>, T: Deserialize<'de>>(
    from: D,
) -> Result<Option<T>, D::Error> {
    T::deserialize(from).map(Some)
}

fn one() -> u8 {
    1
}
