//! Domains that a policy allows or denies.
//!
//! A pattern is a name (`example.com`) or all names below one (`*.example.com`, which does not match `example.com`). Of several patterns that
//! match a name, the longest decides; of an allowing and a denying one of equal length, the denying one.

use std::fmt;
use std::str::FromStr;

use thaw_protocol::api::{DomainLists, Egress};

/// Most patterns of a policy.
pub const MAX_DOMAINS: usize = 256;
/// Longest name and longest label, bytes (RFC 1035).
const MAX_NAME: usize = 253;
const MAX_LABEL: usize = 63;

/// Why a list of domains is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DomainError {
    #[error("more than {MAX_DOMAINS} domains")]
    TooMany,
    #[error("{0:?} is no domain: write example.com, or *.example.com for all names below it")]
    Malformed(String),
}

/// A name, or all names below one. In lower case, without a dot at its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern {
    name: String,
    below: bool,
}

impl Pattern {
    /// Whether it matches a name in lower case, without a dot at its end.
    pub fn matches(&self, name: &str) -> bool {
        match self.below {
            false => name == self.name,
            true => is_below(name, &self.name),
        }
    }

    /// Whether it matches every name that `other` matches.
    pub fn covers(&self, other: &Pattern) -> bool {
        match (self.below, other.below) {
            (true, true) => self.name == other.name || is_below(&other.name, &self.name),
            (_, false) => self.matches(&other.name),
            (false, true) => false,
        }
    }
}

/// Whether a name is below another.
fn is_below(name: &str, above: &str) -> bool {
    let rest = name.strip_suffix(above).and_then(|rest| rest.strip_suffix('.'));
    rest.is_some_and(|rest| !rest.is_empty())
}

impl FromStr for Pattern {
    type Err = DomainError;

    fn from_str(text: &str) -> Result<Pattern, DomainError> {
        let (below, name) = match text.strip_prefix("*.") {
            Some(name) => (true, name),
            None => (false, text),
        };
        let name = name.strip_suffix('.').unwrap_or(name);
        let labels: Vec<&str> = name.split('.').collect();
        // An address is no domain: the last label of every domain has a letter.
        let has_letter = |label: &&str| label.bytes().any(|b| b.is_ascii_alphabetic());
        let is_whole = labels.len() > usize::from(!below) && labels.last().is_some_and(has_letter);
        match is_whole && name.len() <= MAX_NAME && labels.iter().all(|label| is_label(label)) {
            true => Ok(Pattern {
                name: name.to_ascii_lowercase(),
                below,
            }),
            false => Err(DomainError::Malformed(text.chars().take(MAX_NAME).collect())),
        }
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", if self.below { "*." } else { "" }, self.name)
    }
}

/// Whether a text is a label of a host's or a service's name.
fn is_label(text: &str) -> bool {
    let is_inner = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
    (1..=MAX_LABEL).contains(&text.len())
        && text.bytes().all(is_inner)
        && !text.starts_with('-')
        && !text.ends_with('-')
}

/// The domains of a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Domains {
    allow: Vec<Pattern>,
    deny: Vec<Pattern>,
    /// What applies to a name that no pattern matches.
    unlisted: Egress,
}

impl Domains {
    /// Parses the lists; `None` if both are empty. `default` is that of the policy.
    pub fn read(lists: &DomainLists, default: Egress) -> Result<Option<Domains>, DomainError> {
        if lists.is_empty() {
            return Ok(None);
        }
        if lists.allow.len() + lists.deny.len() > MAX_DOMAINS {
            return Err(DomainError::TooMany);
        }
        let read = |texts: &[String]| texts.iter().map(|text| text.parse()).collect::<Result<_, _>>();
        Ok(Some(Domains {
            allow: read(&lists.allow)?,
            deny: read(&lists.deny)?,
            unlisted: match lists.allow.is_empty() {
                true => default,
                false => Egress::Deny,
            },
        }))
    }

    /// Whether a name may be resolved: in lower case, without a dot at its end.
    pub fn allow(&self, name: &str) -> bool {
        let longest = |patterns: &[Pattern]| {
            let matching = patterns.iter().filter(|pattern| pattern.matches(name));
            matching.map(|pattern| pattern.name.len()).max()
        };
        match (longest(&self.allow), longest(&self.deny)) {
            (None, None) => self.unlisted == Egress::Allow,
            (allowed, denied) => allowed > denied,
        }
    }

