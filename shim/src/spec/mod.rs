//! From a bundle's `config.json` to what the guest's agent makes: the specification, the storages, the files that are copied.
//!
//! Invariant: what a microVM cannot do is refused here by name, with what to do, before anything is asked of the guest;
//! what makes no sense in one is left out as docs/shim.md has it, and nothing else is.

pub mod config;
mod devices;
pub mod host;
mod mounts;
mod resources;
mod shown;

use std::path::Path;

use thaw_protocol::agent::agent::{Device, Storage};
use thaw_protocol::agent::{MessageField, layout, oci};

pub use devices::Disk;
pub use mounts::{Bound, CopiedFile, Mounts, Shown, pod_storages};
pub use resources::resources;
pub use shown::OfAnImage;

use crate::error::{Error, Result};
use config::{Linux, Namespace, Process, Spec};

/// What the agent is asked to make.
#[derive(Clone, Debug, PartialEq)]
pub struct Guest {
    pub spec: oci::Spec,
    /// To be mounted before, in order, after the root file system's own.
    pub storages: Vec<Storage>,
    /// To be copied before.
    pub files: Vec<CopiedFile>,
    /// To be shared before, and to be the sources of mounts of the specification.
    pub bound: Vec<Bound>,
    /// To be shown before, and to be the sources of mounts of the specification.
    pub shown: Vec<Shown>,
    /// Block devices among the specification's devices, which are to be given to the microVM before.
    pub disks: Vec<Disk>,
    /// What the agent is told of these, once that is done.
    pub devices: Vec<Device>,
    /// Whether its processes and those of others of the pod see one another.
    pub shares_pids: bool,
}

/// Reads a specification, if there is one.
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

/// What the agent is to make of container `id` of this bundle, whose root file system is `root` of the guest.
pub fn guest(id: &str, bundle: &Path, spec: &Spec, root: String) -> Result<Guest> {
    let process_given = spec
        .process
        .as_ref()
        .ok_or_else(|| Error::Invalid("config.json has no process".into()))?;
    if !spec.linux.uid_mappings.is_empty() || spec.linux.namespace("user").is_some() {
        return Err(Error::Unsupported(
            "a user namespace makes no sense in a microVM, which has the host's users behind its wall: remove it".into(),
        ));
    }
    let pids = spec.linux.namespace("pid");
    let shares_pids = pids.is_some_and(|pids| is_of_the_host(&pids.path));
    let readonly = spec.root.as_ref().is_some_and(|r| r.readonly);
    let Mounts {
        mounts,
        storages,
        files,
        bound,
        shown,
    } = mounts::convert(id, bundle, &spec.mounts)?;
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
        Mounts: mounts,
        Annotations: spec.annotations.clone().into_iter().collect(),
        Linux: MessageField::some(linux(id, &spec.linux)),
        ..Default::default()
    };
    Ok(Guest {
        spec,
        storages,
        files,
        bound,
        shown,
        disks,
        devices: Vec::new(),
        shares_pids,
    })
}

/// A process as the agent takes it. Labels of AppArmor and SELinux are left out: the guest's kernel has neither.
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
        // In the guest there is no one else: the host's place for it says nothing there.
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

/// The network is the guest's own, and so is its clock. A namespace that is joined by a path of the host is the pod's: the
/// guest's own, which is the container's where it makes none; that of processes the agent makes for the pod.
fn namespace(given: &Namespace) -> Option<oci::LinuxNamespace> {
    let own = matches!(given.kind.as_str(), "pid" | "ipc" | "uts" | "mount" | "cgroup");
    (own && !is_of_the_host(&given.path)).then(|| oci::LinuxNamespace {
        Type: given.kind.clone(),
        Path: given.path.clone(),
        ..Default::default()
    })
}

/// Whether a namespace is named that was there before, and not another container's of the guest.
fn is_of_the_host(path: &str) -> bool {
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
