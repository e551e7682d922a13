//! A sandbox's network: a slot of the pool, set up for this sandbox, or the network a pod brings.
//!
//! Invariant: the network in a sandbox's record is in force, or the process that adopts the sandbox puts it in force. So a policy
//! is recorded before it is applied.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use thaw_network::names::NameStatistics;
use thaw_network::pod::PodNetwork;
use thaw_network::policy::Policy;
use thaw_network::{NetworkSlot, Networks, Terms, Traffic, Uplink};
use thaw_protocol::api::{NetworkPolicy, PublishedPort, SandboxNetwork};
use thaw_protocol::handshake::Network;

use super::loopback::Loopback;
use super::pools::{self, Claimed};
use super::{NetworkMode, NetworkSource, Node, Sandbox};
use crate::blocking::blocking;
use crate::dns::{NameServers, Proxy};
use crate::error::{Error, ErrorKind};
use crate::relay::{Relay, SlotGate};
use crate::slow::Slow;
use crate::state::{Record, vsock_socket};
use crate::trace::Trace;
use thaw_sys::lock::Lock;

/// What the node does for a guest whose policy has domains: it resolves names, and carries connections that only a name allows.
#[derive(Debug)]
pub(super) struct ByName {
    _names: Proxy,
    _relay: Relay,
}

/// The network of a sandbox.
#[derive(Debug)]
pub(super) enum Attached {
    Slot {
        slot: Claimed<Networks>,
        /// There is one if the guest's policy has domains.
        names: Mutex<Option<ByName>>,
    },
    Pod {
        /// The forwarder: dropped before the network it forwards from.
        _loopback: Option<Loopback>,
        network: PodNetwork,
    },
}

impl Attached {
    /// The network of a pod whose guest is behind this vsock socket. Must be called within the runtime.
    fn pod(mut network: PodNetwork, vsock: PathBuf) -> Attached {
        let listener = network.take_loopback();
        let loopback = listener.map(|listener| Loopback::bring(listener, vsock));
        let loopback = loopback.and_then(|brought| {
            brought
                .inspect_err(|e| tracing::warn!("nothing is brought to a pod's localhost: {e}"))
                .ok()
        });
        Attached::Pod {
            _loopback: loopback,
            network,
        }
    }

    /// A slot, in which names are resolved if its policy has domains. Must be called within the runtime. Blocks.
    fn in_slot(node: &Node, slot: Claimed<Networks>) -> Result<Attached, Error> {
        let names = match slot.uplink.as_ref().is_some_and(Uplink::has_domains) {
            true => Some(start_names(node, &slot)?),
            false => None,
        };
        Ok(Attached::Slot {
            slot,
            names: Mutex::new(names),
        })
    }

    fn slot(&self) -> Option<&NetworkSlot> {
        match self {
            Attached::Slot { slot, .. } => Some(slot),
            Attached::Pod { .. } => None,
        }
    }

    /// The tap for the VMM. `None` for an adopted pod: its VMM has it already.
    pub(super) fn tap(&self) -> Option<&OwnedFd> {
        match self {
            Attached::Slot { slot, .. } => Some(&slot.tap),
            Attached::Pod { network, .. } => network.tap(),
        }
    }

    /// The configuration for the guest. `None` for an adopted pod: its guest has it already.
    pub(super) fn config(&self) -> Option<&Network> {
        match self {
            Attached::Slot { slot, .. } => Some(&slot.config),
            Attached::Pod { network, .. } => network.config(),
        }
    }

    /// The description for callers and the record, if the network is a slot of this node.
    pub(super) fn describe(&self) -> Option<SandboxNetwork> {
        let uplink = self.slot()?.uplink.as_ref()?;
        Some(uplink.describe())
    }

    /// Gives the published ports back to the host. Whoever waits for the sandbox's end may publish them; the rest of a slot is removed later.
    pub(super) fn unpublish(&mut self) {
        if let Attached::Slot { slot, .. } = self {
            slot.uplink.iter_mut().for_each(Uplink::unpublish);
        }
    }