    /// A number for these lists, by which a later owner of a slot knows what is in force (FNV-1a).
    pub fn number(&self) -> u64 {
        let patterns = |list: &[Pattern]| list.iter().map(Pattern::to_string).collect::<Vec<_>>().join(",");
        let text = format!(
            "{}/{}/{:?}",
            patterns(&self.allow),
            patterns(&self.deny),
            self.unlisted
        );
        text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn domains(allow: &[&str], deny: &[&str], default: Egress) -> Domains {
        let list = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
        let lists = DomainLists {
            allow: list(allow),
            deny: list(deny),
        };
        Domains::read(&lists, default).unwrap().unwrap()
    }

    #[test]
    fn wildcard_matches_names_below_it_alone() {
        let pattern = |text: &str| text.parse::<Pattern>().unwrap();
        let below = pattern("*.Example.com.");
        for (name, matches) in [
            ("a.example.com", true),
            ("a.b.example.com", true),
            ("example.com", false),
            ("badexample.com", false),
            (".example.com", false),
            ("example.com.evil.org", false),
        ] {
            assert_eq!(below.matches(name), matches, "{name}");
        }
        assert!(pattern("Example.COM").matches("example.com"));
        assert!(!pattern("example.com").matches("a.example.com"));
        assert!(below.covers(&pattern("*.a.example.com")) && below.covers(&pattern("a.example.com")));
        assert!(!pattern("*.a.example.com").covers(&below) && !pattern("a.example.com").covers(&below));
        assert_eq!(below.to_string(), "*.example.com");
    }

    #[test]
    fn longest_pattern_decides() {
        let both = domains(
            &["*.example.com", "a.bad.example.com", "same.org"],
            &["*.bad.example.com", "same.org"],
            Egress::Allow,
        );
        for (name, allowed) in [
            ("www.example.com", true),
            ("x.bad.example.com", false),
            ("a.bad.example.com", true),
            ("bad.example.com", true),
            ("same.org", false),
            ("other.org", false),
        ] {
            assert_eq!(both.allow(name), allowed, "{name}");
        }
    }

    #[test]
    fn unlisted_name_follows_the_default_without_an_allow_list() {
        for default in [Egress::Allow, Egress::Deny] {
            let denying = domains(&[], &["evil.org"], default);
            assert!(!denying.allow("evil.org"));
            assert_eq!(denying.allow("other.org"), default == Egress::Allow);
            assert!(!domains(&["a.org"], &[], default).allow("other.org"));
        }
        assert_eq!(Domains::read(&DomainLists::default(), Egress::Allow), Ok(None));
    }

    #[test]
    fn malformed_domain_is_named() {
        let long = format!("{}.org", "a".repeat(64));
        for bad in [
            "",
            "*",
            "*.",
            "com",
            ".com",
            "a..b",
            "a b.org",
            "-a.org",
            "a-.org",
            "192.0.2.1",
            "10.0.0",
            "*.*.org",
            "a.*.org",
            "http://a.org",
            "a.org:443",
            "a.org/",
            "é.org",
            &long,
        ] {
            let error = bad.parse::<Pattern>().unwrap_err();
            assert!(error.to_string().contains(&format!("{bad:?}")), "{bad}: {error}");
        }
        for good in ["a.b", "*.com", "_dmarc.a.org", "xn--9ca.org", "a.org.", "1.2.x3"] {
            good.parse::<Pattern>().unwrap();
        }
        let many = DomainLists {
            allow: vec!["a.org".into(); MAX_DOMAINS + 1],
            deny: Vec::new(),
        };
        assert_eq!(Domains::read(&many, Egress::Deny), Err(DomainError::TooMany));
    }

    #[test]
    fn other_lists_have_another_number() {
        let numbers = [
            domains(&["a.org"], &[], Egress::Deny),
            domains(&["*.a.org"], &[], Egress::Deny),
            domains(&[], &["a.org"], Egress::Deny),
            domains(&[], &["a.org"], Egress::Allow),
        ]
        .map(|domains| domains.number());
        let mut distinct = numbers.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), numbers.len());
        assert_eq!(domains(&["A.org."], &[], Egress::Allow).number(), numbers[0]);
    }
}
