//! Converts a bundle's `config.json` to the input of the guest's agent: a specification, storages and copied files.
//!
//! Invariant: a setting that a microVM does not support is refused here by name, with a remedy, before any call to the guest. Only settings
//! that have no meaning in a microVM are left out, as docs/shim.md describes.

pub mod config;
mod devices;
pub mod host;
mod image_mount;
mod mounts;
mod resources;

use std::path::Path;

use thaw_protocol::agent::agent::{Device, Storage};
use thaw_protocol::agent::{MessageField, layout, oci};

pub use devices::Disk;
pub use image_mount::ImagePath;
pub use mounts::{CopiedFile, ImageMount, Mounts, SharedMount, is_bind, pod_storages};
pub use resources::resources;

use crate::error::{Error, Result};
use config::{Linux, Mount, Namespace, Process, Spec};

/// A container for the agent to create.
#[derive(Clone, Debug, PartialEq)]
pub struct Guest {
    pub spec: oci::Spec,
    /// Storages to mount first, in order, after those of the root file system.
    pub storages: Vec<Storage>,
    /// Files to copy first.
    pub files: Vec<CopiedFile>,
    /// Mounts whose sources must be shared first.
    pub shared_mounts: Vec<SharedMount>,
    /// Mounts whose images must be shown first.
    pub image_mounts: Vec<ImageMount>,
    /// Block devices to attach to the microVM first.
    pub disks: Vec<Disk>,
    /// These block devices as the agent knows them, once they are attached.
    pub devices: Vec<Device>,
    /// Whether its processes share a PID namespace with those of other containers of the pod.
    pub shares_pids: bool,
}

