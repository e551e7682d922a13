//! What a guest is to be told of a pod's network.
//!
//! Invariant: the description is whole before a frame is redirected, and names only interfaces the guest is given.

use std::io;
use std::net::IpAddr;

use thaw_protocol::agent::{EnumOrUnknown, MessageField, types};
use thaw_protocol::handshake;

use crate::netlink::Socket;
use crate::survey::{self, Address, Link, Neighbour, Route};

const IFA_F_TEMPORARY: u32 = 0x01;
const IFA_F_DADFAILED: u32 = 0x08;
const NUD_PERMANENT: u16 = 0x80;
const RT_TABLE_MAIN: u32 = 254;
const RT_SCOPE_LINK: u32 = 253;
/// `RTNH_F_ONLINK`, of a route's flags the one an agent knows.
const ONLINK: u32 = 4;
const NOARP: u32 = libc::IFF_NOARP as u32;

/// What there is of a namespace that a guest can have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Surveyed {
    /// Those that become the guest's.
    pub links: Vec<Link>,
    addresses: Vec<Address>,
    routes: Vec<Route>,
    neighbours: Vec<Neighbour>,
}

impl Surveyed {
    /// All of a namespace's, of whose links a guest takes the Ethernet ones that are up.
    pub fn of(socket: &mut Socket, links: &[Link]) -> io::Result<Surveyed> {
        let (taken, left): (Vec<Link>, Vec<Link>) = links.iter().cloned().partition(is_for_a_guest);
        for link in left
            .iter()
            .filter(|link| link.flags & libc::IFF_LOOPBACK as u32 == 0)
        {
            tracing::debug!(link = link.name, kind = link.kind, "not for the guest");
        }
        Ok(Surveyed::chosen(
            taken,
            survey::addresses(socket)?,
            survey::routes(socket)?,
            survey::neighbours(socket)?,
        ))
    }

    /// Of what was read, what these links have.
    fn chosen(
        links: Vec<Link>,
        mut addresses: Vec<Address>,
        routes: Vec<Route>,
        mut neighbours: Vec<Neighbour>,
    ) -> Surveyed {
        let has = |index: u32| links.iter().any(|link| link.index == index);
        addresses.retain(|a| has(a.link) && a.flags & (IFA_F_TEMPORARY | IFA_F_DADFAILED) == 0);
        neighbours.retain(|n| has(n.link) && n.state & NUD_PERMANENT != 0);
        let main = routes.into_iter().filter(|route| route.table == RT_TABLE_MAIN);
        // The kernel makes its own of a guest's addresses.
        let told = main.filter(|route| !route.kernel);
        let (odd, mut routes): (Vec<Route>, Vec<Route>) = told
            .filter(|route| route.odd || route.by.is_some_and(has))
            .partition(|route| route.odd);
        for route in odd {
            tracing::warn!(to = ?route.to, "a pod's route of several ways, or by a gateway of another family, is not the guest's");
        }
        // A guest has one route to a place: the one that was preferred.
        routes.sort_by_key(|route| route.priority);
        let mut kept: Vec<Route> = Vec::new();
        for route in routes {
            match kept
                .iter()
                .any(|other| (other.v6, other.to) == (route.v6, route.to))
            {
                true => {
                    tracing::warn!(to = ?route.to, by = route.by, "the pod has a better route there; the guest has that one")
                }
                false => kept.push(route),
            }
        }
        Surveyed {
            links,
            addresses,
            routes: kept,
            neighbours,
        }
    }

    fn name(&self, index: u32) -> &str {
        let found = self.links.iter().find(|link| link.index == index);
        found.map_or("", |link| &link.name)
    }

    fn addresses_of(&self, link: &Link) -> impl Iterator<Item = &Address> {
        let index = link.index;
        self.addresses.iter().filter(move |address| address.link == index)
    }

