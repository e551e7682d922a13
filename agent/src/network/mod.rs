//! The guest's network: links, addresses, routes and neighbours, by rtnetlink. No TCP or UDP socket is ever opened.

mod netlink;

use std::net::IpAddr;

use thaw_protocol::handshake::{self, Network};

use crate::error::{Error, Result};
use netlink::*;

const IFF_UP: u32 = 1;
const IFF_LOOPBACK: u32 = 8;
pub(crate) const IFF_NOARP: u32 = 0x80;
/// Include/uapi/linux/if_arp.h.
const ARPHRD_ETHER: u16 = 1;
const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_LINKINFO: u16 = 18;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFA_FLAGS: u16 = 8;
const IFA_F_NODAD: u32 = 2;
const IFA_F_NOPREFIXROUTE: u32 = 0x200;
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
const RTA_PREFSRC: u16 = 7;
const RT_TABLE_MAIN: u8 = 254;
const RTPROT_KERNEL: u8 = 2;
const RTPROT_BOOT: u8 = 3;
const RTN_UNICAST: u8 = 1;
const RTNH_F_ONLINK: u32 = 4;
const NDA_DST: u16 = 1;
const NDA_LLADDR: u16 = 2;
const NUD_PERMANENT: u16 = 0x80;

/// A network interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    pub index: u32,
    pub name: String,
    pub mac: [u8; 6],
    pub mtu: u32,
    pub up: bool,
    pub loopback: bool,
    pub ethernet: bool,
    /// Of a kind that is made by request (dummy, veth, bridge …), not a device's own.
    pub software: bool,
}

/// An address of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkAddress {
    pub link: u32,
    pub ip: IpAddr,
    pub prefix: u8,
    /// Whether the kernel has a route to its prefix for it.
    pub on_link: bool,
}

/// A route of the main table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// None is the default route.
    pub destination: Option<(IpAddr, u8)>,
    pub gateway: Option<IpAddr>,
    pub source: Option<IpAddr>,
    pub link: u32,
    pub scope: u8,
    /// Of a route with neither destination nor gateway.
    pub v6: bool,
    pub onlink: bool,
    /// Made by the kernel for an address: not ours to delete.
    pub kernel: bool,
}

impl Route {
    /// As the handshake tells it, of this link.
    fn told(route: &handshake::Route, link: u32) -> Route {
        Route {
            destination: (route.prefix != 0).then_some((route.to, route.prefix)),
            gateway: route.gateway,
            source: route.source,
            link,
            scope: route.scope,
            v6: route.to.is_ipv6(),
            onlink: route.gateway_on_link,
            kernel: false,
        }
    }
}

/// `xx:xx:xx:xx:xx:xx`.
pub fn parse_mac(text: &str) -> Result<[u8; 6]> {
    let bytes: Option<Vec<u8>> = text
        .split(':')
        .map(|p| {
            if p.len() == 2 {
                u8::from_str_radix(p, 16).ok()
            } else {
                None
            }
        })
        .collect();
    bytes
        .and_then(|b| b.try_into().ok())
        .ok_or_else(|| Error::Invalid(format!("{text:?} is not a MAC address")))
}

/// The reverse of [`parse_mac`].
pub fn format_mac(mac: [u8; 6]) -> String {
    mac.map(|b| format!("{b:02x}")).join(":")
}

/// Brings `lo` up.
pub fn loopback_up() -> Result<()> {
    let mut net = Netlink::open()?;
    match links(&mut net)?.into_iter().find(|l| l.loopback) {
        Some(lo) => set_link(
            &mut net,
            lo.index,
            &Change {
                up: Some(true),
                ..Default::default()
            },
        ),
        None => Err(Error::State("this kernel has no loopback interface".into())),
    }
}

/// The guest's one Ethernet interface: a device's before one made by request, which the kernel may have added of its own
/// accord (`dummy0`).
fn ethernet(net: &mut Netlink) -> Result<Option<Link>> {
    Ok(links(net)?
        .into_iter()
        .filter(|l| l.ethernet && !l.loopback)
        .min_by_key(|l| l.software))
}

/// Takes the Ethernet interface down, with its addresses: routes and neighbours go with it. Without one: nothing to do.
pub fn disconnect() -> Result<()> {
    let mut net = Netlink::open()?;
    match ethernet(&mut net)? {
        Some(link) => undress(&mut net, &link).map(drop),
        None => Ok(()),
    }
}

