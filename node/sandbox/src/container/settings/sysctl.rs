//! Kernel parameters that `--sysctl` sets for a container. The guest has its own kernel and one container, so all of them may be set.

use std::str::FromStr;

use thaw_protocol::agent::oci;

use crate::closest::closest;
use crate::error::Error;

/// The parameters that containers usually set, to suggest one for a name that the guest's kernel does not have.
const USUAL: [&str; 36] = [
    "fs.aio-max-nr",
    "fs.file-max",
    "fs.inotify.max_user_instances",
    "fs.inotify.max_user_watches",
    "fs.mqueue.msg_max",
    "fs.mqueue.queues_max",
    "kernel.core_pattern",
    "kernel.domainname",
    "kernel.msgmax",
    "kernel.msgmnb",
    "kernel.msgmni",
    "kernel.pid_max",
    "kernel.sem",
    "kernel.shmall",
    "kernel.shmmax",
    "kernel.shmmni",
    "kernel.threads-max",
    "net.core.netdev_max_backlog",
    "net.core.rmem_default",
    "net.core.rmem_max",
    "net.core.somaxconn",
    "net.core.wmem_default",
    "net.core.wmem_max",
    "net.ipv4.ip_forward",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ping_group_range",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_max_syn_backlog",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.tcp_tw_reuse",
    "net.ipv4.tcp_wmem",
    "vm.max_map_count",
    "vm.overcommit_memory",
];

/// A parameter and its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sysctl {
    name: String,
    value: String,
}

impl Sysctl {
    /// A parameter by its name, and its value.
    pub fn new(name: &str, value: &str) -> Result<Sysctl, String> {
        let is_plain = |name: &str| {
            let all = name
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b"._-/".contains(&b));
            !name.is_empty() && all && !name.contains("..")
        };
        match is_plain(name) && !value.contains(['\0', '\n']) {
            true => Ok(Sysctl {
                name: name.into(),
                value: value.into(),
            }),
            false => Err(format!(
                "{name:?} is no kernel parameter: they are named as in `sysctl -a`"
            )),
        }
    }
}

impl FromStr for Sysctl {
    type Err = String;

    /// Reads `NAME=VALUE`.
    fn from_str(text: &str) -> Result<Sysctl, String> {
        let (name, value) = text
            .split_once('=')
            .ok_or_else(|| format!("{text:?}: write NAME=VALUE, such as net.core.somaxconn=1024"))?;
        Sysctl::new(name, value)
    }
}

pub(super) fn set(linux: &mut oci::Linux, sysctls: &[Sysctl]) {
    for sysctl in sysctls {
        linux.Sysctl.insert(sysctl.name.clone(), sysctl.value.clone());
    }
}

/// Adds the closest usual parameter to the agent's error about one of these.
pub(super) fn explain(error: Error, sysctls: &[Sysctl]) -> Error {
    let named = sysctls
        .iter()
        .find(|sysctl| error.what.contains(&format!("sysctl {} ", sysctl.name)));
    match named.filter(|sysctl| !USUAL.contains(&sysctl.name.as_str())) {
        Some(sysctl) => {
            let closest = closest(&sysctl.name.replace('/', "."), USUAL);
            error.remedy(format!(
                "`sysctl -a` in a container lists the parameters{closest}"
            ))
        }
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_named_as_by_sysctl() {
        let sysctl: Sysctl = "net.core.somaxconn=1024".parse().unwrap();
        let mut linux = oci::Linux::new();
        set(&mut linux, &[sysctl]);
        assert_eq!(linux.Sysctl["net.core.somaxconn"], "1024");
        assert_eq!("kernel.domainname=a=b".parse::<Sysctl>().unwrap().value, "a=b");
        let failed = |name: &str| {
            let what = format!("set sysctl {name} to \"1\": No such file or directory");
            let error = Error::new(crate::error::ErrorKind::AgentFailed, what);
            let given = [Sysctl::new(name, "1").unwrap()];
            explain(error, &given).remedy.unwrap_or_default()
        };
        assert!(failed("net.core.somaxcon").ends_with("closest is net.core.somaxconn"));
        assert_eq!(failed("net.core.somaxconn"), "");
        for wrong in ["net.core.somaxconn", "=1", "a b=1", "../x=1", "a=1\n2"] {
            assert!(wrong.parse::<Sysctl>().is_err(), "{wrong}");
        }
    }
}
