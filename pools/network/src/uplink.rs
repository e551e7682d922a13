//! A slot's connection to the outside: its address, its policy, its published ports.

use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::process::{PidfdGetfdFlags, pidfd_getfd};
use thaw_protocol::api::{NetworkPolicy, PublishedPort, SandboxNetwork};
use thaw_sys::lock::Lock;

use crate::Error;
use crate::fast::FastPath;
use crate::host::Host;
use crate::in_force::{InForce, PUT};
use crate::names::{NameCounts, NameStatistics, Names};
use crate::policy::{Decision, Policy};
use crate::publish::{Port, Publication};
use crate::resolved::Resolved;
use crate::slot::{Change, DNS};
use crate::tap::{self, Tapped};
use crate::{GUEST_ADDRESS, slot};
use thaw_failpoint::{Failpoint, reach};
use thaw_pools::process::ProcessRecord;
use thaw_sys::conntrack::{self, Connection, Translation};
use thaw_sys::netlink::Socket;

const LEAVE: &str = "have a slot leave its fast path";
const HAND_OVER: &str = "hand a slot's connections over to its namespace (load nf_conntrack_netlink)";

/// A slot's connection to the outside. If it is dropped without [`Uplink::leave`], its interfaces go with its namespace.
#[derive(Debug)]
pub struct Uplink {
    host: Arc<Host>,
    number: u32,
    published: Vec<Publication>,
    policy: Arc<Mutex<InForce>>,
    names: Arc<NameCounts>,
}

impl Uplink {
    pub(super) fn new(host: Arc<Host>, number: u32, filter: Socket, fast: Option<FastPath>) -> Uplink {
        Uplink {
            host,
            number,
            published: Vec::new(),
            policy: Arc::new(Mutex::new(InForce {
                policy: Policy::default(),
                filter,
                fast,
                resolved: Resolved::default(),
            })),
            names: Arc::default(),
        }
    }

    /// The slot's address, at which the host reaches the guest and from which the guest's packets come.
    pub fn address(&self) -> Ipv4Addr {
        self.host.setup.range.slot(self.number)
    }

    /// The address of the host's end.
    #[cfg(test)]
    pub(super) fn host_address(&self) -> Ipv4Addr {
        self.host.setup.range.host(self.number)
    }

    /// Makes its namespace decide every packet, with the rules of a slot that has a fast path.
    #[cfg(test)]
    pub(super) fn turn_off_fast_path(&self) {
        if let Some(mut fast) = self.in_force().fast.take() {
            fast.leave().unwrap();
        }
    }

    /// Its description, for callers and for a later owner that adopts it.
    pub fn describe(&self) -> SandboxNetwork {
        SandboxNetwork {
            address: self.address().to_string(),
            published: self.published.iter().map(|p| p.port.into()).collect(),
            policy: self.in_force().policy.text().clone(),
        }
    }

    /// What resolves names for its guest according to the policy in force.
    pub fn names(&self) -> Names {
        Names::new(self.policy.clone(), self.names.clone(), self.host.setup.range)
    }

    /// What its guest has asked since this process has the slot; `None` if it never had a policy with domains.
    pub fn name_statistics(&self) -> Option<NameStatistics> {
        let statistics = self.names.read();
        let has_some = statistics != NameStatistics::default() || self.has_domains();
        has_some.then_some(statistics)
    }

    /// Whether the policy in force has domains.
    pub fn has_domains(&self) -> bool {
        self.in_force().policy.has_domains()
    }

