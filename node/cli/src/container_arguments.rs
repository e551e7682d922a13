//! The flags of `thaw run` that change its container, named and meant as docker's.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use clap::Args;
use thaw_daemon::api::watch::selector::check_labels;
use thaw_protocol::api::Volume;
use thaw_sandbox::container::seccomp_profile::Profile;
use thaw_sandbox::container::settings::{
    Capability, Chosen, Device, Domainname, Group, Settings, Sysctl, Tmpfs, Ulimit,
};
use thaw_sandbox::container::{Seccomp, SecurityOption, parse_env_file, parse_security_option};
use thaw_sandbox::error::{Error, ErrorKind};

use super::mount::Mount;
use super::size::ByteSize;

mod health;
mod hooks;
mod life;

pub use health::HealthArguments;
pub use hooks::HookArguments;
pub use life::LifeArguments;

/// Largest file of labels in bytes. A sandbox has at most 64.
const MAX_LABEL_FILE: u64 = 64 << 10;

#[derive(Debug, Args)]
#[command(next_help_heading = "Container options")]
pub struct ContainerArguments {
    /// A label of the sandbox
    #[arg(short, long, value_name = "KEY=VALUE")]
    pub label: Vec<String>,
    /// Read labels from a file, one per line
    #[arg(long, value_name = "FILE")]
    pub label_file: Vec<PathBuf>,
    /// Add a group to those of the user: a name that the image has, or a number
    #[arg(long, value_name = "GROUP")]
    pub group_add: Vec<Group>,
    /// The container's NIS domain name
    #[arg(long, value_name = "NAME")]
    pub domainname: Option<Domainname>,
    /// Mount a file system in memory: PATH or PATH:OPTION,... with options such as size=64m, mode=1777, exec
    #[arg(long, value_name = "PATH[:OPTIONS]")]
    pub tmpfs: Vec<Tmpfs>,
    /// `type=bind,source=HOST,target=GUEST[,readonly]`: as -v. `type=volume,target=GUEST`: an empty directory of the sandbox's
    /// own disk. `type=tmpfs,target=GUEST[,tmpfs-size=SIZE][,tmpfs-mode=MODE]`
    #[arg(long, value_name = "MOUNT")]
    pub mount: Vec<Mount>,
    /// Size of /dev/shm: bytes, or with k, m, g [default: 64m]
    #[arg(long, value_name = "SIZE")]
    pub shm_size: Option<ByteSize>,
    /// Limit a resource of each process: NAME=SOFT[:HARD], such as nofile=65536; -1 for no limit
    #[arg(long, value_name = "LIMIT")]
    pub ulimit: Vec<Ulimit>,
    /// Set a parameter of the guest's kernel: NAME=VALUE, such as net.core.somaxconn=1024
    #[arg(long, value_name = "NAME=VALUE")]
    pub sysctl: Vec<Sysctl>,
    /// Add a capability, such as NET_ADMIN or SYS_ADMIN; ALL for all
    #[arg(long, value_name = "NAME")]
    pub cap_add: Vec<Capability>,
    /// Drop a capability; ALL for all but those of --cap-add
    #[arg(long, value_name = "NAME")]
    pub cap_drop: Vec<Capability>,
    /// Give the container a device of the guest: /dev/fuse, /dev/net/tun, /dev/kmsg, /dev/loop-control, /dev/loop0 to /dev/loop7.
    /// No device of this host can be given
    #[arg(long, value_name = "PATH")]
    pub device: Vec<Device>,
    /// All capabilities, devices and system calls of the guest, and a writable /proc/sys, /sys and cgroup tree. It gives
    /// the container nothing of this host
    #[arg(long)]
    pub privileged: bool,
    /// `seccomp=unconfined`: allow all system calls. `seccomp=default`: allow those that docker allows. `seccomp=FILE`: a
    /// profile of your own, in docker's or the OCI's JSON. `no-new-privileges`: set-user-ID programs gain nothing
    #[arg(long, value_name = "OPTION", value_parser = parse_security_option)]
    pub security_opt: Vec<SecurityOption>,
    #[command(flatten)]
    pub life: LifeArguments,
    #[command(flatten)]
    pub health: HealthArguments,
    #[command(flatten)]
    pub hooks: HookArguments,
    /// Write the sandbox's id to a file, which must not exist
    #[arg(long, value_name = "FILE")]
    pub cidfile: Option<PathBuf>,
    /// Only `linux/amd64`
    #[arg(long, value_name = "PLATFORM", value_parser = parse_platform)]
    pub platform: Option<String>,
}

