//! A private network for one sandbox: a network namespace with a tap in it, and a way outside.
//!
//! ```text
//!  guest ─ tap ─ [ slot's namespace: policy, NAT to the slot's address ] ─ veth ─ [ host: NAT, published ports ] ─ outside
//! ```
//!
//! The namespace has no name and the tap no owner but descriptors: when the last is closed all is gone, the pair of
//! interfaces and the slot's address with it, so nothing can leak and a slot lives as long as its VMM. Every guest sees the
//! same MAC, the same address and the same gateway, so a clone has nothing to change: what differs between slots is
//! translated within their namespaces, by two programs (`fast`) where the kernel has them and the policy is the default one, by
//! nftables otherwise. All that takes RTNL is done when a slot is made; what a sandbox wants beyond that (a
//! policy, published ports) is one nftables transaction each, which does not.

#![cfg_attr(test, allow(clippy::unwrap_used))]

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use thaw_protocol::api::SandboxNetwork;
use thaw_protocol::handshake::{Address, Network, Route};

use host::Host;
use tap::{Failure, Privileged, Step, Tapped};
use thaw_pools::process::ProcessRecord;
use thaw_pools::resource::{Kind, Unfit};
use thaw_sys::link;

mod earlier;
mod error;
mod fast;
mod gone;
mod host;
pub mod pod;
pub mod policy;
pub mod publish;
mod range;
mod resolver;
mod slot;
mod tap;
mod traffic;
mod uplink;
#[cfg(test)]
mod world;

pub use error::Error;
pub use host::{FastPathSetting, Setup};
pub use range::{Range, RangeError};
pub use traffic::Traffic;
pub use uplink::{Terms, Uplink};

/// What the guest's interface is called.
const GUEST_INTERFACE: &str = "eth0";
/// The guest's MAC address, the same in every guest: locally administered, "thaw".
pub const GUEST_MAC: [u8; 6] = [0x02, b't', b'h', b'a', b'w', 0x02];
/// The guest's address.
pub const GUEST_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 219, 0, 2);
/// The tap's address, the guest's gateway.
pub const HOST_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 219, 0, 1);
/// The tap's MAC address, which a guest may know from before it was frozen.
pub const GATEWAY_MAC: [u8; 6] = [0x02, b't', b'h', b'a', b'w', 0x01];
/// Those of the pair of interfaces that joins a slot to the host, the same for all: each is a link of its own.
const UPLINK_MAC: [u8; 6] = [0x02, b't', b'h', b'a', b'w', 0x03];
const HOST_MAC: [u8; 6] = [0x02, b't', b'h', b'a', b'w', 0x04];
const PREFIX: u8 = 30;
const MTU: u16 = 1500;
/// Names within a slot's namespace, so they are always free; the index is beyond those the kernel gives by itself.
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
    /// The namespace the tap lives in; keeps it alive.
    pub namespace: OwnedFd,
    /// What the guest is told.
    pub config: Network,
    /// The way outside. None without privilege: the guest reaches its gateway, and nothing else.
    pub uplink: Option<Uplink>,
}

/// The kind: all are alike.
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

    /// The name servers guests are to be told of now.
    pub fn nameservers(&self) -> Vec<IpAddr> {
        self.host.nameservers()
    }

    /// From now on, for as long as this process lives, ports that lead to slots that went are removed at once: for a
    /// process that lives long. Those of slots gone before are by the first slot made.
    ///
    /// # Errors
    /// It cannot be listened for.
    pub fn listen(&self) -> io::Result<()> {
        gone::listen(self.host.clone())
    }

    /// Takes over the slot of a VMM whose owner is gone, as that has described it.
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

    /// A tap whose device is gone says so to poll(2), which takes no RTNL; asking it anything by ioctl(2) would.
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
        // Beyond it, its descriptors are all there is.
        if let Some(uplink) = slot.uplink {
            uplink.leave();
        }
    }
}

/// Tries whether this kernel has what leads slots outside, in a namespace nobody sees.
///
/// # Errors
/// What it lacks; `EPERM` without privilege.
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

/// Tries whether this kernel lets packets be redirected past a slot's namespace, in one nobody sees.
///
/// # Errors
/// What it lacks; `EPERM` without privilege.
pub fn try_fast_path() -> Result<(), Error> {
    fast::try_out()
}

/// What every guest is told, but for the name servers of the moment.
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
