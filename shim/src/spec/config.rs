//! The parts of a bundle's `config.json` that are read. Strings stay as in the OCI runtime specification,
//! because the agent's API has strings too. Other parts are ignored (docs/shim.md).

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer};

/// Go sometimes writes an empty list as `null`.
fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(from: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

macro_rules! of_config {
    ($($(#[$about:meta])* $name:ident { $($(#[$attribute:meta])* $field:ident: $kind:ty,)* })*) => {
        $(
            $(#[$about])*
            #[derive(Clone, Debug, Default, PartialEq, Deserialize)]
            #[serde(default, rename_all = "camelCase")]
            pub struct $name {
                $($(#[$attribute])* #[serde(deserialize_with = "or_default")] pub $field: $kind,)*
            }
        )*
    };
}

of_config! {
    /// The whole specification.
    Spec {
        oci_version: String,
        process: Option<Process>,
        root: Option<Root>,
        hostname: String,
        mounts: Vec<Mount>,
        hooks: Hooks,
        annotations: BTreeMap<String, String>,
        linux: Linux,
    }

    /// The init process, or an exec.
    Process {
        terminal: bool,
        console_size: Option<ConsoleSize>,
        user: User,
        args: Vec<String>,
        env: Vec<String>,
        cwd: String,
        capabilities: Option<Capabilities>,
        rlimits: Vec<Rlimit>,
        no_new_privileges: bool,
        apparmor_profile: String,
        oom_score_adj: Option<i64>,
        selinux_label: String,
    }

    ConsoleSize {
        height: u32,
        width: u32,
    }

    User {
        uid: u32,
        gid: u32,
        additional_gids: Vec<u32>,
        umask: Option<u32>,
    }

    Capabilities {
        bounding: Vec<String>,
        effective: Vec<String>,
        inheritable: Vec<String>,
        permitted: Vec<String>,
        ambient: Vec<String>,
    }

    Rlimit {
        #[serde(rename = "type")]
        kind: String,
        hard: u64,
        soft: u64,
    }

    Root {
        path: String,
        readonly: bool,
    }

    Mount {
        destination: String,
        #[serde(rename = "type")]
        kind: String,
        source: String,
        options: Vec<String>,
    }

    Hooks {
        prestart: Vec<Hook>,
        create_runtime: Vec<Hook>,
        create_container: Vec<Hook>,
        start_container: Vec<Hook>,
        poststart: Vec<Hook>,
        poststop: Vec<Hook>,
    }

    Hook {
        path: String,
        args: Vec<String>,
        env: Vec<String>,
        timeout: Option<i64>,
    }

    Linux {
        sysctl: BTreeMap<String, String>,
        resources: Resources,
        cgroups_path: String,
        namespaces: Vec<Namespace>,
        devices: Vec<Device>,
        seccomp: Option<Seccomp>,
        rootfs_propagation: String,
        masked_paths: Vec<String>,
        readonly_paths: Vec<String>,
        uid_mappings: Vec<serde_json::Value>,
    }

    Namespace {
        #[serde(rename = "type")]
        kind: String,
        path: String,
    }

    Device {
        path: String,
        #[serde(rename = "type")]
        kind: String,
        major: i64,
        minor: i64,
        file_mode: u32,
        uid: u32,
        gid: u32,
    }

    Seccomp {
        default_action: String,
        default_errno_ret: Option<u32>,
        architectures: Vec<String>,
        flags: Vec<String>,
        syscalls: Vec<Syscall>,
    }

    Syscall {
        names: Vec<String>,
        action: String,
        errno_ret: Option<u32>,
        args: Vec<SyscallArgument>,
    }

    SyscallArgument {
        index: u64,
        value: u64,
        value_two: u64,
        op: String,
    }

    /// Resource limits, also of an update.
    Resources {
        devices: Vec<DeviceRule>,
        memory: Option<Memory>,
        cpu: Option<Cpu>,
        pids: Option<Pids>,
        block_io: Option<BlockIo>,
        hugepage_limits: Vec<HugepageLimit>,
        /// Files of cgroup v2.
        unified: BTreeMap<String, String>,
    }

    /// A rule of the devices cgroup. An absent field matches any device.
    DeviceRule {
        allow: bool,
        #[serde(rename = "type")]
        kind: String,
        major: Option<i64>,
        minor: Option<i64>,
        access: String,
    }

    Memory {
        limit: Option<i64>,
        reservation: Option<i64>,
        swap: Option<i64>,
    }

    Cpu {
        shares: Option<u64>,
        quota: Option<i64>,
        period: Option<u64>,
        cpus: String,
        mems: String,
    }

    Pids {
        limit: i64,
    }

    BlockIo {
        weight: Option<u16>,
    }

    HugepageLimit {
        page_size: String,
        limit: u64,
    }
}

impl Linux {
    /// The namespace of this kind that the container gets or joins, if any.
    pub fn namespace(&self, kind: &str) -> Option<&Namespace> {
        self.namespaces.iter().find(|n| n.kind == kind)
    }
}
