//! The network of a pod: a namespace that a CNI plugin made, with its interfaces, addresses and routes, given to a guest.
//!
//! ```text
//!  guest ─ tap thaw-t0 ⇄ eth0 [ the pod's namespace ] ─ whatever the plugin joined it to
//! ```
//!
//! For its Ethernet interface there is a tap. Every frame that arrives at the interface leaves by the tap, unread: ARP, IPv6,
//! whatever there is; what the guest sends leaves by the interface where it is from the pod ([`filter`]). The guest takes the interface's place, with its name, MAC, addresses, MTU, routes and neighbours, which
//! [`PodNetwork::config`] has as a handshake takes them.
//!
//! Invariants: nothing of the plugin's is changed, so that [`detach`] leaves the namespace as it was; what was made is known
//! by what the kernel has of it (a tap's name, a redirect's cookie), so whoever comes after a `kill -9` finds it all. It
//! takes RTNL, the lock of the whole host: a pod that brings its namespace has no slot of a pool.

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
use thaw_sys::{bpf, link, tc};

mod describe;
mod filter;
mod loopback;

pub use crate::error::PodError;
pub use loopback::meant_for;

/// A pod's network, led to a guest. Dropped, the namespace is as it was, unless it is [kept](PodNetwork::keep).
#[derive(Debug)]
pub struct PodNetwork {
    namespace: OwnedFd,
    /// Of the sandbox that was made here.
    led: Option<Led>,
    loopback: Option<TcpListener>,
    kept: bool,
}

/// The tap that stands for an interface, and what the guest is to be told of that.
#[derive(Debug)]
struct Led {
    tap: OwnedFd,
    config: Network,
}

/// Opens a namespace by its path, `/run/netns/…` or `/proc/…/ns/net`.
pub fn open(path: &Path) -> Result<OwnedFd, Error> {
    // What is no namespace, a pipe perhaps, is not waited for.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let opened = rustix::fs::open(path, flags, Mode::empty());
    opened.map_err(|e| Error::Namespace {
        path: path.to_owned(),
        source: e.into(),
    })
}

impl PodNetwork {
    /// Leads the interface of a namespace to a tap. None where it has no interface.
    ///
    /// # Errors
    /// [`PodError`]: it cannot be a guest's. On any error nothing of it is left.
    pub fn attach(namespace: OwnedFd) -> Result<Option<PodNetwork>, Error> {
        refuse_host(namespace.as_fd())?;
        let led = within(namespace.as_fd(), |route| -> Result<_, Error> {
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
            match lead(route, &link, &identity) {
                Ok(tap) => Ok(Some((Led { tap, config }, lead_loopback()))),
                Err(e) => {
                    if let Err(left) = remove(route) {
                        tracing::warn!("a pod's network is not as it was: {left}");
                    }
                    Err(e)
                }
            }
        })?;
        Ok(led.map(|(led, loopback)| PodNetwork {
            namespace,
            led: Some(led),
            loopback,
            kept: false,
        }))
    }

    /// That of a sandbox whose owner is gone, and whose VMM has the tap.
    ///
    /// # Errors
    /// It is no namespace any more, or the host's.
    pub fn adopt(namespace: OwnedFd) -> Result<PodNetwork, Error> {
        refuse_host(namespace.as_fd())?;
        let loopback = within(namespace.as_fd(), |_| Ok(lead_loopback()))?;
        Ok(PodNetwork {
            namespace,
            led: None,
            loopback,
            kept: false,
        })
    }

    /// Where those come who enter the namespace and connect to its `localhost`, once: each is to be led to the port that
    /// [`meant_for`] says, of the guest's. None where the kernel cannot.
    pub fn take_loopback(&mut self) -> Option<TcpListener> {
        self.loopback.take()
    }

    /// As [`crate::NetworkSlot::tap`] is. None of one that was adopted.
    pub fn tap(&self) -> Option<&OwnedFd> {
        self.led.as_ref().map(|led| &led.tap)
    }

    /// What the guest is told. None of one that was adopted.
    pub fn config(&self) -> Option<&Network> {
        self.led.as_ref().map(|led| &led.config)
    }

    /// It stays, for a later owner.
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
        self.led = None;
        if let Err(e) = detach(self.namespace.as_fd()) {
            tracing::warn!("a pod's network is not as it was: {e}");
        }
    }
}

/// Takes away from a namespace what [`PodNetwork::attach`] made in it, whoever called that; nothing where there is nothing.
pub fn detach(namespace: BorrowedFd<'_>) -> Result<(), Error> {
    refuse_host(namespace)?;
    within(namespace, remove)
}

/// Runs `work` in a namespace, with a socket there.
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

/// The host's namespace is that of its first process, and ours.
fn refuse_host(namespace: BorrowedFd<'_>) -> Result<(), Error> {
    let failed = |e: rustix::io::Errno| Error::system("look at the pod's network namespace")(e.into());
    let theirs = rustix::fs::fstat(namespace).map_err(failed)?;
    for host in ["/proc/1/ns/net", "/proc/thread-self/ns/net"] {
        // Another's first process may not be for us to see; our own namespace always is.
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

/// The one there is, for a guest that has one device.
fn only(mut links: Vec<Link>) -> Result<Option<Link>, PodError> {
    if links.len() > 1 {
        let names = links.into_iter().map(|link| link.name);
        return Err(PodError::Several {
            names: names.collect(),
        });
    }
    Ok(links.pop())
}

/// What directs frames already, and is not ours, is not to be pushed aside.
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

/// Makes the tap of an interface, and has frames go both ways, the guest's where it may send them.
fn lead(route: &mut Socket, to: &Link, identity: &Identity) -> Result<OwnedFd, Error> {
    let program = bpf::load(&filter::program(identity, to.index)).map_err(Error::system(
        "filter what a pod's guest sends (CONFIG_BPF_SYSCALL; what the kernel says of the program)",
    ))?;
    let tap = open_tap(POD_TAP, None)?;
    reach(Failpoint::PodTapMade);
    let mut join = || -> io::Result<()> {
        // What the namespace itself would say by the tap is not for the guest.
        match std::fs::write(format!("/proc/sys/net/ipv6/conf/{POD_TAP}/disable_ipv6"), "1") {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            written => written?,
        }
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

/// Without it, a pod is as good to all but those who enter its namespace.
fn lead_loopback() -> Option<TcpListener> {
    let led = loopback::lead();
    reach(Failpoint::PodLoopbackLed);
    led.inspect_err(|e| tracing::warn!("a pod's localhost is nobody's on the host (port-forward): {e}"))
        .ok()
}

/// Takes away all that is ours in the socket's namespace, which is the thread's.
fn remove(route: &mut Socket) -> Result<(), Error> {
    if let Err(e) = loopback::remove() {
        // Who cannot remove a table could not make it.
        tracing::debug!("a pod's localhost: {e}");
    }
    reach(Failpoint::PodLoopbackLeft);
    let mut remove = || -> io::Result<()> {
        for index in tc::with_ingress(route)? {
            let filters = tc::filters(route, index)?;
            // One without filters does nothing: whoever was to add ours has died before.
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

/// What went by itself, or with its interface, is removed as well.
fn gone(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENODEV | libc::ENOENT)) => Ok(()),
        other => other,
    }
}

#[cfg(test)]
#[path = "pod/pod_test.rs"]
mod tests;
