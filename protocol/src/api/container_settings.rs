//! What a request changes in a container's mounts, limits, privileges and names, in the forms of `docker run`'s flags.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Settings of a container. Each is named and written as a flag of `thaw run`. They concern the guest, never the host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ContainerSettings {
    /// File systems in memory: `PATH` or `PATH:OPTION,...`, such as `/run:size=64m,mode=1777`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "openapi", schema(max_items = 128))]
    pub tmpfs: Vec<String>,
    /// Directories of the sandbox's own disk, empty at first: `PATH` or `PATH:ro`. They keep their files when the container starts again. An
    /// overlay can be mounted on them, so programs that run containers need one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "openapi", schema(max_items = 128))]
    pub anonymous_volumes: Vec<String>,
    /// Size of `/dev/shm` in bytes. 64 MiB if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(minimum = 1))]
    pub shm_bytes: Option<u64>,
    /// Resource limits of each process: `NAME=SOFT[:HARD]`, such as `nofile=65536`; -1 is no limit.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "openapi", schema(max_items = 128))]
    pub ulimits: Vec<String>,
    /// Parameters of the guest's kernel by name, such as `net.core.somaxconn`; at most 128.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub sysctls: BTreeMap<String, String>,
    /// Capabilities to add to docker's default ones, such as `NET_ADMIN`; `ALL` for all.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "openapi", schema(max_items = 128))]
    pub cap_add: Vec<String>,
    /// Capabilities to drop; `ALL` for all but those of `cap_add`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "openapi", schema(max_items = 128))]
    pub cap_drop: Vec<String>,
    /// Devices of the guest's kernel: `/dev/fuse`, `/dev/net/tun`, `/dev/kmsg`, `/dev/loop-control`, `/dev/loop0` to `/dev/loop7`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "openapi", schema(max_items = 128))]
    pub devices: Vec<String>,
    /// All capabilities, devices and system calls of the guest, and a writable `/proc/sys`, `/sys` and cgroup tree.
    #[serde(skip_serializing_if = "is_false")]
    pub privileged: bool,
    /// Set-user-ID programs gain nothing.
    #[serde(skip_serializing_if = "is_false")]
    pub no_new_privileges: bool,
    /// A seccomp profile instead of the default one: the text of docker's or the OCI's JSON, at most 256 KiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(max_length = 262144))]
    pub seccomp_profile: Option<String>,
    /// Run an init as PID 1, which forwards signals and reaps orphaned processes.
    #[serde(skip_serializing_if = "is_false")]
    pub init: bool,
    /// Lines of `/etc/hosts`: `NAME:ADDRESS`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "openapi", schema(max_items = 128))]
    pub extra_hosts: Vec<String>,
    /// Addresses of name servers, instead of the network's.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "openapi", schema(max_items = 128))]
    pub dns: Vec<String>,
    /// Domains in which names are looked up.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "openapi", schema(max_items = 128))]
    pub dns_search: Vec<String>,
    /// Options of the resolver, such as `ndots:2`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "openapi", schema(max_items = 128))]
    pub dns_options: Vec<String>,
    /// Groups of its processes besides those of the user: names that the image has, or numbers.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "openapi", schema(max_items = 128))]
    pub group_add: Vec<String>,
    /// Its NIS domain name.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(max_length = 64))]
    pub domainname: Option<String>,
}

impl ContainerSettings {
    pub(super) fn is_default(&self) -> bool {
        *self == ContainerSettings::default()
    }
}

fn is_false(flag: &bool) -> bool {
    !flag
}
