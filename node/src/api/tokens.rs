//! Bearer tokens: who may ask over TCP without a certificate.
//!
//! Invariants: how long a look takes says nothing of the tokens that are known; none is held as it is, nor ever shown.

use std::collections::HashSet;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use axum::http::{HeaderMap, header};
use ring::hmac;

use super::peer::Peer;
use crate::exit::{ExitCode, Failure};

/// Bytes of a file that is read.
const MAX_FILE: u64 = 1 << 20;
/// Most tokens: each look compares them all.
const MOST: usize = 1024;
/// Bytes of a token: what is shorter can be guessed.
const LENGTH: std::ops::RangeInclusive<usize> = 24..=512;

/// The tokens that are known.
#[derive(Debug)]
pub struct Tokens {
    /// Of this process alone: tags of equal texts are equal, and say nothing of the texts.
    key: hmac::Key,
    /// Each with whom it is of.
    known: Vec<(hmac::Tag, Peer)>,
}

impl Tokens {
    /// Reads a file of them: a name and a token a line; `#` begins a comment.
    ///
    /// # Errors
    /// `config-invalid`: others can read it, or a line is not such; no token is in the message.
    pub fn read(path: &Path) -> Result<Tokens, Failure> {
        let invalid = |why: String| {
            let what = format!("the tokens in {} cannot be used: {why}", path.display());
            Failure::new(ExitCode::ConfigInvalid, what)
        };
        let file = std::fs::File::open(path).map_err(|e| invalid(e.to_string()))?;
        let metadata = file.metadata().map_err(|e| invalid(e.to_string()))?;
        if metadata.mode() & 0o077 != 0 {
            let why = format!("its mode is {:o}", metadata.mode() & 0o777);
            return Err(invalid(why).remedy("make it its owner's alone: chmod 600"));
        }
        let mut text = String::new();
        let read = file.take(MAX_FILE + 1).read_to_string(&mut text);
        read.map_err(|e| invalid(e.to_string()))?;
        if text.len() as u64 > MAX_FILE {
            return Err(invalid(format!("it is larger than {MAX_FILE} bytes")));
        }
        Tokens::parse(&text).map_err(invalid)
    }

    fn parse(text: &str) -> Result<Tokens, String> {
        let random = ring::rand::SystemRandom::new();
        let key =
            hmac::Key::generate(hmac::HMAC_SHA256, &random).map_err(|_| "no random bytes".to_owned())?;
        let (mut known, mut names, mut seen) = (Vec::new(), HashSet::new(), HashSet::new());
        for (number, line) in text.lines().enumerate() {
            let wrong = |what: &str| format!("line {}: {what}", number + 1);
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let mut words = line.split_whitespace();
            let (Some(name), Some(token), None) = (words.next(), words.next(), words.next()) else {
                return Err(wrong("this is to be a name and a token"));
            };
            if !names.insert(name) || !seen.insert(token) {
                return Err(wrong("this name or token was there before"));
            }
            if !LENGTH.contains(&token.len()) || !token.bytes().all(|b| b.is_ascii_graphic()) {
                return Err(wrong("a token has 24 to 512 visible ASCII characters"));
            }
            known.push((hmac::sign(&key, token.as_bytes()), Peer::token(name)));
        }
        match known.len() {
            0 => Err("there are none".into()),
            1..=MOST => Ok(Tokens { key, known }),
            _ => Err(format!("there are more than {MOST}")),
        }
    }

    /// Whose a token is, if it is known.
    fn find(&self, token: &[u8]) -> Option<Peer> {
        let presented = hmac::sign(&self.key, token);
        let mut found = None;
        for (known, peer) in &self.known {
            // All of them, however soon one is equal: what is compared are tags, which nobody outside can choose.
            if equal(presented.as_ref(), known.as_ref()) {
                found = Some(*peer);
            }
        }
        found
    }

    /// Whose token a request brings.
    pub fn bearer(&self, headers: &HeaderMap) -> Option<Peer> {
        let mut all = headers.get_all(header::AUTHORIZATION).iter();
        let (one, none) = (all.next()?, all.next());
        let (scheme, token) = one.to_str().ok()?.split_once(' ')?;
        match none.is_none() && scheme.eq_ignore_ascii_case("bearer") && token.len() <= *LENGTH.end() {
            true => self.find(token.as_bytes()),
            false => None,
        }
    }
}

/// Compares all bytes, whatever they are.
fn equal(a: &[u8], b: &[u8]) -> bool {
    let differs = a.iter().zip(b).fold(0, |differs, (a, b)| differs | (a ^ b));
    a.len() == b.len() && std::hint::black_box(differs) == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    const A: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaa";
    const B: &str = "bbbbbbbbbbbbbbbbbbbbbbbbbbbb";

    fn headers(values: &[&str]) -> HeaderMap {
        let pairs = values.iter().map(|v| (header::AUTHORIZATION, v.parse().unwrap()));
        pairs.collect()
    }

    #[test]
    fn a_token_is_known_by_all_of_it() {
        let tokens = Tokens::parse(&format!("# whose\n\none {A}\n two\t{B} \n")).unwrap();
        assert_eq!(tokens.find(A.as_bytes()), Some(Peer::token("one")));
        assert_eq!(tokens.find(B.as_bytes()), Some(Peer::token("two")));
        for unknown in ["", "a", &A[1..], &format!("{A}a"), "one"] {
            assert_eq!(tokens.find(unknown.as_bytes()), None);
        }
        let bearer = |values: &[&str]| tokens.bearer(&headers(values));
        assert_eq!(bearer(&[&format!("Bearer {B}")]), Some(Peer::token("two")));
        assert_eq!(bearer(&[&format!("bearer {B}")]), Some(Peer::token("two")));
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
    fn what_is_no_file_of_tokens_is_told_without_showing_one() {
        for (text, line) in [
            ("", "none"),
            ("one", "line 1"),
            ("one short", "line 1"),
            (format!("one {A} {B}").as_str(), "line 1"),
            (format!("one {A}\ntwo {A}").as_str(), "line 2"),
            (format!("one {A}\none {B}").as_str(), "line 2"),
            (format!("one {}", "é".repeat(20)).as_str(), "line 1"),
            (format!("one {}", "a".repeat(513)).as_str(), "line 1"),
        ] {
            let error = Tokens::parse(text).unwrap_err();
            assert!(error.contains(line) && !error.contains(A), "{text}: {error}");
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), format!("one {A}")).unwrap();
        assert!(Tokens::read(file.path()).is_ok());
        std::fs::set_permissions(file.path(), PermissionsExt::from_mode(0o640)).unwrap();
        assert_eq!(
            Tokens::read(file.path()).unwrap_err().code,
            ExitCode::ConfigInvalid
        );
        assert!(Tokens::read(Path::new("/nowhere")).is_err());
    }
}
