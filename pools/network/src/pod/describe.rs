//! The configuration of a guest in a pod's network.
//!
//! Invariant: the configuration is complete before a frame is redirected, and refers only to the guest's interface.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use thaw_protocol::handshake;

use thaw_sys::netlink::Socket;
use thaw_sys::survey::{self, Address, Link, Neighbour, Route};

const IFA_F_TEMPORARY: u32 = 0x01;
const IFA_F_DADFAILED: u32 = 0x08;
const NUD_PERMANENT: u16 = 0x80;
const RT_TABLE_MAIN: u32 = 254;
const RT_SCOPE_LINK: u8 = 253;
/// `RTNH_F_ONLINK`.
const ONLINK: u32 = 4;

/// The addresses, routes and neighbours of a namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Surveyed {
    addresses: Vec<Address>,
    routes: Vec<Route>,
    neighbours: Vec<Neighbour>,
}

/// The links of a namespace that a guest can replace: Ethernet ones that are up.
pub(super) fn for_a_guest(links: Vec<Link>) -> Vec<Link> {
    let (taken, left): (Vec<Link>, Vec<Link>) = links.into_iter().partition(is_for_a_guest);
    let loopback = |link: &&Link| link.flags & libc::IFF_LOOPBACK as u32 != 0;
    for link in left.iter().filter(|link| !loopback(link)) {
        tracing::debug!(link = link.name, kind = link.kind, "not for the guest");
    }
    taken
}

fn is_for_a_guest(link: &Link) -> bool {
    let is = |flag: libc::c_int| link.flags & flag as u32 != 0;
    let unicast = link.mac.is_some_and(|mac| mac != [0; 6] && mac[0] & 1 == 0);
    link.ethernet && unicast && !link.enslaved && is(libc::IFF_UP) && !is(libc::IFF_LOOPBACK)
}

impl Surveyed {
    pub fn of(socket: &mut Socket) -> io::Result<Surveyed> {
        Ok(Surveyed {
            addresses: survey::addresses(socket)?,
            routes: survey::routes(socket)?,
            neighbours: survey::neighbours(socket)?,
        })
    }

    /// The configuration of a guest that replaces this link.
    pub fn describe(self, link: &Link) -> handshake::Network {
        let of_link = |index: u32| index == link.index;
        let mut addresses = self.addresses;
        addresses.retain(|a| of_link(a.link) && a.flags & (IFA_F_TEMPORARY | IFA_F_DADFAILED) == 0);
        let main = self
            .routes
            .into_iter()
            .filter(|route| route.table == RT_TABLE_MAIN);
        // The guest's kernel creates these from its addresses.
        let (made, told): (Vec<Route>, Vec<Route>) = main.partition(|route| route.kernel);
        let made = made.into_iter().filter(|route| route.by.is_some_and(of_link));
        let on_link: Vec<(IpAddr, u8)> = made.filter_map(|route| route.to).collect();
        // The peer of a point-to-point address is a route of its own.
        let peers = addresses.iter().filter_map(|address| {
            Some(handshake::Route {
                to: address.peer?,
                prefix: address.prefix,
                gateway: None,
                source: Some(address.ip),
                scope: RT_SCOPE_LINK,
                gateway_on_link: false,
            })
        });
        let routes = chosen(told, link).into_iter().map(|route| {
            let (to, prefix) = route.to.unwrap_or(everything(route.v6));
            handshake::Route {
                to,
                prefix,
                gateway: route.gateway,
                source: route.source,
                scope: route.scope,
                gateway_on_link: route.flags & ONLINK != 0,
            }
        });
        let neighbours = self.neighbours.iter();
        // Only permanent ones, which were set on purpose.
        let neighbours = neighbours.filter(|n| of_link(n.link) && n.state & NUD_PERMANENT != 0);
        handshake::Network {
            name: link.name.clone(),
            mac: link.mac.unwrap_or_default(),
            mtu: u16::try_from(link.mtu).unwrap_or(u16::MAX),
            arp: link.flags & libc::IFF_NOARP as u32 == 0,
            routes: peers.chain(routes).collect(),
            neighbours: neighbours
                .map(|n| handshake::Neighbour { ip: n.ip, mac: n.mac })
                .collect(),
            addresses: addresses
                .iter()
                .map(|a| handshake::Address {
                    ip: a.ip,
                    prefix: a.prefix,
                    on_link: on_link.contains(&(masked(a.ip, a.prefix), a.prefix)),
                })
                .collect(),
            nameservers: Vec::new(),
        }
    }
}

/// The routes through a link that a guest can have: the preferred one to each destination.
fn chosen(mut routes: Vec<Route>, link: &Link) -> Vec<Route> {
    routes.sort_by_key(|route| route.priority);
    let mut kept: Vec<Route> = Vec::new();
    for route in routes {
        let (to, by) = (route.to, route.by);
        if route.complex {
            tracing::warn!(
                ?to,
                "a pod's route of several ways, or by a gateway of another family, is not the guest's"
            );
        } else if by != Some(link.index) {
            tracing::debug!(?to, by, "a route by another interface is not the guest's");
        } else if kept.iter().any(|other| (other.v6, other.to) == (route.v6, to)) {
            tracing::warn!(
                ?to,
                by,
                "the pod has a better route there; the guest has that one"
            );
        } else {
            kept.push(route);
        }
    }
    kept
}

fn everything(v6: bool) -> (IpAddr, u8) {
    match v6 {
        false => (Ipv4Addr::UNSPECIFIED.into(), 0),
        true => (Ipv6Addr::UNSPECIFIED.into(), 0),
    }
}

/// The first address of a prefix.
fn masked(ip: IpAddr, prefix: u8) -> IpAddr {
    match ip {
        IpAddr::V4(ip) => {
            let mask = u32::MAX.checked_shl(32u32.saturating_sub(prefix.into()));
            Ipv4Addr::from(u32::from(ip) & mask.unwrap_or(0)).into()
        }
        IpAddr::V6(ip) => {
            let mask = u128::MAX.checked_shl(128u32.saturating_sub(prefix.into()));
            Ipv6Addr::from(u128::from(ip) & mask.unwrap_or(0)).into()
        }
    }
}

#[cfg(test)]
#[path = "describe_test.rs"]
mod tests;
