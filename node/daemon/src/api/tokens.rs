//! Bearer tokens: access over TCP without a certificate.
//!
//! Invariants: the time of a lookup reveals nothing about the known tokens; no token is kept in plain text or ever shown.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::time::SystemTime;

use axum::http::{HeaderMap, header};
use ring::hmac;
use thaw_sandbox::error::Error;

use super::grant::{Expiry, Grant, Granted, lines, read_file, unusable};
use super::peer::{Admission, Peer};

/// What errors call the file's contents.
const WHAT: &str = "tokens";
/// Most tokens.
const MOST: usize = 1024;
/// The length of a token, bytes: a shorter one could be guessed.
const LENGTH: std::ops::RangeInclusive<usize> = 24..=512;

/// The known tokens.
#[derive(Debug)]
pub struct Tokens {
    /// A key of this process only: the tags of equal texts are equal, and reveal nothing about the texts.
    key: hmac::Key,
    /// Callers, by the tags of their tokens.
    known: HashMap<Box<[u8]>, Known>,
    /// The names of tokens whose line has no role: they are administrators.
    without_role: Vec<String>,
}

#[derive(Debug)]
struct Known {
    peer: Peer,
    expires: Option<Expiry>,
}

impl Known {
    fn admission(&self) -> Admission {
        Admission {
            peer: self.peer.clone(),
            until: self.expires.map(Expiry::begins),
        }
    }
}

impl Tokens {
    /// Reads a file of tokens: `NAME TOKEN [role=ROLE] [tenant=TENANT] [expires=YYYY-MM-DD]` a line; `#` begins a comment.
    ///
    /// # Errors
    /// `config-invalid`: others can read the file, or a line is invalid. Messages contain no token.
    pub fn read(path: &Path) -> Result<Tokens, Error> {
        let text = read_file(path, WHAT, 0o077)?;
        Tokens::parse(&text).map_err(|why| unusable(path, WHAT, &why))
    }

    fn parse(text: &str) -> Result<Tokens, String> {
        let random = ring::rand::SystemRandom::new();
        let key =
            hmac::Key::generate(hmac::HMAC_SHA256, &random).map_err(|_| "no random bytes".to_owned())?;
        let (mut known, mut names) = (HashMap::new(), HashSet::new());
        let mut without_role = Vec::new();
        for (number, line) in lines(text) {
            let wrong = |what: &str| format!("line {number}: {what}");
            let mut words = line.split_whitespace();
            let (Some(name), Some(token)) = (words.next(), words.next()) else {
                return Err(wrong("this is to be a name and a token"));
            };
            // A wrapped line, or one without a name: it would grant access to a token that can be guessed.
            if [name, token].into_iter().any(Granted::is_term) {
                return Err(wrong(
                    "a name and a token come before role=, tenant= and expires=",
                ));
            }
            if !LENGTH.contains(&token.len()) || !token.bytes().all(|b| b.is_ascii_graphic()) {
                return Err(wrong("a token has 24 to 512 visible ASCII characters"));
            }
            let Granted { grant, expires } = Granted::parse(words).map_err(|why| wrong(&why))?;
            if grant.is_none() {
                without_role.push(name.to_owned());
            }
            let peer = Peer::token(name, grant.unwrap_or_else(Grant::admin));
            let tag = hmac::sign(&key, token.as_bytes());
            let before = known.insert(tag.as_ref().into(), Known { peer, expires });
            if !names.insert(name) || before.is_some() {
                return Err(wrong("this name or token was there before"));
            }
        }
        match known.len() {
            0 => Err("there are none".into()),
            1..=MOST => Ok(Tokens {
                key,
                known,
                without_role,
            }),
            _ => Err(format!("there are more than {MOST}")),
        }
    }

    /// Names of the tokens whose line has no role.
    pub fn without_role(&self) -> &[String] {
        &self.without_role
    }

    /// The caller of a token, if it is known and valid at this time.
    fn find(&self, token: &[u8], now: SystemTime) -> Option<&Known> {
        // The time of the lookup depends on tags, which callers cannot choose.
        let tag = hmac::sign(&self.key, token);
        let found = self.known.get(tag.as_ref());
        found.filter(|known| !known.expires.is_some_and(|expires| expires.is_over(now)))
    }

