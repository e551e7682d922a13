//! The record of a sandbox: the facts that need no question to its VMM or its guest.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use thaw_pools::process::ProcessRecord;
use thaw_protocol::api::{HookResult, SandboxNetwork, Volume};
use thaw_protocol::control::DeviceId;
use thaw_records::RecordError;

use super::{Ending, HostDisk, PodNamespace, Provenance, RemoteMemory, Terms, recorded};
use crate::container::RootServing;
use crate::tenant::Tenant;

/// Name of the record in the sandbox's directory.
pub(super) const RECORD: &str = "record.json";

/// The control protocol version of a VMM whose record names none: the release before this field used this version.
const FIRST_CONTROL: u32 = 4;

/// The record of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub id: String,
    /// Given by `--name`.
    pub name: Option<String>,
    /// The image as the user named it.
    pub image: String,
    /// The image's manifest digest.
    pub image_digest: Option<String>,
    /// The container's command.
    pub command: Vec<String>,
    /// Seconds since the Unix epoch.
    pub created: u64,
    /// The process that made the sandbox: the CLI or thawd.
    pub owner: Option<ProcessRecord>,
    /// If thawd made the sandbox: the process that it was made for, and with which it ends.
    pub client: Option<ProcessRecord>,
    /// Its VMM, once there is one.
    pub vmm: Option<ProcessRecord>,
    /// Control protocol version of that VMM.
    #[serde(default = "first_control")]
    pub control: u32,
    /// The name of its cgroup, if it has its own.
    #[serde(default)]
    pub cgroup: Option<String>,
    /// Whether the sandbox ends with its owner.
    pub tethered: bool,
    /// Whether its agent has taken its identity. A sandbox that was not ready when its owner died is removed.
    pub ready: bool,
    pub vcpus: u8,
    pub memory_mib: u32,
    /// What a later owner needs to freeze it.
    #[serde(default)]
    pub provenance: Option<Provenance>,
    /// Its network, if it has access to the outside. A later owner adopts the network by it.
    #[serde(default, deserialize_with = "recorded::network")]
    pub network: Option<SandboxNetwork>,
    /// The network namespace, if a pod brought one.
    #[serde(default)]
    pub pod_network: Option<PodNamespace>,
    /// How its image is served.
    #[serde(default)]
    pub root: RootServing,
    #[serde(default)]
    pub terms: Terms,
    /// Directories and files of the host that are shared with the sandbox.
    #[serde(default, deserialize_with = "recorded::volumes")]
    pub volumes: Vec<Volume>,
    /// The thaw-share that serves the volumes.
    #[serde(default)]
    pub share: Option<ProcessRecord>,
    /// Block devices of the host that are attached, by slot.
    #[serde(default)]
    pub host_disks: BTreeMap<DeviceId, HostDisk>,
    /// Limit of the host's CPU time, in thousandths of a CPU.
    #[serde(default)]
    pub cpu_limit_millis: Option<u32>,
    /// The tenant whose images and templates the sandbox is made from. `None`: those of the node.
    #[serde(default)]
    pub stock: Option<Tenant>,
    /// The host name that its guest was given, if that is not its id.
    #[serde(default)]
    pub hostname: Option<String>,
    /// How the hook of its container after its thaw ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_thaw: Option<HookResult>,
    /// Where its memory comes from, if the snapshot was still being fetched when it was thawed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote: Option<RemoteMemory>,
}

impl Record {
    /// What ends the sandbox beside its machine and its time limit.
    pub fn ending(&self) -> Ending {
        Ending {
            client: self.client,
            on_exit: self.terms.on_exit(),
        }
    }

    /// Whether the sandbox runs on without its owner, to be adopted.
    pub(super) fn outlives_owner(&self) -> bool {
        !self.tethered && self.ready
    }
}

fn first_control() -> u32 {
    FIRST_CONTROL
}

/// Reads the record in a sandbox's directory.
pub(super) fn read_record(directory: &Path) -> Result<Record, RecordError> {
    thaw_records::read(&directory.join(RECORD))
}
