//! Links, addresses and routes by rtnetlink(7), as far as a network slot needs them.
//!
//! Every change here takes RTNL, the lock of the whole host: a slot's are made ahead of its sandbox.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::netlink::{Attributes, CREATE, EXCLUSIVE, Message, Parsed, Socket};
use crate::prefix::Prefix;

// include/uapi/linux/{rtnetlink,if_link,if_addr,veth,neighbour}.h
const NEW_LINK: u16 = 16;
const DELETE_LINK: u16 = 17;
const GET_LINK: u16 = 18;
const NEW_ADDRESS: u16 = 20;
const GET_ADDRESS: u16 = 22;
const NEW_ROUTE: u16 = 24;
const GET_ROUTE: u16 = 26;
const NEW_NEIGHBOUR: u16 = 28;
const IFLA_IFNAME: u16 = 3;
const IFLA_LINKINFO: u16 = 18;
const IFLA_NET_NS_FD: u16 = 28;
const INFO_KIND: u16 = 1;
const INFO_DATA: u16 = 2;
const VETH_PEER: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFA_ADDRESS: u16 = 1;
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
const RT_TABLE_MAIN: u8 = 254;
const RTPROT_BOOT: u8 = 3;
const RTN_UNICAST: u8 = 1;
const NUD_PERMANENT: u16 = 0x80;
const NDA_DST: u16 = 1;
const NDA_LLADDR: u16 = 2;
/// Bytes of `struct ifinfomsg`, `struct rtmsg` and `struct ifaddrmsg`.
const LINK: usize = 16;
const ROUTE: usize = 12;
const ADDRESS: usize = 8;

/// `struct ifinfomsg`: the link of this index, or any; flags to be set.
fn link(index: u32, flags: u32) -> [u8; LINK] {
    let mut body = [0; LINK];
    body[4..8].copy_from_slice(&index.to_ne_bytes());
    body[8..12].copy_from_slice(&flags.to_ne_bytes());
    body[12..16].copy_from_slice(&flags.to_ne_bytes());
    body
}

/// Makes two interfaces joined to one another, both down: `here` in the socket's namespace, `there` in another.
///
/// # Errors
/// `EEXIST`: there is one of that name.
pub(crate) fn make_pair(
    socket: &mut Socket,
    here: &str,
    there: &str,
    namespace: BorrowedFd<'_>,
) -> io::Result<()> {
    let fd = namespace.as_raw_fd().to_ne_bytes();
    // The peer's attributes follow a header of its own.
    let attributes = Attributes::default()
        .text(IFLA_IFNAME, there)
        .bytes(IFLA_NET_NS_FD, &fd);
    let mut peer = link(0, 0).to_vec();
    peer.extend_from_slice(attributes.as_bytes());
    let info = Attributes::default()
        .text(INFO_KIND, "veth")
        .nest(INFO_DATA, Attributes::default().bytes(VETH_PEER, &peer));
    let attributes = Attributes::default()
        .text(IFLA_IFNAME, here)
        .nest(IFLA_LINKINFO, info);
    let flags = CREATE | EXCLUSIVE;
    socket.request(&Message::new(NEW_LINK, flags, &link(0, 0), attributes))
}

/// The index of an interface.
pub(crate) fn index(socket: &mut Socket, name: &str) -> io::Result<u32> {
    let mut found = None;
    let message = Message::new(GET_LINK, 0, &link(0, 0), Attributes::default());
    socket.dump(&message, |kind, payload| {
        if let (NEW_LINK, Some(body)) = (kind, payload.first_chunk::<LINK>()) {
            let called = Parsed(&payload[LINK..]).get(IFLA_IFNAME);
            if called.and_then(|text| text.strip_suffix(b"\0")) == Some(name.as_bytes()) {
                found = body[4..].first_chunk().map(|index| u32::from_ne_bytes(*index));
            }
        }
    })?;
    found.ok_or_else(|| io::Error::from_raw_os_error(libc::ENODEV))
}

/// Brings an interface up.
pub(crate) fn set_up(socket: &mut Socket, index: u32) -> io::Result<()> {
    let up = link(index, libc::IFF_UP as u32);
    socket.request(&Message::new(NEW_LINK, 0, &up, Attributes::default()))
}

