//! A seccomp profile of the caller: the JSON of docker's profiles, or `linux.seccomp` of the OCI runtime specification.
//!
//! Docker's form chooses rules by capability, architecture and kernel; the OCI form has none of these choices. [`Profile::rules`] makes the
//! section that the agent compiles. Invariant: a [`Profile`] has no action, comparison, flag or argument that the agent's compiler refuses.

use std::collections::BTreeSet;
use std::path::Path;

use serde::Deserialize;
use thaw_protocol::agent::oci;
use thaw_protocol::agent::seccomp::{ACTIONS, COMPARISONS, FLAGS};

use crate::closest::closest;
use crate::error::{Error, ErrorKind};

/// Largest profile in bytes. Docker's default profile has about 20 KiB.
pub const MAX_BYTES: usize = 256 << 10;
/// Most conditions of a rule. A rule of Docker's default profile has at most one.
const MAX_ARGUMENTS: usize = 64;
/// `MAX_ERRNO`, include/linux/err.h.
const MAX_ERRNO: u32 = 4095;
/// Calls have arguments 0 to 5.
const MAX_INDEX: u64 = 5;
/// The name of a guest's architecture in docker's profiles.
const ARCHITECTURE: &str = "amd64";
/// The oldest kernel that guests run.
const OLDEST_KERNEL: (u32, u32) = (6, 1);

