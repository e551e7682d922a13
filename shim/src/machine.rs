//! The pod's microVM. thawd creates it with the pod's first container and ends it with the last.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use thaw_protocol::api::RateLimit;
use thaw_protocol::shim::MessageField;
use thaw_protocol::shim::pods::pod_network::Mode;
use thaw_protocol::shim::pods::{
    CreatePodRequest, CreatePodResponse, PodNetwork, RateLimit as PodRate, ThawPodRequest, ThawedContainer,
};

use crate::agent::Agent;
use crate::error::{Error, Result, WithContext};
use crate::kata::Settings;
use crate::sizing;
use crate::spec::config::Spec;
use crate::thawd::Thawd;
use crate::thawed::{Thawed, Wanted};

/// The file in a bundle that names the container's microVM, for the cleanup after a shim that was killed.
const FILE: &str = "thaw.json";

/// A microVM.
#[derive(Debug)]
pub struct Machine {
    pub sandbox: String,
    /// PID of its VMM, which containerd shows as the task's process.
    pub vmm: i32,
    pub agent: Agent,
    /// Kata's settings of the pod, which hold for all its containers.
    pub kata: Settings,
    /// The container that was thawed with it from a stored snapshot. It is paused.
    pub thawed: Option<Thawed>,
}

/// The record of a microVM in a bundle.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineRecord {
    pub sandbox: String,
    pub vmm: i32,
}

impl MachineRecord {
    /// Reads a bundle's record. `None` if the container never had a microVM.
    pub fn read(bundle: &Path) -> Option<MachineRecord> {
        serde_json::from_slice(&std::fs::read(bundle.join(FILE)).ok()?).ok()
    }

    /// Removes the record, once the container is removed and its hooks have run.
    pub fn remove(bundle: &Path) {
        let _ = std::fs::remove_file(bundle.join(FILE));
    }

    pub fn write(&self, bundle: &Path) -> Result<()> {
        let path: PathBuf = bundle.join(FILE);
        let text = serde_json::to_vec(self).map_err(|e| Error::malformed(&path, e))?;
        std::fs::write(&path, text).with_context(|| format!("write {}", path.display()))
    }
}

/// The pod that a microVM is for, and the container or sandbox that creates it.
#[derive(Clone, Copy, Debug)]
pub struct PodOf<'a> {
    pub namespace: &'a str,
    pub id: &'a str,
    pub bundle: &'a Path,
    pub spec: &'a Spec,
}

impl Machine {
    /// Creates the microVM of a pod and records it in the bundle.
    pub async fn make(thawd: &Thawd, pod: PodOf<'_>, kata: Settings) -> Result<Machine> {
        let spec = pod.spec;
        let shape = sizing::shape(spec, &kata);
        let network = network_of(spec, &kata)?;
        let request = CreatePodRequest {
            hostname: spec.hostname.clone(),
            network: MessageField::some(network),
            cgroup: spec.linux.cgroups_path.clone(),
            cpus: shape.cpus,
            memory_mib: shape.memory_mib,
            labels: labels(pod.namespace, pod.id),
            client_pid: own_pid(),
            disk_rate: rate(&kata.disk_rate),
            net_out_rate: rate(&kata.net_out_rate),
            net_in_rate: rate(&kata.net_in_rate),
            ..Default::default()
        };
        let limited =
            request.disk_rate.is_some() || request.net_out_rate.is_some() || request.net_in_rate.is_some();
        let made = thawd.create(&request).await?;
        if limited && !made.rate_limited {
            // The error below is the one to report.
            let _ = thawd.end(&made.sandbox_id).await;
            return Err(Error::Unsupported(
                "the pod's rate limits: this node's thawd is of a release that does not support them".into(),
            ));
        }
        Machine::of(thawd, made, pod.bundle, kata).await
    }

    /// Thaws a container's microVM from its snapshot, with the network of its namespace or else as it was frozen, and records it in the
    /// bundle.
    pub async fn thaw(thawd: &Thawd, pod: PodOf<'_>, kata: Settings, snapshot: &Path) -> Result<Machine> {
        let spec = pod.spec;
        let network = Some(network_of(spec, &kata)?);
        let request = ThawPodRequest {
            directory: snapshot.display().to_string(),
            // A network of thawd is one only if the container had one.
            network: MessageField::from_option(network.filter(|n| n.mode != Mode::PRIVATE.into())),
            hostname: spec.hostname.clone(),
            cgroup: spec.linux.cgroups_path.clone(),
            labels: labels(pod.namespace, pod.id),
            client_pid: own_pid(),
            ..Default::default()
        };
        let made = thawd.thaw(&request).await?;
        Machine::of(thawd, made, pod.bundle, kata).await
    }

    /// Thaws a pod's microVM from a stored snapshot, with the pod's network, pauses the container in it, and records it in the bundle.
    pub async fn thaw_stored(
        thawd: &Thawd,
        pod: PodOf<'_>,
        kata: Settings,
        wanted: Wanted<'_>,
    ) -> Result<Machine> {
        let spec = pod.spec;
        let has_rates = [&kata.disk_rate, &kata.net_out_rate, &kata.net_in_rate];
        if has_rates.into_iter().any(|limit| rate(limit).is_some()) {
            return Err(Error::Unsupported(
                "the pod's rate limits: a pod that is thawed from a snapshot has those that were frozen"
                    .into(),
            ));
        }
        let shape = sizing::shape(spec, &kata);
        let request = ThawPodRequest {
            snapshot: wanted.snapshot.into(),
            namespace: wanted.namespace.into(),
            network: MessageField::some(network_of(spec, &kata)?),
            hostname: spec.hostname.clone(),
            cgroup: spec.linux.cgroups_path.clone(),
            labels: labels(pod.namespace, pod.id),
            client_pid: own_pid(),
            ..Default::default()
        };
        let mut made = thawd.thaw(&request).await?;
        let sandbox = made.sandbox_id.clone();
        let thawed = async {
            let container = fitting(made.container.take(), shape.memory_mib)?;
            let mut machine = Machine::of(thawd, made, pod.bundle, kata).await?;
            machine.agent.pause(&container.id, true).await?;
            machine.thawed = Some(Thawed::new(container));
            Ok::<_, Error>(machine)
        };
        let thawed = thawed.await;
        if thawed.is_err() {
            // The first error is the one to report.
            let _ = thawd.end(&sandbox).await;
        }
        thawed
    }