    pub(super) fn in_force(&self) -> MutexGuard<'_, InForce> {
        self.policy.locked()
    }

    /// Whether its packets are redirected past its namespace.
    pub fn is_fast(&self) -> bool {
        self.in_force().fast.is_some()
    }

    /// Gives a sandbox's policy and ports to a slot that no guest has used yet. Blocks for one nftables transaction each; takes no RTNL.
    pub fn assign(&mut self, terms: Terms) -> Result<(), Error> {
        let Terms { policy, ports } = terms;
        if !policy.allows_all() {
            let own = self.address();
            let mut in_force = self.in_force();
            let in_force = &mut *in_force;
            // No guest has sent anything, so there is no connection to wait for, to hand over or to end.
            if let Some(mut fast) = in_force.fast.take() {
                fast.turn_off().map_err(Error::system(LEAVE))?;
            }
            let change = Change {
                policy: &policy,
                own,
                resolved: &[],
                unused_set: None,
            };
            change
                .transaction()
                .commit(&mut in_force.filter)
                .map_err(Error::system(PUT))?;
            reach(Failpoint::PolicyInForce);
            in_force.resolved.replace(policy.resolved_set(), &[]);
            in_force.policy = policy;
        }
        match ports.as_slice() {
            [] => Ok(()),
            ports => self.publish(ports),
        }
    }

    /// Changes the policy, at once and as a whole, and ends the connections that it denies. Blocks for an nftables transaction, or two if
    /// the domains change; and if the slot leaves its fast path, until the packets on it are through.
    ///
    /// # Errors
    /// A request to the kernel fails. The policy before is in force.
    pub fn set_policy(&self, policy: Policy) -> Result<(), Error> {
        let own = self.address();
        let mut in_force = self.in_force();
        let in_force = &mut *in_force;
        if in_force.fast.is_some() && policy.allows_all() {
            in_force.policy = policy;
            return Ok(());
        }
        let mut host = Socket::netfilter().map_err(Error::system("open a netfilter socket"))?;
        // A later owner that finds the same domains in force keeps the connections to addresses that the earlier one has resolved.
        let set_before = &in_force.resolved.set;
        let (had_names, same_names) = (set_before.is_some(), *set_before == policy.resolved_set());
        let resolved = in_force.resolved.of_names(|name| policy.allows_name(name));
        let denied = |began: Ipv4Addr, connection: &Connection| {
            let to = &connection.original;
            let is_allowed = match policy.decides(to.destination, to.protocol, to.port) {
                // Queries that were redirected.
                Decision::Allow => !(had_names && to.port == DNS),
                Decision::Deny => false,
                Decision::ByName => {
                    same_names || resolved.iter().any(|(address, _)| *address == to.destination)
                }
            };
            to.source == began && (slot::is_barred(self.host.setup.range, to.destination) || !is_allowed)
        };
        let allowed = |connection: &Connection| !denied(own, connection);
        let translation = Translation {
            inside: GUEST_ADDRESS,
            outside: own,
        };
        if in_force.fast.is_some() {
            // The namespace must know which side opened each connection before it decides; connections opened meanwhile follow below.
            conntrack::hand_over(&mut host, &mut in_force.filter, translation, allowed)
                .map_err(Error::system(HAND_OVER))?;
        }
        let ended = in_force.change(&policy, own, &resolved, |now| {
            reach(Failpoint::PolicyInForce);
            if let Some(fast) = &mut now.fast {
                fast.leave().map_err(Error::system(LEAVE))?;
                now.fast = None;
                reach(Failpoint::PolicyFastLeft);
                tracing::info!(slot = self.number, "left its fast path for its policy");
                conntrack::hand_over(&mut host, &mut now.filter, translation, allowed)
                    .map_err(Error::system(HAND_OVER))?;
            }
            // The host's entries first: without them no packet returns to the slot.
            let ended = conntrack::end(&mut host, |connection| denied(own, connection)).and_then(|_| {
                conntrack::end(&mut now.filter, |connection| denied(GUEST_ADDRESS, connection))
            });
            reach(Failpoint::PolicyConnectionsEnded);
            ended.map_err(Error::system("end connections (load nf_conntrack_netlink)"))
        })?;
        if ended > 0 {
            tracing::info!(
                slot = self.number,
                ended,
                "ended connections that are not allowed any more"
            );
        }
        Ok(())
    }

    /// Publishes all of these ports of the host for it, or none.
    pub fn publish(&mut self, ports: &[Port]) -> Result<(), Error> {
        let published = Publication::all(&self.host, self.address(), ports)?;
        self.published.extend(published);
        Ok(())
    }

    /// Gives its ports back to the host.
    pub fn unpublish(&mut self) {
        self.published.clear();
    }

    /// Leaves everything as it is for a later owner.
    pub fn keep(&mut self) {
        self.published.iter_mut().for_each(Publication::keep);
    }

    /// Removes the slot from the host's network.
    pub(super) fn leave(self) {
        drop(self.published);
        self.host.leave(&Host::link_name(self.number));
        reach(Failpoint::NetworkPairDeleted);
    }

    /// The uplink of a slot that the owner of a VMM described; the tap is the one that the VMM has open.
    pub(super) fn adopt(
        host: &Arc<Host>,
        vmm: ProcessRecord,
        described: &SandboxNetwork,
    ) -> Result<(Tapped, Uplink), Error> {
        let invalid = |what| Error::system(what)(std::io::ErrorKind::InvalidData.into());
        let address: Ipv4Addr = described
            .address
            .parse()
            .map_err(|_| invalid("read a slot's address"))?;
        let number = host.setup.range.number(address);
        let number = number.ok_or_else(|| invalid("adopt a slot of another range"))?;
        let policy =
            Policy::new(described.policy.clone()).map_err(|_| invalid("read a slot's network policy"))?;
        let tap = tap_of(vmm).map_err(Error::system("have the tap of a VMM"))?;
        let (namespace, route, mut filter) = tap::namespace_of(&tap)?;
        let fast = FastPath::found(route).map_err(Error::system("look for the fast path of a slot"))?;
        let resolved = Resolved::found(&policy, &mut filter)
            .map_err(Error::system("read the resolved addresses of a slot"))?;
        let ports = described.published.iter();
        let ports = ports.filter_map(|port| Port::try_from(port).ok());
        let uplink = Uplink {
            published: ports.map(|port| Publication::kept(host, port)).collect(),
            policy: Arc::new(Mutex::new(InForce {
                policy,
                filter,
                fast,
                resolved,
            })),
            names: Arc::default(),
            host: host.clone(),
            number,
        };
        Ok((Tapped { tap, namespace }, uplink))
    }
}