/// Takes a link down and its addresses away; returns it as it is now.
fn undress(net: &mut Netlink, link: &Link) -> Result<Link> {
    for old in addresses(net)?
        .into_iter()
        .filter(|a| a.link == link.index && !is_link_local(a.ip))
    {
        delete_address(net, old)?;
    }
    if link.up {
        set_link(
            net,
            link.index,
            &Change {
                up: Some(false),
                ..Default::default()
            },
        )?;
    }
    Ok(Link {
        up: false,
        ..link.clone()
    })
}

/// Makes the guest's Ethernet interface what the host says it is, and nothing of what it may have been before.
pub fn configure(network: &Network) -> Result<()> {
    let mut net = Netlink::open()?;
    let link = ethernet(&mut net)?.ok_or_else(|| {
        Error::State("a network was given, but this guest has no Ethernet interface".into())
    })?;
    let link = undress(&mut net, &link)?;
    let dressed = Dressed {
        mac: network.mac,
        mtu: u32::from(network.mtu),
        name: Some(&network.name),
        arp: network.arp,
    };
    dress(&mut net, &link, &dressed)?;
    for a in &network.addresses {
        add_address(
            &mut net,
            LinkAddress {
                link: link.index,
                ip: a.ip,
                prefix: a.prefix,
                on_link: a.on_link,
            },
        )?;
    }
    let mut routes: Vec<&handshake::Route> = network.routes.iter().collect();
    // A gateway must be reachable by the time it is named.
    routes.sort_by_key(|route| route.gateway.is_some());
    for route in routes {
        add_route(&mut net, &Route::told(route, link.index))?;
    }
    for neighbour in &network.neighbours {
        let (state, flags) = (NUD_PERMANENT, 0);
        add_neighbour(&mut net, link.index, neighbour.ip, neighbour.mac, state, flags)?;
    }
    Ok(())
}

/// What a link is to be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dressed<'a> {
    pub mac: [u8; 6],
    /// 0: as it is.
    pub mtu: u32,
    /// None: as it is.
    pub name: Option<&'a str>,
    pub arp: bool,
}

/// Makes a link that, and brings it up.
pub(crate) fn dress(net: &mut Netlink, link: &Link, to: &Dressed<'_>) -> Result<()> {
    let Dressed { mac, mtu, name, arp } = *to;
    let rename = name.filter(|n| *n != link.name);
    // Neither may be changed of a link that is up, with some drivers.
    if link.up && (link.mac != mac || rename.is_some()) {
        set_link(
            net,
            link.index,
            &Change {
                up: Some(false),
                ..Default::default()
            },
        )?;
    }
    set_link(
        net,
        link.index,
        &Change {
            mac: (link.mac != mac).then_some(mac),
            mtu: (mtu != 0 && link.mtu != mtu).then_some(mtu),
            name: rename,
            ..Default::default()
        },
    )?;
    set_link(
        net,
        link.index,
        &Change {
            up: Some(true),
            arp: Some(arp),
            ..Default::default()
        },
    )
}

/// Whether it is an address of IPv6 that an interface has by itself.
pub(crate) fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local())
}

/// A netlink socket for several of the calls below.
pub fn open() -> Result<Netlink> {
    Netlink::open()
}

/// Every interface.
pub fn links(net: &mut Netlink) -> Result<Vec<Link>> {
    let answers = net.dump(Request::new(RTM_GETLINK, 0, &[0; 16]), RTM_NEWLINK, 16)?;
    Ok(answers
        .iter()
        .map(|a| {
            let flags = u32_at(&a.body, 8);
            Link {
                index: u32_at(&a.body, 4),
                name: text(a.get(IFLA_IFNAME).unwrap_or(&[])),
                mac: a
                    .get(IFLA_ADDRESS)
                    .and_then(|m| m.try_into().ok())
                    .unwrap_or_default(),
                mtu: a.get_u32(IFLA_MTU).unwrap_or(0),
                up: flags & IFF_UP != 0,
                loopback: flags & IFF_LOOPBACK != 0,
                ethernet: u16::from_ne_bytes([a.body[2], a.body[3]]) == ARPHRD_ETHER,
                software: a.get(IFLA_LINKINFO).is_some(),
            }
        })
        .collect())
}

