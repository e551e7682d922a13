//! The network flags of `thaw run` and `thaw thaw`, and `thaw network`, which changes the policy of a running sandbox.

use clap::Args;
use thaw_network::policy::{Policy, parse_into};
use thaw_network::publish::{Port, PortError};
use thaw_protocol::api::{NetworkPolicy, PublishedPort};
use thaw_sandbox::error::{Error, ErrorKind};

use super::running::Owner;

/// Published ports, and the policy for connections of the container.
#[derive(Debug, Default, Args)]
pub struct NetworkArguments {
    /// Publish a port of the container at a port of the host; 0 is any free port
    #[arg(short, long, value_name = "[ADDRESS:]PORT:PORT[/udp]", value_parser = parse_port)]
    pub publish: Vec<PublishedPort>,
    /// Where the container may connect to: allow=NETWORK[:PORT,...][/tcp|udp|icmp] or deny=...; the first match decides;
    /// allow=DOMAIN or deny=DOMAIN, as in example.com or *.example.com; default=allow or default=deny for the rest
    #[arg(long, value_name = "RULE", value_parser = check_rule)]
    pub egress: Vec<String>,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  thaw network web allow=192.0.2.0/24:443/tcp default=deny\n  thaw network web allow=pypi.org 'allow=*.pythonhosted.org' default=deny\n  thaw network web default=allow"
)]
pub struct ChangeArguments {
    /// The sandbox: id, name, or the beginning of an id
    pub sandbox: String,
    /// The complete new policy: rules as for --egress of `thaw run`
    #[arg(required = true, value_name = "RULE", value_parser = check_rule)]
    pub rules: Vec<String>,
}

impl NetworkArguments {
    /// The policy of the flags; `None` without flags.
    pub(super) fn policy(&self) -> Result<Option<NetworkPolicy>, Error> {
        match self.egress.as_slice() {
            [] => Ok(None),
            rules => policy(rules).map(Some),
        }
    }
}

/// `thaw network`.
pub(super) async fn change(arguments: &ChangeArguments) -> Result<u8, Error> {
    let owner = Owner::find(&arguments.sandbox)?;
    let policy = policy(&arguments.rules)?;
    owner.client.set_network_policy(&owner.id, &policy).await?;
    Ok(0)
}

fn policy(rules: &[String]) -> Result<NetworkPolicy, Error> {
    read(rules).map_err(|e| Error::new(ErrorKind::Runtime, e))
}

fn parse_port(text: &str) -> Result<PublishedPort, String> {
    let port: Result<Port, PortError> = text.parse();
    port.map(PublishedPort::from).map_err(|e| e.to_string())
}

/// A rule of a flag.
fn check_rule(text: &str) -> Result<String, String> {
    read(&[text.to_owned()]).map(|_| text.to_owned())
}

fn read(rules: &[String]) -> Result<NetworkPolicy, String> {
    let mut policy = NetworkPolicy::default();
    for rule in rules {
        parse_into(&mut policy, rule)?;
    }
    Policy::new(policy.clone()).map_err(|e| e.to_string())?;
    Ok(policy)
}
