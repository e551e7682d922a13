//! Names that a slot's guest resolves, and the addresses that it may connect to because of them.
//!
//! A policy with domains allows an address for as long as it is among the slot's resolved addresses ([`crate::resolved`]). Invariants: only
//! addresses of names that the policy in force allows are added; no name leads to a private address, or to one that no policy can allow (DNS
//! rebinding).

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use thaw_sys::lock::Lock;
use thaw_sys::prefix::Prefix;

use crate::Error;
use crate::in_force::InForce;
use crate::policy::Policy;
use crate::range::Range;
use crate::slot;

/// Networks of a host's surroundings, besides those that no policy can allow: private use (RFC 1918), shared address space (RFC 6598), IETF
/// protocols (RFC 6890) and benchmarks (RFC 2544).
const PRIVATE: [(Ipv4Addr, u8); 6] = [
    (Ipv4Addr::new(10, 0, 0, 0), 8),
    (Ipv4Addr::new(172, 16, 0, 0), 12),
    (Ipv4Addr::new(192, 168, 0, 0), 16),
    (Ipv4Addr::new(100, 64, 0, 0), 10),
    (Ipv4Addr::new(192, 0, 0, 0), 24),
    (Ipv4Addr::new(198, 18, 0, 0), 15),
];

/// Whether a name may lead to an address.
fn is_public(range: Range, address: Ipv4Addr) -> bool {
    let mut private = PRIVATE
        .iter()
        .filter_map(|(first, length)| Prefix::around(*first, *length));
    !slot::is_barred(range, address) && !private.any(|prefix| prefix.contains(address))
}

/// What the guest of a slot has asked since this process has the slot.
#[derive(Debug, Default)]
pub(super) struct NameCounts {
    resolved: AtomicU64,
    refused: AtomicU64,
    withheld: AtomicU64,
    connections_refused: AtomicU64,
}

/// The values of the counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NameStatistics {
    /// Queries that were answered with addresses.
    pub resolved: u64,
    /// Queries for names that the policy does not allow.
    pub refused: u64,
    /// Addresses that were left out of answers.
    pub withheld: u64,
    /// Connections to resolved addresses that ask for a host which the policy does not allow, or for none.
    pub connections_refused: u64,
}

impl NameCounts {
    pub fn read(&self) -> NameStatistics {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        NameStatistics {
            resolved: read(&self.resolved),
            refused: read(&self.refused),
            withheld: read(&self.withheld),
            connections_refused: read(&self.connections_refused),
        }
    }
}

/// Decides which names a slot's guest resolves, and lets it connect to their addresses.
#[derive(Clone, Debug)]
pub struct Names {
    in_force: Arc<Mutex<InForce>>,
    counts: Arc<NameCounts>,
    range: Range,
}

impl Names {
    pub(super) fn new(in_force: Arc<Mutex<InForce>>, counts: Arc<NameCounts>, range: Range) -> Names {
        Names {
            in_force,
            counts,
            range,
        }
    }

    /// Whether the policy in force allows a name: in lower case, without a dot at its end. A refusal is counted.
    pub fn allows(&self, name: &str) -> bool {
        let is_allowed = self.in_force.locked().policy.allows_name(name);
        if !is_allowed {
            self.counts.refused.fetch_add(1, Ordering::Relaxed);
        }
        is_allowed
    }

    /// The same of a host that a connection asks for. A refusal is not counted.
    pub fn allows_connection(&self, name: &str) -> bool {
        self.in_force.locked().policy.allows_name(name)
    }

    /// Counts a connection that was refused because of the host that it asks for.
    pub fn count_refused_connection(&self) {
        self.counts.connections_refused.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether a name may lead to an address.
    pub fn may_lead_to(&self, address: Ipv4Addr) -> bool {
        is_public(self.range, address)
    }

    /// Lets the guest connect to the addresses of a name until an answer with this time to live is over. Returns the addresses that the
    /// guest may be told. Blocks for an nftables transaction.
    ///
    /// # Errors
    /// The kernel refuses the addresses. The guest must not be told them.
    pub fn admit(&self, name: &str, addresses: &[Ipv4Addr], ttl: Duration) -> Result<Vec<Ipv4Addr>, Error> {
        let mut in_force = self.in_force.locked();
        let in_force = &mut *in_force;
        // The policy may have changed while the name was resolved.
        if !in_force.policy.allows_name(name) {
            return Ok(Vec::new());
        }
        let (told, reachable) = admissible(&in_force.policy, self.range, addresses);
        let added = in_force.resolved.add(&mut in_force.filter, name, &reachable, ttl);
        added.map_err(Error::system("let a sandbox connect to the addresses of a name"))?;
        let withheld = addresses.len() - told.len();
        self.counts.withheld.fetch_add(withheld as u64, Ordering::Relaxed);
        let is_answered = u64::from(!told.is_empty());
        self.counts.resolved.fetch_add(is_answered, Ordering::Relaxed);
        Ok(told)
    }
}

/// The addresses that a guest may be told, and those of them to which it may connect because of the name. To the others a rule allows it.
fn admissible(policy: &Policy, range: Range, addresses: &[Ipv4Addr]) -> (Vec<Ipv4Addr>, Vec<Ipv4Addr>) {
    let is_told = |address: &Ipv4Addr| {
        is_public(range, *address) || (policy.allows_address(*address) && !slot::is_barred(range, *address))
    };
    let told: Vec<Ipv4Addr> = addresses.iter().copied().filter(is_told).collect();
    let reachable = told.iter().copied().filter(|address| is_public(range, *address));
    (told.clone(), reachable.collect())
}

#[cfg(test)]
#[path = "names_test.rs"]
mod tests;
