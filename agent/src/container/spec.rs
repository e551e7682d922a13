//! Checks a container's OCI runtime specification and converts it from the API's messages. Features that this agent does not support are
//! refused here, by name, before anything is created.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rustix::fs::Mode;
use rustix::mount::{MountFlags, MountPropagationFlags};
use rustix::thread::UnshareFlags;
use thaw_protocol::agent::agent::StringUser;
use thaw_protocol::agent::{annotations, oci};

use super::capabilities::Capabilities;
use super::rlimits::{Limit, resource};
use super::seccomp::{self, Filter};
use crate::error::{Error, Result};
use crate::mount_options::{MountOptions, propagation};
use crate::storage::check_guest_path;

/// The umask of a process whose specification has none.
const UMASK: u32 = 0o022;

/// A container.
#[derive(Clone, Debug)]
pub struct Spec {
    pub root: PathBuf,
    pub read_only: bool,
    pub hostname: String,
    pub mounts: Vec<Mount>,
    /// Namespaces to create.
    pub unshare: UnshareFlags,
    /// Namespaces to join, by path.
    pub join: Vec<PathBuf>,
    pub devices: Vec<DeviceNode>,
    pub sysctl: BTreeMap<String, String>,
    pub masked: Vec<String>,
    pub read_only_paths: Vec<String>,
    pub propagation: Option<MountPropagationFlags>,
    pub cgroup: PathBuf,
    /// The container manages its own cgroups: it has a cgroup namespace, and its cgroups are writable.
    pub delegates: bool,
    pub resources: oci::LinuxResources,
    pub seccomp: Option<Filter>,
    /// Its first process is an [init](super::init), which starts the program.
    pub init: bool,
    pub process: ProcessSpec,
}

/// A process of a container.
#[derive(Clone, Debug)]
pub struct ProcessSpec {
    pub terminal: bool,
    /// Rows and columns.
    pub console: Option<(u16, u16)>,
    pub user: UserSpec,
    pub args: Vec<String>,
    pub env: Vec<String>,
    pub cwd: PathBuf,
    pub capabilities: Capabilities,
    pub limits: Vec<Limit>,
    pub no_new_privileges: bool,
    pub oom_score_adj: i32,
    pub umask: Mode,
}

/// The user of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UserSpec {
    Ids {
        uid: u32,
        gid: u32,
        groups: Vec<u32>,
    },
    /// `USER[:GROUP]`: names or numbers, which are looked up in the root file system.
    Name {
        user: String,
        /// Names or numbers of more groups.
        more_groups: Vec<String>,
    },
}

/// A mount inside the container.
#[derive(Clone, Debug)]
pub struct Mount {
    pub destination: PathBuf,
    pub source: String,
    pub kind: String,
    pub options: MountOptions,
}

/// A device node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceNode {
    pub path: PathBuf,
    pub kind: DeviceKind,
    pub major: u32,
    pub minor: u32,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    Block,
    Character,
    Fifo,
}

fn invalid(text: impl Into<String>) -> Error {
    Error::Invalid(text.into())
}

fn no_nul(what: &str, texts: &[String]) -> Result<()> {
    match texts.iter().find(|t| t.contains('\0')) {
        Some(_) => Err(invalid(format!("{what} has a NUL in it"))),
        None => Ok(()),
    }
}

impl Spec {
    /// Checks and converts. `id` names the cgroup if the specification does not.
    pub fn new(id: &str, spec: &oci::Spec, user: Option<&StringUser>) -> Result<Self> {
        if let Some(hooks) = spec.Hooks.as_ref() {
            reject_hooks(hooks)?;
        }
        let root = spec
            .Root
            .as_ref()
            .ok_or_else(|| invalid("the specification has no root"))?;
        let process = spec
            .Process
            .as_ref()
            .ok_or_else(|| invalid("the specification has no process"))?;
        let default = oci::Linux::new();
        let linux = spec.Linux.as_ref().unwrap_or(&default);
        if !linux.UIDMappings.is_empty() || !linux.GIDMappings.is_empty() {
            return Err(Error::Unsupported(
                "user namespaces are not supported: the container has a microVM of its own".into(),
            ));
        }
        let (unshare, join) = namespaces(&linux.Namespaces)?;
        let root_path = PathBuf::from(&root.Path);
        check_guest_path(&root_path)?;
        let mounts = spec.Mounts.iter().map(Mount::new).collect::<Result<Vec<_>>>()?;
        Ok(Spec {
            root: root_path,
            read_only: root.Readonly,
            hostname: spec.Hostname.clone(),
            delegates: unshare.contains(UnshareFlags::NEWCGROUP)
                && mounts.iter().any(Mount::is_writable_cgroup),
            mounts,
            unshare,
            join,
            devices: linux.Devices.iter().map(DeviceNode::new).collect::<Result<_>>()?,
            sysctl: sysctls(linux)?,
            masked: linux.MaskedPaths.clone(),
            read_only_paths: linux.ReadonlyPaths.clone(),
            propagation: match linux.RootfsPropagation.as_str() {
                "" => None,
                name => Some(
                    propagation(name)
                        .ok_or_else(|| invalid(format!("root propagation {name:?} is unknown")))?,
                ),
            },
            cgroup: cgroup_path(id, &linux.CgroupsPath)?,
            resources: linux.Resources.clone().unwrap_or_default(),
            seccomp: linux.Seccomp.as_ref().map(seccomp::compile).transpose()?,
            init: spec
                .Annotations
                .get(annotations::INIT)
                .is_some_and(|value| value == "true"),
            process: ProcessSpec::new(process, user)?,
        })
    }