    /// Leaves the network in place, for a later owner.
    pub(super) fn keep(self) {
        match self {
            Attached::Slot { mut slot, .. } => {
                slot.uplink.iter_mut().for_each(Uplink::keep);
                slot.keep();
            }
            Attached::Pod { network, .. } => network.keep(),
        }
    }
}

/// Checks a requested network policy and the published ports.
///
/// # Errors
/// The rule or port that is invalid.
pub fn read(policy: Option<&NetworkPolicy>, publish: &[PublishedPort]) -> Result<Terms, Error> {
    let wrong = |what| Error::new(ErrorKind::Runtime, what).remedy("see docs/networking.md");
    Terms::read(policy, publish).map_err(wrong)
}

pub(super) fn failed(error: thaw_network::Error) -> Error {
    let failure = Error::from(error);
    match failure.kind {
        ErrorKind::PortUnavailable => failure,
        _ => Error::new(ErrorKind::NetworkUnavailable, failure.what),
    }
}

fn nowhere() -> Error {
    let what =
        "ports are published, and connections allowed or denied, of a private network that leads outside";
    Error::new(ErrorKind::NetworkUnavailable, what).remedy("run as root, with --network private")
}

/// The network that the sandbox with this directory asks for: the slot that its machine was parked with, or else a claimed one. A slot
/// that was made ahead and needs no change costs no system call except reading the host's name servers.
pub(super) async fn claim(
    node: &Node,
    parked: Option<Claimed<Networks>>,
    (source, terms): (&NetworkSource, &Terms),
    directory: &Path,
    trace: &Trace,
) -> Result<Option<Attached>, Error> {
    match source {
        NetworkSource::Ours(NetworkMode::Private) => {
            let _stage = trace.stage("network");
            let slot = match parked {
                Some(slot) => slot,
                None => pools::claim(&node.pools, |p| &p.networks, (), failed, trace).await?,
            };
            Ok(Some(set_up(node, slot, terms, trace).await?))
        }
        _ if !terms.are_default() => Err(nowhere()),
        NetworkSource::Ours(NetworkMode::None) => Ok(None),
        NetworkSource::Pod(namespace) => {
            let _stage = trace.stage("net_attach");
            let namespace = namespace.clone();
            let attached = blocking(move || namespace.attach()).await?;
            Ok(attached.map(|network| Attached::pod(network, vsock_socket(directory))))
        }
    }
}

/// Sets a slot up for a sandbox.
async fn set_up(
    node: &Node,
    mut slot: Claimed<Networks>,
    terms: &Terms,
    trace: &Trace,
) -> Result<Attached, Error> {
    if slot.uplink.is_some() {
        slot.config.nameservers = node.pools.networks.kind().nameservers();
    } else {
        trace.reason(
            Slow::NetworkInward,
            "without root, its network leads to its gateway and no further",
        );
    }
    if terms.are_default() {
        return Attached::in_slot(node, slot);
    }
    let (node, terms) = (node.clone(), terms.clone());
    blocking(move || {
        fulfil(&mut slot, terms)?;
        Attached::in_slot(&node, slot)
    })
    .await
}

/// Resolves names for the guest of a slot and carries its connections from now on.
fn start_names(node: &Node, slot: &NetworkSlot) -> Result<ByName, Error> {
    let uplink = slot.uplink.as_ref().ok_or_else(nowhere)?;
    let servers = NameServers::new(&node.pools.networks.kind().nameservers());
    let gate = SlotGate {
        names: uplink.names(),
        connector: Arc::new(slot.connector().map_err(failed)?),
    };
    Ok(ByName {
        _relay: Relay::start(slot.relay_socket().map_err(failed)?, gate)?,
        _names: Proxy::start(slot.name_socket().map_err(failed)?, uplink.names(), servers)?,
    })
}

fn fulfil(slot: &mut NetworkSlot, terms: Terms) -> Result<(), Error> {
    let uplink = slot.uplink.as_mut().ok_or_else(nowhere)?;
    uplink.assign(terms).map_err(failed)
}

