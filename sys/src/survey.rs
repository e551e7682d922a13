//! Reads the interfaces, addresses, routes and neighbours of a network namespace, IPv4 and IPv6, by rtnetlink(7).
//!
//! Invariants: unknown entries are left out, never guessed; this module only reads.

use std::io;
use std::net::IpAddr;

use crate::netlink::{Attributes, Message, Parsed, Socket};

// include/uapi/linux/{rtnetlink,if_link,if_addr,neighbour}.h
const NEW_LINK: u16 = 16;
const GET_LINK: u16 = 18;
const NEW_ADDRESS: u16 = 20;
const GET_ADDRESS: u16 = 22;
const NEW_ROUTE: u16 = 24;
const GET_ROUTE: u16 = 26;
const NEW_NEIGHBOUR: u16 = 28;
const GET_NEIGHBOUR: u16 = 30;
const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_MASTER: u16 = 10;
const IFLA_LINKINFO: u16 = 18;
const INFO_KIND: u16 = 1;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFA_FLAGS: u16 = 8;
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
const RTA_PRIORITY: u16 = 6;
const RTA_PREFSRC: u16 = 7;
const RTA_MULTIPATH: u16 = 9;
const RTA_TABLE: u16 = 15;
const RTA_VIA: u16 = 18;
const NDA_DST: u16 = 1;
const NDA_LLADDR: u16 = 2;
const RTM_F_CLONED: u32 = 0x200;
const RTN_UNICAST: u8 = 1;
const RTPROT_KERNEL: u8 = 2;
pub const RT_TABLE_MAIN: u32 = 254;
/// Flag of an address: the kernel creates no route to its prefix.
pub const IFA_F_NOPREFIXROUTE: u32 = 0x200;
/// Flag of a route: its gateway is on the link, regardless of the addresses.
pub const RTNH_F_ONLINK: u32 = 4;
/// State of a neighbour that never expires.
pub const NUD_PERMANENT: u16 = 0x80;
/// Bytes of `struct ifinfomsg`, `ifaddrmsg`, `rtmsg` and `ndmsg`.
const LINK: usize = 16;
const ADDRESS: usize = 8;
const ROUTE: usize = 12;
const NEIGHBOUR: usize = 12;

/// An interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    pub index: u32,
    pub name: String,
    /// The driver, for a link that was created by request: `veth`, `tun`.
    pub kind: Option<String>,
    pub mac: Option<[u8; 6]>,
    pub mtu: u32,
    /// `IFF_*`.
    pub flags: u32,
    /// Carries Ethernet frames; the loopback does not.
    pub ethernet: bool,
    /// It is part of another link: of a bridge or a bond.
    pub enslaved: bool,
}

impl Link {
    pub fn is_up(&self) -> bool {
        self.flags & libc::IFF_UP as u32 != 0
    }

    pub fn is_loopback(&self) -> bool {
        self.flags & libc::IFF_LOOPBACK as u32 != 0
    }
}

/// An address of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    pub link: u32,
    pub ip: IpAddr,
    pub prefix: u8,
    /// The address at the other end of a point-to-point link.
    pub peer: Option<IpAddr>,
    /// `IFA_F_*`.
    pub flags: u32,
}

/// A unicast route.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Route {
    pub v6: bool,
    pub table: u32,
    /// `None`: a default route.
    pub to: Option<(IpAddr, u8)>,
    pub gateway: Option<IpAddr>,
    pub source: Option<IpAddr>,
    /// The interface of the route; `None` for a route with several next hops.
    pub by: Option<u32>,
    /// Lower is preferred.
    pub priority: u32,
    pub scope: u8,
    /// `RTNH_F_*`.
    pub flags: u32,
    /// The kernel created it for an address.
    pub kernel: bool,
    /// It has several next hops, or a gateway of the other family.
    pub complex: bool,
}

/// A neighbour on a link and its MAC address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Neighbour {
    pub link: u32,
    pub ip: IpAddr,
    pub mac: [u8; 6],
    /// `NUD_*`.
    pub state: u16,
    /// `NTF_*`.
    pub flags: u8,
}

