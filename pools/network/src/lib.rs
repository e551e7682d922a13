//! The network of a sandbox: a network namespace with a tap in it (a slot), and its connection to the outside; or, in [`pod`], the
//! namespace that a CNI plugin made.
//!
//! ```text
//!  guest ─ tap ─ [ slot's namespace: policy, NAT to the slot's address ] ─ veth ─ [ host: NAT, published ports ] ─ outside
//! ```
//!
//! Invariant: only descriptors hold a slot's namespace and its tap. When the last of them is closed the kernel removes both, the pair of
//! interfaces and the slot's address, so nothing can leak, and a slot lives as long as its VMM.
//!
//! Every guest sees the same MAC, address and gateway, so a clone has nothing to change. The differences between slots are translated
//! within their namespaces: by two BPF programs (`fast`) if the kernel supports them and the policy is the default one, by nftables
//! otherwise. All steps that take RTNL, the kernel's host-wide network lock, happen when a slot is made. A policy or published ports later
//! take an nftables transaction or two each, which do not take RTNL.

#![cfg_attr(test, allow(clippy::unwrap_used))]

use std::io;
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use thaw_protocol::api::SandboxNetwork;
use thaw_protocol::handshake::{Address, Network, Route};

use host::Host;
use tap::{Failure, Privileged, Step, Tapped};
use thaw_pools::process::ProcessRecord;
use thaw_pools::resource::{Kind, Unfit};
use thaw_sys::link;

pub mod domains;
mod error;
mod fast;
mod host;
mod in_force;
pub mod names;
mod owner;
pub mod pod;
pub mod policy;
pub mod publish;
mod range;
mod removed_slots;
mod resolved;
mod resolver;
mod slot;
mod stale_connections;
mod tap;
#[cfg(test)]
mod testbed;
mod traffic;
mod uplink;

pub use error::Error;
pub use host::{FastPathSetting, Setup};
pub use range::{Range, RangeError};
pub use traffic::Traffic;
pub use uplink::{Terms, Uplink};

/// The name of the guest's interface.
const GUEST_INTERFACE: &str = "eth0";
/// The guest's MAC address, the same in every guest: locally administered, "thaw".
pub const GUEST_MAC: [u8; 6] = [0x02, b't', b'h', b'a', b'w', 0x02];
/// The guest's address.
pub const GUEST_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 219, 0, 2);
/// The tap's address, the guest's gateway.
pub const HOST_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 219, 0, 1);
/// The tap's MAC address, which a guest may know from before it was frozen.
pub const GATEWAY_MAC: [u8; 6] = [0x02, b't', b'h', b'a', b'w', 0x01];
/// The MAC addresses of the pair of interfaces that joins a slot to the host: the same for all, because each pair is a link of its own.
const UPLINK_MAC: [u8; 6] = [0x02, b't', b'h', b'a', b'w', 0x03];
const HOST_MAC: [u8; 6] = [0x02, b't', b'h', b'a', b'w', 0x04];
const PREFIX: u8 = 30;
const MTU: u16 = 1500;
/// Names within a slot's own namespace, where nothing else takes them; the index is above those that the kernel assigns.
const TAP_NAME: &str = "thaw0";
const TAP_INDEX: libc::c_uint = 1000;
const UPLINK_NAME: &str = "uplink";
/// The name of a tap in the namespace of a pod.
const POD_TAP: &str = "thaw-t0";
/// Most addresses of one family that a pod may have: each is some dozen instructions of a filter, and jumps are of 16 bits.
const MAX_POD_ADDRESSES: usize = 256;

/// One sandbox's network.
#[derive(Debug)]
pub struct NetworkSlot {
    /// The tap: `IFF_NO_PI | IFF_VNET_HDR`, 12-byte header, all offloads a guest may take.
    pub tap: OwnedFd,
    /// The tap's namespace, which this descriptor keeps alive.
    pub namespace: OwnedFd,
    /// The guest's network configuration.
    pub config: Network,
    /// The connection to the outside. `None` without privilege: the guest then reaches only its gateway.
    pub uplink: Option<Uplink>,
}

