//! The resolved addresses of a slot: a set in its namespace, from which the kernel removes each address when its time is over.
//!
//! Invariant: the set has at most [`MAX_RESOLVED`] addresses.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use thaw_sys::netlink::Socket;
use thaw_sys::nft::{self, Field, Transaction};

use crate::policy::Policy;
use crate::slot::TABLE;

/// Most resolved addresses of one slot. The one whose time is over first makes room.
const MAX_RESOLVED: usize = 1024;
/// How much longer than an answer's time to live its addresses can be connected to: the guest may use an answer until its end.
const GRACE: Duration = Duration::from_secs(30);
/// How much longer an address is known than the kernel has it: one that the kernel still has would keep its time when it is added again.
const SLACK: Duration = Duration::from_secs(1);

/// The resolved addresses of a slot.
#[derive(Debug, Default)]
pub(super) struct Resolved {
    /// The kernel's set of them. `None`: there is none.
    pub set: Option<String>,
    known: BTreeMap<Ipv4Addr, Known>,
    /// Those that an earlier owner has added.
    found: BTreeSet<Ipv4Addr>,
}

#[derive(Debug)]
struct Known {
    /// The name that was resolved last.
    name: String,
    until: Instant,
}

impl Resolved {
    /// What an earlier owner of a slot has resolved under this policy. `filter` is a socket in the slot's namespace.
    pub fn found(policy: &Policy, filter: &mut Socket) -> io::Result<Resolved> {
        let Some(set) = policy.resolved_set() else {
            return Ok(Resolved::default());
        };
        let addresses = nft::addresses(filter, TABLE, &set)?;
        Ok(Resolved {
            set: addresses.is_some().then_some(set),
            known: BTreeMap::new(),
            found: addresses.into_iter().flatten().collect(),
        })
    }

    /// The addresses of names that are still allowed, and how long each stays.
    pub fn of_names(&self, allowed: impl Fn(&str) -> bool) -> Vec<(Ipv4Addr, Duration)> {
        let now = Instant::now();
        let known = self.known.iter().filter(|(_, known)| allowed(&known.name));
        let left = known.map(|(address, known)| (*address, known.until.saturating_duration_since(now)));
        left.filter(|(_, left)| !left.is_zero()).collect()
    }

    /// The set is now this one, with these of the known addresses in it.
    pub fn replace(&mut self, set: Option<String>, kept: &[(Ipv4Addr, Duration)]) {
        self.set = set;
        self.found.clear();
        self.known
            .retain(|address, _| kept.iter().any(|(kept, _)| kept == address));
    }

    /// Adds addresses of a name, for the time to live of its answer.
    pub fn add(
        &mut self,
        filter: &mut Socket,
        name: &str,
        addresses: &[Ipv4Addr],
        ttl: Duration,
    ) -> io::Result<()> {
        let Some(set) = self.set.clone() else {
            return Ok(());
        };
        let now = Instant::now();
        self.known.retain(|_, known| known.until + SLACK > now);
        let is_new = |address: &Ipv4Addr| {
            self.known
                .get(address)
                .is_none_or(|known| known.until < now + ttl)
        };
        let new: BTreeSet<Ipv4Addr> = addresses.iter().copied().filter(is_new).collect();
        if new.is_empty() {
            return Ok(());
        }
        for address in self.evicted(&new) {
            nft::remove_raw(filter, TABLE, &set, &address.octets())?;
            self.known.remove(&address);
            self.found.remove(&address);
        }
        let time = ttl + GRACE;
        let is_there = |address: &Ipv4Addr| self.known.contains_key(address) || self.found.contains(address);
        let mut renewal = Transaction::new(TABLE);
        for address in &new {
            // The kernel does not change the time of one that is there.
            if is_there(address) {
                renewal.remove(&set, &[Field::Address(*address)]);
            }
            renewal.add_address(&set, *address, time);
        }
        match renewal.commit(filter) {
            // The kernel has removed one since.
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => {
                let mut addition = Transaction::new(TABLE);
                for address in &new {
                    nft::remove_raw(filter, TABLE, &set, &address.octets())?;
                    addition.add_address(&set, *address, time);
                }
                addition.commit(filter)?;
            }
            committed => committed?,
        }
        for address in new {
            let known = Known {
                name: name.to_owned(),
                until: now + time,
            };
            self.found.remove(&address);
            self.known.insert(address, known);
        }
        Ok(())
    }

    /// The addresses that make room for new ones: those of an earlier owner, then those whose time is over first.
    fn evicted(&self, new: &BTreeSet<Ipv4Addr>) -> Vec<Ipv4Addr> {
        let is_other =
            |address: &&Ipv4Addr| !self.known.contains_key(*address) && !self.found.contains(*address);
        let others = new.iter().filter(is_other);
        let over = (self.known.len() + self.found.len() + others.count()).saturating_sub(MAX_RESOLVED);
        let mut known: Vec<_> = self
            .known
            .iter()
            .map(|(address, known)| (known.until, *address))
            .collect();
        known.sort_unstable();
        let known = known.into_iter().map(|(_, address)| address);
        let oldest = self.found.iter().copied().chain(known);
        oldest
            .filter(|address| !new.contains(address))
            .take(over)
            .collect()
    }
}

#[cfg(test)]
#[path = "resolved_test.rs"]
mod tests;