/// The tap that a process has open.
fn tap_of(process: ProcessRecord) -> std::io::Result<OwnedFd> {
    let gone = || std::io::Error::from(std::io::ErrorKind::NotFound);
    let pidfd = process.open().ok_or_else(gone)?;
    for entry in std::fs::read_dir(format!("/proc/{}/fd", process.pid))? {
        let path = entry?.path();
        let is_tap = std::fs::read_link(&path).is_ok_and(|to| to.as_os_str() == "/dev/net/tun");
        let number = path.file_name().and_then(|n| n.to_str()?.parse().ok());
        if let (true, Some(number)) = (is_tap, number) {
            return Ok(pidfd_getfd(&pidfd, number, PidfdGetfdFlags::empty())?);
        }
    }
    Err(gone())
}

/// A sandbox's network settings for its slot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    pub policy: Policy,
    pub ports: Vec<Port>,
}

impl Terms {
    /// Parses a request; the error names the invalid part.
    pub fn read(policy: Option<&NetworkPolicy>, ports: &[PublishedPort]) -> Result<Terms, String> {
        if ports.len() > crate::publish::MAX_PORTS {
            return Err(format!(
                "publish has {} ports; it may have {}",
                ports.len(),
                crate::publish::MAX_PORTS
            ));
        }
        let ports = ports.iter().map(Port::try_from).collect::<Result<_, _>>();
        Ok(Terms {
            policy: Policy::new(policy.cloned().unwrap_or_default())
                .map_err(|e| format!("network policy: {e}"))?,
            ports: ports.map_err(|e| format!("publish: {e}"))?,
        })
    }

    /// Whether a new slot fulfils them unchanged.
    pub fn are_default(&self) -> bool {
        self.ports.is_empty() && self.policy.allows_all()
    }
}
