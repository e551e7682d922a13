//! The host's side of all slots: forwarding, one nftables table, and the numbers that are taken.
//!
//! A slot's number is part of the name of its interface in the host's namespace, so the kernel assigns each number once among all
//! processes. The kernel removes the interface with the slot's namespace, even if its owner is killed. Invariants of the table
//! (docs/networking.md): packets from a slot reach neither this host, except its name servers, nor another slot; packets to a slot go to a
//! published port, come from this host, or answer the slot.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::{fs, io};

use rustix::io::Errno;
use rustix::net::netdevice::index_to_name;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use serde::{Deserialize, Serialize};
use thaw_sys::lock::Lock;

use crate::Error;
use crate::fast::{FastPath, Programs, Wiring};
use crate::range::{Range, SLOT_LENGTH};
use crate::stale_connections::StaleConnections;
use crate::tap::Privileged;
use crate::{GUEST_ADDRESS, GUEST_MAC, HOST_MAC, TAP_INDEX, UPLINK_MAC, UPLINK_NAME, resolver, slot};
use thaw_failpoint::{Failpoint, reach};
use thaw_sys::bpf;
use thaw_sys::conntrack;
use thaw_sys::link;
use thaw_sys::netlink::Socket;
use thaw_sys::nft::rule::{ESTABLISHED, Interface, RELATED, Rule, TCP, UDP};
use thaw_sys::nft::{self, Field, Hook, Transaction};
use thaw_sys::prefix::Prefix;
use thaw_sys::survey;
use thaw_sys::sysctl;

/// The names of the host's ends of slots, before their numbers.
pub(super) const LINKS: &str = "thaw-n";
/// Maps of the table: ports published on any address of the host, and on one.
pub(super) const ANYWHERE: &str = "published_anywhere";
pub(super) const AT: &str = "published_at";
const FORWARDING: &str = "/proc/sys/net/ipv4/ip_forward";
const DNS: u16 = 53;

/// The section `[network]` of the configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Setup {
    /// The range of the slots' addresses, four each: a private network to which this host has no other route.
    pub range: Range,
    /// Turn on net.ipv4.ip_forward if it is off.
    pub forwarding: bool,
    /// Whether packets are redirected by eBPF past the namespaces of slots.
    pub fast_path: FastPathSetting,
    /// Name servers for guests, instead of the host's.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub nameservers: Vec<Ipv4Addr>,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup {
            range: Range::default(),
            forwarding: true,
            fast_path: FastPathSetting::default(),
            nameservers: Vec::new(),
        }
    }
}

/// Whether slots have a fast path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FastPathSetting {
    /// If the kernel supports it.
    #[default]
    Auto,
    /// Never: nftables does it all.
    Off,
}

/// How packets of slots are forwarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Not known yet whether the fast path works: the first slot tries it.
    Untried,
    Fast,
    Nftables,
}

/// The host's side of all slots.
#[derive(Debug)]
pub(super) struct Host {
    pub setup: Setup,
    pub table: String,
    /// The number at which the next search for a free one begins.
    next: AtomicU32,
    /// `None` before the first slot.
    prepared: Mutex<Option<Way>>,
    /// The programs of the fast path; `None` before the first slot that has one.
    programs: Mutex<Option<Arc<Programs>>>,
    /// Which numbers may have connections of an earlier slot.
    pub stale: StaleConnections,
}

impl Host {
    pub fn new(setup: Setup) -> Host {
        // Processes begin at different numbers, so that they do not search where another has taken all.
        let next = rustix::process::getpid().as_raw_nonzero().get() as u32;
        Host {
            table: setup.range.table(),
            next: AtomicU32::new(next.wrapping_mul(0x9e37_79b9)),
            prepared: Mutex::new(None),
            programs: Mutex::new(None),
            stale: StaleConnections::default(),
            setup,
        }
    }

    /// The name servers for guests.
    pub fn nameservers(&self) -> Vec<IpAddr> {
        let servers = match self.setup.nameservers.as_slice() {
            [] => resolver::nameservers(),
            set => set.to_vec(),
        };
        servers.into_iter().map(IpAddr::V4).collect()
    }

