//! `thaw port`: the published ports of a sandbox.

use clap::Args;
use thaw_protocol::api::PublishedPort;
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::paths::Paths;
use thaw_sandbox::state::RunDirectory;

use super::{Global, print};

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  thaw port web\n  curl http://$(thaw port web 80)/")]
pub struct PortArguments {
    /// The sandbox: id, name, or the beginning of an id
    pub sandbox: String,
    /// Print only the address of the host for this port of the guest
    #[arg(value_name = "PORT[/PROTOCOL]", value_parser = parse_port)]
    pub port: Option<(u16, String)>,
}

fn parse_port(text: &str) -> Result<(u16, String), String> {
    let (port, protocol) = text.split_once('/').unwrap_or((text, "tcp"));
    match (port.parse(), protocol) {
        (Ok(port), "tcp" | "udp") => Ok((port, protocol.into())),
        _ => Err("a port, or with a protocol, such as 80 or 53/udp".into()),
    }
}

pub(super) fn port(arguments: &PortArguments, global: &Global) -> Result<u8, Error> {
    let run = RunDirectory::open(&Paths::from_env().run)?;
    let record = run.find(&arguments.sandbox)?;
    let published = record.network.map(|n| n.published).unwrap_or_default();
    let wanted = arguments.port.as_ref();
    let chosen: Vec<&PublishedPort> = published
        .iter()
        .filter(|p| wanted.is_none_or(|(port, protocol)| p.guest == *port && p.protocol == *protocol))
        .collect();
    if let (Some((port, protocol)), true) = (wanted, chosen.is_empty()) {
        let what = format!("sandbox {} does not publish {port}/{protocol}", record.id);
        let remedy = format!("`thaw port {}` lists what it publishes", arguments.sandbox);
        return Err(Error::new(ErrorKind::Runtime, what).remedy(remedy));
    }
    if global.json {
        print(&serde_json::json!(chosen).to_string());
        return Ok(0);
    }
    for published in chosen {
        let address = address(published);
        print(&match wanted {
            Some(_) => address,
            None => format!("{}/{} -> {address}", published.guest, published.protocol),
        });
    }
    Ok(0)
}

/// Where the host listens. An IPv6 address is in brackets.
fn address(published: &PublishedPort) -> String {
    match published.address.as_deref() {
        Some(address) if address.contains(':') => format!("[{address}]:{}", published.host),
        address => format!("{}:{}", address.unwrap_or("0.0.0.0"), published.host),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_of_tcp_unless_it_names_a_protocol() {
        assert_eq!(parse_port("80"), Ok((80, "tcp".into())));
        assert_eq!(parse_port("53/udp"), Ok((53, "udp".into())));
        for wrong in ["", "http", "80/sctp", "70000", "80/"] {
            assert!(parse_port(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn an_address_is_one_that_clients_take() {
        let mut published = PublishedPort {
            host: 49153,
            guest: 80,
            protocol: "tcp".into(),
            ..PublishedPort::default()
        };
        assert_eq!(address(&published), "0.0.0.0:49153");
        published.address = Some("::1".into());
        assert_eq!(address(&published), "[::1]:49153");
    }
}
