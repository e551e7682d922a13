//! The name servers for guests: the host's, at addresses that a guest can reach.

use std::fs::File;
use std::io::Read;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;

use crate::slot::PLATFORM;

const FILE: &str = "/etc/resolv.conf";
/// The upstream name servers of systemd-resolved, which itself listens on the host's loopback.
const UPSTREAM: &str = "/run/systemd/resolve/resolv.conf";
/// Most bytes of a file that are read, and most servers that a resolver uses (`MAXNS`).
const MAX_FILE: u64 = 64 << 10;
const MAX_SERVERS: usize = 3;

/// The host's name servers that a guest can reach: IPv4, and not on the host's loopback.
pub(super) fn nameservers() -> Vec<Ipv4Addr> {
    usable(&read(Path::new(FILE)), || read(Path::new(UPSTREAM)))
}

/// The servers at addresses where a guest may reach only DNS: link-local ones, and the platform's (as on Azure).
pub(super) fn barred(servers: &[IpAddr]) -> Vec<Ipv4Addr> {
    let v4 = servers.iter().filter_map(|server| match server {
        IpAddr::V4(v4) => Some(*v4),
        IpAddr::V6(_) => None,
    });
    v4.filter(|v4| v4.is_link_local() || PLATFORM.contains(v4))
        .collect()
}

fn read(path: &Path) -> String {
    let mut text = Vec::new();
    match File::open(path).and_then(|file| file.take(MAX_FILE).read_to_end(&mut text)) {
        Ok(_) => String::from_utf8_lossy(&text).into_owned(),
        Err(_) => String::new(),
    }
}

fn usable(text: &str, upstream: impl FnOnce() -> String) -> Vec<Ipv4Addr> {
    let found = parse(text);
    let outside = |found: Vec<Ipv4Addr>| -> Vec<Ipv4Addr> {
        let usable = |s: &Ipv4Addr| !s.is_loopback() && !s.is_unspecified();
        found.into_iter().filter(usable).take(MAX_SERVERS).collect()
    };
    match outside(found) {
        none if none.is_empty() => outside(parse(&upstream())),
        found => found,
    }
}

fn parse(text: &str) -> Vec<Ipv4Addr> {
    let servers = text.lines().filter_map(|line| {
        let mut words = line.split_ascii_whitespace();
        match (words.next(), words.next()) {
            (Some("nameserver"), Some(address)) => address.parse().ok(),
            _ => None,
        }
    });
    servers.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_resolver_is_replaced_by_its_upstreams() {
        let stub = "# stub\nnameserver 127.0.0.53\noptions edns0\n";
        let upstream = || "nameserver 192.0.2.53\nnameserver 2001:db8::53\nnameserver 192.0.2.54\n".into();
        assert_eq!(
            usable(stub, upstream),
            [Ipv4Addr::new(192, 0, 2, 53), Ipv4Addr::new(192, 0, 2, 54)]
        );
        let mixed = "nameserver 127.0.0.1\nnameserver 198.51.100.1\nnameserver\nnameserver x\n";
        assert_eq!(
            usable(mixed, || panic!("not asked")),
            [Ipv4Addr::new(198, 51, 100, 1)]
        );
        assert!(usable("", String::new).is_empty());
    }

    #[test]
    fn name_servers_beyond_the_resolver_limit_are_dropped() {
        let text: String = (1..9).map(|n| format!("nameserver 192.0.2.{n}\n")).collect();
        assert_eq!(usable(&text, String::new).len(), MAX_SERVERS);
    }
}
