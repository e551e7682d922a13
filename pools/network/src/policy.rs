//! Network policies: where a guest may connect to. Rules are tried in order, and the first that matches decides.
//!
//! A policy with domains also decides by name: what no rule decides is allowed if its address was resolved ([`crate::names`]), and DNS goes to
//! the node alone.
//!
//! Invariant: [`Policy::decides`] and the nftables rules of a policy ([`Policy::rules`]) agree. When a policy changes, the one finds the
//! connections that are denied now, and the other stops their packets.

use std::net::Ipv4Addr;
use std::ops::RangeInclusive;

use thaw_protocol::api::{Egress, EgressRule, NetworkPolicy};

use crate::domains::{DomainError, Domains, Pattern};
use thaw_sys::nft::rule::{ESTABLISHED, RELATED, Rule, TCP, UDP};
use thaw_sys::prefix::{Prefix, PrefixError};

/// Most rules of a policy, and most nftables rules that they may expand to.
pub const MAX_RULES: usize = 128;
const MAX_EXPANDED: usize = 512;
const ICMP: u8 = 1;
const DNS: u16 = 53;
/// HTTP/3, whose server name is not checked.
const QUIC: u16 = 443;

/// A policy, valid by construction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    rules: Vec<Entry>,
    default: Egress,
    /// `None`: names do not matter.
    domains: Option<Domains>,
    text: NetworkPolicy,
}

/// What a policy says of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Decision {
    Allow,
    Deny,
    /// It is allowed if its address was resolved for the guest.
    ByName,
}