    /// For UpdateInterface.
    pub fn interface(&self, link: &Link) -> types::Interface {
        let addresses = self.addresses_of(link);
        types::Interface {
            device: link.name.clone(),
            name: link.name.clone(),
            IPAddresses: addresses.map(|a| address(a.ip, Some(a.prefix))).collect(),
            mtu: u64::from(link.mtu),
            hwAddr: written(link.mac.unwrap_or_default()),
            raw_flags: link.flags & NOARP,
            ..Default::default()
        }
    }

    /// For a handshake.
    pub fn config(&self, link: &Link) -> handshake::Network {
        let addresses = self.addresses_of(link);
        let gateway = |v6: bool| {
            let mut routes = self.routes.iter();
            let default =
                |route: &&Route| route.v6 == v6 && route.to.is_none() && route.by == Some(link.index);
            routes.find(default).and_then(|route| route.gateway)
        };
        handshake::Network {
            mac: link.mac.unwrap_or_default(),
            mtu: u16::try_from(link.mtu).unwrap_or(u16::MAX),
            addresses: addresses
                .map(|a| handshake::Address {
                    ip: a.ip,
                    prefix: a.prefix,
                })
                .collect(),
            gateways: [false, true].into_iter().filter_map(gateway).collect(),
            nameservers: Vec::new(),
        }
    }

    /// For UpdateRoutes: those that need no gateway first, whose gateways they may be.
    pub fn routes(&self) -> Vec<types::Route> {
        // Whom an address names at the other end is a route of its own.
        let peers = self.addresses.iter().filter_map(|address| {
            Some(types::Route {
                dest: format!("{}/{}", address.peer?, address.prefix),
                device: self.name(address.link).to_owned(),
                source: address.ip.to_string(),
                scope: RT_SCOPE_LINK,
                family: family(address.ip.is_ipv6()),
                ..Default::default()
            })
        });
        let mut routes: Vec<&Route> = self.routes.iter().collect();
        routes.sort_by_key(|route| route.gateway.is_some());
        let routes = routes.into_iter().map(|route| types::Route {
            dest: route
                .to
                .map_or_else(String::new, |(to, length)| format!("{to}/{length}")),
            gateway: route
                .gateway
                .map_or_else(String::new, |gateway| gateway.to_string()),
            device: self.name(route.by.unwrap_or(0)).to_owned(),
            source: route.source.map_or_else(String::new, |source| source.to_string()),
            scope: u32::from(route.scope),
            family: family(route.v6),
            flags: route.flags & ONLINK,
            ..Default::default()
        });
        peers.chain(routes).collect()
    }

    /// For AddARPNeighbors: those that somebody has set.
    pub fn neighbours(&self) -> Vec<types::ARPNeighbor> {
        let told = self.neighbours.iter().map(|neighbour| types::ARPNeighbor {
            toIPAddress: MessageField::some(address(neighbour.ip, None)),
            device: self.name(neighbour.link).to_owned(),
            lladdr: written(neighbour.mac),
            state: i32::from(neighbour.state),
            flags: i32::from(neighbour.flags),
            ..Default::default()
        });
        told.collect()
    }
}

fn is_for_a_guest(link: &Link) -> bool {
    let is = |flag: libc::c_int| link.flags & flag as u32 != 0;
    let unicast = link.mac.is_some_and(|mac| mac != [0; 6] && mac[0] & 1 == 0);
    link.ethernet && unicast && !link.enslaved && is(libc::IFF_UP) && !is(libc::IFF_LOOPBACK)
}

fn family(v6: bool) -> EnumOrUnknown<types::IPFamily> {
    EnumOrUnknown::new(match v6 {
        true => types::IPFamily::v6,
        false => types::IPFamily::v4,
    })
}

fn address(ip: IpAddr, prefix: Option<u8>) -> types::IPAddress {
    types::IPAddress {
        family: family(ip.is_ipv6()),
        address: ip.to_string(),
        mask: prefix.map_or_else(String::new, |prefix| prefix.to_string()),
        ..Default::default()
    }
}

fn written(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

#[cfg(test)]
#[path = "describe_test.rs"]
mod tests;