impl NetworkSlot {
    /// A socket at the gateway, to which a policy with domains redirects the guest's DNS queries. Nothing else listens there.
    ///
    /// # Errors
    /// The namespace cannot be entered, or another process has the port.
    pub fn name_socket(&self) -> Result<UdpSocket, Error> {
        let listen = || {
            let socket = UdpSocket::bind((HOST_ADDRESS, slot::DNS))?;
            socket.set_nonblocking(true).map(|()| socket)
        };
        inside(&self.namespace, "listen for a sandbox's DNS queries", listen)
    }

    /// A socket at the gateway, to which a policy with domains redirects the guest's TCP connections to resolved addresses. The addresses are
    /// those of `SO_ORIGINAL_DST`.
    ///
    /// # Errors
    /// The namespace cannot be entered, or another process has the port.
    pub fn relay_socket(&self) -> Result<TcpListener, Error> {
        let listen = || {
            let socket = TcpListener::bind((HOST_ADDRESS, slot::RELAY))?;
            socket.set_nonblocking(true).map(|()| socket)
        };
        inside(&self.namespace, "listen for a sandbox's connections", listen)
    }

    /// What opens connections from the slot's address, by no rule of its policy.
    ///
    /// # Errors
    /// The process has too many descriptors.
    pub fn connector(&self) -> Result<Connector, Error> {
        let copied = self.namespace.try_clone();
        let namespace = copied.map_err(Error::system("copy the descriptor of a slot's namespace"))?;
        Ok(Connector { namespace })
    }
}

/// Opens connections from a slot's address. It keeps the slot's namespace alive.
#[derive(Debug)]
pub struct Connector {
    namespace: OwnedFd,
}

impl Connector {
    /// A socket that does not block and is not connected yet.
    ///
    /// # Errors
    /// The namespace cannot be entered, or the process has too many descriptors.
    pub fn socket(&self) -> Result<TcpStream, Error> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let open = || -> io::Result<OwnedFd> {
            Ok(socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)?)
        };
        inside(&self.namespace, "open a connection of a sandbox", open).map(TcpStream::from)
    }
}

/// Does something in the namespace of a slot; `what` is for its error.
fn inside<T: Send>(
    namespace: &OwnedFd,
    what: &'static str,
    work: impl FnOnce() -> io::Result<T> + Send,
) -> Result<T, Error> {
    tap::on_a_thread(|| {
        tap::move_into(namespace.as_fd())?;
        work().map_err(Error::system(what))
    })
}

/// The kind of resource: all slots are alike.
#[derive(Debug)]
pub struct Networks {
    host: Arc<Host>,
}

impl Networks {
    pub fn new(setup: Setup) -> Networks {
        Networks {
            host: Arc::new(Host::new(setup)),
        }
    }

    /// The name servers that guests are to use now.
    pub fn nameservers(&self) -> Vec<IpAddr> {
        self.host.nameservers()
    }

    /// Starts a thread that removes published ports of a slot as soon as the slot is gone, for as long as this process lives. Ports of
    /// slots that were gone before are removed when the first slot is made.
    ///
    /// # Errors
    /// The kernel's events cannot be subscribed to.
    pub fn listen(&self) -> io::Result<()> {
        removed_slots::listen(self.host.clone())
    }

    /// Takes over the slot of a VMM whose owner is gone, as that owner described it.
    pub fn adopt(&self, vmm: ProcessRecord, described: &SandboxNetwork) -> Result<NetworkSlot, Error> {
        let (Tapped { tap, namespace }, uplink) = Uplink::adopt(&self.host, vmm, described)?;
        Ok(NetworkSlot {
            tap,
            namespace,
            config: config(),
            uplink: Some(uplink),
        })
    }

    fn privileged(&self, mut made: Privileged) -> Result<NetworkSlot, Error> {
        let (number, fast) = self.host.join(&mut made)?;
        let Tapped { tap, namespace } = made.tapped;
        Ok(NetworkSlot {
            tap,
            namespace,
            config: config(),
            uplink: Some(Uplink::new(self.host.clone(), number, made.filter, fast)),
        })
    }
}

