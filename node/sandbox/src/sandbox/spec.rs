//! A caller's request for a sandbox, its checks, and the record made from it.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use thaw_network::Terms as NetworkTerms;
use thaw_pools::process::ProcessRecord;
use thaw_protocol::api::{CPU_LIMIT_MILLIS as CPU_MILLIS, DISK_MIB, Volume};
use thaw_protocol::control::{CONTROL_VERSION, MEMORY_MIB, MemoryMode, VCPUS};

use crate::container::RootServing;
use crate::error::{Error, ErrorKind};
use crate::id::new_id;
use crate::images::Pull;
use crate::state::{PodNamespace, Record, Terms};

/// The kind of network of a sandbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NetworkMode {
    /// Loopback only.
    None,
    /// A network of its own, with access to the outside through the host.
    #[default]
    Private,
}

/// Where a sandbox's network comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NetworkSource {
    /// A network of this node, or none.
    Ours(NetworkMode),
    /// The network of the sandbox's pod.
    Pod(PodNamespace),
}

impl NetworkSource {
    pub(super) fn namespace(&self) -> Option<&PodNamespace> {
        match self {
            NetworkSource::Ours(_) => None,
            NetworkSource::Pod(namespace) => Some(namespace),
        }
    }
}

/// What a caller asks for.
#[derive(Clone, Debug)]
pub struct SandboxSpec {
    /// `None`: the sandbox gets its images later, by `Sandbox::show`.
    pub image: Option<String>,
    pub pull: Pull,
    pub plain_http: bool,
    pub vcpus: u8,
    pub memory_mib: u32,
    /// Size of the writable layer, MiB.
    pub disk_mib: u32,
    pub hostname: Option<String>,
    pub name: Option<String>,
    pub network: NetworkSource,
    pub network_terms: NetworkTerms,
    /// The command to show in `thaw ps`.
    pub command: Vec<String>,
    /// Whether the sandbox ends with this process: for one made by the CLI itself.
    pub tethered: bool,
    /// For a sandbox that thawd makes: the process that it is made for, and with which it ends.
    pub client: Option<ProcessRecord>,
    /// Whether to boot the guest instead of thawing one.
    pub cold: bool,
    /// How a thawed guest gets its memory.
    pub memory_mode: MemoryMode,
    /// How the image is served.
    pub root: RootServing,
    /// A SEQPACKET socket over which the VMM reports which bytes of the image are read ([`thaw_protocol::access`]).
    pub record: Option<Arc<OwnedFd>>,
    /// Whether to read ahead the bytes that a recorded run of the image read.
    pub prefetch: bool,
    pub terms: Terms,
    /// Directories and files of the host.
    pub volumes: Vec<Volume>,
    /// Limit of the host's CPU time, in thousandths of a CPU. `None`: limited only by the number of vCPUs.
    pub cpu_limit_millis: Option<u32>,
}

pub(super) fn check_shape(spec: &SandboxSpec) -> Result<(), Error> {
    if spec.memory_mib < *MEMORY_MIB.start() {
        let what = format!(
            "{} MiB of memory is too small for a guest: the least is {}",
            spec.memory_mib,
            MEMORY_MIB.start()
        );
        return Err(Error::new(ErrorKind::MemoryTooSmall, what));
    }
    if spec.memory_mib > *MEMORY_MIB.end() {
        let what = format!(
            "{} MiB of memory is more than a guest can have: {}",
            spec.memory_mib,
            MEMORY_MIB.end()
        );
        return Err(Error::new(ErrorKind::Runtime, what).remedy("give it less (--memory; a pod: its limits)"));
    }
    if !DISK_MIB.contains(&spec.disk_mib) {
        let what = format!(
            "a disk cannot have {} MiB: {} to {}",
            spec.disk_mib,
            DISK_MIB.start(),
            DISK_MIB.end()
        );
        return Err(Error::new(ErrorKind::Runtime, what).remedy("choose another --disk"));
    }
    if !VCPUS.contains(&spec.vcpus) {
        let what = format!(
            "a guest cannot have {} CPUs: {} to {}",
            spec.vcpus,
            VCPUS.start(),
            VCPUS.end()
        );
        return Err(
            Error::new(ErrorKind::Runtime, what).remedy("give it another number (--cpus; a pod: its limits)")
        );
    }
    if let Some(millis) = spec.cpu_limit_millis.filter(|m| !CPU_MILLIS.contains(m)) {
        let what = format!(
            "a CPU limit cannot be {millis} thousandths of a CPU: {} to {}",
            CPU_MILLIS.start(),
            CPU_MILLIS.end()
        );
        return Err(Error::new(ErrorKind::Runtime, what).remedy("choose another --cpu-limit"));
    }
    Ok(())
}

pub(super) fn record(spec: &SandboxSpec) -> Result<Record, Error> {
    Ok(Record {
        name: spec.name.clone(),
        image: spec.image.clone().unwrap_or_default(),
        command: spec.command.clone(),
        client: spec.client,
        tethered: spec.tethered,
        vcpus: spec.vcpus,
        memory_mib: spec.memory_mib,
        root: spec.root,
        pod_network: spec.network.namespace().cloned(),
        terms: Terms {
            rate_limits: Some(spec.terms.rate_limits.unwrap_or_default()),
            ..spec.terms.clone()
        },
        volumes: spec.volumes.clone(),
        hostname: spec.hostname.clone(),
        cpu_limit_millis: spec.cpu_limit_millis,
        ..new_record()?
    })
}

/// A record with a new id, owned by this process.
pub(super) fn new_record() -> Result<Record, Error> {
    Ok(Record {
        id: new_id().map_err(|e| Error::system("cannot read random bytes", &e))?,
        name: None,
        image: String::new(),
        image_digest: None,
        command: Vec::new(),
        created: SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |d| d.as_secs()),
        owner: ProcessRecord::myself(),
        client: None,
        vmm: None,
        control: CONTROL_VERSION,
        cgroup: None,
        tethered: true,
        ready: false,
        vcpus: 1,
        memory_mib: *MEMORY_MIB.start(),
        provenance: None,
        network: None,
        pod_network: None,
        root: RootServing::Virtiofs,
        terms: Terms::default(),
        volumes: Vec::new(),
        share: None,
        host_disks: BTreeMap::new(),
        cpu_limit_millis: None,
        stock: None,
        hostname: None,
        after_thaw: None,
        remote: None,
    })
}
