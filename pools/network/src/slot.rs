//! The nftables rules in a slot's namespace: they translate the guest's address to the slot's, and enforce the network policy.
//!
//! They are evaluated for every packet in the direction that the guest opened, not only for a connection's first: a policy change
//! applies at once to existing connections.

use std::net::Ipv4Addr;
use std::time::Duration;

use crate::policy::Policy;
use crate::range::Range;
use crate::{GUEST_ADDRESS, HOST_ADDRESS, TAP_NAME, UPLINK_NAME};
use thaw_sys::nft::rule::{ESTABLISHED, Interface, NEW, RELATED, Rule, TCP, UDP};
use thaw_sys::nft::{Hook, Transaction};
use thaw_sys::prefix::Prefix;

pub(super) const TABLE: &str = "thaw";
const EGRESS: &str = "egress";
const DENIED: &str = "denied";
const ICMP: u8 = 1;
pub(super) const DNS: u16 = 53;
/// Where the gateway takes the guest's connections to resolved addresses.
pub(super) const RELAY: u16 = 10_080;
const PREROUTING: &str = "prerouting";
const INPUT: &str = "input";
/// Networks that no policy can allow, with [`PLATFORM`]: link-local (which has metadata services), multicast, broadcast, and addresses
/// that are no destination.
const BARRED: [(Ipv4Addr, u8); 5] = [
    (Ipv4Addr::UNSPECIFIED, 8),
    (Ipv4Addr::LOCALHOST, 8),
    (Ipv4Addr::new(169, 254, 0, 0), 16),
    (Ipv4Addr::new(224, 0, 0, 0), 4),
    (Ipv4Addr::new(240, 0, 0, 0), 4),
];

/// Addresses of clouds' metadata and other platform services that are not link-local: Azure, Alibaba, Oracle.
pub(super) const PLATFORM: [Ipv4Addr; 3] = [
    Ipv4Addr::new(168, 63, 129, 16),
    Ipv4Addr::new(100, 100, 100, 200),
    Ipv4Addr::new(192, 0, 0, 192),
];

fn barred() -> impl Iterator<Item = Prefix> {
    let prefixes = BARRED.iter();
    prefixes
        .filter_map(|(first, length)| Prefix::around(*first, *length))
        .chain(PLATFORM.map(Prefix::host))
}

/// Networks to and from which the rules decide by connection, or drop: the fast path must leave these packets to them.
pub(super) fn undecided(range: Range) -> Vec<Prefix> {
    barred().chain([range.prefix()]).collect()
}

/// Whether no policy can allow connections to an address.
pub(super) fn is_barred(range: Range, to: Ipv4Addr) -> bool {
    undecided(range).iter().any(|prefix| prefix.contains(to))
}

/// All rules of a slot, with the default policy. `barred`: name servers at barred addresses. `fast`: the slot will have a fast path, so the
/// namespace may see connections only from their middle on.
pub(super) fn rules(range: Range, number: u32, barred: &[Ipv4Addr], fast: bool) -> Transaction<'static> {
    let own = range.slot(number);
    let (guest, uplink) = (Interface::Named(TAP_NAME), Interface::Named(UPLINK_NAME));
    let mut t = Transaction::new(TABLE);

    t.hooked(PREROUTING, Hook::NatBefore, true);
    add_inward(&mut t, own, &Policy::default());
    t.hooked("postrouting", Hook::NatAfter, true);
    t.rule("postrouting", Rule::new().leaving(uplink).snat(own));

    t.chain(DENIED);
    t.rule(DENIED, Rule::new().protocol(TCP).reset());
    t.rule(DENIED, Rule::new().prohibit());
    t.chain(EGRESS);
    add_policy(&mut t, &Policy::default());
    t.chain("barred");
    for server in barred {
        for protocol in [UDP, TCP] {
            let asked = Rule::new().to(Prefix::host(*server)).protocol(protocol);
            t.rule("barred", asked.port(&(DNS..=DNS)).goto(EGRESS));
        }
    }
    for prefix in undecided(range) {
        t.rule("barred", Rule::new().to(prefix).goto(DENIED));
    }
    t.rule("barred", Rule::new().goto(EGRESS));

    t.hooked(INPUT, Hook::Input, false);
    add_input(&mut t, &Policy::default());
    t.hooked("forward", Hook::Forward, false);
    let inward = || Rule::new().arriving(uplink).leaving(guest);
    if !fast {
        // It belongs to a connection of an earlier slot with this number.
        t.rule(
            "forward",
            inward().state(NEW).protocol(TCP).begins_nothing().drop(),
        );
    }
    t.rule("forward", inward().accept());
    let outward = || Rule::new().arriving(guest).leaving(uplink);
    t.rule("forward", outward().not_from(Prefix::host(GUEST_ADDRESS)).drop());
    t.rule("forward", outward().replying().accept());
    t.rule("forward", outward().goto("barred"));
    t
}