/// What to change of a link.
#[derive(Clone, Copy, Debug, Default)]
struct Change<'a> {
    mac: Option<[u8; 6]>,
    mtu: Option<u32>,
    name: Option<&'a str>,
    up: Option<bool>,
    arp: Option<bool>,
}

fn set_link(net: &mut Netlink, index: u32, change: &Change<'_>) -> Result<()> {
    let mut body = [0u8; 16];
    body[4..8].copy_from_slice(&index.to_ne_bytes());
    let (mut flags, mut changed) = (0, 0);
    for (flag, wanted) in [(IFF_UP, change.up), (IFF_NOARP, change.arp.map(|arp| !arp))] {
        flags |= wanted.filter(|on| *on).map_or(0, |_| flag);
        changed |= wanted.map_or(0, |_| flag);
    }
    body[8..12].copy_from_slice(&flags.to_ne_bytes());
    body[12..16].copy_from_slice(&changed.to_ne_bytes());
    let mut request = Request::new(RTM_NEWLINK, 0, &body);
    if let Some(mac) = change.mac {
        request = request.attribute(IFLA_ADDRESS, &mac);
    }
    if let Some(mtu) = change.mtu {
        request = request.attribute(IFLA_MTU, &mtu.to_ne_bytes());
    }
    if let Some(name) = change.name {
        if name.is_empty() || name.len() > 15 || name.contains(['/', ':', ' ', '\0']) {
            return Err(Error::Invalid(format!("{name:?} is not an interface name")));
        }
        request = request.attribute(IFLA_IFNAME, format!("{name}\0").as_bytes());
    }
    net.request(request, || format!("change interface {index}: {change:?}"))
}

/// Every address.
pub fn addresses(net: &mut Netlink) -> Result<Vec<LinkAddress>> {
    let answers = net.dump(Request::new(RTM_GETADDR, 0, &[0; 8]), RTM_NEWADDR, 8)?;
    Ok(answers
        .iter()
        .filter_map(|a| {
            let ip = a.get_ip(IFA_LOCAL).or_else(|| a.get_ip(IFA_ADDRESS))?;
            Some(LinkAddress {
                link: u32_at(&a.body, 4),
                ip,
                prefix: a.body[1],
                on_link: a.get_u32(IFA_FLAGS).unwrap_or(0) & IFA_F_NOPREFIXROUTE == 0,
            })
        })
        .collect())
}

fn address_request(kind: u16, flags: u16, a: LinkAddress) -> Result<Request> {
    let width = if a.ip.is_ipv4() { 32 } else { 128 };
    if a.prefix > width {
        return Err(Error::Invalid(format!(
            "{}/{}: the prefix is longer than the address",
            a.ip, a.prefix
        )));
    }
    // Duplicate address detection would hold an IPv6 address back for a second; the host made sure it is unique.
    let unchecked = if a.ip.is_ipv6() { IFA_F_NODAD } else { 0 };
    let alone = if a.on_link { 0 } else { IFA_F_NOPREFIXROUTE };
    let mut body = vec![family(a.ip), a.prefix, 0, 0];
    body.extend_from_slice(&a.link.to_ne_bytes());
    Ok(Request::new(kind, flags, &body)
        .attribute(IFA_LOCAL, &ip_bytes(a.ip))
        .attribute(IFA_ADDRESS, &ip_bytes(a.ip))
        .attribute(IFA_FLAGS, &(unchecked | alone).to_ne_bytes()))
}

/// Gives an interface an address; having it already is no error.
pub fn add_address(net: &mut Netlink, a: LinkAddress) -> Result<()> {
    net.request(address_request(RTM_NEWADDR, NLM_F_REPLACE, a)?, || {
        format!("add address {}/{}", a.ip, a.prefix)
    })
}

/// Takes an address away.
pub fn delete_address(net: &mut Netlink, a: LinkAddress) -> Result<()> {
    net.request(address_request(RTM_DELADDR, 0, a)?, || {
        format!("delete address {}/{}", a.ip, a.prefix)
    })
}

