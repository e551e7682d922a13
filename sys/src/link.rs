//! Changes to interfaces, addresses, routes and neighbours, by rtnetlink(7). [`crate::survey`] reads them.
//!
//! Every change takes RTNL, a lock of the whole host: callers make them ahead of time if a sandbox would otherwise wait for them.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::netlink::{Attributes, CREATE, EXCLUSIVE, Message, Parsed, REPLACE, Socket};
use crate::survey::{self, Address, IFA_F_NOPREFIXROUTE, NUD_PERMANENT, Neighbour, RTNH_F_ONLINK, Route};

// include/uapi/linux/{rtnetlink,if_link,if_addr,veth,neighbour}.h
const NEW_LINK: u16 = 16;
const DELETE_LINK: u16 = 17;
const NEW_ADDRESS: u16 = 20;
const DELETE_ADDRESS: u16 = 21;
const NEW_ROUTE: u16 = 24;
const DELETE_ROUTE: u16 = 25;
const NEW_NEIGHBOUR: u16 = 28;
const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_LINKINFO: u16 = 18;
const IFLA_NET_NS_FD: u16 = 28;
const INFO_KIND: u16 = 1;
const INFO_DATA: u16 = 2;
const VETH_PEER: u16 = 1;
const IFA_LOCAL: u16 = 2;
/// Skips the second in which IPv6 looks for another interface with the address.
const IFA_F_NODAD: u32 = 2;
const IFA_ADDRESS: u16 = 1;
const IFA_FLAGS: u16 = 8;
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
const RTA_PREFSRC: u16 = 7;
const RTPROT_BOOT: u8 = 3;
const RTN_UNICAST: u8 = 1;
const NDA_DST: u16 = 1;
const NDA_LLADDR: u16 = 2;
/// Bytes of `struct ifinfomsg`.
const LINK: usize = 16;

/// `struct ifinfomsg` for the link with this index (0: not known yet). It sets those of `flags` that are in `mask`.
fn link(index: u32, flags: u32, mask: u32) -> [u8; LINK] {
    let mut body = [0; LINK];
    body[4..8].copy_from_slice(&index.to_ne_bytes());
    body[8..12].copy_from_slice(&flags.to_ne_bytes());
    body[12..16].copy_from_slice(&mask.to_ne_bytes());
    body
}

/// Creates two interfaces that are connected to each other, both down: `here` in the socket's namespace, `there` in another.
///
/// # Errors
/// `EEXIST`: an interface with that name exists.
pub fn make_pair(socket: &mut Socket, here: &str, there: &str, namespace: BorrowedFd<'_>) -> io::Result<()> {
    let fd = namespace.as_raw_fd().to_ne_bytes();
    // The peer's attributes follow a header of their own.
    let attributes = Attributes::default()
        .text(IFLA_IFNAME, there)
        .bytes(IFLA_NET_NS_FD, &fd);
    let mut peer = link(0, 0, 0).to_vec();
    peer.extend_from_slice(attributes.as_bytes());
    let info = Attributes::default()
        .text(INFO_KIND, "veth")
        .nest(INFO_DATA, Attributes::default().bytes(VETH_PEER, &peer));
    let attributes = Attributes::default()
        .text(IFLA_IFNAME, here)
        .nest(IFLA_LINKINFO, info);
    let flags = CREATE | EXCLUSIVE;
    socket.request(&Message::new(NEW_LINK, flags, &link(0, 0, 0), attributes))
}

/// The name of the link whose deletion the event reports; `None` for any other event.
pub fn deleted(kind: u16, payload: &[u8]) -> Option<&str> {
    let attributes = payload.get(LINK..).filter(|_| kind == DELETE_LINK)?;
    let name = Parsed(attributes).get(IFLA_IFNAME)?;
    std::str::from_utf8(name.strip_suffix(b"\0")?).ok()
}

/// The index of an interface.
///
/// # Errors
/// `ENODEV`: no interface has that name.
pub fn index(socket: &mut Socket, name: &str) -> io::Result<u32> {
    let links = survey::links(socket)?;
    let found = links.iter().find(|link| link.name == name);
    let found = found.ok_or_else(|| io::Error::from_raw_os_error(libc::ENODEV))?;
    Ok(found.index)
}