    /// Whether its first process is also the first of a PID namespace.
    pub fn has_own_pids(&self) -> bool {
        self.unshare.contains(UnshareFlags::NEWPID)
    }
}

impl ProcessSpec {
    /// Checks and converts.
    pub fn new(p: &oci::Process, user: Option<&StringUser>) -> Result<Self> {
        if p.Args.first().is_none_or(String::is_empty) {
            return Err(invalid("the process has no arguments: nothing to execute"));
        }
        no_nul("an argument", &p.Args)?;
        no_nul("an environment variable", &p.Env)?;
        let cwd = if p.Cwd.is_empty() { "/" } else { &p.Cwd };
        if !cwd.starts_with('/') || cwd.contains('\0') {
            return Err(invalid(format!("working directory {cwd:?} is not absolute")));
        }
        Ok(ProcessSpec {
            terminal: p.Terminal,
            console: p.ConsoleSize.as_ref().map(|b| (clamp(b.Height), clamp(b.Width))),
            user: user_spec(p.User.as_ref(), user),
            args: p.Args.clone(),
            env: p.Env.clone(),
            cwd: cwd.into(),
            capabilities: Capabilities::new(p.Capabilities.as_ref()),
            limits: p
                .Rlimits
                .iter()
                .map(|l| {
                    Ok(Limit {
                        resource: resource(&l.Type)?,
                        soft: l.Soft,
                        hard: l.Hard,
                    })
                })
                .collect::<Result<_>>()?,
            no_new_privileges: p.NoNewPrivileges,
            oom_score_adj: p.OOMScoreAdj.clamp(-1000, 1000) as i32,
            umask: Mode::from_raw_mode(p.User.Umask.unwrap_or(UMASK) & 0o777),
        })
    }
}

fn clamp(n: u32) -> u16 {
    n.min(u32::from(u16::MAX)) as u16
}

fn user_spec(user: Option<&oci::User>, strings: Option<&StringUser>) -> UserSpec {
    if let Some(s) = strings.filter(|s| !s.uid.is_empty()) {
        let gid = if s.gid.is_empty() {
            String::new()
        } else {
            format!(":{}", s.gid)
        };
        return UserSpec::Name {
            user: format!("{}{gid}", s.uid),
            more_groups: Vec::new(),
        };
    }
    match user {
        Some(u) if !u.Username.is_empty() || !u.AdditionalGroups.is_empty() => UserSpec::Name {
            user: u.Username.clone(),
            more_groups: u.AdditionalGroups.clone(),
        },
        Some(u) => UserSpec::Ids {
            uid: u.UID,
            gid: u.GID,
            groups: u.AdditionalGids.clone(),
        },
        None => UserSpec::Ids {
            uid: 0,
            gid: 0,
            groups: Vec::new(),
        },
    }
}

fn reject_hooks(hooks: &oci::Hooks) -> Result<()> {
    let all = [
        ("prestart", &hooks.Prestart),
        ("poststart", &hooks.Poststart),
        ("poststop", &hooks.Poststop),
        ("createRuntime", &hooks.CreateRuntime),
        ("createContainer", &hooks.CreateContainer),
        ("startContainer", &hooks.StartContainer),
    ];
    match all.iter().find(|(_, h)| !h.is_empty()) {
        Some((name, h)) => Err(Error::Unsupported(format!(
            "the specification has a {name} hook ({}): hooks are programs of the host and cannot run in this guest; remove it",
            h[0].Path
        ))),
        None => Ok(()),
    }
}

