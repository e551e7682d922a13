//! The `localhost` of a pod for processes that enter its namespace on the host, as containerd does for `kubectl port-forward`. Their
//! connections are for the guest's `localhost`, so they are redirected to a listener of ours, which forwards them there.
//!
//! Invariant: this adds one nftables table with a fixed name; without that table, the namespace is as it was.

use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::AsFd;

use thaw_sys::netlink::Socket;
use thaw_sys::nft::rule::{Rule, TCP};
use thaw_sys::nft::{Hook, Transaction};
use thaw_sys::prefix::Prefix;

const TABLE: &str = "thaw_pod";
const CHAIN: &str = "output";
const LOCALHOST: (Ipv4Addr, u8) = (Ipv4Addr::new(127, 0, 0, 0), 8);

/// Redirects all connections to `localhost` in the thread's namespace to a listener.
pub(super) fn redirect() -> io::Result<TcpListener> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = listener.local_addr()?.port();
    let mut rules = Transaction::new(TABLE);
    rules.hooked(CHAIN, Hook::NatOutput, true);
    let (first, length) = LOCALHOST;
    let localhost = Prefix::around(first, length).ok_or(io::ErrorKind::InvalidInput)?;
    let rule = Rule::new().to(localhost).protocol(TCP);
    rules.rule(CHAIN, rule.dnat_to_port(Ipv4Addr::LOCALHOST, port));
    rules.commit(&mut Socket::netfilter()?)?;
    Ok(listener)
}

/// Removes the redirection.
pub(super) fn remove() -> io::Result<()> {
    let mut rules = Transaction::new(TABLE);
    rules.delete();
    rules.commit(&mut Socket::netfilter()?)
}

/// The port that a connection of this listener was made to.
///
/// # Errors
/// The connection was not redirected.
pub fn original_port(connection: impl AsFd) -> io::Result<u16> {
    Ok(rustix::net::sockopt::ip_original_dst(connection)?.port())
}