/// Dumps the objects of the request `get` and parses each answer of the kind `new`: its fixed body and its attributes.
fn survey<const BODY: usize, T>(
    socket: &mut Socket,
    (get, new): (u16, u16),
    read: impl Fn(&[u8; BODY], Parsed<'_>) -> Option<T>,
) -> io::Result<Vec<T>> {
    let mut found = Vec::new();
    let message = Message::new(get, 0, &[0; BODY], Attributes::default());
    socket.dump(&message, |kind, payload| {
        if let (true, Some(body)) = (kind == new, payload.first_chunk()) {
            found.extend(read(body, Parsed(&payload[BODY..])));
        }
    })?;
    Ok(found)
}

fn u32_at<const N: usize>(body: &[u8; N], at: usize) -> u32 {
    let bytes = body.get(at..).and_then(|rest| rest.first_chunk());
    bytes.map_or(0, |bytes| u32::from_ne_bytes(*bytes))
}

fn number(attributes: Parsed<'_>, kind: u16) -> Option<u32> {
    attributes.array(kind).map(u32::from_ne_bytes)
}

fn text(bytes: &[u8]) -> Option<String> {
    let bytes = bytes.strip_suffix(b"\0").unwrap_or(bytes);
    std::str::from_utf8(bytes).ok().map(str::to_owned)
}

fn ip(attributes: Parsed<'_>, kind: u16) -> Option<IpAddr> {
    let value = attributes.get(kind)?;
    let v4 = || <[u8; 4]>::try_from(value).map(IpAddr::from);
    let v6 = || <[u8; 16]>::try_from(value).map(IpAddr::from);
    v4().or_else(|_| v6()).ok()
}

/// Every interface.
pub fn links(socket: &mut Socket) -> io::Result<Vec<Link>> {
    survey(socket, (GET_LINK, NEW_LINK), |body: &[u8; LINK], attributes| {
        let info = attributes.nested(IFLA_LINKINFO);
        Some(Link {
            index: u32_at(body, 4),
            name: attributes.get(IFLA_IFNAME).and_then(text)?,
            kind: info.and_then(|info| info.get(INFO_KIND)).and_then(text),
            mac: attributes.array(IFLA_ADDRESS),
            mtu: number(attributes, IFLA_MTU).unwrap_or(0),
            flags: u32_at(body, 8),
            ethernet: u16::from_ne_bytes([body[2], body[3]]) == libc::ARPHRD_ETHER,
            enslaved: attributes.get(IFLA_MASTER).is_some(),
        })
    })
}

/// Every address.
pub fn addresses(socket: &mut Socket) -> io::Result<Vec<Address>> {
    survey(
        socket,
        (GET_ADDRESS, NEW_ADDRESS),
        |body: &[u8; ADDRESS], attributes| {
            let address = ip(attributes, IFA_ADDRESS);
            let local = ip(attributes, IFA_LOCAL).or(address)?;
            Some(Address {
                link: u32_at(body, 4),
                ip: local,
                prefix: body[1],
                peer: address.filter(|address| *address != local),
                flags: number(attributes, IFA_FLAGS).unwrap_or(u32::from(body[2])),
            })
        },
    )
}

/// Every unicast route, of every table.
pub fn routes(socket: &mut Socket) -> io::Result<Vec<Route>> {
    survey(
        socket,
        (GET_ROUTE, NEW_ROUTE),
        |body: &[u8; ROUTE], attributes| {
            let v6 = match i32::from(body[0]) {
                libc::AF_INET => false,
                libc::AF_INET6 => true,
                _ => return None,
            };
            let flags = u32_at(body, 8);
            if body[7] != RTN_UNICAST || flags & RTM_F_CLONED != 0 {
                return None;
            }
            Some(Route {
                v6,
                table: number(attributes, RTA_TABLE).unwrap_or(u32::from(body[4])),
                to: ip(attributes, RTA_DST).map(|to| (to, body[1])),
                gateway: ip(attributes, RTA_GATEWAY),
                source: ip(attributes, RTA_PREFSRC),
                by: number(attributes, RTA_OIF),
                priority: number(attributes, RTA_PRIORITY).unwrap_or(0),
                scope: body[6],
                flags,
                kernel: body[5] == RTPROT_KERNEL,
                complex: attributes.get(RTA_MULTIPATH).is_some() || attributes.get(RTA_VIA).is_some(),
            })
        },
    )
}

/// Every neighbour.
pub fn neighbours(socket: &mut Socket) -> io::Result<Vec<Neighbour>> {
    survey(
        socket,
        (GET_NEIGHBOUR, NEW_NEIGHBOUR),
        |body: &[u8; NEIGHBOUR], attributes| {
            Some(Neighbour {
                link: u32_at(body, 4),
                ip: ip(attributes, NDA_DST)?,
                mac: attributes.array(NDA_LLADDR)?,
                state: u16::from_ne_bytes([body[8], body[9]]),
                flags: body[10],
            })
        },
    )
}