/// Reads a specification. `None` if the file does not exist.
pub fn read_if_any(path: &Path) -> Result<Option<Spec>> {
    match read(path) {
        Err(Error::System { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
        read => read.map(Some),
    }
}

/// Reads a specification.
pub fn read(path: &Path) -> Result<Spec> {
    let text = std::fs::read(path).map_err(|source| Error::System {
        what: format!("read {}", path.display()),
        source,
    })?;
    serde_json::from_slice(&text).map_err(|e| Error::malformed(path, e))
}

/// Converts the specification of container `id` of a bundle, whose root file system is at `root` in the
/// guest.
pub fn guest(id: &str, bundle: &Path, spec: &Spec, root: String) -> Result<Guest> {
    let process_given = spec
        .process
        .as_ref()
        .ok_or_else(|| Error::Invalid("config.json has no process".into()))?;
    if !spec.linux.uid_mappings.is_empty() || spec.linux.namespace("user").is_some() {
        return Err(Error::Unsupported(
            "a microVM supports no user namespaces, and isolates the host's users without one: remove it"
                .into(),
        ));
    }
    let pids = spec.linux.namespace("pid");
    let shares_pids = pids.is_some_and(|pids| is_host_path(&pids.path));
    let readonly = spec.root.as_ref().is_some_and(|r| r.readonly);
    let with_mounts = only_mounts(id, bundle, &spec.mounts)?;
    let disks = devices::disks(&spec.linux)?;
    let spec = oci::Spec {
        Version: spec.oci_version.clone(),
        Process: MessageField::some(process(process_given)),
        Root: MessageField::some(oci::Root {
            Path: root,
            Readonly: readonly,
            ..Default::default()
        }),
        Hostname: spec.hostname.clone(),
        Mounts: with_mounts.spec.Mounts,
        Annotations: spec.annotations.clone().into_iter().collect(),
        Linux: MessageField::some(linux(id, &spec.linux)),
        ..Default::default()
    };
    Ok(Guest {
        spec,
        disks,
        shares_pids,
        ..with_mounts
    })
}

/// Converts mounts of container `id` of a bundle, and nothing else of it.
pub fn only_mounts(id: &str, bundle: &Path, given: &[Mount]) -> Result<Guest> {
    let Mounts {
        mounts,
        storages,
        files,
        shared_mounts,
        image_mounts,
    } = mounts::convert(id, bundle, given)?;
    Ok(Guest {
        spec: oci::Spec {
            Mounts: mounts,
            ..Default::default()
        },
        storages,
        files,
        shared_mounts,
        image_mounts,
        disks: Vec::new(),
        devices: Vec::new(),
        shares_pids: false,
    })
}

/// A process as the agent takes it. AppArmor and SELinux labels are left out, because the guest's kernel has
/// neither.
pub fn process(given: &Process) -> oci::Process {
    let size = given.console_size.as_ref().map(|size| oci::Box {
        Height: size.height,
        Width: size.width,
        ..Default::default()
    });
    let capabilities = given.capabilities.as_ref().map(|c| oci::LinuxCapabilities {
        Bounding: c.bounding.clone(),
        Effective: c.effective.clone(),
        Inheritable: c.inheritable.clone(),
        Permitted: c.permitted.clone(),
        Ambient: c.ambient.clone(),
        ..Default::default()
    });
    let rlimits = given.rlimits.iter().map(|limit| oci::POSIXRlimit {
        Type: limit.kind.clone(),
        Hard: limit.hard,
        Soft: limit.soft,
        ..Default::default()
    });
    oci::Process {
        Terminal: given.terminal,
        ConsoleSize: MessageField::from_option(size),
        User: MessageField::some(oci::User {
            UID: given.user.uid,
            GID: given.user.gid,
            AdditionalGids: given.user.additional_gids.clone(),
            Umask: given.user.umask,
            ..Default::default()
        }),
        Args: given.args.clone(),
        Env: given.env.clone(),
        Cwd: given.cwd.clone(),
        Capabilities: MessageField::from_option(capabilities),
        Rlimits: rlimits.collect(),
        NoNewPrivileges: given.no_new_privileges,
        OOMScoreAdj: given.oom_score_adj.unwrap_or(0),
        ..Default::default()
    }
}

fn linux(id: &str, given: &Linux) -> oci::Linux {
    let namespaces = given.namespaces.iter().filter_map(namespace);
    let devices = given.devices.iter().map(|device| oci::LinuxDevice {
        Path: device.path.clone(),
        Type: device.kind.clone(),
        Major: device.major,
        Minor: device.minor,
        FileMode: device.file_mode,
        UID: device.uid,
        GID: device.gid,
        ..Default::default()
    });
    oci::Linux {
        Sysctl: given.sysctl.clone().into_iter().collect(),
        Resources: MessageField::some(resources(&given.resources)),
        // The host's cgroup path has no meaning in the guest.
        CgroupsPath: format!("/{id}"),
        Namespaces: namespaces.collect(),
        Devices: devices.collect(),
        Seccomp: MessageField::from_option(given.seccomp.as_ref().map(seccomp)),
        RootfsPropagation: given.rootfs_propagation.clone(),
        MaskedPaths: given.masked_paths.clone(),
        ReadonlyPaths: given.readonly_paths.clone(),
        ..Default::default()
    }
}

/// Converts a namespace. Network and time are the guest's own and left out. A namespace with a path on the
/// host is the pod's, which in the guest is the agent's own or, for PIDs, one the agent creates for the pod.
fn namespace(given: &Namespace) -> Option<oci::LinuxNamespace> {
    let own = matches!(given.kind.as_str(), "pid" | "ipc" | "uts" | "mount" | "cgroup");
    (own && !is_host_path(&given.path)).then(|| oci::LinuxNamespace {
        Type: given.kind.clone(),
        Path: given.path.clone(),
        ..Default::default()
    })
}

/// Whether the path is a namespace of the host, rather than that of a container in the guest.
fn is_host_path(path: &str) -> bool {
    !path.is_empty() && layout::container_of_pid_namespace(path).is_none()
}

fn seccomp(given: &config::Seccomp) -> oci::LinuxSeccomp {
    let syscalls = given.syscalls.iter().map(|rule| oci::LinuxSyscall {
        Names: rule.names.clone(),
        Action: rule.action.clone(),
        ErrnoRet: rule.errno_ret.map(oci::linux_syscall::ErrnoRet::Errnoret),
        Args: rule
            .args
            .iter()
            .map(|argument| oci::LinuxSeccompArg {
                Index: argument.index,
                Value: argument.value,
                ValueTwo: argument.value_two,
                Op: argument.op.clone(),
                ..Default::default()
            })
            .collect(),
        ..Default::default()
    });
    oci::LinuxSeccomp {
        DefaultAction: given.default_action.clone(),
        DefaultErrnoRet: given.default_errno_ret,
        Architectures: given.architectures.clone(),
        Flags: given.flags.clone(),
        Syscalls: syscalls.collect(),
        ..Default::default()
    }
}

#[cfg(test)]
#[path = "../spec_test.rs"]
mod tests;