    /// Joins a slot's namespace to the host's, with an address and rules of its own. Returns its number and its fast path.
    pub fn join(&self, slot: &mut Privileged) -> Result<(u32, Option<FastPath>), Error> {
        let way = self.prepare()?;
        let mut route = Socket::route().map_err(Error::system("open a netlink socket"))?;
        let (number, name) = self.take_number(&mut route, &slot.tapped.namespace)?;
        reach(Failpoint::NetworkPairMade);
        let joined = self
            .configure_links(&mut route, number, &name, slot)
            .map_err(Error::system("give a network slot its addresses"))
            .inspect(|_| reach(Failpoint::NetworkAddressed))
            .and_then(|uplink| {
                self.remove_published(|_| Ok(vec![self.setup.range.slot(number)]))?;
                // Without a fast path the namespace does not continue connections that it has not seen.
                let fast =
                    way != Way::Nftables && self.stale.clear(number, || self.end_earlier(number)).is_ok();
                slot::rules(
                    self.setup.range,
                    number,
                    &resolver::barred(&self.nameservers()),
                    fast,
                )
                .commit(&mut slot.filter)
                .map_err(Error::system("write the nftables rules of a network slot"))?;
                Ok((uplink, fast))
            });
        let (uplink, fast) = joined.inspect_err(|_| self.leave(&name))?;
        reach(Failpoint::NetworkRulesMade);
        Ok((
            number,
            fast.then(|| self.install_fast_path(slot, number, uplink))
                .flatten(),
        ))
    }

    /// Installs a slot's fast path. The slot works without one; if the first slot's fails, no other is tried.
    fn install_fast_path(&self, slot: &mut Privileged, number: u32, uplink: u32) -> Option<FastPath> {
        let range = self.setup.range;
        let wiring = Wiring::new(range.slot(number), range.host(number), uplink);
        let programs = self.programs();
        let installed =
            programs.and_then(|programs| FastPath::install(&mut slot.route, &programs, &wiring, uplink));
        let mut way = self.prepared.locked();
        let first = *way == Some(Way::Untried);
        match &installed {
            Ok(_) if first => {
                tracing::info!("packets of sandboxes without a policy are redirected by eBPF");
                *way = Some(Way::Fast);
            }
            Err(e) if first => {
                tracing::info!("packets of sandboxes go through nftables: {e}");
                *way = Some(Way::Nftables);
            }
            Err(e) => tracing::warn!(slot = number, "a slot goes without its fast path: {e}"),
            Ok(_) => {}
        }
        installed.ok()
    }

    /// The programs of the fast path: the kernel verifies them for the first slot.
    fn programs(&self) -> io::Result<Arc<Programs>> {
        let mut kept = self.programs.locked();
        if let Some(programs) = &*kept {
            return Ok(programs.clone());
        }
        let loaded = Arc::new(Programs::load(&slot::undecided(self.setup.range))?);
        *kept = Some(loaded.clone());
        Ok(loaded)
    }

    /// Makes the pair of interfaces, with the first free number.
    fn take_number(&self, route: &mut Socket, namespace: &OwnedFd) -> Result<(u32, String), Error> {
        let slots = self.setup.range.slots();
        for _ in 0..slots {
            let number = self.next.fetch_add(1, Ordering::Relaxed) % slots;
            let name = Host::link_name(number);
            match link::make_pair(route, &name, UPLINK_NAME, namespace.as_fd()) {
                Err(e) if e.raw_os_error() == Some(libc::EEXIST) => {}
                Ok(()) => return Ok((number, name)),
                Err(source) => {
                    let what = "make a pair of interfaces (load the veth module, or use --network none)";
                    return Err(Error::system(what)(source));
                }
            }
        }
        Err(Error::RangeFull {
            range: self.setup.range.to_string(),
            slots,
        })
    }

    /// Configures both interfaces. Returns the index of the uplink in its namespace.
    fn configure_links(
        &self,
        route: &mut Socket,
        number: u32,
        name: &str,
        slot: &mut Privileged,
    ) -> io::Result<u32> {
        let range = self.setup.range;
        let (host, own) = (range.host(number), range.slot(number));
        // Connections from this host's loopback to a published port are translated on the way out by this interface.
        sysctl::set(format!("ipv4/conf/{name}/route_localnet"), "1")?;
        sysctl::disable_ipv6(name)?;
        reach(Failpoint::NetworkPairSet);
        let index = rustix::net::netdevice::name_to_index(inet()?, name)?;
        link::set_up_as(route, index, HOST_MAC)?;
        reach(Failpoint::NetworkPairUp);
        let uplink = link::index(&mut slot.route, UPLINK_NAME)?;
        link::set_up_as(&mut slot.route, uplink, UPLINK_MAC)?;
        link::add_address(route, index, host, SLOT_LENGTH)?;
        reach(Failpoint::NetworkHostAddressed);
        link::add_address(&mut slot.route, uplink, own, SLOT_LENGTH)?;
        link::add_default_route(&mut slot.route, uplink, host)?;
        reach(Failpoint::NetworkRouted);
        link::add_neighbour(&mut slot.route, TAP_INDEX, GUEST_ADDRESS, GUEST_MAC)?;
        Ok(uplink)
    }

