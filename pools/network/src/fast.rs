//! The fast path of a slot: its packets are redirected past the namespace's routing, connection tracking and rules, by two
//! programs that all slots share.
//!
//! ```text
//!  guest ─ tap ─ program ───────────────────────── thaw-n12 ─ [ the host: NAT ] ─ outside
//!           └─ what it does not take: the namespace ─┘
//! ```
//!
//! It is for the policy of a slot nobody said anything of, and for no other: a slot that is given one leaves its fast path
//! and does not come back to it. Invariants: the namespace has its rules all the time, and a packet that no program takes is
//! decided by them; once [`FastPath::leave`] has returned, every packet is. What the namespace must know of connections it
//! has not seen, the host's connection tracking tells it ([`conntrack::hand_over`]).

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use crate::Error;
use crate::tap::{self, Privileged};
use crate::{TAP_INDEX, UPLINK_NAME};
pub(super) use program::Wiring;
use thaw_failpoint::{Failpoint, reach};
use thaw_sys::bpf::{self, Table};
use thaw_sys::netlink::Socket;
use thaw_sys::prefix::Prefix;
use thaw_sys::{conntrack, link, tc};

mod program;

/// The programs, and the table of the slots they serve.
#[derive(Debug)]
pub(super) struct Programs {
    slots: Table<Wiring>,
    outward: OwnedFd,
    inward: OwnedFd,
}

impl Programs {
    /// Has the kernel verify them. `barred`: where connections decide, or nothing is let through.
    pub fn load(barred: &[Prefix]) -> io::Result<Programs> {
        let slots = Table::new()?;
        let outward = bpf::load(&program::outward(&slots, barred))?;
        let inward = bpf::load(&program::inward(&slots, barred))?;
        reach(Failpoint::NetworkFastLoaded);
        Ok(Programs {
            slots,
            outward,
            inward,
        })
    }
}

/// A slot's entry in the table; removed when dropped.
#[derive(Debug)]
pub(super) struct Entry {
    programs: Arc<Programs>,
    key: u16,
}

impl Entry {
    fn remove(&self) -> io::Result<()> {
        self.programs.slots.remove(self.key)
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if let Err(error) = self.remove() {
            tracing::warn!(%error, "a slot stays in the table of the fast path");
        }
    }
}

/// A fast path that is laid.
#[derive(Debug)]
pub(super) enum FastPath {
    /// By us: turning it off takes no RTNL.
    Ours(Entry),
    /// By an earlier owner of the slot, whose namespace the socket is of: it is removed, which does.
    Found { route: Socket, uplink: u32 },
}

impl FastPath {
    /// Lays it: `route` is of the slot's namespace, in which the uplink has that index. No guest has the slot yet. On an error
    /// nothing of it is left.
    pub fn lay(
        route: &mut Socket,
        programs: &Arc<Programs>,
        wiring: &Wiring,
        uplink: u32,
    ) -> io::Result<FastPath> {
        let mut attach = || -> io::Result<Entry> {
            let key = programs.slots.insert(wiring)?;
            let entry = Entry {
                programs: programs.clone(),
                key,
            };
            for (link, program) in [(TAP_INDEX, &programs.outward), (uplink, &programs.inward)] {
                tc::add_ingress(route, link)?;
                tc::run(route, link, program.as_raw_fd(), entry.key)?;
                reach(Failpoint::NetworkFastAttached);
            }
            reach(Failpoint::NetworkFastOn);
            Ok(entry)
        };
        match attach() {
            Ok(entry) => Ok(FastPath::Ours(entry)),
            Err(e) => {
                remove(route, uplink)?;
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
            FastPath::Ours(entry) => entry.remove(),
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
    bpf::can_wait().map_err(Error::system(
        "wait for programs (membarrier(2), not with nohz_full)",
    ))?;
    let Privileged {
        tapped, mut route, ..
    } = tap::in_thread()?;
    let mut host = Socket::netfilter().map_err(Error::system("open an nftables socket (load nf_tables)"))?;
    conntrack::find(&mut host, |_| false)
        .map_err(Error::system("read connections (load nf_conntrack_netlink)"))?;
    let mut lay = || -> io::Result<()> {
        // The other end is there as well; what matters is that it is a pair's.
        link::make_pair(&mut route, "here", UPLINK_NAME, tapped.namespace.as_fd())?;
        let uplink = link::index(&mut route, UPLINK_NAME)?;
        let wiring = Wiring::new(Ipv4Addr::UNSPECIFIED, Ipv4Addr::UNSPECIFIED, uplink);
        FastPath::lay(&mut route, &Arc::new(Programs::load(&[])?), &wiring, uplink).map(drop)
    };
    lay().map_err(Error::system(
        "redirect packets by eBPF (CONFIG_BPF_SYSCALL, CONFIG_NET_CLS_BPF, Linux 5.10)",
    ))
}