/// Deletes an interface by its name, and with it the one it is joined to.
pub(crate) fn delete(socket: &mut Socket, name: &str) -> io::Result<()> {
    let attributes = Attributes::default().text(IFLA_IFNAME, name);
    socket.request(&Message::new(DELETE_LINK, 0, &link(0, 0), attributes))
}

/// Gives an interface an address.
pub(crate) fn add_address(socket: &mut Socket, index: u32, address: Ipv4Addr, length: u8) -> io::Result<()> {
    let mut body = [libc::AF_INET as u8, length, 0, 0, 0, 0, 0, 0];
    body[4..].copy_from_slice(&index.to_ne_bytes());
    let attributes = Attributes::default()
        .bytes(IFA_LOCAL, &address.octets())
        .bytes(IFA_ADDRESS, &address.octets());
    socket.request(&Message::new(NEW_ADDRESS, CREATE | EXCLUSIVE, &body, attributes))
}

/// Sends everything that has no other way to a gateway.
pub(crate) fn add_default_route(socket: &mut Socket, index: u32, gateway: Ipv4Addr) -> io::Result<()> {
    let mut body = [0; ROUTE];
    body[0] = libc::AF_INET as u8;
    (body[4], body[5], body[7]) = (RT_TABLE_MAIN, RTPROT_BOOT, RTN_UNICAST);
    let attributes = Attributes::default()
        .bytes(RTA_OIF, &index.to_ne_bytes())
        .bytes(RTA_GATEWAY, &gateway.octets());
    socket.request(&Message::new(NEW_ROUTE, CREATE | EXCLUSIVE, &body, attributes))
}

/// Says once and for all which MAC address a neighbour has.
pub(crate) fn add_neighbour(
    socket: &mut Socket,
    index: u32,
    address: Ipv4Addr,
    mac: [u8; 6],
) -> io::Result<()> {
    // struct ndmsg: family, padding, index, state, flags, type.
    let mut body = [0; 12];
    body[0] = libc::AF_INET as u8;
    body[4..8].copy_from_slice(&index.to_ne_bytes());
    body[8..10].copy_from_slice(&NUD_PERMANENT.to_ne_bytes());
    let attributes = Attributes::default()
        .bytes(NDA_DST, &address.octets())
        .bytes(NDA_LLADDR, &mac);
    socket.request(&Message::new(NEW_NEIGHBOUR, CREATE, &body, attributes))
}

/// Every IPv4 address of the namespace.
pub(crate) fn addresses(socket: &mut Socket) -> io::Result<Vec<Ipv4Addr>> {
    let mut body = [0; ADDRESS];
    body[0] = libc::AF_INET as u8;
    let mut found = Vec::new();
    let message = Message::new(GET_ADDRESS, 0, &body, Attributes::default());
    socket.dump(&message, |kind, payload| {
        if kind == NEW_ADDRESS && payload.first() == Some(&(libc::AF_INET as u8)) {
            let local = payload
                .get(ADDRESS..)
                .map(Parsed)
                .and_then(|p| p.array(IFA_LOCAL));
            found.extend(local.map(Ipv4Addr::from_octets));
        }
    })?;
    Ok(found)
}

/// A route of any of the namespace's tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    pub to: Prefix,
    /// The index of the interface it leads to, where it is one.
    pub by: Option<u32>,
}

/// Every unicast IPv4 route that is no default route.
pub(crate) fn routes(socket: &mut Socket) -> io::Result<Vec<Route>> {
    let mut body = [0; ROUTE];
    body[0] = libc::AF_INET as u8;
    let mut found = Vec::new();
    let message = Message::new(GET_ROUTE, 0, &body, Attributes::default());
    socket.dump(&message, |kind, payload| {
        let (Some(header), NEW_ROUTE) = (payload.first_chunk::<ROUTE>(), kind) else {
            return;
        };
        let attributes = Parsed(&payload[ROUTE..]);
        if header[0] == libc::AF_INET as u8
            && header[7] == RTN_UNICAST
            && let Some(to) = attributes.array(RTA_DST)
            && let Some(to) = Prefix::around(to.into(), header[1])
        {
            let by = attributes.array(RTA_OIF).map(u32::from_ne_bytes);
            found.push(Route { to, by });
        }
    })?;
    Ok(found)
}
