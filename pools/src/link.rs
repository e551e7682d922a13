//! Links, addresses and routes changed by rtnetlink(7), as far as a network slot needs it.
//!
//! Every change here takes RTNL, the lock of the whole host: a slot's are made ahead of its sandbox.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::netlink::{Attributes, CREATE, EXCLUSIVE, Message, Parsed, Socket};
use crate::survey;

// include/uapi/linux/{rtnetlink,if_link,if_addr,veth,neighbour}.h
const NEW_LINK: u16 = 16;
const DELETE_LINK: u16 = 17;
const NEW_ADDRESS: u16 = 20;
const NEW_ROUTE: u16 = 24;
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
/// IPv6 does not look for another who has it.
const IFA_F_NODAD: u8 = 2;
const IFA_ADDRESS: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
const RT_TABLE_MAIN: u8 = 254;
const RTPROT_BOOT: u8 = 3;
const RTN_UNICAST: u8 = 1;
const NUD_PERMANENT: u16 = 0x80;
const NDA_DST: u16 = 1;
const NDA_LLADDR: u16 = 2;
/// Bytes of `struct ifinfomsg` and `struct rtmsg`.
const LINK: usize = 16;
const ROUTE: usize = 12;

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

/// The name of the link an event says was deleted; none of another event.
pub(crate) fn deleted(kind: u16, payload: &[u8]) -> Option<&str> {
    let attributes = payload.get(LINK..).filter(|_| kind == DELETE_LINK)?;
    let name = Parsed(attributes).get(IFLA_IFNAME)?;
    std::str::from_utf8(name.strip_suffix(b"\0")?).ok()
}

/// The index of an interface.
pub(crate) fn index(socket: &mut Socket, name: &str) -> io::Result<u32> {
    let links = survey::links(socket)?;
    let found = links.iter().find(|link| link.name == name);
    let found = found.ok_or_else(|| io::Error::from_raw_os_error(libc::ENODEV))?;
    Ok(found.index)
}

/// Sets how many bytes a frame's payload may have.
pub(crate) fn set_mtu(socket: &mut Socket, index: u32, mtu: u32) -> io::Result<()> {
    let attributes = Attributes::default().bytes(IFLA_MTU, &mtu.to_ne_bytes());
    socket.request(&Message::new(NEW_LINK, 0, &link(index, 0), attributes))
}

/// Brings an interface up.
pub(crate) fn set_up(socket: &mut Socket, index: u32) -> io::Result<()> {
    let up = link(index, libc::IFF_UP as u32);
    socket.request(&Message::new(NEW_LINK, 0, &up, Attributes::default()))
}

/// Gives an interface a MAC address, which nobody else changes then, and brings it up.
pub(crate) fn set_up_as(socket: &mut Socket, index: u32, mac: [u8; 6]) -> io::Result<()> {
    let up = link(index, libc::IFF_UP as u32);
    let attributes = Attributes::default().bytes(IFLA_ADDRESS, &mac);
    socket.request(&Message::new(NEW_LINK, 0, &up, attributes))
}

/// Deletes an interface by its name, and with it the one it is joined to.
pub(crate) fn delete(socket: &mut Socket, name: &str) -> io::Result<()> {
    let attributes = Attributes::default().text(IFLA_IFNAME, name);
    socket.request(&Message::new(DELETE_LINK, 0, &link(0, 0), attributes))
}

/// `AF_INET` or `AF_INET6`, and the address as the kernel has it.
fn family(address: IpAddr) -> (u8, Vec<u8>) {
    match address {
        IpAddr::V4(address) => (libc::AF_INET as u8, address.octets().to_vec()),
        IpAddr::V6(address) => (libc::AF_INET6 as u8, address.octets().to_vec()),
    }
}

/// Gives an interface an address, which nobody else on it has.
pub(crate) fn add_address(
    socket: &mut Socket,
    index: u32,
    address: impl Into<IpAddr>,
    length: u8,
) -> io::Result<()> {
    let (family, address) = family(address.into());
    // struct ifaddrmsg: family, length, flags, scope, index.
    let mut body = [family, length, IFA_F_NODAD, 0, 0, 0, 0, 0];
    body[4..].copy_from_slice(&index.to_ne_bytes());
    let attributes = Attributes::default()
        .bytes(IFA_LOCAL, &address)
        .bytes(IFA_ADDRESS, &address);
    socket.request(&Message::new(NEW_ADDRESS, CREATE | EXCLUSIVE, &body, attributes))
}

/// Sends everything that has no other way to a gateway.
pub(crate) fn add_default_route(
    socket: &mut Socket,
    index: u32,
    gateway: impl Into<IpAddr>,
) -> io::Result<()> {
    let (family, gateway) = family(gateway.into());
    let mut body = [0; ROUTE];
    body[0] = family;
    (body[4], body[5], body[7]) = (RT_TABLE_MAIN, RTPROT_BOOT, RTN_UNICAST);
    let attributes = Attributes::default()
        .bytes(RTA_OIF, &index.to_ne_bytes())
        .bytes(RTA_GATEWAY, &gateway);
    socket.request(&Message::new(NEW_ROUTE, CREATE | EXCLUSIVE, &body, attributes))
}

/// Says once and for all which MAC address a neighbour has.
pub(crate) fn add_neighbour(
    socket: &mut Socket,
    index: u32,
    address: impl Into<IpAddr>,
    mac: [u8; 6],
) -> io::Result<()> {
    let (family, address) = family(address.into());
    // struct ndmsg: family, padding, index, state, flags, type.
    let mut body = [0; 12];
    body[0] = family;
    body[4..8].copy_from_slice(&index.to_ne_bytes());
    body[8..10].copy_from_slice(&NUD_PERMANENT.to_ne_bytes());
    let attributes = Attributes::default()
        .bytes(NDA_DST, &address)
        .bytes(NDA_LLADDR, &mac);
    socket.request(&Message::new(NEW_NEIGHBOUR, CREATE, &body, attributes))
}
