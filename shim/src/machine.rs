//! The pod's microVM: made by thawd when the first container is, ended with the last.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use thaw_protocol::api::RateLimit;
use thaw_protocol::shim::MessageField;
use thaw_protocol::shim::pods::pod_network::Mode;
use thaw_protocol::shim::pods::{
    CreatePodRequest, CreatePodResponse, PodNetwork, RateLimit as PodRate, ThawPodRequest,
};

use crate::agent::Agent;
use crate::error::{Error, For, Result};
use crate::kata::Settings;
use crate::sizing;
use crate::spec::config::Spec;
use crate::thawd::Thawd;

/// The file of a bundle that says which microVM its container is in: for whoever cleans up after a shim that was killed.
const FILE: &str = "thaw.json";

/// A microVM.
#[derive(Debug)]
pub struct Machine {
    pub sandbox: String,
    /// Its VMM: what containerd has for a task's process.
    pub vmm: i32,
    pub agent: Agent,
    /// What Kata's settings make of the pod: its containers have the same.
    pub kata: Settings,
}

/// What a bundle says of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    pub sandbox: String,
    pub vmm: i32,
}

impl Note {
    /// Of a bundle; none where its container never had one.
    pub fn read(bundle: &Path) -> Option<Note> {
        serde_json::from_slice(&std::fs::read(bundle.join(FILE)).ok()?).ok()
    }

    /// The container is removed, and its hooks were run.
    pub fn remove(bundle: &Path) {
        let _ = std::fs::remove_file(bundle.join(FILE));
    }

    pub fn write(&self, bundle: &Path) -> Result<()> {
        let path: PathBuf = bundle.join(FILE);
        let text = serde_json::to_vec(self).map_err(|e| Error::malformed(&path, e))?;
        std::fs::write(&path, text).for_(|| format!("write {}", path.display()))
    }
}

impl Machine {
    /// Makes the microVM of a pod whose own specification is `spec`, with Kata's settings for it, and notes it in its bundle.
    pub async fn make(
        thawd: &Thawd,
        namespace: &str,
        id: &str,
        bundle: &Path,
        spec: &Spec,
        kata: Settings,
    ) -> Result<Machine> {
        let shape = sizing::shape(spec, &kata);
        let mut network = network(spec)?;
        if kata.no_network {
            network = PodNetwork::default();
        }
        let request = CreatePodRequest {
            hostname: spec.hostname.clone(),
            network: MessageField::some(network),
            cgroup: spec.linux.cgroups_path.clone(),
            cpus: shape.cpus,
            memory_mib: shape.memory_mib,
            labels: labels(namespace, id),
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
            // The first error says more.
            let _ = thawd.end(&made.sandbox_id).await;
            return Err(Error::Unsupported(
                "the pod's rate limits: this node's thawd is of a release without them".into(),
            ));
        }
        Machine::of(thawd, made, bundle, kata).await
    }

    /// Thaws that of a container from its snapshot, with the network it had, and notes it in the bundle.
    pub async fn thaw(
        thawd: &Thawd,
        namespace: &str,
        id: &str,
        bundle: &Path,
        spec: &Spec,
        kata: Settings,
        snapshot: &Path,
    ) -> Result<Machine> {
        if network(spec)?.mode == Mode::NAMESPACE.into() {
            return Err(Error::Unsupported(
                "a microVM that was frozen cannot be given a network namespace of the host's: it has the network it had".into(),
            ));
        }
        let request = ThawPodRequest {
            directory: snapshot.display().to_string(),
            hostname: spec.hostname.clone(),
            cgroup: spec.linux.cgroups_path.clone(),
            labels: labels(namespace, id),
            client_pid: own_pid(),
            ..Default::default()
        };
        let made = thawd.thaw(&request).await?;
        Machine::of(thawd, made, bundle, kata).await
    }

    async fn of(thawd: &Thawd, made: CreatePodResponse, bundle: &Path, kata: Settings) -> Result<Machine> {
        let note = Note {
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
            }),
            Err(e) => {
                // The first error says more.
                let _ = thawd.end(&made.sandbox_id).await;
                Err(e)
            }
        }
    }

    pub fn note(&self) -> Note {
        Note {
            sandbox: self.sandbox.clone(),
            vmm: self.vmm,
        }
    }
}

/// A limit as thawd is told it. What comes once goes with a rate: without one it means nothing, as in Kata.
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

/// By which people find it.
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

/// The network namespace that was made for the pod, or one of thawd's own.
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
    fn a_bundle_remembers_its_machine() {
        let bundle = tempfile::tempdir().unwrap();
        assert_eq!(Note::read(bundle.path()), None);
        let note = Note {
            sandbox: "s".into(),
            vmm: 7,
        };
        note.write(bundle.path()).unwrap();
        assert_eq!(Note::read(bundle.path()), Some(note));
        Note::remove(bundle.path());
        assert_eq!(Note::read(bundle.path()), None);
    }

    #[test]
    fn a_network_is_the_pods_or_one_made_for_it_and_never_the_hosts() {
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