/// A valid profile.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Profile {
    default_action: String,
    default_errno_ret: Option<u32>,
    /// The filter always covers the guest's architecture, and gives calls of others the default action.
    architectures: Option<Vec<String>>,
    arch_map: Option<Vec<ArchitectureMap>>,
    flags: Option<Vec<String>>,
    listener_path: Option<String>,
    listener_metadata: Option<String>,
    syscalls: Option<Vec<Rule>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ArchitectureMap {
    #[serde(rename = "architecture")]
    _architecture: String,
    #[serde(rename = "subArchitectures")]
    _sub_architectures: Option<Vec<String>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Rule {
    name: Option<String>,
    names: Option<Vec<String>>,
    action: String,
    errno_ret: Option<u32>,
    args: Option<Vec<Argument>>,
    #[serde(rename = "comment")]
    _comment: Option<String>,
    includes: Option<Choice>,
    excludes: Option<Choice>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Argument {
    index: u64,
    #[serde(default)]
    value: u64,
    #[serde(default)]
    value_two: u64,
    op: String,
}

/// When docker includes or excludes a rule.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Choice {
    caps: Option<Vec<String>>,
    arches: Option<Vec<String>>,
    min_kernel: Option<String>,
}

impl Profile {
    /// Reads a profile's JSON.
    ///
    /// # Errors
    /// What is wrong, and where.
    pub fn parse(json: &[u8]) -> Result<Profile, String> {
        if json.len() > MAX_BYTES {
            return Err(format!("it is larger than {} KiB", MAX_BYTES >> 10));
        }
        let profile: Profile = serde_json::from_slice(json).map_err(|e| e.to_string())?;
        profile.check()?;
        Ok(profile)
    }

    /// Reads a profile from a file.
    ///
    /// # Errors
    /// [`ErrorKind::Runtime`], with the file's name and what is wrong with it.
    pub fn read(path: &Path) -> Result<Profile, Error> {
        let failed = |what: String| {
            let what = format!("--security-opt seccomp={}: {what}", path.display());
            Error::new(ErrorKind::Runtime, what)
                .remedy("give a file with a profile in docker's or the OCI's JSON, `default` or `unconfined`")
        };
        let file = std::fs::File::open(path).map_err(|e| failed(e.to_string()))?;
        let mut json = Vec::new();
        let mut bounded = std::io::Read::take(file, MAX_BYTES as u64 + 1);
        std::io::Read::read_to_end(&mut bounded, &mut json).map_err(|e| failed(e.to_string()))?;
        Profile::parse(&json).map_err(failed)
    }

    fn check(&self) -> Result<(), String> {
        check_action("defaultAction", &self.default_action, self.default_errno_ret)?;
        if self.architectures.as_ref().is_some_and(|all| !all.is_empty()) && self.arch_map.is_some() {
            return Err("architectures and archMap exclude each other".into());
        }
        let has_listener = [&self.listener_path, &self.listener_metadata];
        if has_listener.into_iter().flatten().any(|text| !text.is_empty()) {
            return Err("listenerPath: no process of the host can listen for a guest's system calls".into());
        }
        for flag in self.flags.iter().flatten() {
            known("flags", flag, &FLAGS)?;
        }
        for (at, rule) in self.syscalls.iter().flatten().enumerate() {
            rule.check().map_err(|why| format!("syscalls[{at}]: {why}"))?;
        }
        Ok(())
    }

    /// The section for a container with these capabilities, which the agent compiles.
    pub(super) fn rules(&self, capabilities: &[String]) -> oci::LinuxSeccomp {
        let rules = self.syscalls.iter().flatten();
        let rules = rules.filter(|rule| rule.applies(capabilities)).map(Rule::encode);
        oci::LinuxSeccomp {
            DefaultAction: self.default_action.clone(),
            DefaultErrnoRet: self.default_errno_ret,
            Architectures: vec!["SCMP_ARCH_X86_64".into()],
            Flags: self.flags.clone().unwrap_or_default(),
            Syscalls: rules.collect(),
            ..Default::default()
        }
    }
}

impl Rule {
    fn check(&self) -> Result<(), String> {
        match (&self.name, self.names.as_deref().unwrap_or_default()) {
            (None, []) => return Err("names is missing".into()),
            (Some(_), [_, ..]) => return Err("name and names exclude each other".into()),
            _ => {}
        }
        check_action("action", &self.action, self.errno_ret)?;
        let arguments = self.args.as_deref().unwrap_or_default();
        if arguments.len() > MAX_ARGUMENTS {
            return Err(format!("args has more than {MAX_ARGUMENTS} conditions"));
        }
        for argument in arguments {
            if argument.index > MAX_INDEX {
                return Err(format!(
                    "args: index {} is above {MAX_INDEX}, a call's last argument",
                    argument.index
                ));
            }
            known("op", &argument.op, &COMPARISONS)?;
        }
        for choice in [&self.includes, &self.excludes].into_iter().flatten() {
            if let Some(kernel) = &choice.min_kernel {
                check_kernel(kernel)?;
            }
        }
        Ok(())
    }

    /// Whether docker uses the rule for a container with these capabilities.
    fn applies(&self, capabilities: &[String]) -> bool {
        let is_held = |name: &String| capabilities.contains(name);
        let is_guests = |name: &String| name == ARCHITECTURE;
        let excluded = self.excludes.as_ref().is_some_and(|choice| {
            choice.min_kernel.is_some()
                || choice.arches.iter().flatten().any(is_guests)
                || choice.caps.iter().flatten().any(is_held)
        });
        let included = self.includes.as_ref().is_none_or(|choice| {
            let arches = choice.arches.as_deref().unwrap_or_default();
            (arches.is_empty() || arches.iter().any(is_guests)) && choice.caps.iter().flatten().all(is_held)
        });
        included && !excluded
    }

    fn encode(&self) -> oci::LinuxSyscall {
        let names: BTreeSet<&String> = self.names.iter().flatten().chain(&self.name).collect();
        let arguments = self.args.iter().flatten().map(Argument::encode);
        oci::LinuxSyscall {
            Names: names.into_iter().cloned().collect(),
            Action: self.action.clone(),
            ErrnoRet: self.errno_ret.map(oci::linux_syscall::ErrnoRet::Errnoret),
            Args: arguments.collect(),
            ..Default::default()
        }
    }
}

impl Argument {
    fn encode(&self) -> oci::LinuxSeccompArg {
        let mut argument = oci::LinuxSeccompArg::new();
        (argument.Index, argument.Value, argument.ValueTwo) = (self.index, self.value, self.value_two);
        argument.Op.clone_from(&self.op);
        argument
    }
}

fn check_action(field: &str, action: &str, errno: Option<u32>) -> Result<(), String> {
    if action == "SCMP_ACT_NOTIFY" {
        return Err(format!(
            "{field}: SCMP_ACT_NOTIFY needs a process of the host that listens, and there is none"
        ));
    }
    known(field, action, &ACTIONS)?;
    match errno {
        Some(errno) if errno > MAX_ERRNO => {
            Err(format!("{field}: error number {errno} is above {MAX_ERRNO}"))
        }
        _ => Ok(()),
    }
}

fn known(field: &str, name: &str, all: &[&str]) -> Result<(), String> {
    match all.contains(&name) {
        true => Ok(()),
        false => {
            let closest = closest(name, all.iter().copied());
            Err(format!(
                "{field}: {name:?} is unknown; there are {}{closest}",
                all.join(", ")
            ))
        }
    }
}

/// Checks a `minKernel`. All guests' kernels must agree about it, because this host does not know the guest's.
fn check_kernel(text: &str) -> Result<(), String> {
    let parts = text.split_once('.');
    let version = parts.and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    let (major, minor) = OLDEST_KERNEL;
    match version {
        Some(version) if version <= OLDEST_KERNEL => Ok(()),
        Some(_) => Err(format!(
            "minKernel {text}: guests' kernels may be older, from {major}.{minor}; remove the condition"
        )),
        None => Err(format!("minKernel {text:?} is no version such as 4.8")),
    }
}

/// Parses a profile and makes its rules, for a container with no capability.
#[cfg(fuzzing)]
pub fn fuzz_rules(json: &[u8]) -> Option<oci::LinuxSeccomp> {
    Profile::parse(json).ok().map(|profile| profile.rules(&[]))
}

#[cfg(test)]
#[path = "seccomp_profile_test.rs"]
mod tests;
