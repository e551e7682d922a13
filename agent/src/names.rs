//! What a container adds to the guest's own `hosts` and `resolv.conf`.
//!
//! It stays in force when the guest gets another identity: those files are then written again.

use std::collections::HashMap;
use std::net::IpAddr;

use thaw_protocol::agent::annotations::{DNS, DNS_OPTIONS, DNS_SEARCH, HOSTS};

use crate::error::{Error, Result};

/// The names and name servers that a container asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    hosts: Vec<(String, IpAddr)>,
    /// Empty: the guest's own.
    servers: Vec<IpAddr>,
    search: Vec<String>,
    options: Vec<String>,
}

impl Names {
    /// Reads a container's annotations. `None` if it asks for nothing.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the annotation and the value that is wrong.
    pub fn of(annotations: &HashMap<String, String>) -> Result<Option<Names>> {
        let value = |key: &str| annotations.get(key).map(String::as_str).unwrap_or_default();
        let pair = |line: &str| match line.split_once(' ') {
            Some((name, address)) => Ok((plain(HOSTS, name)?, self::address(HOSTS, address)?)),
            None => Err(Error::Invalid(format!("{HOSTS}: {line:?} is not NAME ADDRESS"))),
        };
        let names = Names {
            hosts: value(HOSTS).lines().map(pair).collect::<Result<_>>()?,
            servers: words(value(DNS))
                .map(|w| address(DNS, w))
                .collect::<Result<_>>()?,
            search: words(value(DNS_SEARCH))
                .map(|w| plain(DNS_SEARCH, w))
                .collect::<Result<_>>()?,
            options: words(value(DNS_OPTIONS))
                .map(|w| plain(DNS_OPTIONS, w))
                .collect::<Result<_>>()?,
        };
        Ok((names != Names::default()).then_some(names))
    }

    /// The lines for the end of `hosts`.
    pub fn hosts(&self) -> String {
        self.hosts
            .iter()
            .map(|(name, ip)| format!("{ip}\t{name}\n"))
            .collect()
    }

    /// `resolv.conf`, if the guest's own name servers are these.
    pub fn resolv_conf(&self, own: &[IpAddr]) -> String {
        let servers = if self.servers.is_empty() {
            own
        } else {
            &self.servers
        };
        let mut text: String = servers.iter().map(|ip| format!("nameserver {ip}\n")).collect();
        for (keyword, words) in [("search", &self.search), ("options", &self.options)] {
            if !words.is_empty() {
                text.push_str(&format!("{keyword} {}\n", words.join(" ")));
            }
        }
        text
    }
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(' ').filter(|word| !word.is_empty())
}

fn address(key: &str, text: &str) -> Result<IpAddr> {
    text.parse()
        .map_err(|_| Error::Invalid(format!("{key}: {text:?} is no IP address")))
}

/// A name that is one word of its file.
fn plain(key: &str, text: &str) -> Result<String> {
    match !text.is_empty() && text.bytes().all(|b| b.is_ascii_graphic() && b != b'#') {
        true => Ok(text.to_owned()),
        false => Err(Error::Invalid(format!("{key}: {text:?} is no name"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(pairs: &[(&str, &str)]) -> Result<Option<Names>> {
        Names::of(
            &pairs
                .iter()
                .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
                .collect(),
        )
    }

    #[test]
    fn container_without_annotations_asks_for_nothing() {
        assert_eq!(names(&[("run.thaw.init", "true")]).unwrap(), None);
    }

    #[test]
    fn hosts_servers_and_search_domains_are_written() {
        let own = ["192.0.2.1".parse().unwrap()];
        let all = names(&[
            (HOSTS, "db 10.0.0.5\nsix fd00::5"),
            (DNS, "192.0.2.53 fd00::53"),
            (DNS_SEARCH, "a.test b.test"),
            (DNS_OPTIONS, "ndots:2 rotate"),
        ]);
        let all = all.unwrap().unwrap();
        assert_eq!(all.hosts(), "10.0.0.5\tdb\nfd00::5\tsix\n");
        let expected =
            "nameserver 192.0.2.53\nnameserver fd00::53\nsearch a.test b.test\noptions ndots:2 rotate\n";
        assert_eq!(all.resolv_conf(&own), expected);
        let search = names(&[(DNS_SEARCH, "a.test")]).unwrap().unwrap();
        assert_eq!(search.resolv_conf(&own), "nameserver 192.0.2.1\nsearch a.test\n");
    }

    #[test]
    fn values_that_would_break_the_files_are_refused() {
        for (key, value) in [
            (HOSTS, "db"),
            (HOSTS, "db 10.0.0"),
            (HOSTS, "d#b 10.0.0.1"),
            (DNS, "one"),
            (DNS_SEARCH, "a\nb"),
            (DNS_OPTIONS, "ndots:2\nnameserver"),
        ] {
            let refused = names(&[(key, value)]).unwrap_err();
            assert!(refused.to_string().contains(key), "{refused}");
        }
    }
}
