//! Configures the guest's links, addresses, routes and neighbours by rtnetlink. Opens no TCP or UDP socket.

use std::net::IpAddr;

use thaw_protocol::handshake::{self, Network};
use thaw_sys::link::{self, Change};
use thaw_sys::netlink::Socket;
use thaw_sys::survey::{
    self, Address, IFA_F_NOPREFIXROUTE, Link, NUD_PERMANENT, Neighbour, RT_TABLE_MAIN, RTNH_F_ONLINK, Route,
};

use crate::error::{Error, Result, WithContext};

/// Converts a route of the handshake to one over this link.
fn over_link(route: &handshake::Route, link: u32) -> Route {
    Route {
        to: (route.prefix != 0).then_some((route.to, route.prefix)),
        gateway: route.gateway,
        source: route.source,
        by: Some(link),
        scope: route.scope,
        v6: route.to.is_ipv6(),
        flags: if route.gateway_on_link { RTNH_F_ONLINK } else { 0 },
        ..Route::default()
    }
}

/// Parses `xx:xx:xx:xx:xx:xx`.
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
    let mut net = open()?;
    match links(&mut net)?.into_iter().find(Link::is_loopback) {
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

/// The guest's only Ethernet interface that belongs to a device. Interfaces that the kernel makes by itself (`dummy0`) do not count.
fn ethernet(net: &mut Socket) -> Result<Option<Link>> {
    Ok(links(net)?
        .into_iter()
        .filter(|l| l.ethernet && !l.is_loopback())
        .min_by_key(|l| l.kind.is_some()))
}

/// Takes the Ethernet interface down and removes its addresses, and with them its routes and neighbours.
/// Without an interface this has no effect.
pub fn disconnect() -> Result<()> {
    let mut net = open()?;
    match ethernet(&mut net)? {
        Some(link) => reset_link(&mut net, &link).map(drop),
        None => Ok(()),
    }
}

/// Takes a link down and removes its addresses. Returns its new state.
fn reset_link(net: &mut Socket, link: &Link) -> Result<Link> {
    for old in addresses(net)?
        .into_iter()
        .filter(|a| a.link == link.index && !is_link_local(a.ip))
    {
        delete_address(net, &old)?;
    }
    if link.is_up() {
        take_down(net, link)?;
    }
    Ok(Link {
        flags: link.flags & !(libc::IFF_UP as u32),
        ..link.clone()
    })
}

/// Configures the guest's Ethernet interface as the host says, and removes any earlier configuration.
pub fn configure(network: &Network) -> Result<()> {
    let mut net = open()?;
    let link = ethernet(&mut net)?.ok_or_else(|| {
        Error::State("a network was given, but this guest has no Ethernet interface".into())
    })?;
    let link = reset_link(&mut net, &link)?;
    let config = LinkConfig {
        mac: network.mac,
        mtu: u32::from(network.mtu),
        name: Some(&network.name),
        arp: network.arp,
    };
    configure_link(&mut net, &link, &config)?;
    for a in &network.addresses {
        add_address(
            &mut net,
            &Address {
                link: link.index,
                ip: a.ip,
                prefix: a.prefix,
                peer: None,
                flags: if a.on_link { 0 } else { IFA_F_NOPREFIXROUTE },
            },
        )?;
    }
    let mut routes: Vec<&handshake::Route> = network.routes.iter().collect();
    // A gateway must be reachable before a route can name it, so routes without gateways come first.
    routes.sort_by_key(|route| route.gateway.is_some());
    for route in routes {
        add_route(&mut net, &over_link(route, link.index))?;
    }
    for neighbour in &network.neighbours {
        let neighbour = Neighbour {
            link: link.index,
            ip: neighbour.ip,
            mac: neighbour.mac,
            state: NUD_PERMANENT,
            flags: 0,
        };
        add_neighbour(&mut net, &neighbour)?;
    }
    Ok(())
}

/// The configuration of a link.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LinkConfig<'a> {
    pub mac: [u8; 6],
    /// 0 means unchanged.
    pub mtu: u32,
    /// `None` means unchanged.
    pub name: Option<&'a str>,
    pub arp: bool,
}

