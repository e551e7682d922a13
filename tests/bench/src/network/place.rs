//! A host with the world outside beside it: two network namespaces and a pair of interfaces, which end with this process.

use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};

use rustix::fs::{Mode, OFlags};
use rustix::thread::{LinkNameSpaceType, UnshareFlags};

/// The host's address outside, and that of a server there.
pub const HOST: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 1);
pub const OUTSIDE: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 2);
pub const PORT: u16 = 7;
/// Bytes a server may have waiting: a burst of the largest.
const WAITING: usize = 16 << 20;

/// A host the calling thread is in.
pub struct Place {
    /// Keeps the namespace outside.
    outside: Child,
}

impl Place {
    /// Moves the calling thread, and those it starts, to a host of its own. Takes root, and iproute2.
    pub fn enter() -> Result<Place, String> {
        // SAFETY: the flag unshares no file descriptors, the one thing that breaks other code's assumptions.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }
            .map_err(|e| format!("make a network namespace (as root): {e}"))?;
        let outside = Command::new("unshare")
            .args(["--net", "sh", "-c", "echo; exec cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| format!("unshare: {e}"))?;
        let mut place = Place { outside };
        // It is there once it says so.
        let said = place
            .outside
            .stdout
            .as_mut()
            .map(|said| io::Read::read(said, &mut [0]));
        if !matches!(said, Some(Ok(1))) {
            return Err("unshare: it makes no network namespace".into());
        }
        let outside = place.outside.id().to_string();
        ip(&[
            "link", "add", "wan", "type", "veth", "peer", "name", "lan", "netns", &outside,
        ])?;
        ip(&["address", "add", &format!("{HOST}/24"), "dev", "wan"])?;
        for link in ["lo", "wan"] {
            ip(&["link", "set", link, "up"])?;
        }
        place.within(|| {
            ip(&["address", "add", &format!("{OUTSIDE}/24"), "dev", "lan"])?;
            ip(&["link", "set", "lan", "up"])
        })??;
        Ok(place)
    }

    /// A server outside, at a port.
    pub fn server(&self, port: u16) -> Result<UdpSocket, String> {
        let failed = |e: io::Error| format!("a server outside: {e}");
        let server = self
            .within(|| UdpSocket::bind((OUTSIDE, port)))?
            .map_err(failed)?;
        let sized = rustix::net::sockopt::set_socket_recv_buffer_size_force(&server, WAITING);
        sized.map_err(|e| failed(e.into()))?;
        Ok(server)
    }

    fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, String> {
        let failed = |e: rustix::io::Errno| format!("enter the namespace outside: {e}");
        let path = format!("/proc/{}/ns/net", self.outside.id());
        let open = OFlags::RDONLY | OFlags::CLOEXEC;
        let namespace: OwnedFd = rustix::fs::open(path, open, Mode::empty()).map_err(failed)?;
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let kind = Some(LinkNameSpaceType::Network);
                rustix::thread::move_into_link_name_space(namespace.as_fd(), kind).map_err(failed)?;
                Ok(work())
            });
            thread
                .join()
                .unwrap_or_else(|_| Err("it panicked outside".into()))
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = self.outside.kill();
        let _ = self.outside.wait();
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