fn namespaces(list: &[oci::LinuxNamespace]) -> Result<(UnshareFlags, Vec<PathBuf>)> {
    // A container always has its own mount namespace.
    let mut unshare = UnshareFlags::NEWNS;
    let mut join = Vec::new();
    for n in list {
        let flag = match n.Type.as_str() {
            "pid" => UnshareFlags::NEWPID,
            "network" | "net" => UnshareFlags::NEWNET,
            "mount" | "mnt" => UnshareFlags::NEWNS,
            "ipc" => UnshareFlags::NEWIPC,
            "uts" => UnshareFlags::NEWUTS,
            "cgroup" => UnshareFlags::NEWCGROUP,
            other => {
                return Err(Error::Unsupported(format!(
                    "{other} namespaces are not supported: the container has a microVM of its own"
                )));
            }
        };
        if n.Path.is_empty() {
            unshare |= flag;
        } else if flag == UnshareFlags::NEWNS {
            return Err(Error::Unsupported(
                "joining a mount namespace by path is not supported".into(),
            ));
        } else {
            check_guest_path(Path::new(&n.Path))?;
            join.push(PathBuf::from(&n.Path));
        }
    }
    Ok((unshare, join))
}

fn sysctls(linux: &oci::Linux) -> Result<BTreeMap<String, String>> {
    for key in linux.Sysctl.keys() {
        let plain = key
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"._-/".contains(&b))
            && !key.contains("..");
        if key.is_empty() || !plain {
            return Err(invalid(format!("{key:?} is not a sysctl")));
        }
    }
    Ok(linux.Sysctl.iter().map(|(k, v)| (k.clone(), v.clone())).collect())
}

/// Returns the cgroup path relative to the hierarchy's root. systemd's `slice:prefix:name` becomes
/// `prefix-name` below `slice`.
fn cgroup_path(id: &str, given: &str) -> Result<PathBuf> {
    let path = match given.split(':').collect::<Vec<_>>()[..] {
        [""] => format!("thaw/{id}"),
        [plain] => plain.trim_matches('/').to_owned(),
        [slice, prefix, name] => format!("{}/{prefix}-{name}", slice.trim_matches('/')),
        _ => {
            return Err(invalid(format!(
                "cgroup path {given:?} is neither a path nor slice:prefix:name"
            )));
        }
    };
    check_guest_path(&Path::new("/").join(&path))
        .map_err(|_| invalid(format!("cgroup path {given:?} is not a valid path")))?;
    Ok(PathBuf::from(path))
}

impl Mount {
    pub(super) fn new(m: &oci::Mount) -> Result<Self> {
        if m.destination.is_empty() || m.destination.contains('\0') || m.source.contains('\0') {
            return Err(invalid(format!(
                "mount destination {:?} is not a valid path",
                m.destination
            )));
        }
        let mut options = MountOptions::parse(m.options.iter().map(String::as_str))?;
        if m.type_ == "bind" && options.bind.is_none() {
            options.bind = Some(true);
        }
        if options.bind.is_some() && !m.source.starts_with('/') {
            return Err(invalid(format!(
                "mount at {}: bind source {:?} is not absolute",
                m.destination, m.source
            )));
        }
        Ok(Mount {
            destination: m.destination.as_str().into(),
            source: m.source.clone(),
            kind: m.type_.clone(),
            options,
        })
    }
}

impl Mount {
    fn is_writable_cgroup(&self) -> bool {
        self.kind.starts_with("cgroup") && !self.options.flags.contains(MountFlags::RDONLY)
    }
}

impl DeviceNode {
    fn new(d: &oci::LinuxDevice) -> Result<Self> {
        check_guest_path(Path::new(&d.Path))?;
        let kind = match d.Type.as_str() {
            "b" => DeviceKind::Block,
            "c" | "u" => DeviceKind::Character,
            "p" => DeviceKind::Fifo,
            other => return Err(invalid(format!("device {}: type {other:?} is unknown", d.Path))),
        };
        let number = |n: i64| {
            u32::try_from(n).map_err(|_| invalid(format!("device {}: number {n} is out of range", d.Path)))
        };
        Ok(DeviceNode {
            path: d.Path.as_str().into(),
            kind,
            major: number(d.Major)?,
            minor: number(d.Minor)?,
            mode: if d.FileMode == 0 {
                0o666
            } else {
                d.FileMode & 0o7777
            },
            uid: d.UID,
            gid: d.GID,
        })
    }
}

#[cfg(test)]
#[path = "spec_test.rs"]
mod tests;
