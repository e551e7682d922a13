//! The network of a pod: a namespace that a CNI plugin made, whose interfaces, addresses and routes a guest gets.
//!
//! ```text
//!  guest ─ tap thaw-t0 ⇄ eth0 [ the pod's namespace ] ─ whatever the plugin connected it to
//! ```
//!
//! The namespace's Ethernet interface gets a tap beside it. Every frame that arrives at the interface is redirected to the tap unread: ARP,
//! IPv6, anything. A frame that the guest sends is redirected to the interface if it is from the pod ([`filter`]). The guest has the
//! interface's name, MAC, addresses, MTU, routes and neighbours, which [`PodNetwork::config`] gives for its handshake.
//!
//! Invariants: nothing that the plugin made is changed, so [`detach`] restores the namespace. What was added is recognised by its state in
//! the kernel (a tap's name, a redirect's cookie), so a process that comes after a `kill -9` finds all of it. Attaching takes RTNL, the
//! kernel's host-wide network lock: a pod brings its own namespace and takes no slot from the pool.

use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use thaw_failpoint::{Failpoint, reach};
use thaw_protocol::handshake::Network;

use crate::tap::{move_into, on_a_thread, open_tap};
use crate::{Error, POD_TAP};
use describe::Surveyed;
use filter::Identity;
use thaw_sys::netlink::Socket;
use thaw_sys::survey::{self, Link};
use thaw_sys::{bpf, link, sysctl, tc};

mod describe;
mod filter;
mod loopback;

pub use crate::error::PodError;
pub use loopback::original_port;

/// A pod's network, attached to a guest. Dropping it restores the namespace, unless it is [kept](PodNetwork::keep).
#[derive(Debug)]
pub struct PodNetwork {
    namespace: OwnedFd,
    /// `None` of an adopted sandbox.
    tap: Option<GuestTap>,
    loopback: Option<TcpListener>,
    kept: bool,
}

/// The tap beside an interface, and the guest's configuration.
#[derive(Debug)]
struct GuestTap {
    tap: OwnedFd,
    config: Network,
}

/// Opens a network namespace by its path, `/run/netns/…` or `/proc/…/ns/net`.
pub fn open(path: &Path) -> Result<OwnedFd, Error> {
    // Opening another file, such as a pipe, must not block.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let opened = rustix::fs::open(path, flags, Mode::empty());
    opened.map_err(|e| Error::Namespace {
        path: path.to_owned(),
        source: e.into(),
    })
}

impl PodNetwork {
    /// Attaches a tap to the interface of a namespace. `None` if it has no interface.
    ///
    /// # Errors
    /// [`PodError`]: a guest cannot join it. On any error the namespace is unchanged.
    pub fn attach(namespace: OwnedFd) -> Result<Option<PodNetwork>, Error> {
        refuse_host(namespace.as_fd())?;
        let attached = within(namespace.as_fd(), |route| -> Result<_, Error> {
            let links = survey::links(route).map_err(Error::system("read the pod's interfaces"))?;
            if links.iter().any(is_tap) {
                return Err(PodError::InUse.into());
            }
            remove(route)?;
            let Some(link) = only(describe::for_a_guest(links))? else {
                return Ok(None);
            };
            let surveyed = Surveyed::of(route).map_err(Error::system("read the pod's network"))?;
            refuse_directed(route, &link)?;
            let config = surveyed.describe(&link);
            let addresses = config.addresses.iter().map(|address| address.ip);
            let identity = Identity::new(config.mac, addresses)?;
            match attach_tap(route, &link, &identity) {
                Ok(tap) => Ok(Some((GuestTap { tap, config }, redirect_loopback()))),
                Err(e) => {
                    if let Err(left) = remove(route) {
                        tracing::warn!("a pod's network is not as it was: {left}");
                    }
                    Err(e)
                }
            }
        })?;
        Ok(attached.map(|(tap, loopback)| PodNetwork {
            namespace,
            tap: Some(tap),
            loopback,
            kept: false,
        }))
    }

    /// Takes over the network of a sandbox whose owner is gone and whose VMM has the tap.
    ///
    /// # Errors
    /// The namespace is gone, or is the host's.
    pub fn adopt(namespace: OwnedFd) -> Result<PodNetwork, Error> {
        refuse_host(namespace.as_fd())?;
        let loopback = within(namespace.as_fd(), |_| Ok(redirect_loopback()))?;
        Ok(PodNetwork {
            namespace,
            tap: None,
            loopback,
            kept: false,
        })
    }

    /// Takes the listener for connections to `localhost` that processes in the namespace make on the host: each is to be forwarded to the
    /// guest's port that [`original_port`] returns. `None` if the kernel does not support it.
    pub fn take_loopback(&mut self) -> Option<TcpListener> {
        self.loopback.take()
    }

    /// The tap, like [`crate::NetworkSlot::tap`]. `None` of an adopted one.
    pub fn tap(&self) -> Option<&OwnedFd> {
        self.tap.as_ref().map(|tap| &tap.tap)
    }

    /// The guest's network configuration. `None` of an adopted one.
    pub fn config(&self) -> Option<&Network> {
        self.tap.as_ref().map(|tap| &tap.config)
    }

    /// Leaves it as it is for a later owner.
    pub fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for PodNetwork {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        // The tap goes with its last descriptor.
        self.tap = None;
        if let Err(e) = detach(self.namespace.as_fd()) {
            tracing::warn!("a pod's network is not as it was: {e}");
        }
    }
}