/// Takes over the network of an adopted sandbox and puts its policy in force. `None` if it has none or it cannot be taken over: the sandbox
/// then runs on without network.
pub(super) async fn adopt(node: &Node, record: &Record) -> Option<Attached> {
    match &record.pod_network {
        Some(namespace) => {
            let adopted = blocking({
                let namespace = namespace.clone();
                move || Ok(namespace.adopt())
            });
            let vsock = vsock_socket(&node.run.directory(&record.id));
            let network = adopted.await.ok().flatten()?;
            Some(Attached::pod(network, vsock))
        }
        None => adopt_slot(node, record).await,
    }
}

async fn adopt_slot(node: &Node, record: &Record) -> Option<Attached> {
    let (described, vmm) = (record.network.clone()?, record.vmm?);
    let (pools, of) = (node.pools.clone(), node.clone());
    let adopted = blocking(move || {
        let slot = pools.networks.kind().adopt(vmm, &described).map_err(failed)?;
        let policy =
            Policy::new(described.policy).map_err(|e| Error::new(ErrorKind::Runtime, e.to_string()))?;
        if let Some(uplink) = &slot.uplink
            && let Err(e) = uplink.set_policy(policy)
        {
            tracing::warn!("the network policy of an adopted sandbox is what it was: {e}");
        }
        let names = match slot.uplink.as_ref().is_some_and(Uplink::has_domains) {
            true => start_names(&of, &slot)
                .inspect_err(|e| {
                    tracing::warn!("an adopted sandbox resolves no names, and reaches nothing by them: {e}")
                })
                .ok(),
            false => None,
        };
        Ok(Attached::Slot {
            slot: Claimed::new(slot, &pools, |p| &p.networks),
            names: Mutex::new(names),
        })
    });
    match adopted.await {
        Ok(slot) => Some(slot),
        Err(e) => {
            tracing::warn!(
                sandbox = record.id,
                "adopted, but its network cannot be changed: {e}"
            );
            None
        }
    }
}

impl Sandbox {
    /// Its network, if it has access to the outside.
    pub fn network(&self) -> Option<SandboxNetwork> {
        self.resources.network.as_ref()?.describe()
    }

    /// The traffic of its network, if it has one. Blocks.
    pub fn traffic(&self) -> Option<Traffic> {
        self.resources.network.as_ref()?.slot()?.traffic()
    }

    /// What its guest asked of the node's DNS, if its network policy has or had domains.
    pub fn name_statistics(&self) -> Option<NameStatistics> {
        let network = self.resources.network.as_ref()?;
        network.slot()?.uplink.as_ref()?.name_statistics()
    }

    /// Replaces the policy: atomically, and for existing connections too.
    pub async fn set_network_policy(
        self: &Arc<Sandbox>,
        node: &Node,
        policy: NetworkPolicy,
    ) -> Result<SandboxNetwork, Error> {
        let policy = read(Some(&policy), &[])?.policy;
        let _one = self.freezing.lock().await;
        let (sandbox, node) = (self.clone(), node.clone());
        blocking(move || {
            let Some(Attached::Slot { slot, names }) = &sandbox.resources.network else {
                return Err(nowhere());
            };
            let uplink = slot.uplink.as_ref().ok_or_else(nowhere)?;
            let mut names = names.locked();
            // Before the policy redirects queries.
            if policy.has_domains() && names.is_none() {
                *names = Some(start_names(&node, slot)?);
            }
            let after = SandboxNetwork {
                policy: policy.text().clone(),
                ..uplink.describe()
            };
            let write = |network: &SandboxNetwork| {
                sandbox.resources.directory.write(&Record {
                    network: Some(network.clone()),
                    ..sandbox.record_now()
                })
            };
            let changed = write(&after).and_then(|()| uplink.set_policy(policy).map_err(failed));
            if changed.is_err() {
                // What is in force, which is the old policy. If it cannot be recorded either, the first error is the more useful one.
                let _ = write(&uplink.describe());
            }
            if !uplink.has_domains() {
                *names = None;
            }
            changed?;
            Ok(after)
        })
        .await
    }
}