/// Changes to an interface; a field that is `None` changes nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Change<'a> {
    pub mac: Option<[u8; 6]>,
    /// Bytes of a frame's payload.
    pub mtu: Option<u32>,
    pub name: Option<&'a str>,
    pub up: Option<bool>,
    /// Whether it asks for and answers MAC addresses.
    pub arp: Option<bool>,
}

/// Changes an interface. Some drivers refuse a new MAC address or name while the interface is up.
pub fn change(socket: &mut Socket, index: u32, to: &Change<'_>) -> io::Result<()> {
    let (mut flags, mut mask) = (0, 0);
    let wanted = [
        (libc::IFF_UP as u32, to.up),
        (libc::IFF_NOARP as u32, to.arp.map(|arp| !arp)),
    ];
    for (flag, wanted) in wanted {
        flags |= wanted.filter(|on| *on).map_or(0, |_| flag);
        mask |= wanted.map_or(0, |_| flag);
    }
    let mut attributes = Attributes::default();
    if let Some(mac) = to.mac {
        attributes = attributes.bytes(IFLA_ADDRESS, &mac);
    }
    if let Some(mtu) = to.mtu {
        attributes = attributes.bytes(IFLA_MTU, &mtu.to_ne_bytes());
    }
    if let Some(name) = to.name {
        attributes = attributes.text(IFLA_IFNAME, name);
    }
    let body = link(index, flags, mask);
    socket.request(&Message::new(NEW_LINK, 0, &body, attributes))
}

/// Sets how many bytes a frame's payload may have.
pub fn set_mtu(socket: &mut Socket, index: u32, mtu: u32) -> io::Result<()> {
    let mtu = Some(mtu);
    change(
        socket,
        index,
        &Change {
            mtu,
            ..Change::default()
        },
    )
}

/// Brings an interface up.
pub fn set_up(socket: &mut Socket, index: u32) -> io::Result<()> {
    let up = Some(true);
    change(
        socket,
        index,
        &Change {
            up,
            ..Change::default()
        },
    )
}

/// Gives an interface a MAC address, which the kernel then keeps, and brings it up.
pub fn set_up_as(socket: &mut Socket, index: u32, mac: [u8; 6]) -> io::Result<()> {
    let (mac, up) = (Some(mac), Some(true));
    change(
        socket,
        index,
        &Change {
            mac,
            up,
            ..Change::default()
        },
    )
}

/// Deletes an interface by its name, and with it the other end of its pair.
///
/// # Errors
/// `ENODEV`: no interface has that name.
pub fn delete(socket: &mut Socket, name: &str) -> io::Result<()> {
    let attributes = Attributes::default().text(IFLA_IFNAME, name);
    socket.request(&Message::new(DELETE_LINK, 0, &link(0, 0, 0), attributes))
}

/// `AF_INET` or `AF_INET6`, and the address in network byte order.
fn family(address: IpAddr) -> (u8, Vec<u8>) {
    match address {
        IpAddr::V4(address) => (libc::AF_INET as u8, address.octets().to_vec()),
        IpAddr::V6(address) => (libc::AF_INET6 as u8, address.octets().to_vec()),
    }
}

fn address(kind: u16, how: u16, to: &Address, flags: u32) -> Message {
    let (family, ip) = family(to.ip);
    // struct ifaddrmsg: family, length, flags, scope, index.
    let mut body = [family, to.prefix, 0, 0, 0, 0, 0, 0];
    body[4..].copy_from_slice(&to.link.to_ne_bytes());
    let attributes = Attributes::default()
        .bytes(IFA_LOCAL, &ip)
        .bytes(IFA_ADDRESS, &ip)
        .bytes(IFA_FLAGS, &flags.to_ne_bytes());
    Message::new(kind, how, &body, attributes)
}

/// Gives an interface an address that no other host on its link has.
///
/// # Errors
/// `EEXIST`: the interface has it.
pub fn add_address(socket: &mut Socket, index: u32, ip: impl Into<IpAddr>, prefix: u8) -> io::Result<()> {
    let to = Address {
        link: index,
        ip: ip.into(),
        prefix,
        peer: None,
        flags: 0,
    };
    socket.request(&address(NEW_ADDRESS, CREATE | EXCLUSIVE, &to, IFA_F_NODAD))
}

/// The flags of a new address. From `address` comes only whether the kernel creates a route to its prefix.
fn flags_of(address: &Address) -> u32 {
    let unchecked = if address.ip.is_ipv6() { IFA_F_NODAD } else { 0 };
    address.flags & IFA_F_NOPREFIXROUTE | unchecked
}

