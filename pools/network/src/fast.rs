//! The fast path of a slot: two BPF programs, which all slots share, redirect its packets past the namespace's routing, connection tracking
//! and rules.
//!
//! ```text
//!  guest ─ tap ─ program ───────────────────────── thaw-n12 ─ [ the host: NAT ] ─ outside
//!           └─ packets that it does not take: namespace ─┘
//! ```
//!
//! Only a slot with the default policy has a fast path; a slot that gets another policy leaves it for good. Invariants: the namespace
//! always has its rules, which decide every packet that no program takes; once [`FastPath::leave`] has returned, they decide every
//! packet. The namespace learns from the host's connection tracking which connections exist ([`conntrack::hand_over`]).

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

/// The programs, and the table of the slots that they serve.
#[derive(Debug)]
pub(super) struct Programs {
    slots: Table<Wiring>,
    outward: OwnedFd,
    inward: OwnedFd,
}

impl Programs {
    /// Loads the programs, which the kernel verifies. `barred`: networks for which the namespace must decide.
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

/// An installed fast path.
#[derive(Debug)]
pub(super) enum FastPath {
    /// Installed by this process: turning it off takes no RTNL.
    Ours(Entry),
    /// Installed by an earlier owner of the slot: it must be removed, which takes RTNL. `route` is a socket in the slot's namespace.
    Found { route: Socket, uplink: u32 },
}

impl FastPath {
    /// Installs it before a guest has the slot. `route` is a socket in the slot's namespace, where the uplink has the index `uplink`. An
    /// error leaves nothing behind.
    pub fn install(
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

    /// The fast path of a slot that another process made, if it has one.
    pub fn found(mut route: Socket) -> io::Result<Option<FastPath>> {
        if !tc::with_ingress(&mut route)?.contains(&TAP_INDEX) {
            return Ok(None);
        }
        let uplink = link::index(&mut route, UPLINK_NAME)?;
        Ok(Some(FastPath::Found { route, uplink }))
    }

    /// Makes the namespace decide every packet that arrives from now on. Programs that are running may still redirect theirs.
    pub fn turn_off(&mut self) -> io::Result<()> {
        match self {
            FastPath::Ours(entry) => entry.remove(),
            FastPath::Found { route, uplink } => remove(route, *uplink),
        }
    }

    /// Turns it off and waits some milliseconds until running programs have ended.
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

/// Tests, in a namespace of its own, whether this kernel supports the fast path.
///
/// # Errors
/// The feature that the kernel lacks.
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
    let mut install = || -> io::Result<()> {
        // The other end is in the same namespace, which does not matter: the uplink only has to be one of a pair.
        link::make_pair(&mut route, "here", UPLINK_NAME, tapped.namespace.as_fd())?;
        let uplink = link::index(&mut route, UPLINK_NAME)?;
        let wiring = Wiring::new(Ipv4Addr::UNSPECIFIED, Ipv4Addr::UNSPECIFIED, uplink);
        FastPath::install(&mut route, &Arc::new(Programs::load(&[])?), &wiring, uplink).map(drop)
    };
    install().map_err(Error::system(
        "redirect packets by eBPF (CONFIG_BPF_SYSCALL, CONFIG_NET_CLS_BPF, Linux 5.10)",
    ))
}
