//! The files of the guest's names, `hosts` and `resolv.conf`, after its network or its container's names have changed.

use std::fs;
use std::path::Path;

use thaw_sys::lock::Lock;

use crate::error::{Error, Result};
use crate::identity;
use crate::names::Names;
use crate::sandbox::Sandbox;

/// Writes the guest's names again, with those of a container.
pub(super) fn take_names(sandbox: &Sandbox, names: Names) -> Result<()> {
    *sandbox.names.locked() = names;
    rewrite(sandbox, &[])
}

/// Without `dns`, the name servers of before stay.
pub(super) fn rewrite(sandbox: &Sandbox, dns: &[String]) -> Result<()> {
    let mut nameservers = Vec::new();
    for server in dns {
        nameservers.push(
            server
                .parse()
                .map_err(|_| Error::Invalid(format!("name server {server:?} is not an address")))?,
        );
    }
    if nameservers.is_empty() {
        // The handshake's addresses stay.
        let old = fs::read_to_string(Path::new(identity::ETC).join("resolv.conf")).unwrap_or_default();
        nameservers = old
            .lines()
            .filter_map(|l| l.strip_prefix("nameserver ")?.trim().parse().ok())
            .collect();
    }
    let hostname = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let mut net = crate::network::open()?;
    let ethernet: Vec<u32> = crate::network::links(&mut net)?
        .iter()
        .filter(|l| l.ethernet && !l.is_loopback())
        .map(|l| l.index)
        .collect();
    let addresses: Vec<_> = crate::network::addresses(&mut net)?
        .into_iter()
        .filter(|a| {
            ethernet.contains(&a.link)
                && !matches!(a.ip, std::net::IpAddr::V6(v6) if v6.is_unicast_link_local())
        })
        .map(|a| a.ip)
        .collect();
    let names = sandbox.names.locked().clone();
    identity::write_etc(&hostname, &addresses, &nameservers, &names)
}
