//! The address range of slots: four addresses for each slot, by its number.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use thaw_sys::prefix::{Prefix, PrefixError};

/// Networks that are not routed on the internet (RFC 1918, RFC 6598, RFC 2544).
const PRIVATE: [(Ipv4Addr, u8); 5] = [
    (Ipv4Addr::new(10, 0, 0, 0), 8),
    (Ipv4Addr::new(100, 64, 0, 0), 10),
    (Ipv4Addr::new(172, 16, 0, 0), 12),
    (Ipv4Addr::new(192, 168, 0, 0), 16),
    (Ipv4Addr::new(198, 18, 0, 0), 15),
];
/// Prefix length of a slot's own network, and its number of addresses.
pub(super) const SLOT_LENGTH: u8 = 30;
const SLOT: u32 = 4;

/// A private network with room for at least one slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Range(Prefix);

impl Default for Range {
    fn default() -> Range {
        const SHARED: Prefix = match Prefix::around(Ipv4Addr::new(100, 64, 0, 0), 16) {
            Some(prefix) => prefix,
            None => unreachable!(),
        };
        Range(SHARED)
    }
}

/// Why a network cannot be the range of slots.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RangeError {
    #[error(transparent)]
    Prefix(#[from] PrefixError),
    #[error("{0} is too small for a slot: it is a /30 at least")]
    Small(Prefix),
    #[error(
        "{0} is not private: choose one within 10.0.0.0/8, 100.64.0.0/10, 172.16.0.0/12, 192.168.0.0/16 or 198.18.0.0/15"
    )]
    Public(Prefix),
    #[error("{0} has the address every guest sees as its own, {guest}", guest = crate::GUEST_ADDRESS)]
    Guests(Prefix),
}

impl Range {
    /// The network.
    pub fn prefix(self) -> Prefix {
        self.0
    }

    /// How many slots it has room for.
    pub fn slots(self) -> u32 {
        1 << (SLOT_LENGTH - self.0.length())
    }

    fn at(self, number: u32, offset: u32) -> Ipv4Addr {
        let number = number % self.slots();
        Ipv4Addr::from_bits(self.0.first().to_bits() + number * SLOT + offset)
    }

    /// The address of the host's end of a slot.
    pub(super) fn host(self, number: u32) -> Ipv4Addr {
        self.at(number, 1)
    }

    /// A slot's own address, from which it sends.
    pub(super) fn slot(self, number: u32) -> Ipv4Addr {
        self.at(number, 2)
    }

    /// The number of the slot with this address.
    pub(super) fn number(self, slot: Ipv4Addr) -> Option<u32> {
        self.number_at(slot, 2)
    }

    /// The number of the slot whose host's end has this address.
    pub(super) fn number_of_host(self, host: Ipv4Addr) -> Option<u32> {
        self.number_at(host, 1)
    }

    fn number_at(self, address: Ipv4Addr, offset: u32) -> Option<u32> {
        let from_first = address.to_bits().wrapping_sub(self.0.first().to_bits());
        (self.0.contains(address) && from_first % SLOT == offset).then_some(from_first / SLOT)
    }

    /// The name of the host's nftables table for it, so that thawds with different ranges do not share one.
    pub(super) fn table(self) -> String {
        let [a, b, c, d] = self.0.first().octets();
        format!("thaw_{a}_{b}_{c}_{d}_{}", self.0.length())
    }
}

impl FromStr for Range {
    type Err = RangeError;

    fn from_str(text: &str) -> Result<Range, RangeError> {
        let prefix: Prefix = text.parse()?;
        if prefix.length() > SLOT_LENGTH {
            return Err(RangeError::Small(prefix));
        }
        let within = |(first, length): &(Ipv4Addr, u8)| {
            Prefix::around(*first, *length).is_some_and(|private| {
                private.contains(prefix.first()) && private.length() <= prefix.length()
            })
        };
        if !PRIVATE.iter().any(within) {
            return Err(RangeError::Public(prefix));
        }
        match prefix.contains(crate::GUEST_ADDRESS) {
            true => Err(RangeError::Guests(prefix)),
            false => Ok(Range(prefix)),
        }
    }
}

impl TryFrom<String> for Range {
    type Error = RangeError;

    fn try_from(text: String) -> Result<Range, RangeError> {
        text.parse()
    }
}

impl From<Range> for String {
    fn from(range: Range) -> String {
        range.to_string()
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_range_has_room_for_16384_slots() {
        let range = Range::default();
        assert_eq!(range.to_string().parse(), Ok(range));
        assert_eq!(range.slots(), 16384);
        assert_eq!(range.table(), "thaw_100_64_0_0_16");
        assert_eq!(range.slot(0), Ipv4Addr::new(100, 64, 0, 2));
        assert_eq!(range.host(16383), Ipv4Addr::new(100, 64, 255, 253));
    }

    #[test]
    fn invalid_range_error_says_why() {
        for (text, why) in [
            ("100.64.0.0/31", "too small"),
            ("8.8.0.0/16", "not private"),
            ("10.0.0.0/7", "not private"),
            ("10.0.0.0/8", "every guest"),
            ("10.219.0.0/30", "every guest"),
            ("x", "no IPv4"),
        ] {
            let error = text.parse::<Range>().unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    proptest::proptest! {
        #[test]
        fn slot_is_found_by_its_own_address(length in 16u8..=30, a: u32, b: u32) {
            let range: Range = format!("100.64.0.0/{length}").parse().unwrap();
            let (a, b) = (a % range.slots(), b % range.slots());
            assert_eq!(range.number(range.slot(a)), Some(a));
            assert_eq!(range.number(range.host(a)), None);
            assert_eq!(range.slot(a) == range.slot(b), a == b);
            assert!(range.prefix().contains(range.slot(a)) && range.prefix().contains(range.host(a)));
        }
    }
}