/// Every unicast route of the main table.
pub fn routes(net: &mut Netlink) -> Result<Vec<Route>> {
    let answers = net.dump(Request::new(RTM_GETROUTE, 0, &[0; 12]), RTM_NEWROUTE, 12)?;
    Ok(answers
        .iter()
        .filter(|a| a.body[4] == RT_TABLE_MAIN && a.body[7] == RTN_UNICAST)
        .map(|a| Route {
            destination: a.get_ip(RTA_DST).map(|ip| (ip, a.body[1])),
            gateway: a.get_ip(RTA_GATEWAY),
            source: a.get_ip(RTA_PREFSRC),
            link: a.get_u32(RTA_OIF).unwrap_or(0),
            scope: a.body[6],
            v6: a.body[0] == libc::AF_INET6 as u8,
            onlink: u32_at(&a.body, 8) & RTNH_F_ONLINK != 0,
            kernel: a.body[5] == RTPROT_KERNEL,
        })
        .collect())
}

fn route_request(kind: u16, flags: u16, r: &Route) -> Request {
    let af = if r.v6 { libc::AF_INET6 } else { libc::AF_INET } as u8;
    let prefix = r.destination.map_or(0, |(_, p)| p);
    let mut body = vec![af, prefix, 0, 0, RT_TABLE_MAIN, RTPROT_BOOT, r.scope, RTN_UNICAST];
    if kind == RTM_DELROUTE {
        body[5] = 0;
    }
    body.extend_from_slice(&if r.onlink { RTNH_F_ONLINK } else { 0 }.to_ne_bytes());
    let mut request = Request::new(kind, flags, &body).attribute(RTA_OIF, &r.link.to_ne_bytes());
    if let Some((ip, _)) = r.destination {
        request = request.attribute(RTA_DST, &ip_bytes(ip));
    }
    if let Some(ip) = r.gateway {
        request = request.attribute(RTA_GATEWAY, &ip_bytes(ip));
    }
    if let Some(ip) = r.source {
        request = request.attribute(RTA_PREFSRC, &ip_bytes(ip));
    }
    request
}

/// Adds a route, or replaces the one to the same destination.
pub fn add_route(net: &mut Netlink, r: &Route) -> Result<()> {
    net.request(route_request(RTM_NEWROUTE, NLM_F_REPLACE, r), || {
        format!("add route {r:?}")
    })
}

/// Deletes a route.
pub fn delete_route(net: &mut Netlink, r: &Route) -> Result<()> {
    net.request(route_request(RTM_DELROUTE, 0, r), || {
        format!("delete route {r:?}")
    })
}

/// Adds a permanent neighbour, or replaces it.
pub fn add_neighbour(
    net: &mut Netlink,
    link: u32,
    ip: IpAddr,
    mac: [u8; 6],
    state: u16,
    flags: u8,
) -> Result<()> {
    let mut body = vec![family(ip), 0, 0, 0];
    body.extend_from_slice(&link.to_ne_bytes());
    body.extend_from_slice(&if state == 0 { NUD_PERMANENT } else { state }.to_ne_bytes());
    body.extend_from_slice(&[flags, 0]);
    let request = Request::new(RTM_NEWNEIGH, NLM_F_REPLACE, &body)
        .attribute(NDA_DST, &ip_bytes(ip))
        .attribute(NDA_LLADDR, &mac);
    net.request(request, || format!("add neighbour {ip}"))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes
        .get(at..at + 4)
        .and_then(|b| b.try_into().ok())
        .map_or(0, u32::from_ne_bytes)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes.split(|b| *b == 0).next().unwrap_or_default()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mac_is_read_as_it_is_written_and_nothing_else() {
        let mac = [2, 0, 0xab, 0xcd, 0, 1];
        assert_eq!(parse_mac(&format_mac(mac)).unwrap(), mac);
        for bad in [
            "",
            "02:00:ab:cd:00",
            "02:00:ab:cd:00:01:02",
            "2:0:ab:cd:0:1",
            "zz:00:ab:cd:00:01",
        ] {
            assert!(parse_mac(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn the_loopback_link_is_seen() {
        let mut net = Netlink::open().unwrap();
        let links = links(&mut net).unwrap();
        assert!(links.iter().any(|l| l.loopback && l.name == "lo"));
        addresses(&mut net).unwrap();
        routes(&mut net).unwrap();
    }
}
