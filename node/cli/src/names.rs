//! The flags of `thaw run` for the container's `/etc/hosts` and `/etc/resolv.conf`.

use std::net::IpAddr;

use clap::Args;
use thaw_sandbox::container::names::{ExtraHost, Names, ResolverOption, SearchDomain, parse_server};

/// Names and name servers of a container.
#[derive(Debug, Default, Args)]
pub struct NameArguments {
    /// Add a line to /etc/hosts
    #[arg(long, value_name = "NAME:ADDRESS")]
    pub add_host: Vec<ExtraHost>,
    /// Use this name server instead of the network's. The policy of --egress applies to it
    #[arg(long, value_name = "ADDRESS", value_parser = parse_server)]
    pub dns: Vec<IpAddr>,
    /// Look up names in this domain too
    #[arg(long, value_name = "DOMAIN")]
    pub dns_search: Vec<SearchDomain>,
    /// Set an option of the resolver, such as ndots:2
    #[arg(long, value_name = "OPTION")]
    pub dns_option: Vec<ResolverOption>,
}

impl NameArguments {
    pub(super) fn names(&self) -> Names {
        Names {
            hosts: self.add_host.clone(),
            servers: self.dns.clone(),
            search: self.dns_search.clone(),
            options: self.dns_option.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::{Cli, Command};

    #[test]
    fn flags_for_names_reach_the_container() {
        let line = [
            "thaw",
            "run",
            "--init",
            "--add-host",
            "db:192.0.2.7",
            "--dns",
            "fd00::53",
            "--dns-search",
            "a.example",
            "--dns-option",
            "ndots:2",
            "x",
        ];
        let Command::Run(run) = Cli::try_parse_from(line).unwrap().command else {
            panic!("not run");
        };
        let names = run.names.names();
        assert_eq!(names.hosts, ["db:192.0.2.7".parse().unwrap()]);
        assert_eq!(names.servers, ["fd00::53".parse::<IpAddr>().unwrap()]);
        assert_eq!(names.search, ["a.example".parse().unwrap()]);
        assert_eq!(names.options, ["ndots:2".parse().unwrap()]);
        assert!(run.init);
    }

    #[test]
    fn wrong_values_are_named_with_flag_and_form() {
        for (flag, value, form) in [
            ("--add-host", "db", "NAME:ADDRESS"),
            ("--dns", "one.example", "192.0.2.53"),
            ("--dns-search", "a b", "corp.example"),
            ("--dns-option", "a b", "ndots:2"),
        ] {
            let refused = Cli::try_parse_from(["thaw", "run", flag, value, "x"])
                .unwrap_err()
                .to_string();
            assert!(
                [flag, value, form].iter().all(|part| refused.contains(part)),
                "{refused}"
            );
        }
    }
}
