//! What `--add-host`, `--dns`, `--dns-search` and `--dns-option` add to a container's `/etc/hosts` and `/etc/resolv.conf`.
//!
//! The agent writes both files, also when a clone gets another identity. It takes these from the annotations of the specification.

use std::collections::HashMap;
use std::net::IpAddr;
use std::str::FromStr;

use thaw_protocol::agent::annotations::{DNS, DNS_OPTIONS, DNS_SEARCH, HOSTS};

/// The longest name of the DNS, in bytes (RFC 1035, section 2.3.4).
const MAX_NAME: usize = 253;
/// The longest option of the resolver, in bytes.
const MAX_OPTION: usize = 64;

/// The names and name servers of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    pub hosts: Vec<ExtraHost>,
    /// Replace the name servers of the sandbox's network. Empty: those stay.
    pub servers: Vec<IpAddr>,
    pub search: Vec<SearchDomain>,
    pub options: Vec<ResolverOption>,
}

/// A line of `/etc/hosts`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExtraHost {
    name: String,
    address: IpAddr,
}

/// A domain in which a name without dots is looked up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SearchDomain(String);

/// An option of the resolver (resolv.conf(5)).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolverOption(String);

impl FromStr for ResolverOption {
    type Err = String;

    /// Reads `NAME` or `NAME:VALUE`. Libraries ignore options they do not know, so the names are not checked.
    fn from_str(text: &str) -> Result<ResolverOption, String> {
        let is_plain = |b: u8| b.is_ascii_alphanumeric() || b"-_:".contains(&b);
        match (1..=MAX_OPTION).contains(&text.len()) && text.bytes().all(is_plain) {
            true => Ok(ResolverOption(text.into())),
            false => Err(format!(
                "{text:?} is no option of the resolver: write one of resolv.conf(5), such as ndots:2 or rotate"
            )),
        }
    }
}

impl FromStr for ExtraHost {
    type Err = String;

    /// Reads `NAME:ADDRESS` or `NAME=ADDRESS`. An IPv6 address may have brackets.
    fn from_str(text: &str) -> Result<ExtraHost, String> {
        let form = || format!("{text:?}: write NAME:ADDRESS, such as db:192.0.2.7 or db:fd00::7");
        let (name, address) = text.split_once(['=', ':']).ok_or_else(form)?;
        if address == "host-gateway" {
            return Err(format!(
                "{text:?}: a sandbox cannot reach its host, so there is no host-gateway; write an address"
            ));
        }
        let bare = address.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        match (is_name(name), bare.unwrap_or(address).parse()) {
            (true, Ok(address)) => Ok(ExtraHost {
                name: name.into(),
                address,
            }),
            _ => Err(form()),
        }
    }
}

impl FromStr for SearchDomain {
    type Err = String;

    fn from_str(text: &str) -> Result<SearchDomain, String> {
        match is_name(text.trim_end_matches('.')) {
            true => Ok(SearchDomain(text.into())),
            false => Err(format!(
                "{text:?} is no domain: write letters, digits, '-', '_' and '.', such as corp.example"
            )),
        }
    }
}

/// Parses the address of a name server.
///
/// # Errors
/// What is invalid, and what to write.
pub fn parse_server(text: &str) -> Result<IpAddr, String> {
    text.parse().map_err(|_| {
        format!("{text:?} is no IP address: write that of a name server, such as 192.0.2.53 or fd00::53")
    })
}

pub(super) fn is_name(text: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
    !text.is_empty() && text.len() <= MAX_NAME && text.bytes().all(plain) && !text.starts_with('.')
}

impl Names {
    /// Adds the annotations from which the agent takes these.
    pub(super) fn annotate(&self, annotations: &mut HashMap<String, String>) {
        let hosts: Vec<String> = self
            .hosts
            .iter()
            .map(|h| format!("{} {}", h.name, h.address))
            .collect();
        let servers: Vec<String> = self.servers.iter().map(IpAddr::to_string).collect();
        let search: Vec<&str> = self.search.iter().map(|domain| domain.0.as_str()).collect();
        let options: Vec<&str> = self.options.iter().map(|option| option.0.as_str()).collect();
        for (key, value) in [
            (HOSTS, hosts.join("\n")),
            (DNS, servers.join(" ")),
            (DNS_SEARCH, search.join(" ")),
            (DNS_OPTIONS, options.join(" ")),
        ] {
            if !value.is_empty() {
                annotations.insert(key.into(), value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_read_as_docker_reads_them() {
        for (text, address) in [
            ("db:192.0.2.7", "192.0.2.7"),
            ("db=192.0.2.7", "192.0.2.7"),
            ("db:fd00::7", "fd00::7"),
            ("db=[fd00::7]", "fd00::7"),
        ] {
            let host: ExtraHost = text.parse().unwrap();
            assert_eq!(
                (host.name.as_str(), host.address),
                ("db", address.parse().unwrap()),
                "{text}"
            );
        }
        for wrong in [
            "db",
            "db:",
            ":192.0.2.7",
            "db:192.0.2",
            "d b:192.0.2.7",
            "db:[fd00::7",
            "a\nb:192.0.2.7",
        ] {
            let refused = wrong.parse::<ExtraHost>().unwrap_err();
            assert!(refused.contains("NAME:ADDRESS"), "{wrong}: {refused}");
        }
        let gateway = "me:host-gateway".parse::<ExtraHost>().unwrap_err();
        assert!(gateway.contains("cannot reach its host"), "{gateway}");
    }

    #[test]
    fn search_domains_are_names() {
        for good in ["corp.example", "a", "corp.example."] {
            assert!(good.parse::<SearchDomain>().is_ok(), "{good}");
        }
        for wrong in ["", ".", "a b", "a\nb", &"x".repeat(254)] {
            assert!(wrong.parse::<SearchDomain>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn annotations_have_only_what_is_asked_for() {
        let mut annotations = HashMap::new();
        Names::default().annotate(&mut annotations);
        assert!(annotations.is_empty());
        let names = Names {
            hosts: vec!["db:192.0.2.7".parse().unwrap(), "six:fd00::7".parse().unwrap()],
            servers: vec!["192.0.2.53".parse().unwrap()],
            search: vec!["a.example".parse().unwrap(), "b.example".parse().unwrap()],
            options: vec!["ndots:2".parse().unwrap(), "rotate".parse().unwrap()],
        };
        names.annotate(&mut annotations);
        assert_eq!(annotations[HOSTS], "db 192.0.2.7\nsix fd00::7");
        assert_eq!(annotations[DNS], "192.0.2.53");
        assert_eq!(annotations[DNS_SEARCH], "a.example b.example");
        assert_eq!(annotations[DNS_OPTIONS], "ndots:2 rotate");
        for wrong in ["", "a b", "a\nb", &"x".repeat(65)] {
            assert!(wrong.parse::<ResolverOption>().is_err(), "{wrong}");
        }
    }
}