    async fn of(thawd: &Thawd, made: CreatePodResponse, bundle: &Path, kata: Settings) -> Result<Machine> {
        let note = MachineRecord {
            sandbox: made.sandbox_id.clone(),
            vmm: made.vmm_pid,
        };
        let connected = async {
            note.write(bundle)?;
            Agent::connect(Path::new(&made.vsock)).await
        };
        match connected.await {
            Ok(agent) => Ok(Machine {
                sandbox: made.sandbox_id,
                vmm: made.vmm_pid,
                agent,
                kata,
                thawed: None,
            }),
            Err(e) => {
                // The first error is the one to report.
                let _ = thawd.end(&made.sandbox_id).await;
                Err(e)
            }
        }
    }

    pub fn note(&self) -> MachineRecord {
        MachineRecord {
            sandbox: self.sandbox.clone(),
            vmm: self.vmm,
        }
    }
}

/// A rate limit for thawd. A one-time burst needs a rate; without one it has no meaning, as in Kata.
fn rate(limit: &RateLimit) -> MessageField<PodRate> {
    let once = |rate: Option<u64>, once: Option<u64>| rate.and(once).unwrap_or(0);
    if limit.bytes_per_s.is_none() && limit.ops_per_s.is_none() {
        return MessageField::none();
    }
    MessageField::some(PodRate {
        bytes_per_s: limit.bytes_per_s.unwrap_or(0),
        once_bytes: once(limit.bytes_per_s, limit.once_bytes),
        ops_per_s: limit.ops_per_s.unwrap_or(0),
        once_ops: once(limit.ops_per_s, limit.once_ops),
        ..Default::default()
    })
}

/// Labels by which people find the sandbox.
fn labels(namespace: &str, id: &str) -> HashMap<String, String> {
    [
        ("containerd.io/namespace".to_owned(), namespace.to_owned()),
        ("containerd.io/id".to_owned(), id.to_owned()),
    ]
    .into()
}

fn own_pid() -> i32 {
    rustix::process::getpid().as_raw_nonzero().get()
}

/// The pod's network, or none if Kata's settings say so.
fn network_of(spec: &Spec, kata: &Settings) -> Result<PodNetwork> {
    let network = network(spec)?;
    match kata.no_network {
        true => Ok(PodNetwork::default()),
        false => Ok(network),
    }
}

/// The container of a thawed pod, if it fits into the pod's memory.
fn fitting(container: Option<ThawedContainer>, memory_mib: u32) -> Result<ThawedContainer> {
    match container {
        None => Err(Error::Unsupported(
            "a pod of a stored snapshot: this node's thawd is of a release that does not support it".into(),
        )),
        Some(container) if container.memory_mib > memory_mib => Err(Error::Unsupported(format!(
            "the snapshot's microVM has {} MiB of memory, and the pod may use {memory_mib} MiB: raise the limits of its container",
            container.memory_mib
        ))),
        Some(container) => Ok(container),
    }
}

/// The pod's network: the namespace made for it, or a private network of thawd.
fn network(spec: &Spec) -> Result<PodNetwork> {
    let namespace = spec.linux.namespace("network").ok_or_else(|| {
        Error::Unsupported(
            "the host's network cannot be a microVM's: give the pod a network of its own (no hostNetwork, no --net-host)"
                .into(),
        )
    })?;
    let mode = match namespace.path.is_empty() {
        true => Mode::PRIVATE,
        false => Mode::NAMESPACE,
    };
    Ok(PodNetwork {
        mode: mode.into(),
        namespace: namespace.path.clone(),
        ..Default::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::config::Namespace;

    #[test]
    fn machine_record_is_read_from_its_bundle() {
        let bundle = tempfile::tempdir().unwrap();
        assert_eq!(MachineRecord::read(bundle.path()), None);
        let note = MachineRecord {
            sandbox: "s".into(),
            vmm: 7,
        };
        note.write(bundle.path()).unwrap();
        assert_eq!(MachineRecord::read(bundle.path()), Some(note));
        MachineRecord::remove(bundle.path());
        assert_eq!(MachineRecord::read(bundle.path()), None);
    }

    #[test]
    fn network_is_the_pods_or_new_never_the_hosts() {
        let mut spec = Spec::default();
        assert!(network(&spec).unwrap_err().to_string().contains("hostNetwork"));
        let mut namespace = Namespace {
            kind: "network".into(),
            ..Default::default()
        };
        spec.linux.namespaces = vec![namespace.clone()];
        assert_eq!(network(&spec).unwrap().mode, Mode::PRIVATE.into());
        namespace.path = "/run/netns/x".into();
        spec.linux.namespaces = vec![namespace];
        let told = network(&spec).unwrap();
        assert_eq!(
            (told.mode, told.namespace.as_str()),
            (Mode::NAMESPACE.into(), "/run/netns/x")
        );
    }
}
