//! What the flags of `docker run` change in a container's specification: mounts, limits, capabilities and devices.
//!
//! A sandbox is one container in a machine of its own. So `--privileged` and `--device` give a container more of the guest, and nothing of
//! the host.

use thaw_protocol::agent::{MessageField, oci};

use super::seccomp::{self, Seccomp};
use crate::error::Error;

pub use anonymous_volume::AnonymousVolume;
pub use capability::{Capability, Chosen};
pub use device::Device;
pub use domain::Domainname;
pub use group::Group;
pub use sysctl::Sysctl;
pub use tmpfs::Tmpfs;
pub use ulimit::Ulimit;

pub(super) mod anonymous_volume;
mod capability;
mod device;
mod domain;
mod group;
mod sysctl;
mod tmpfs;
mod ulimit;

/// The directories of the kernel that only a privileged container may write to.
const KERNEL_MOUNTS: [&str; 2] = ["/sys", "/sys/fs/cgroup"];

/// The settings of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    pub tmpfs: Vec<Tmpfs>,
    pub anonymous_volumes: Vec<AnonymousVolume>,
    /// Size of `/dev/shm`, bytes [default: 64 MiB].
    pub shm_bytes: Option<u64>,
    pub ulimits: Vec<Ulimit>,
    pub sysctls: Vec<Sysctl>,
    pub capabilities: Chosen,
    pub devices: Vec<Device>,
    /// All capabilities, all devices, all system calls, and a writable `/proc/sys`, `/sys` and cgroup tree.
    pub privileged: bool,
    /// A program cannot gain privileges by `execve(2)`.
    pub no_new_privileges: bool,
    /// Groups of its processes besides those of the user.
    pub groups: Vec<Group>,
    pub domainname: Option<Domainname>,
}

impl Settings {
    /// Adds to an error of the agent what these settings know about its cause.
    pub(super) fn explain(&self, error: Error) -> Error {
        sysctl::explain(error, &self.sysctls)
    }

    /// Changes a specification made with docker's defaults. `seccomp` is the profile it was made with.
    pub(super) fn apply(&self, spec: &mut oci::Spec, is_root: bool, seccomp: &Seccomp) {
        let capabilities = self.capabilities.held(self.privileged);
        let process = spec.Process.mut_or_insert_default();
        process.NoNewPrivileges = self.no_new_privileges;
        group::add(process.User.mut_or_insert_default(), &self.groups);
        ulimit::set(&mut process.Rlimits, &self.ulimits);
        process.Capabilities = MessageField::some(super::defaults::capabilities(&capabilities, is_root));
        if let Some(bytes) = self.shm_bytes {
            tmpfs::resize(&mut spec.Mounts, "/dev/shm", bytes);
        }
        tmpfs::add(&mut spec.Mounts, &self.tmpfs);
        let linux = spec.Linux.mut_or_insert_default();
        if let Some(name) = &self.domainname {
            name.set(linux);
        }
        sysctl::set(linux, &self.sysctls);
        linux.Devices = match self.privileged {
            true => device::all(),
            false => self.devices.iter().map(Device::node).collect(),
        };
        // As under docker, a profile of the caller also confines a privileged container.
        linux.Seccomp = MessageField::from_option(match seccomp {
            Seccomp::Profile(profile) => Some(profile.rules(&capabilities)),
            Seccomp::Default if !self.privileged => Some(seccomp::allowing(&capabilities)),
            Seccomp::Default | Seccomp::Unconfined => None,
        });
        if self.privileged {
            linux.MaskedPaths.clear();
            linux.ReadonlyPaths.clear();
            let is_kernels = |mount: &&mut oci::Mount| KERNEL_MOUNTS.contains(&mount.destination.as_str());
            for mount in spec.Mounts.iter_mut().filter(is_kernels) {
                mount.options.retain(|option| option != "ro");
            }
        }
    }
}

/// A path in the container that a mount may have, without a slash at its end.
fn container_path(path: &str) -> Result<String, String> {
    let plain = path.trim_end_matches('/');
    let is_absolute = plain.starts_with('/') && !plain.split('/').any(|part| part == "..");
    match is_absolute && !plain.contains('\0') {
        true => Ok(plain.to_owned()),
        false => Err(format!("{path:?} is no absolute path in the container")),
    }
}

#[cfg(test)]
#[path = "settings_test.rs"]
mod tests;
