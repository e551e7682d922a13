//! A host with the world outside beside it: two network namespaces and a pair of interfaces, which end with this process.

use std::io;
use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::process::Command;

use rustix::thread::UnshareFlags;

use super::namespace::Namespace;

/// The host's address outside, and that of a server there.
pub const HOST: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 1);
pub const OUTSIDE: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 2);
pub const PORT: u16 = 7;
/// Bytes a server may have waiting: a burst of the largest.
const WAITING: usize = 16 << 20;

/// A host the calling thread is in.
pub struct Place {
    outside: Namespace,
}

impl Place {
    /// Moves the calling thread, and those it starts, to a host of its own. Takes root, and iproute2.
    pub fn enter() -> Result<Place, String> {
        // SAFETY: the flag unshares no file descriptors, the one thing that breaks other code's assumptions.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }
            .map_err(|e| format!("make a network namespace (as root): {e}"))?;
        let outside = Namespace::make()?;
        let pid = outside.pid().to_string();
        ip(&[
            "link", "add", "wan", "type", "veth", "peer", "name", "lan", "netns", &pid,
        ])?;
        ip(&["address", "add", &format!("{HOST}/24"), "dev", "wan"])?;
        for link in ["lo", "wan"] {
            ip(&["link", "set", link, "up"])?;
        }
        outside.within(|| {
            ip(&["address", "add", &format!("{OUTSIDE}/24"), "dev", "lan"])?;
            ip(&["link", "set", "lan", "up"])
        })??;
        Ok(Place { outside })
    }

    /// A server outside, at a port.
    pub fn server(&self, port: u16) -> Result<UdpSocket, String> {
        let failed = |e: io::Error| format!("a server outside: {e}");
        let server = self
            .outside
            .within(|| UdpSocket::bind((OUTSIDE, port)))?
            .map_err(failed)?;
        let sized = rustix::net::sockopt::set_socket_recv_buffer_size_force(&server, WAITING);
        sized.map_err(|e| failed(e.into()))?;
        Ok(server)
    }

    /// A server of connections outside, at a port.
    pub fn listener(&self, port: u16) -> Result<TcpListener, String> {
        let listener = self.outside.within(|| TcpListener::bind((OUTSIDE, port)))?;
        listener.map_err(|e| format!("a server outside: {e}"))
    }
}

/// Runs ip(8) in the calling thread's network namespace.
pub(crate) fn ip(arguments: &[&str]) -> Result<(), String> {
    let status = Command::new("ip").args(arguments).status();
    match status
        .map_err(|e| format!("ip (install iproute2): {e}"))?
        .success()
    {
        true => Ok(()),
        false => Err(format!("ip {} failed", arguments.join(" "))),
    }
}
