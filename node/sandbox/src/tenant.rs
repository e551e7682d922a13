//! A tenant: the owner of a sandbox, for callers of the API.
//!
//! Invariant: a [`Tenant`] is a word of at most [`MAX`] bytes, valid by construction, also when it is read from a record.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Maximum length, bytes.
const MAX: usize = 63;

/// A tenant's name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Tenant(Arc<str>);

/// The error for a text that is not a valid tenant name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a tenant is 1 to {MAX} of A-Z a-z 0-9 - _ . and begins and ends with a letter or digit")]
pub struct NotATenant;

impl Tenant {
    /// Its name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Tenant {
    type Err = NotATenant;

    fn from_str(text: &str) -> Result<Tenant, NotATenant> {
        let bytes = text.as_bytes();
        let ends_well = [bytes.first(), bytes.last()]
            .into_iter()
            .all(|end| end.is_some_and(u8::is_ascii_alphanumeric));
        let is_plain = bytes
            .iter()
            .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(b));
        match ends_well && is_plain && bytes.len() <= MAX {
            true => Ok(Tenant(text.into())),
            false => Err(NotATenant),
        }
    }
}

impl TryFrom<String> for Tenant {
    type Error = NotATenant;

    fn try_from(text: String) -> Result<Tenant, NotATenant> {
        text.parse()
    }
}

impl From<Tenant> for String {
    fn from(tenant: Tenant) -> String {
        tenant.as_str().to_owned()
    }
}

impl fmt::Display for Tenant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenant_is_a_plain_word() {
        for good in ["a", "acme", "Team-1", "a.b_c", &"x".repeat(63)] {
            let tenant: Tenant = good.parse().unwrap();
            let written = serde_json::to_string(&tenant).unwrap();
            assert_eq!(serde_json::from_str::<Tenant>(&written).unwrap(), tenant);
            assert_eq!(written, format!("{good:?}"));
        }
        for bad in ["", "-a", "a-", ".", "a b", "a/b", "a\0b", "ä", &"x".repeat(64)] {
            assert!(bad.parse::<Tenant>().is_err(), "{bad:?}");
            let written = serde_json::to_string(bad).unwrap();
            assert!(serde_json::from_str::<Tenant>(&written).is_err(), "{bad:?}");
        }
    }
}