/// Removes from a namespace what [`PodNetwork::attach`] added, in whichever process.
pub fn detach(namespace: BorrowedFd<'_>) -> Result<(), Error> {
    refuse_host(namespace)?;
    within(namespace, remove)
}

/// Runs `work` in a namespace, with a netlink socket there.
fn within<T: Send>(
    namespace: BorrowedFd<'_>,
    work: impl FnOnce(&mut Socket) -> Result<T, Error> + Send,
) -> Result<T, Error> {
    on_a_thread(|| {
        move_into(namespace)?;
        let mut route = Socket::route().map_err(Error::system("open a netlink socket"))?;
        work(&mut route)
    })
}

/// Refuses the host's namespace: that of its first process, and ours.
fn refuse_host(namespace: BorrowedFd<'_>) -> Result<(), Error> {
    let failed = |e: rustix::io::Errno| Error::system("look at the pod's network namespace")(e.into());
    let theirs = rustix::fs::fstat(namespace).map_err(failed)?;
    for host in ["/proc/1/ns/net", "/proc/thread-self/ns/net"] {
        // The first process may not be visible to us; our own namespace is.
        if let Ok(host) = rustix::fs::stat(host)
            && (host.st_dev, host.st_ino) == (theirs.st_dev, theirs.st_ino)
        {
            return Err(PodError::HostNetwork.into());
        }
    }
    Ok(())
}

fn is_tap(link: &Link) -> bool {
    link.name == POD_TAP && link.kind.as_deref() == Some("tun")
}

/// The only interface: a guest has one.
fn only(mut links: Vec<Link>) -> Result<Option<Link>, PodError> {
    if links.len() > 1 {
        let names = links.into_iter().map(|link| link.name);
        return Err(PodError::Several {
            names: names.collect(),
        });
    }
    Ok(links.pop())
}

/// Refuses an interface that has filters of another program on arriving frames.
fn refuse_directed(route: &mut Socket, link: &Link) -> Result<(), Error> {
    let directed = tc::with_ingress(route).map_err(Error::system("read the pod's qdiscs"))?;
    match directed.contains(&link.index) {
        true => {
            let interface = link.name.clone();
            Err(PodError::Directed { interface }.into())
        }
        false => Ok(()),
    }
}

/// Makes the tap of an interface, and redirects frames both ways; those of the guest pass the filter.
fn attach_tap(route: &mut Socket, to: &Link, identity: &Identity) -> Result<OwnedFd, Error> {
    let program = bpf::load(&filter::program(identity, to.index)).map_err(Error::system(
        "filter what a pod's guest sends (CONFIG_BPF_SYSCALL; what the kernel says of the program)",
    ))?;
    let tap = open_tap(POD_TAP, None)?;
    reach(Failpoint::PodTapMade);
    let mut join = || -> io::Result<()> {
        // The guest must not get frames of the namespace's own IPv6 stack.
        sysctl::disable_ipv6(POD_TAP)?;
        let index = link::index(route, POD_TAP)?;
        link::set_mtu(route, index, to.mtu)?;
        link::set_up(route, index)?;
        reach(Failpoint::PodTapUp);
        tc::add_ingress(route, index)?;
        reach(Failpoint::PodIngressMade);
        tc::run(route, index, program.as_raw_fd(), 0)?;
        reach(Failpoint::PodRedirected);
        tc::add_ingress(route, to.index)?;
        reach(Failpoint::PodIngressMade);
        tc::redirect(route, to.index, index)?;
        reach(Failpoint::PodRedirected);
        Ok(())
    };
    join().map_err(Error::system(
        "filter and redirect a pod's frames (load sch_ingress, cls_bpf, cls_u32, act_mirred)",
    ))?;
    Ok(tap)
}

/// Only processes that enter the pod's namespace on the host need it, so a failure is only logged.
fn redirect_loopback() -> Option<TcpListener> {
    let redirected = loopback::redirect();
    reach(Failpoint::PodLoopbackLed);
    redirected
        .inspect_err(|e| tracing::warn!("a pod's localhost is nobody's on the host (port-forward): {e}"))
        .ok()
}

/// Removes everything of ours from the socket's namespace, in which the thread is too.
fn remove(route: &mut Socket) -> Result<(), Error> {
    if let Err(e) = loopback::remove() {
        // A process that cannot remove a table could not have made it.
        tracing::debug!("a pod's localhost: {e}");
    }
    reach(Failpoint::PodLoopbackLeft);
    let mut remove = || -> io::Result<()> {
        for index in tc::with_ingress(route)? {
            let filters = tc::filters(route, index)?;
            // A discipline without filters has no effect: the process that was about to add ours was killed.
            let removed = match (filters.ours, filters.others) {
                (_, false) => tc::delete_ingress(route, index),
                (true, true) => tc::delete_redirect(route, index),
                (false, true) => Ok(()),
            };
            gone(removed)?;
            reach(Failpoint::PodLeft);
        }
        for tap in survey::links(route)?.iter().filter(|link| is_tap(link)) {
            gone(link::delete(route, &tap.name))?;
        }
        Ok(())
    };
    remove().map_err(Error::system("take a sandbox's taps out of a pod's network"))
}

/// Treats an object that no longer exists as removed.
fn gone(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENODEV | libc::ENOENT)) => Ok(()),
        other => other,
    }
}

#[cfg(test)]
#[path = "pod/pod_test.rs"]
mod tests;
