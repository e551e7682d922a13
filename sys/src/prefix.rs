//! An IPv4 network in CIDR notation.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

/// A network: its first address, and how many bits all of its addresses share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Prefix {
    first: Ipv4Addr,
    length: u8,
}

impl Prefix {
    /// Every address.
    pub const ALL: Prefix = Prefix {
        first: Ipv4Addr::UNSPECIFIED,
        length: 0,
    };

    /// One address.
    pub const fn host(address: Ipv4Addr) -> Prefix {
        Prefix {
            first: address,
            length: 32,
        }
    }

    /// The network that contains an address. `None` if `length` is above 32.
    pub const fn around(address: Ipv4Addr, length: u8) -> Option<Prefix> {
        match mask(length) {
            Some(mask) => Some(Prefix {
                first: Ipv4Addr::from_bits(address.to_bits() & mask),
                length,
            }),
            None => None,
        }
    }

    pub fn first(self) -> Ipv4Addr {
        self.first
    }

    pub fn length(self) -> u8 {
        self.length
    }

    pub fn mask(self) -> Ipv4Addr {
        Ipv4Addr::from_bits(mask(self.length).unwrap_or(u32::MAX))
    }

    pub fn contains(self, address: Ipv4Addr) -> bool {
        address.to_bits() & self.mask().to_bits() == self.first.to_bits()
    }

    /// Whether some address is in both.
    pub fn overlaps(self, other: Prefix) -> bool {
        self.contains(other.first) || other.contains(self.first)
    }
}

const fn mask(length: u8) -> Option<u32> {
    match length {
        0 => Some(0),
        1..=32 => Some(u32::MAX << (32 - length)),
        _ => None,
    }
}

/// Why a text is not a network.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PrefixError {
    #[error("{0:?} is no IPv4 network: write it as 192.0.2.0/24")]
    Malformed(String),
    #[error("{0} is IPv6, which guests have none of")]
    Version6(String),
    #[error("{0} has bits set beyond its prefix: {1} is the network")]
    Excess(String, Prefix),
}

impl FromStr for Prefix {
    type Err = PrefixError;

    /// `ADDRESS/LENGTH`, or only an address.
    fn from_str(text: &str) -> Result<Prefix, PrefixError> {
        let malformed = || PrefixError::Malformed(text.to_owned());
        let (address, length) = text.split_once('/').unwrap_or((text, "32"));
        if address.parse::<std::net::Ipv6Addr>().is_ok() {
            return Err(PrefixError::Version6(text.to_owned()));
        }
        let digits = !length.is_empty() && length.bytes().all(|b| b.is_ascii_digit());
        let address: Ipv4Addr = address.parse().map_err(|_| malformed())?;
        let length = length.parse().ok().filter(|_| digits).ok_or_else(malformed)?;
        let prefix = Prefix::around(address, length).ok_or_else(malformed)?;
        match prefix.first == address {
            true => Ok(prefix),
            false => Err(PrefixError::Excess(text.to_owned(), prefix)),
        }
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.first, self.length)
    }
}

#[cfg(test)]
#[path = "prefix_test.rs"]
mod tests;