/// Gives an interface an address that no other host on its link has, or replaces it.
pub fn replace_address(socket: &mut Socket, to: &Address) -> io::Result<()> {
    let how = REPLACE | CREATE;
    socket.request(&address(NEW_ADDRESS, how, to, flags_of(to)))
}

/// Takes an address away from an interface.
pub fn delete_address(socket: &mut Socket, from: &Address) -> io::Result<()> {
    socket.request(&address(DELETE_ADDRESS, 0, from, flags_of(from)))
}

/// A message on a unicast route of the main table.
fn route(kind: u16, how: u16, route: &Route) -> Message {
    let family = if route.v6 { libc::AF_INET6 } else { libc::AF_INET };
    let protocol = if kind == DELETE_ROUTE { 0 } else { RTPROT_BOOT };
    let length = route.to.map_or(0, |(_, length)| length);
    // struct rtmsg: family, lengths of destination and source, TOS, table, protocol, scope, type, flags.
    let mut body = [0; 12];
    body[..8].copy_from_slice(&[
        family as u8,
        length,
        0,
        0,
        survey::RT_TABLE_MAIN as u8,
        protocol,
        route.scope,
        RTN_UNICAST,
    ]);
    body[8..].copy_from_slice(&(route.flags & RTNH_F_ONLINK).to_ne_bytes());
    let mut attributes = Attributes::default();
    if let Some(by) = route.by {
        attributes = attributes.bytes(RTA_OIF, &by.to_ne_bytes());
    }
    let addresses = [
        (RTA_DST, route.to.map(|(ip, _)| ip)),
        (RTA_GATEWAY, route.gateway),
        (RTA_PREFSRC, route.source),
    ];
    for (attribute, ip) in addresses {
        if let Some(ip) = ip {
            attributes = attributes.bytes(attribute, &self::family(ip).1);
        }
    }
    Message::new(kind, how, &body, attributes)
}

/// Adds a default route to the main table.
///
/// # Errors
/// `EEXIST`: one exists.
pub fn add_default_route(socket: &mut Socket, index: u32, gateway: impl Into<IpAddr>) -> io::Result<()> {
    let gateway = gateway.into();
    let to = Route {
        v6: gateway.is_ipv6(),
        gateway: Some(gateway),
        by: Some(index),
        ..Route::default()
    };
    socket.request(&route(NEW_ROUTE, CREATE | EXCLUSIVE, &to))
}

/// Adds a route to the main table, or replaces the one to the same destination. Of its flags only `RTNH_F_ONLINK` counts.
pub fn replace_route(socket: &mut Socket, to: &Route) -> io::Result<()> {
    socket.request(&route(NEW_ROUTE, REPLACE | CREATE, to))
}

/// Deletes a route from the main table.
pub fn delete_route(socket: &mut Socket, from: &Route) -> io::Result<()> {
    socket.request(&route(DELETE_ROUTE, 0, from))
}

fn neighbour(how: u16, to: &Neighbour) -> Message {
    let (family, ip) = family(to.ip);
    // struct ndmsg: family, padding, index, state, flags, type.
    let mut body = [0; 12];
    body[0] = family;
    body[4..8].copy_from_slice(&to.link.to_ne_bytes());
    body[8..10].copy_from_slice(&to.state.to_ne_bytes());
    body[10] = to.flags;
    let attributes = Attributes::default()
        .bytes(NDA_DST, &ip)
        .bytes(NDA_LLADDR, &to.mac);
    Message::new(NEW_NEIGHBOUR, how, &body, attributes)
}

/// Sets a neighbour's MAC address for good, if it is not known yet.
pub fn add_neighbour(socket: &mut Socket, index: u32, ip: impl Into<IpAddr>, mac: [u8; 6]) -> io::Result<()> {
    let to = Neighbour {
        link: index,
        ip: ip.into(),
        mac,
        state: NUD_PERMANENT,
        flags: 0,
    };
    socket.request(&neighbour(CREATE, &to))
}

/// Adds a neighbour, or replaces it.
pub fn replace_neighbour(socket: &mut Socket, to: &Neighbour) -> io::Result<()> {
    socket.request(&neighbour(REPLACE | CREATE, to))
}