impl From<Egress> for Decision {
    fn from(verdict: Egress) -> Decision {
        match verdict {
            Egress::Allow => Decision::Allow,
            Egress::Deny => Decision::Deny,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    verdict: Egress,
    to: Prefix,
    /// Empty: any.
    protocols: Vec<u8>,
    /// Empty: any.
    ports: Vec<RangeInclusive<u16>>,
}

/// Why a policy is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    #[error("more than {MAX_RULES} rules, or more than {MAX_EXPANDED} of their ports and protocols together")]
    TooMany,
    #[error("rule {0} has either allow or deny")]
    Verdict(usize),
    #[error("rule {0}: {1}")]
    Network(usize, PrefixError),
    #[error("rule {0}: {1:?} is no port: write 443, or 8000-8999")]
    Port(usize, String),
    #[error("rule {0}: {1:?} is no protocol: tcp, udp or icmp")]
    Protocol(usize, String),
    #[error("rule {0}: icmp has no ports")]
    NoPorts(usize),
    #[error("domains: {0}")]
    Domain(#[from] DomainError),
}

impl Policy {
    /// Parses a policy.
    pub fn new(text: NetworkPolicy) -> Result<Policy, PolicyError> {
        if text.egress.len() > MAX_RULES {
            return Err(PolicyError::TooMany);
        }
        let numbered = text.egress.iter().enumerate();
        let rules = numbered.map(|(n, rule)| Entry::new(n + 1, rule));
        let rules: Vec<Entry> = rules.collect::<Result<_, _>>()?;
        if rules.iter().map(Entry::expanded).sum::<usize>() > MAX_EXPANDED {
            return Err(PolicyError::TooMany);
        }
        Ok(Policy {
            rules,
            default: text.default,
            domains: Domains::read(&text.domains, text.default)?,
            text,
        })
    }

    /// The text that it was parsed from.
    pub fn text(&self) -> &NetworkPolicy {
        &self.text
    }

    /// Whether it is the default policy, which denies nothing.
    pub fn allows_all(&self) -> bool {
        self.rules.is_empty() && self.default == Egress::Allow && self.domains.is_none()
    }

    /// Whether it has domains.
    pub fn has_domains(&self) -> bool {
        self.domains.is_some()
    }

    /// Whether a guest may resolve a name: in lower case, without a dot at its end.
    pub fn allows_name(&self, name: &str) -> bool {
        self.domains.as_ref().is_some_and(|domains| domains.allow(name))
    }

    /// The set of resolved addresses in a slot with this policy. Policies with other domains have another one.
    pub(super) fn resolved_set(&self) -> Option<String> {
        let domains = self.domains.as_ref()?;
        Some(format!("resolved_{:016x}", domains.number()))
    }

    /// Whether a rule allows connections to an address, at least to some port.
    pub(super) fn allows_address(&self, to: Ipv4Addr) -> bool {
        let mut allowing = self.rules.iter().filter(|rule| rule.verdict == Egress::Allow);
        allowing.any(|rule| rule.to.contains(to))
    }

    /// Whether a guest may connect to an address and port. A protocol without ports has port 0.
    pub(super) fn decides(&self, to: Ipv4Addr, protocol: u8, port: u16) -> Decision {
        if self.has_domains() && port == DNS && [TCP, UDP].contains(&protocol) {
            return Decision::Deny;
        }
        let matching = self.rules.iter().find(|rule| rule.matches(to, protocol, port));
        match matching {
            Some(rule) => rule.verdict.into(),
            None if self.has_domains() && (protocol, port) == (UDP, QUIC) => Decision::Deny,
            None if self.has_domains() => Decision::ByName,
            None => self.default.into(),
        }
    }

    /// What nftables matches if a rule decides, or if it is DNS over TCP, which is denied; without verdicts. Of a policy with domains.
    pub(super) fn deciding(&self) -> impl Iterator<Item = Rule> {
        let dns = Rule::new().protocol(TCP).port(&(DNS..=DNS));
        std::iter::once(dns).chain(self.rules.iter().flat_map(Entry::rules))
    }

    /// The nftables rules of the policy, which decide every packet. `denied` is the chain for denied packets.
    pub(super) fn rules(&self, denied: &str) -> Vec<Rule> {
        let decide = |rule: Rule, verdict| match verdict {
            Egress::Allow => rule.accept(),
            Egress::Deny => rule.goto(denied),
        };
        let mut rules = Vec::new();
        if self.has_domains() {
            // Queries by UDP are redirected to the node before.
            let asked = |protocol| Rule::new().protocol(protocol).port(&(DNS..=DNS));
            rules.extend([TCP, UDP].map(|protocol| asked(protocol).goto(denied)));
        }
        for entry in &self.rules {
            for rule in entry.rules() {
                rules.push(decide(rule, entry.verdict));
            }
        }
        match self.resolved_set() {
            None => rules.push(decide(Rule::new(), self.default)),
            Some(resolved) => {
                rules.push(Rule::new().protocol(UDP).port(&(QUIC..=QUIC)).goto(denied));
                // An address may leave the set while a connection to it lasts. A policy that denies the connection ends it.
                rules.push(Rule::new().state(ESTABLISHED | RELATED).accept());
                rules.push(Rule::new().to_any_of(&resolved).accept());
                rules.push(Rule::new().goto(denied));
            }
        }
        rules
    }
}

impl Entry {
    fn new(number: usize, rule: &EgressRule) -> Result<Entry, PolicyError> {
        let (verdict, to) = match (&rule.allow, &rule.deny) {
            (Some(to), None) => (Egress::Allow, to),
            (None, Some(to)) => (Egress::Deny, to),
            _ => return Err(PolicyError::Verdict(number)),
        };
        let to = to.parse().map_err(|e| PolicyError::Network(number, e))?;
        let port = |text: &String| ports(text).ok_or_else(|| PolicyError::Port(number, text.clone()));
        let ports = rule.ports.iter().map(port).collect::<Result<Vec<_>, _>>()?;
        let protocols = match rule.protocol.as_deref() {
            Some("tcp") => vec![TCP],
            Some("udp") => vec![UDP],
            Some("icmp") if ports.is_empty() => vec![ICMP],
            Some("icmp") => return Err(PolicyError::NoPorts(number)),
            Some(other) => return Err(PolicyError::Protocol(number, other.to_owned())),
            None if ports.is_empty() => Vec::new(),
            None => vec![TCP, UDP],
        };
        Ok(Entry {
            verdict,
            to,
            protocols,
            ports,
        })
    }

    fn expanded(&self) -> usize {
        self.protocols.len().max(1) * self.ports.len().max(1)
    }

    fn matches(&self, to: Ipv4Addr, protocol: u8, port: u16) -> bool {
        self.to.contains(to)
            && (self.protocols.is_empty() || self.protocols.contains(&protocol))
            && (self.ports.is_empty() || self.ports.iter().any(|range| range.contains(&port)))
    }

    /// One rule for each protocol and range of ports, without a verdict.
    fn rules(&self) -> Vec<Rule> {
        let to = Rule::new().to(self.to);
        let by_protocol: Vec<Rule> = match self.protocols.as_slice() {
            [] => vec![to],
            protocols => protocols.iter().map(|p| to.clone().protocol(*p)).collect(),
        };
        match self.ports.as_slice() {
            [] => by_protocol,
            ports => by_protocol
                .iter()
                .flat_map(|rule| ports.iter().map(|range| rule.clone().port(range)))
                .collect(),
        }
    }
}

fn ports(text: &str) -> Option<RangeInclusive<u16>> {
    let number = |text: &str| {
        let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        text.parse::<u16>().ok().filter(|port| digits && *port > 0)
    };
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let range = number(first)?..=number(last)?;
    (!range.is_empty()).then_some(range)
}

/// Parses a rule of the command line into a policy: `allow=NETWORK[:PORT,…][/PROTOCOL]`, `allow=DOMAIN`, `deny=…`; or `default=allow|deny`.
pub fn parse_into(policy: &mut NetworkPolicy, text: &str) -> Result<(), String> {
    let wrong = || {
        format!(
            "{text:?} is neither allow=NETWORK[:PORTS][/PROTOCOL], allow=DOMAIN, the same with deny, nor default=allow or default=deny"
        )
    };
    let (verdict, rest) = text.split_once('=').ok_or_else(wrong)?;
    if verdict == "default" {
        policy.default = match rest {
            "allow" => Egress::Allow,
            "deny" => Egress::Deny,
            _ => return Err(wrong()),
        };
        return Ok(());
    }
    if rest.parse::<Pattern>().is_ok() {
        let list = match verdict {
            "allow" => &mut policy.domains.allow,
            "deny" => &mut policy.domains.deny,
            _ => return Err(wrong()),
        };
        list.push(rest.to_owned());
        return Ok(());
    }
    let (rest, protocol) = match rest.rsplit_once('/') {
        Some((rest, protocol)) if protocol.starts_with(|c: char| c.is_ascii_alphabetic()) => {
            (rest, Some(protocol.to_owned()))
        }
        _ => (rest, None),
    };
    let (to, ports) = rest
        .split_once(':')
        .map_or((rest, None), |(to, ports)| (to, Some(ports)));
    let mut rule = EgressRule {
        ports: ports.map_or_else(Vec::new, |ports| ports.split(',').map(str::to_owned).collect()),
        protocol,
        ..EgressRule::default()
    };
    match verdict {
        "allow" => rule.allow = Some(to.to_owned()),
        "deny" => rule.deny = Some(to.to_owned()),
        _ => return Err(wrong()),
    }
    policy.egress.push(rule);
    Ok(())
}

#[cfg(test)]
#[path = "policy_test.rs"]
mod tests;
