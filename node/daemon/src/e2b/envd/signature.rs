//! Signed URLs of files. Such a URL permits its holder to read or write one file, without the token of the sandbox.
//!
//! A signature is `v1_` and the SHA-256, in base64 without padding, of `PATH:OPERATION:USER:TOKEN`, and of `:EXPIRATION` (seconds since 1970)
//! after it if the URL expires. PATH and USER are those of the URL's query, as they are written there.

use std::time::{Duration, SystemTime};

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use ring::hmac;
use sha2::{Digest, Sha256};

/// What a signed URL allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Read,
    Write,
}

/// What a URL says.
#[derive(Clone, Copy, Debug)]
pub struct Signed<'a> {
    pub path: &'a str,
    pub operation: Operation,
    pub user: &'a str,
    pub signature: &'a str,
    /// Seconds since 1970.
    pub expiration: Option<u64>,
}

impl Signed<'_> {
    /// Whether the sandbox's token signed it, and it has not expired.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self, token: &str, now: SystemTime) -> Result<(), &'static str> {
        if !is_same(self.expected(token).as_bytes(), self.signature.as_bytes()) {
            return Err("the signature is not that of this file, operation, user and expiration");
        }
        let end = self
            .expiration
            .map(|seconds| SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds)));
        match end {
            Some(Some(end)) if end <= now => Err("the signature has expired"),
            _ => Ok(()),
        }
    }

    fn expected(&self, token: &str) -> String {
        let Signed { path, user, .. } = self;
        let operation = match self.operation {
            Operation::Read => "read",
            Operation::Write => "write",
        };
        let mut text = format!("{path}:{operation}:{user}:{token}");
        if let Some(expiration) = self.expiration {
            text.push_str(&format!(":{expiration}"));
        }
        format!("v1_{}", STANDARD_NO_PAD.encode(Sha256::digest(text)))
    }
}

/// Compares secrets in a time that reveals nothing about the expected one.
pub fn is_same(expected: &[u8], given: &[u8]) -> bool {
    let key = hmac::Key::new(hmac::HMAC_SHA256, expected);
    let tag = hmac::sign(&key, expected);
    hmac::verify(&key, given, tag.as_ref()).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    /// These signatures were made with the Python SDK.
    #[test]
    fn signatures_of_the_sdk_are_accepted() {
        let forever = Signed {
            path: "/home/user/a b.txt",
            operation: Operation::Read,
            user: "user",
            signature: "v1_8rGUb+9hyeZdt4AqnXQbDTq40oi9lJNYLxjHxc/vPFM",
            expiration: None,
        };
        assert_eq!(forever.check("token", at(5)), Ok(()));
        let expiring = Signed {
            path: "x",
            operation: Operation::Write,
            user: "",
            signature: "v1_YPSiMzQhlAunQ6UgwlvvUKR61ZEsfgNl3TmDLxLlWrM",
            expiration: Some(1000),
        };
        assert_eq!(expiring.check("token", at(999)), Ok(()));
        assert!(expiring.check("token", at(1000)).is_err());
        for changed in [
            Signed {
                path: "y",
                ..expiring
            },
            Signed {
                user: "root",
                ..expiring
            },
            Signed {
                operation: Operation::Read,
                ..expiring
            },
            Signed {
                expiration: Some(1001),
                ..expiring
            },
            Signed {
                expiration: None,
                ..expiring
            },
            Signed {
                signature: "",
                ..expiring
            },
        ] {
            assert!(changed.check("token", at(5)).is_err(), "{changed:?}");
        }
        assert!(expiring.check("other", at(5)).is_err());
    }

    #[test]
    fn secrets_are_same_only_if_they_are_equal() {
        assert!(is_same(b"abc", b"abc"));
        for other in [&b"abd"[..], b"ab", b"abcd", b""] {
            assert!(!is_same(b"abc", other));
        }
    }
}