    /// Deletes a slot's interface, and with it its addresses.
    pub fn leave(&self, name: &str) {
        let left = Socket::route().and_then(|mut route| link::delete(&mut route, name));
        match left {
            Err(e) if e.raw_os_error() != Some(libc::ENODEV) => {
                tracing::warn!("cannot delete the interface {name}: {e}");
            }
            _ => {}
        }
    }

    /// The name of a slot's interface here.
    pub fn link_name(number: u32) -> String {
        format!("{LINKS}{number}")
    }

    /// The number of the slot whose interface here has this name.
    pub fn number_of(name: &str) -> Option<u32> {
        name.strip_prefix(LINKS)?.parse().ok()
    }

    /// Prepares the host for the first slot: checks the range, turns on forwarding, writes the table.
    fn prepare(&self) -> Result<Way, Error> {
        let mut prepared = self.prepared.locked();
        if let Some(way) = *prepared {
            return Ok(way);
        }
        self.check_range()?;
        self.forward()?;
        let mut filter =
            Socket::netfilter().map_err(Error::system("open an nftables socket (load nf_tables)"))?;
        self.rules().commit(&mut filter).map_err(Error::system(
            "write the host's nftables rules (load nf_tables, nft_chain_nat, nft_masq, nft_fib_ipv4)",
        ))?;
        reach(Failpoint::NetworkTableWritten);
        self.sweep()?;
        let way = match self.setup.fast_path {
            FastPathSetting::Auto if bpf::can_wait().is_ok() => Way::Untried,
            _ => Way::Nftables,
        };
        *prepared = Some(way);
        Ok(way)
    }

    /// Refuses a range to which the host has other routes.
    fn check_range(&self) -> Result<(), Error> {
        let failed = Error::system("read the host's routes");
        let mut route = Socket::route().map_err(failed)?;
        let inet = inet().map_err(failed)?;
        for found in survey::routes(&mut route).map_err(failed)? {
            let Some((IpAddr::V4(to), length)) = found.to else {
                continue;
            };
            let to = Prefix::around(to, length);
            let Some(to) = to.filter(|to| to.overlaps(self.setup.range.prefix())) else {
                continue;
            };
            let by = match found.by.map(|index| index_to_name(&inet, index)) {
                Some(Ok(name)) => name,
                // The interface, mostly of another sandbox, is gone since the routes were read, and its route with it.
                Some(Err(Errno::NODEV)) => continue,
                Some(Err(e)) => return Err(failed(e.into())),
                None => "no one interface".into(),
            };
            if !by.starts_with(LINKS) {
                return Err(Error::RangeTaken {
                    range: self.setup.range.to_string(),
                    route: to.to_string(),
                    interface: by,
                });
            }
        }
        Ok(())
    }

    fn forward(&self) -> Result<(), Error> {
        let failed = Error::system("turn on forwarding (sysctl net.ipv4.ip_forward=1)");
        if fs::read_to_string(FORWARDING).map_err(failed)?.trim() != "0" {
            return Ok(());
        }
        if !self.setup.forwarding {
            return Err(Error::ForwardingOff);
        }
        fs::write(FORWARDING, "1").map_err(failed)?;
        tracing::warn!(
            "net.ipv4.ip_forward was 0 and is 1 now: sandboxes reach the network through this host"
        );
        Ok(())
    }

