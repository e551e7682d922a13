//! The fast path of a slot: its packets are redirected by two programs, past the namespace's routing, connection tracking
//! and rules.
//!
//! ```text
//!  guest ─ tap ─ program ───────────────────────── thaw-n12 ─ [ the host: NAT ] ─ outside
//!           └─ what it does not take: the namespace ─┘
//! ```
//!
//! It is for the policy of a slot nobody said anything of, and for no other: a slot that is given one leaves its fast path
//! and does not come back to it. Invariants: the namespace has its rules all the time, and a packet that no program takes is
//! decided by them; once [`FastPath::leave`] has returned, every packet is. What the namespace must know of connections it
//! has not seen, the host's connection tracking tells it ([`super::conntrack::hand_over`]).

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, AsRawFd};

use super::tap::{self, Privileged};
use super::{TAP_INDEX, UPLINK_NAME, conntrack};
use crate::bpf::{self, Switch};
use crate::netlink::Socket;
use crate::{Error, link, tc};
pub(super) use program::Wiring;
use thaw_failpoint::{Failpoint, reach};

mod program;

/// A fast path that is laid.
#[derive(Debug)]
pub(super) enum FastPath {
    /// By us: turning it off takes no RTNL.
    Ours(Switch),
    /// By an earlier owner of the slot, whose namespace the socket is of: it is removed, which does.
    Found { route: Socket, uplink: u32 },
}

impl FastPath {
    /// Lays it: `route` is of the slot's namespace. On an error nothing of it is left.
    pub fn lay(route: &mut Socket, wiring: &Wiring) -> io::Result<FastPath> {
        let switch = Switch::new()?;
        let outward = bpf::load(&program::outward(wiring, &switch))?;
        let inward = bpf::load(&program::inward(wiring, &switch))?;
        reach(Failpoint::NetworkFastLoaded);
        let mut attach = || -> io::Result<()> {
            for (link, program) in [(TAP_INDEX, &outward), (wiring.uplink, &inward)] {
                tc::add_ingress(route, link)?;
                tc::run(route, link, program.as_raw_fd())?;
                reach(Failpoint::NetworkFastAttached);
            }
            switch.set(true)?;
            reach(Failpoint::NetworkFastOn);
            Ok(())
        };
        match attach() {
            Ok(()) => Ok(FastPath::Ours(switch)),
            Err(e) => {
                remove(route, wiring.uplink)?;
                Err(e)
            }
        }
    }

    /// That of a slot somebody else made, where it has one.
    pub fn found(mut route: Socket) -> io::Result<Option<FastPath>> {
        if !tc::with_ingress(&mut route)?.contains(&TAP_INDEX) {
            return Ok(None);
        }
        let uplink = link::index(&mut route, UPLINK_NAME)?;
        Ok(Some(FastPath::Found { route, uplink }))
    }

    /// Has the namespace decide every packet that comes from now on. Programs that had begun may still redirect theirs.
    pub fn turn_off(&mut self) -> io::Result<()> {
        match self {
            FastPath::Ours(switch) => switch.set(false),
            FastPath::Found { route, uplink } => remove(route, *uplink),
        }
    }

    /// The same, and waits for those, some milliseconds.
    pub fn leave(&mut self) -> io::Result<()> {
        self.turn_off()?;
        bpf::wait_for_running()
    }
}

fn remove(route: &mut Socket, uplink: u32) -> io::Result<()> {
    for link in [TAP_INDEX, uplink] {
        match tc::delete_ingress(route, link) {
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::EINVAL)) => {}
            removed => removed?,
        }
    }
    Ok(())
}

/// Tries whether this kernel has what it takes, in a namespace nobody sees.
///
/// # Errors
/// What it lacks.
pub(super) fn try_out() -> Result<(), Error> {
    let failed = |what| move |source| Error::System { what, source };
    bpf::can_wait().map_err(failed("wait for programs (membarrier(2), not with nohz_full)"))?;
    let Privileged {
        tapped, mut route, ..
    } = tap::in_thread()?;
    let mut host = Socket::netfilter().map_err(failed("open an nftables socket (load nf_tables)"))?;
    conntrack::find(&mut host, |_| false).map_err(failed("read connections (load nf_conntrack_netlink)"))?;
    let mut lay = || -> io::Result<()> {
        // The other end is there as well; what matters is that it is a pair's.
        link::make_pair(&mut route, "here", UPLINK_NAME, tapped.namespace.as_fd())?;
        let uplink = link::index(&mut route, UPLINK_NAME)?;
        FastPath::lay(
            &mut route,
            &Wiring {
                slot: Ipv4Addr::UNSPECIFIED,
                host: Ipv4Addr::UNSPECIFIED,
                uplink,
                barred: Vec::new(),
            },
        )
        .map(drop)
    };
    lay().map_err(failed(
        "redirect packets by eBPF (CONFIG_BPF_SYSCALL, CONFIG_NET_CLS_BPF, Linux 5.10)",
    ))
}