/// Configures a link, and brings it up.
pub(crate) fn configure_link(net: &mut Socket, link: &Link, to: &LinkConfig<'_>) -> Result<()> {
    let LinkConfig { mac, mtu, name, arp } = *to;
    let rename = name.filter(|n| *n != link.name);
    // Some drivers cannot change the MAC address or the name of a link that is up.
    if link.is_up() && (link.mac != Some(mac) || rename.is_some()) {
        take_down(net, link)?;
    }
    set_link(
        net,
        link.index,
        &Change {
            mac: (link.mac != Some(mac)).then_some(mac),
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

/// Whether this is an IPv6 address that an interface assigns itself.
pub(crate) fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local())
}

/// Opens a netlink socket, which can be used for several of the calls below.
pub fn open() -> Result<Socket> {
    Socket::route().with_context(|| "open a netlink socket".into())
}

/// Lists all interfaces.
pub fn links(net: &mut Socket) -> Result<Vec<Link>> {
    survey::links(net).with_context(|| "list interfaces".into())
}

fn take_down(net: &mut Socket, link: &Link) -> Result<()> {
    let down = Change {
        up: Some(false),
        ..Default::default()
    };
    set_link(net, link.index, &down)
}

fn set_link(net: &mut Socket, index: u32, change: &Change<'_>) -> Result<()> {
    if let Some(name) = change.name
        && (name.is_empty() || name.len() > 15 || name.contains(['/', ':', ' ', '\0']))
    {
        return Err(Error::Invalid(format!("{name:?} is not an interface name")));
    }
    link::change(net, index, change).with_context(|| format!("change interface {index}: {change:?}"))
}

/// Lists all addresses.
pub fn addresses(net: &mut Socket) -> Result<Vec<Address>> {
    survey::addresses(net).with_context(|| "list addresses".into())
}

fn check(a: &Address) -> Result<()> {
    let width = if a.ip.is_ipv4() { 32 } else { 128 };
    match a.prefix > width {
        true => Err(Error::Invalid(format!(
            "{}/{}: the prefix is longer than the address",
            a.ip, a.prefix
        ))),
        false => Ok(()),
    }
}

/// Adds an address to an interface. It may have the address already.
pub fn add_address(net: &mut Socket, a: &Address) -> Result<()> {
    check(a)?;
    link::replace_address(net, a).with_context(|| format!("add address {}/{}", a.ip, a.prefix))
}

/// Removes an address.
pub fn delete_address(net: &mut Socket, a: &Address) -> Result<()> {
    check(a)?;
    link::delete_address(net, a).with_context(|| format!("delete address {}/{}", a.ip, a.prefix))
}

/// Lists all unicast routes of the main table.
pub fn routes(net: &mut Socket) -> Result<Vec<Route>> {
    let mut routes = survey::routes(net).with_context(|| "list routes".into())?;
    routes.retain(|route| route.table == RT_TABLE_MAIN);
    Ok(routes)
}

/// Adds a route, or replaces the one to the same destination.
pub fn add_route(net: &mut Socket, r: &Route) -> Result<()> {
    link::replace_route(net, r).with_context(|| format!("add route {r:?}"))
}

/// Deletes a route.
pub fn delete_route(net: &mut Socket, r: &Route) -> Result<()> {
    link::delete_route(net, r).with_context(|| format!("delete route {r:?}"))
}

/// Adds a neighbour, or replaces it.
pub fn add_neighbour(net: &mut Socket, n: &Neighbour) -> Result<()> {
    link::replace_neighbour(net, n).with_context(|| format!("add neighbour {}", n.ip))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mac_address_is_parsed_as_it_is_written() {
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
    fn loopback_link_is_listed() {
        let mut net = open().unwrap();
        let links = links(&mut net).unwrap();
        assert!(links.iter().any(|l| l.is_loopback() && l.name == "lo"));
        addresses(&mut net).unwrap();
        routes(&mut net).unwrap();
    }
}