    /// The host's table.
    pub fn rules(&self) -> Transaction<'_> {
        let slots = Interface::Beginning(LINKS);
        let range = self.setup.range.prefix();
        let mut t = Transaction::new(&self.table);
        let (address, protocol, port) = (
            Field::Address(Ipv4Addr::UNSPECIFIED),
            Field::Protocol(0),
            Field::Port(0),
        );
        t.map(AT, &[address, protocol, port]);
        t.map(ANYWHERE, &[protocol, port]);
        t.chain("published");
        t.rule("published", Rule::new().dnat_by(AT, true));
        t.rule("published", Rule::new().dnat_by(ANYWHERE, false));
        for (chain, hook) in [("prerouting", Hook::NatBefore), ("output", Hook::NatOutput)] {
            t.hooked(chain, hook, true);
            t.rule(chain, Rule::new().for_this_host().jump("published"));
        }
        t.hooked("postrouting", Hook::NatAfter, true);
        t.rule(
            "postrouting",
            Rule::new().from(range).leaving_elsewhere(slots).masquerade(),
        );
        if let Some(loopback) = Prefix::around(Ipv4Addr::LOCALHOST, 8) {
            t.rule(
                "postrouting",
                Rule::new().from(loopback).leaving(slots).masquerade(),
            );
        }
        t.hooked("input", Hook::Input, true);
        let from_slot = || Rule::new().arriving(slots);
        t.rule("input", from_slot().state(ESTABLISHED | RELATED).accept());
        for server in self.nameservers() {
            if let IpAddr::V4(server) = server {
                for protocol in [UDP, TCP] {
                    let asked = from_slot().to(Prefix::host(server)).protocol(protocol);
                    t.rule("input", asked.port(&(DNS..=DNS)).accept());
                }
            }
        }
        t.rule("input", from_slot().prohibit());
        t.hooked("forward", Hook::Forward, true);
        t.rule("forward", from_slot().leaving(slots).prohibit());
        t.rule("forward", from_slot().not_from(range).drop());
        let to_slot = || Rule::new().leaving(slots);
        t.rule("forward", to_slot().state(ESTABLISHED | RELATED).accept());
        t.rule("forward", to_slot().redirected().accept());
        t.rule("forward", to_slot().drop());
        t
    }

    /// Ends connections of slots that are gone, and of an earlier slot with this number.
    fn end_earlier(&self, number: u32) -> io::Result<()> {
        let mut socket = Socket::netfilter()?;
        let here = self.slots_here()?;
        let range = self.setup.range;
        let gone = |address| {
            range
                .number(address)
                .is_some_and(|n| n == number || !here.contains(&n))
        };
        conntrack::end(&mut socket, |connection| connection.ends().into_iter().any(gone)).map(drop)
    }

    /// The numbers of this range that have a slot: those whose address is on an interface here.
    fn slots_here(&self) -> io::Result<HashSet<u32>> {
        let mut route = Socket::route()?;
        let range = self.setup.range;
        let number = |ip| match ip {
            IpAddr::V4(ip) => range.number_of_host(ip),
            IpAddr::V6(_) => None,
        };
        let addresses = survey::addresses(&mut route)?;
        Ok(addresses.iter().filter_map(|here| number(here.ip)).collect())
    }

    /// Removes published ports that lead to slots that are gone.
    pub fn sweep(&self) -> Result<(), Error> {
        let range = self.setup.range;
        self.remove_published(|targets| {
            // Read after the ports: a slot created since then has none of these ports.
            let here = self.slots_here()?;
            let is_gone =
                |target: &Ipv4Addr| range.number(*target).is_none_or(|number| !here.contains(&number));
            Ok(targets.into_iter().filter(is_gone).collect())
        })
    }

    /// Removes the published ports that lead to the addresses which `which` selects. It is not called if no port is published.
    fn remove_published(
        &self,
        which: impl FnOnce(Vec<Ipv4Addr>) -> io::Result<Vec<Ipv4Addr>>,
    ) -> Result<(), Error> {
        let remove = || -> io::Result<usize> {
            let mut socket = Socket::netfilter()?;
            let mut published = Vec::new();
            for map in [ANYWHERE, AT] {
                let elements = nft::elements(&mut socket, &self.table, map)?;
                published.extend(
                    elements
                        .into_iter()
                        .map(|(key, target)| (map, key, target.address)),
                );
            }
            if published.is_empty() {
                return Ok(0);
            }
            let doomed = which(published.iter().map(|(_, _, target)| *target).collect())?;
            published.retain(|(_, _, target)| doomed.contains(target));
            for (map, key, _) in &published {
                nft::remove_raw(&mut socket, &self.table, map, key)?;
                reach(Failpoint::PublishSwept);
            }
            Ok(published.len())
        };
        let removed = remove().map_err(Error::system("remove ports that dead owners had published"))?;
        if removed > 0 {
            tracing::info!(removed, "removed ports that dead owners had published");
        }
        Ok(())
    }
}

/// A socket for requests about interfaces.
fn inet() -> io::Result<OwnedFd> {
    let (family, kind) = (AddressFamily::INET, SocketType::DGRAM);
    Ok(rustix::net::socket_with(
        family,
        kind,
        SocketFlags::CLOEXEC,
        None,
    )?)
}