impl Kind for Networks {
    const NAME: &'static str = "network";
    type Want = ();
    type Resource = NetworkSlot;
    type Error = Error;

    fn make(&self, (): &()) -> Result<NetworkSlot, Error> {
        match tap::in_thread() {
            Ok(made) => self.privileged(made),
            Err(Failure {
                step: Step::Unshare,
                error,
            }) if error == rustix::io::Errno::PERM => {
                let Tapped { tap, namespace } = tap::in_user_namespace()?;
                Ok(NetworkSlot {
                    tap,
                    namespace,
                    config: config(),
                    uplink: None,
                })
            }
            Err(failure) => Err(failure.into()),
        }
    }

    /// poll(2) reports a tap whose device is gone without taking RTNL; an ioctl(2) would take it.
    fn check(&self, slot: &NetworkSlot) -> Result<(), Unfit> {
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let mut tap = [PollFd::new(&slot.tap, PollFlags::OUT)];
        let polled = rustix::io::retry_on_intr(|| poll(&mut tap, Some(&now)));
        polled.map_err(|e| Unfit(format!("cannot look at the tap: {e}")))?;
        let said = tap[0].revents();
        match said.contains(PollFlags::OUT) && !said.intersects(PollFlags::ERR | PollFlags::HUP) {
            true => Ok(()),
            false => Err(Unfit("the tap is gone or down".into())),
        }
    }

    fn destroy(&self, slot: NetworkSlot) {
        // The rest goes with its descriptors.
        if let Some(uplink) = slot.uplink {
            uplink.leave();
        }
    }
}

/// Tests, in a namespace of its own, whether this kernel supports the features that connect slots to the outside.
///
/// # Errors
/// The feature that the kernel lacks; `EPERM` without privilege.
pub fn try_out() -> Result<(), Error> {
    let host = Host::new(Setup::default());
    let mut made = tap::in_thread()?;
    let namespace = made.tapped.namespace.as_fd();
    let joined = link::make_pair(&mut made.route, "here", "there", namespace);
    joined.map_err(Error::system("make a pair of interfaces (modprobe veth)"))?;
    let rules = [host.rules(), slot::rules(host.setup.range, 0, &[], false)];
    for rules in rules {
        rules.commit(&mut made.filter).map_err(Error::system(
            "write nftables rules (modprobe nf_tables nft_chain_nat nft_ct nft_masq nft_nat nft_fib_ipv4 nft_reject_ipv4)",
        ))?;
    }
    Ok(())
}

/// Tests, in a namespace of its own, whether this kernel supports redirecting packets past a slot's namespace.
///
/// # Errors
/// The feature that the kernel lacks; `EPERM` without privilege.
pub fn try_fast_path() -> Result<(), Error> {
    fast::try_out()
}

/// The configuration of every guest, without name servers, which may change.
fn config() -> Network {
    Network {
        name: GUEST_INTERFACE.into(),
        mac: GUEST_MAC,
        mtu: MTU,
        arp: true,
        addresses: vec![Address {
            ip: IpAddr::V4(GUEST_ADDRESS),
            prefix: PREFIX,
            on_link: true,
        }],
        routes: vec![Route {
            to: IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            prefix: 0,
            gateway: Some(IpAddr::V4(HOST_ADDRESS)),
            source: None,
            scope: 0,
            gateway_on_link: false,
        }],
        neighbours: Vec::new(),
        nameservers: Vec::new(),
    }
}

#[cfg(test)]
#[path = "domains_test.rs"]
mod domains_tests;
#[cfg(test)]
#[path = "fast_test.rs"]
mod fast_tests;
#[cfg(test)]
#[path = "paths_test.rs"]
mod paths_tests;
#[cfg(test)]
#[path = "rtnl_test.rs"]
mod rtnl_tests;
#[cfg(test)]
#[path = "network_test.rs"]
mod tests;