/// A change of the policy and of nothing else.
pub(super) struct Change<'a> {
    pub policy: &'a Policy,
    /// The slot's address.
    pub own: Ipv4Addr,
    /// Resolved addresses to add to the policy's set, and how long each stays.
    pub resolved: &'a [(Ipv4Addr, Duration)],
    /// A set of another policy, to be removed.
    pub unused_set: Option<String>,
}

impl Change<'_> {
    pub fn transaction(&self) -> Transaction<'static> {
        let mut t = Transaction::new(TABLE);
        if let Some(set) = self.policy.resolved_set() {
            t.addresses(&set);
            for (address, time) in self.resolved {
                t.add_address(&set, *address, *time);
            }
        }
        for chain in [EGRESS, PREROUTING, INPUT] {
            t.flush(chain);
        }
        add_policy(&mut t, self.policy);
        add_inward(&mut t, self.own, self.policy);
        add_input(&mut t, self.policy);
        if let Some(set) = &self.unused_set {
            t.delete_set(set);
        }
        t
    }
}

/// Translates the slot's address to the guest's, and, if the policy has domains, redirects to the gateway the guest's DNS queries, and its
/// TCP connections to resolved addresses that no rule decides. Only the first packet of a connection is looked at.
fn add_inward(t: &mut Transaction<'_>, own: Ipv4Addr, policy: &Policy) {
    let inward = Rule::new()
        .arriving(Interface::Named(UPLINK_NAME))
        .to(Prefix::host(own));
    t.rule(PREROUTING, inward.dnat(GUEST_ADDRESS));
    if policy.has_domains() {
        let asked = Rule::new()
            .arriving(Interface::Named(TAP_NAME))
            .protocol(UDP)
            .port(&(DNS..=DNS));
        t.rule(PREROUTING, asked.dnat(HOST_ADDRESS));
    }
    if let Some(resolved) = policy.resolved_set() {
        for decided in policy.deciding() {
            t.rule(PREROUTING, decided.accept());
        }
        let by_name = Rule::new()
            .arriving(Interface::Named(TAP_NAME))
            .protocol(TCP)
            .to_any_of(&resolved);
        t.rule(PREROUTING, by_name.dnat_to_port(HOST_ADDRESS, RELAY));
    }
}

/// What the namespace itself takes.
fn add_input(t: &mut Transaction<'_>, policy: &Policy) {
    // An answer to another source would leave the slot, whatever the policy says.
    let from_guest = || {
        let arriving = Rule::new().arriving(Interface::Named(TAP_NAME));
        arriving.from(Prefix::host(GUEST_ADDRESS))
    };
    t.rule(INPUT, Rule::new().state(ESTABLISHED | RELATED).accept());
    // The gateway answers a ping.
    t.rule(INPUT, from_guest().protocol(ICMP).accept());
    if policy.has_domains() {
        let asked = from_guest().to(Prefix::host(HOST_ADDRESS)).protocol(UDP);
        t.rule(INPUT, asked.port(&(DNS..=DNS)).accept());
        let carried = from_guest().to(Prefix::host(HOST_ADDRESS)).protocol(TCP);
        t.rule(INPUT, carried.port(&(RELAY..=RELAY)).redirected().accept());
    }
}

fn add_policy(t: &mut Transaction<'_>, policy: &Policy) {
    for rule in policy.rules(DENIED) {
        t.rule(EGRESS, rule);
    }
}