    /// The caller of a request's token.
    pub fn bearer(&self, headers: &HeaderMap, now: SystemTime) -> Option<Admission> {
        let mut all = headers.get_all(header::AUTHORIZATION).iter();
        let (one, none) = (all.next()?, all.next());
        let (scheme, token) = one.to_str().ok()?.split_once(' ')?;
        match none.is_none() && scheme.eq_ignore_ascii_case("bearer") && token.len() <= *LENGTH.end() {
            true => self.find(token.as_bytes(), now).map(Known::admission),
            false => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use thaw_sandbox::error::ErrorKind;

    use super::*;
    use crate::api::grant::Role;
    use std::os::unix::fs::PermissionsExt;
    use std::time::{Duration, UNIX_EPOCH};

    const A: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaa";
    const B: &str = "bbbbbbbbbbbbbbbbbbbbbbbbbbbb";

    fn headers(values: &[&str]) -> HeaderMap {
        let pairs = values.iter().map(|v| (header::AUTHORIZATION, v.parse().unwrap()));
        pairs.collect()
    }

    fn admin(name: &str) -> Option<Peer> {
        Some(Peer::token(name, Grant::admin()))
    }

    fn peer_of(tokens: &Tokens, token: &str, now: SystemTime) -> Option<Peer> {
        tokens.find(token.as_bytes(), now).map(|known| known.peer.clone())
    }

    #[test]
    fn a_token_is_known_by_all_of_it() {
        let tokens = Tokens::parse(&format!("# whose\n\none {A}\n two\t{B} \n")).unwrap();
        let now = SystemTime::now();
        assert_eq!(peer_of(&tokens, A, now), admin("one"));
        assert_eq!(peer_of(&tokens, B, now), admin("two"));
        for unknown in ["", "a", &A[1..], &A[..A.len() - 1], &format!("{A}a"), "one"] {
            assert_eq!(peer_of(&tokens, unknown, now), None);
        }
        let bearer = |values: &[&str]| tokens.bearer(&headers(values), now).map(|a| a.peer);
        assert_eq!(bearer(&[&format!("Bearer {B}")]), admin("two"));
        assert_eq!(bearer(&[&format!("bearer {B}")]), admin("two"));
        let (basic, twice) = (format!("Basic {B}"), format!("Bearer {B}"));
        let (basic, twice) = (basic.as_str(), twice.as_str());
        for wrong in [
            vec![],
            vec![B],
            vec![basic],
            vec![twice, twice],
            vec!["Bearer  "],
            vec!["Bearer"],
        ] {
            assert_eq!(bearer(&wrong), None);
        }
    }

    #[test]
    fn line_without_a_role_is_an_administrator() {
        let text = format!("one {A}\ntwo {B} role=operate tenant=acme");
        let tokens = Tokens::parse(&text).unwrap();
        assert_eq!(tokens.without_role(), ["one"]);
        let now = SystemTime::now();
        let two = peer_of(&tokens, B, now).unwrap();
        assert_eq!(
            (two.role(), two.tenant().unwrap().as_str()),
            (Role::Operate, "acme")
        );
        assert_eq!(peer_of(&tokens, A, now).unwrap().role(), Role::Admin);
    }

    #[test]
    fn expired_token_is_unknown() {
        let tokens = Tokens::parse(&format!("one {A} expires=2027-01-01")).unwrap();
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        let last = tokens.find(A.as_bytes(), at(1_798_761_599)).unwrap();
        assert_eq!(last.admission().until, Some(at(1_798_761_600)));
        assert!(tokens.find(A.as_bytes(), at(1_798_761_600)).is_none());
    }

    #[test]
    fn ten_thousand_wrong_tokens_are_unknown() {
        let lines = (0..64).map(|n| format!("t{n} {:0>40} role=read tenant=t{n}\n", n * 7919));
        let tokens = Tokens::parse(&lines.collect::<String>()).unwrap();
        let now = SystemTime::now();
        assert!(tokens.find(format!("{:0>40}", 7919).as_bytes(), now).is_some());
        for n in 0..10_000 {
            // Near a known token: as long, but with other last digits or one other bit.
            let (near, mut bit) = (
                format!("{:0>40}", n * 7919 + 1),
                format!("{:0>40}", n % 64 * 7919).into_bytes(),
            );
            bit[n % 40] ^= 1 << (n % 7);
            let is_known = |token: &[u8]| tokens.find(token, now).is_some();
            assert!(!is_known(near.as_bytes()), "{near}");
            let other = (0..64).any(|n| format!("{:0>40}", n * 7919).as_bytes() == bit);
            assert_eq!(is_known(&bit), other, "{bit:?}");
        }
    }

    #[test]
    fn what_is_no_file_of_tokens_is_told_without_showing_one() {
        for (text, line) in [
            ("", "none"),
            ("one", "line 1"),
            ("one short", "line 1"),
            // Wrapped by an editor, and without a name.
            (
                format!("one {A}\n  role=operate tenant=acme-production-eu-1").as_str(),
                "line 2",
            ),
            ("tenant=acme-production-eu-1 role=admin", "line 1"),
            (
                format!("{A} tenant=acme-production-eu-1 role=admin").as_str(),
                "line 1",
            ),
            (format!("one {A} {B}").as_str(), "line 1"),
            (format!("one {A}\ntwo {A}").as_str(), "line 2"),
            (format!("one {A}\none {B}").as_str(), "line 2"),
            (format!("{A} one").as_str(), "line 1"),
            (format!("one {A} role=operate").as_str(), "line 1"),
            (format!("one {A} tenant=acme").as_str(), "line 1"),
            (format!("one {A} role=admin role={A}").as_str(), "line 1"),
            (format!("one role=admin {A}").as_str(), "line 1"),
            (format!("one {}", "é".repeat(20)).as_str(), "line 1"),
            (format!("one {}", "a".repeat(513)).as_str(), "line 1"),
        ] {
            let error = Tokens::parse(text).unwrap_err();
            let shows = error.contains(A) || error.contains(B);
            assert!(error.contains(line) && !shows, "{text}: {error}");
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), format!("one {A}")).unwrap();
        assert!(Tokens::read(file.path()).is_ok());
        std::fs::set_permissions(file.path(), PermissionsExt::from_mode(0o640)).unwrap();
        assert_eq!(
            Tokens::read(file.path()).unwrap_err().kind,
            ErrorKind::ConfigInvalid
        );
        assert!(Tokens::read(Path::new("/nowhere")).is_err());
    }
}
