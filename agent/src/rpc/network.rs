//! Configures interfaces, routes and neighbours after the handshake, for Kata's runtime.

use std::net::IpAddr;

use thaw_protocol::agent::agent::{Interfaces, Routes};
use thaw_protocol::agent::types::{ARPNeighbor, IPAddress, IPFamily, Interface, Route as RouteMessage};

use thaw_sys::survey::{Address, Link, NUD_PERMANENT, Neighbour, RTNH_F_ONLINK, Route};

use crate::error::{Error, Result};
use crate::network::{self, LinkConfig};

fn ip(text: &str) -> Result<IpAddr> {
    text.parse()
        .map_err(|_| Error::Invalid(format!("{text:?} is not an IP address")))
}

fn prefixed(text: &str, prefix: &str) -> Result<(IpAddr, u8)> {
    let address = ip(text)?;
    let prefix = prefix
        .parse()
        .map_err(|_| Error::Invalid(format!("{prefix:?} is not a prefix length")))?;
    Ok((address, prefix))
}

fn family(address: &IpAddr) -> IPFamily {
    if address.is_ipv4() {
        IPFamily::v4
    } else {
        IPFamily::v6
    }
}

fn by_name<'a>(links: &'a [Link], name: &str) -> Result<&'a Link> {
    links
        .iter()
        .find(|l| l.name == name)
        .ok_or_else(|| Error::Invalid(format!("there is no interface {name:?}")))
}

/// Finds the link by its MAC address and sets its name, MTU and addresses; other addresses are removed.
pub fn update_interface(interface: Option<Interface>) -> Result<Interface> {
    let wanted = interface.ok_or_else(|| Error::Invalid("the request has no interface".into()))?;
    let mac = network::parse_mac(&wanted.hwAddr)?;
    let addresses = wanted
        .IPAddresses
        .iter()
        .map(|a| prefixed(&a.address, &a.mask))
        .collect::<Result<Vec<_>>>()?;
    let mtu = u32::try_from(wanted.mtu)
        .map_err(|_| Error::Invalid(format!("MTU {} is out of range", wanted.mtu)))?;
    let mut net = network::open()?;
    let link = network::links(&mut net)?
        .into_iter()
        .find(|l| l.mac.unwrap_or_default() == mac && !l.is_loopback())
        .ok_or_else(|| Error::Invalid(format!("there is no interface with MAC {}", wanted.hwAddr)))?;
    for old in network::addresses(&mut net)?
        .into_iter()
        .filter(|a| a.link == link.index)
    {
        network::delete_address(&mut net, &old)?;
    }
    let config = LinkConfig {
        mac,
        mtu,
        name: Some(wanted.name.as_str()).filter(|n| !n.is_empty()),
        arp: wanted.raw_flags & libc::IFF_NOARP as u32 == 0,
    };
    network::configure_link(&mut net, &link, &config)?;
    for (ip, prefix) in addresses {
        network::add_address(
            &mut net,
            &Address {
                link: link.index,
                ip,
                prefix,
                peer: None,
                flags: 0,
            },
        )?;
    }
    Ok(wanted)
}

/// Replaces every route except the kernel's own.
pub fn update_routes(routes: &[RouteMessage]) -> Result<Routes> {
    let mut net = network::open()?;
    let links = network::links(&mut net)?;
    let mut wanted = routes
        .iter()
        .map(|r| route(r, &links))
        .collect::<Result<Vec<_>>>()?;
    for old in network::routes(&mut net)?.into_iter().filter(|r| !r.kernel) {
        network::delete_route(&mut net, &old)?;
    }
    // A gateway must be reachable before a route can name it, so routes without gateways come first.
    wanted.sort_by_key(|r| r.gateway.is_some());
    for r in &wanted {
        network::add_route(&mut net, r)?;
    }
    list_routes()
}

fn route(r: &RouteMessage, links: &[Link]) -> Result<Route> {
    let optional = |text: &str| {
        if text.is_empty() {
            Ok(None)
        } else {
            ip(text).map(Some)
        }
    };
    let to = match r.dest.as_str() {
        "" | "default" => None,
        dest => {
            let (address, prefix) = dest
                .split_once('/')
                .unwrap_or((dest, if dest.contains(':') { "128" } else { "32" }));
            Some(prefixed(address, prefix)?).filter(|(_, prefix)| *prefix != 0)
        }
    };
    let (gateway, source) = (optional(&r.gateway)?, optional(&r.source)?);
    let some = to.map(|(to, _)| to).or(gateway);
    Ok(Route {
        to,
        gateway,
        source,
        by: Some(by_name(links, &r.device)?.index),
        scope: r.scope.min(255) as u8,
        v6: some.map_or(r.family.enum_value_or_default() == IPFamily::v6, |ip| {
            ip.is_ipv6()
        }),
        flags: r.flags & RTNH_F_ONLINK,
        ..Route::default()
    })
}

pub fn list_interfaces() -> Result<Interfaces> {
    let mut net = network::open()?;
    let links = network::links(&mut net)?;
    let addresses = network::addresses(&mut net)?;
    let message = |l: &Link| Interface {
        device: l.name.clone(),
        name: l.name.clone(),
        mtu: u64::from(l.mtu),
        hwAddr: network::format_mac(l.mac.unwrap_or_default()),
        IPAddresses: addresses
            .iter()
            .filter(|a| a.link == l.index)
            .map(|a| IPAddress {
                family: family(&a.ip).into(),
                address: a.ip.to_string(),
                mask: a.prefix.to_string(),
                ..Default::default()
            })
            .collect(),
        ..Default::default()
    };
    Ok(Interfaces {
        Interfaces: links.iter().map(message).collect(),
        ..Default::default()
    })
}

pub fn list_routes() -> Result<Routes> {
    let mut net = network::open()?;
    let links = network::links(&mut net)?;
    let text = |ip: Option<IpAddr>| ip.map(|ip| ip.to_string()).unwrap_or_default();
    let message = |r: Route| RouteMessage {
        dest: r.to.map(|(ip, p)| format!("{ip}/{p}")).unwrap_or_default(),
        gateway: text(r.gateway),
        device: links
            .iter()
            .find(|l| Some(l.index) == r.by)
            .map(|l| l.name.clone())
            .unwrap_or_default(),
        source: text(r.source),
        scope: u32::from(r.scope),
        family: if r.v6 { IPFamily::v6 } else { IPFamily::v4 }.into(),
        flags: r.flags & RTNH_F_ONLINK,
        ..Default::default()
    };
    Ok(Routes {
        Routes: network::routes(&mut net)?.into_iter().map(message).collect(),
        ..Default::default()
    })
}

pub fn add_neighbours(neighbours: &[ARPNeighbor]) -> Result<()> {
    let mut net = network::open()?;
    let links = network::links(&mut net)?;
    for n in neighbours {
        let to = n
            .toIPAddress
            .as_ref()
            .ok_or_else(|| Error::Invalid("a neighbour without an address".into()))?;
        let link = by_name(&links, &n.device)?;
        let mac = network::parse_mac(&n.lladdr)?;
        let neighbour = Neighbour {
            link: link.index,
            ip: ip(&to.address)?,
            mac,
            state: match n.state as u16 {
                0 => NUD_PERMANENT,
                state => state,
            },
            flags: n.flags as u8,
        };
        network::add_neighbour(&mut net, &neighbour)?;
    }
    Ok(())
}