impl ContainerArguments {
    /// The labels of the flags, checked.
    pub(super) fn labels(&self) -> Result<BTreeMap<String, String>, Error> {
        let mut all = Vec::new();
        for path in &self.label_file {
            all.extend(read_labels(path)?);
        }
        // Flags win over files.
        all.extend(self.label.iter().cloned());
        labels_of(&all)
    }

    /// The directories of this host that `--mount` shares.
    pub(super) fn volumes(&self) -> impl Iterator<Item = Volume> {
        self.mount.iter().filter_map(|mount| match mount {
            Mount::Bind(volume) => Some(volume.clone()),
            Mount::Tmpfs(_) | Mount::Volume(_) => None,
        })
    }

    /// The seccomp profile of the flags. Reads its file, if it is in one.
    pub(super) fn seccomp(&self) -> Result<Seccomp, Error> {
        let chosen = self.security_opt.iter().rev().find_map(|option| match option {
            SecurityOption::Seccomp(profile) => Some(Ok(Seccomp::from(*profile))),
            SecurityOption::SeccompFile(path) => Some(Profile::read(path).map(Seccomp::Profile)),
            SecurityOption::NoNewPrivileges(_) => None,
        });
        chosen.unwrap_or_else(|| Ok(Seccomp::default()))
    }

    pub(super) fn settings(&self) -> Settings {
        let mounted = self.mount.iter().filter_map(|mount| match mount {
            Mount::Tmpfs(tmpfs) => Some(tmpfs.clone()),
            Mount::Bind(_) | Mount::Volume(_) => None,
        });
        let anonymous = self.mount.iter().filter_map(|mount| match mount {
            Mount::Volume(volume) => Some(volume.clone()),
            Mount::Bind(_) | Mount::Tmpfs(_) => None,
        });
        let no_new_privileges = self.security_opt.iter().rev().find_map(|option| match option {
            SecurityOption::Seccomp(_) | SecurityOption::SeccompFile(_) => None,
            SecurityOption::NoNewPrivileges(set) => Some(*set),
        });
        Settings {
            tmpfs: self.tmpfs.iter().cloned().chain(mounted).collect(),
            anonymous_volumes: anonymous.collect(),
            shm_bytes: self.shm_size.map(ByteSize::bytes),
            ulimits: self.ulimit.clone(),
            sysctls: self.sysctl.clone(),
            capabilities: Chosen {
                add: self.cap_add.clone(),
                drop: self.cap_drop.clone(),
            },
            devices: self.device.clone(),
            privileged: self.privileged,
            no_new_privileges: no_new_privileges.unwrap_or_default(),
            groups: self.group_add.clone(),
            domainname: self.domainname.clone(),
        }
    }

    /// Creates the file of `--cidfile`, before anything else is made.
    pub(super) fn create_cidfile(&self) -> Result<Option<std::fs::File>, Error> {
        let Some(path) = &self.cidfile else {
            return Ok(None);
        };
        let created = std::fs::File::create_new(path);
        created.map(Some).map_err(|e| {
            Error::system(format!("cannot create --cidfile {}", path.display()), &e)
                .remedy("name a file that does not exist, in a directory that does")
        })
    }
}

/// The labels of flags `--label`, checked.
pub(super) fn labels_of(flags: &[String]) -> Result<BTreeMap<String, String>, Error> {
    let pairs = flags.iter().map(|label| {
        // As under docker, a key alone has the empty value.
        let (key, value) = label.split_once('=').unwrap_or((label, ""));
        (key.to_owned(), value.to_owned())
    });
    let labels = pairs.collect();
    check_labels(&labels).map_err(|why| Error::new(ErrorKind::Runtime, format!("--label: {why}")))?;
    Ok(labels)
}

/// The lines of a file of `--label-file`.
fn read_labels(path: &Path) -> Result<Vec<String>, Error> {
    let failed = |what: String| {
        Error::new(
            ErrorKind::Runtime,
            format!("--label-file {}: {what}", path.display()),
        )
    };
    let file = std::fs::File::open(path).map_err(|e| failed(e.to_string()))?;
    let mut text = String::new();
    let mut bounded = file.take(MAX_LABEL_FILE + 1);
    bounded
        .read_to_string(&mut text)
        .map_err(|e| failed(e.to_string()))?;
    match text.len() as u64 > MAX_LABEL_FILE {
        true => Err(failed(format!("it is larger than {} KiB", MAX_LABEL_FILE >> 10))),
        false => Ok(parse_env_file(&text)),
    }
}

fn parse_platform(text: &str) -> Result<String, String> {
    match text {
        "linux/amd64" | "linux/x86_64" | "linux" => Ok(text.to_owned()),
        _ => Err(format!(
            "{text:?}: sandboxes run linux/amd64, and no processor is emulated"
        )),
    }
}

#[cfg(test)]
#[path = "container_arguments_test.rs"]
mod tests;
