//! Probes whether a container is ready: whether one of its TCP ports accepts connections, or answers over HTTP.
//!
//! The kernel reports when the container listens on the port ([`listens`]), and the agent then connects to it
//! from within the container's network. A refused connection means that the port was closed again, so the probe
//! waits for the next report. In a container that has started already, localhost is tried first, because a socket
//! that listens already is not reported. Only a bad HTTP answer, and a connection that ends without one, are tried again
//! periodically, because no event announces that they would succeed. Invariant: a probe ends with the
//! container's first process or at its time limit, whatever the container does, and releases its resources. A
//! port of an `exec` counts like any other in the container's cgroup.

mod bpf;
pub mod http;
mod listens;
pub mod network;

use std::fmt::Display;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use thaw_protocol::agent::readiness::ExpectReadyRequest;
use tokio::time::{sleep, timeout};

use crate::error::{Error, Result};
use crate::reaper::{Child, ExitCode};
use http::Request;
use listens::ListenWatch;
use network::Network;

/// Limit for one connection and its answer: the process that accepted it may be gone.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Most addresses kept of one port. The oldest are dropped first.
const MAX_ADDRESSES: usize = 8;
/// After this many addresses that no longer listen, the next are tried once per period.
const MAX_CLOSED: u32 = 32;
/// Longest period.
const MAX_PERIOD: Duration = Duration::from_secs(60);

/// The result of a probe.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    Ready,
    /// The container's first process ended first.
    Exited(ExitCode),
    /// With the last problem seen.
    TimedOut(String),
}

/// A probe of a container.
#[derive(Debug)]
pub struct Probe {
    port: u16,
    request: Option<Request>,
    period: Duration,
    listens: ListenWatch,
    /// Addresses that may have been listened on before the watch began.
    earlier: Vec<IpAddr>,
}

/// The result of one connection.
enum Attempt {
    Good,
    /// The port is closed again.
    Closed,
    /// Perhaps reachable by another address; with the reason.
    Unreachable(String),
    /// With the reason.
    Bad(String),
}

impl Probe {
    /// Watches from now on whether the processes of a cgroup listen on the port. If they have started already, tries localhost too. Must be
    /// called within the runtime.
    pub fn new(request: &ExpectReadyRequest, cgroup: &Path, has_started: bool) -> Result<Self> {
        let port = u16::try_from(request.port).ok().filter(|port| *port != 0);
        let port = port.ok_or_else(|| Error::Invalid(format!("there is no TCP port {}", request.port)))?;
        let period = Duration::from_millis(request.period_ms.into());
        if period.is_zero() || period > MAX_PERIOD {
            return Err(Error::Invalid(format!(
                "a period is 1 to {} ms, not {}",
                MAX_PERIOD.as_millis(),
                request.period_ms
            )));
        }
        let request = request
            .http
            .as_ref()
            .map(|http| Request::new(&http.path, &http.host));
        Ok(Probe {
            port,
            request: request.transpose()?,
            period,
            listens: ListenWatch::watch(cgroup, port)?,
            earlier: match has_started {
                true => vec![Ipv6Addr::UNSPECIFIED.into()],
                false => Vec::new(),
            },
        })
    }

    /// Waits until the started container whose first process is `init` is ready, has ended, or `limit` has passed.
    pub async fn wait(mut self, init: &Child, limit: Duration) -> Result<Outcome> {
        let network = Network::of(init)?;
        let mut bad = None;
        tokio::select! {
            biased;
            code = init.wait() => return Ok(Outcome::Exited(code)),
            held = self.hold(&network, &mut bad) => return held.map(|()| Outcome::Ready),
            () = sleep(limit) => {}
        }
        let seen = bad.unwrap_or_else(|| network.describe_listening(self.port));
        Ok(Outcome::TimedOut(seen))
    }

    /// Waits until the probe succeeds. Keeps the last problem in `bad`.
    async fn hold(&mut self, network: &Network, bad: &mut Option<String>) -> Result<()> {
        let (mut addresses, mut closed) = (std::mem::take(&mut self.earlier), 0);
        loop {
            tokio::select! {
                told = self.listens.next() => told?.into_iter().for_each(|a| note(&mut addresses, a)),
                // The port is open, and its answer may become good.
                () = sleep(self.period), if !addresses.is_empty() => {}
            }
            let mut open = Vec::new();
            for address in addresses {
                match attempt(network, address, self.port, self.request.as_ref()).await? {
                    Attempt::Good => return Ok(()),
                    Attempt::Closed => closed += 1,
                    Attempt::Unreachable(how) | Attempt::Bad(how) => {
                        *bad = Some(how);
                        open.push(address);
                    }
                }
            }
            addresses = open;
            if closed >= MAX_CLOSED {
                sleep(self.period).await;
            }
        }
    }
}

/// Keeps each address once, the newest last.
fn note(addresses: &mut Vec<IpAddr>, address: IpAddr) {
    addresses.retain(|there| *there != address);
    addresses.push(address);
    if addresses.len() > MAX_ADDRESSES {
        addresses.remove(0);
    }
}

/// Connects to a listening address, and sends the request if there is one.
async fn attempt(
    network: &Network,
    listened: IpAddr,
    port: u16,
    request: Option<&Request>,
) -> Result<Attempt> {
    let mut last = Attempt::Closed;
    for address in reached_at(listened) {
        let address = SocketAddr::new(address, port);
        let how = |how: &dyn Display| format!("{address} {how}");
        let socket = network.socket(&address).await?;
        let asked = timeout(TIMEOUT, async {
            let stream = match socket.connect(address).await {
                // On a closed port, a socket can be given that very port as its own, and connect to itself.
                Ok(stream) if stream.local_addr().is_ok_and(|own| own == address) => return Attempt::Closed,
                Ok(stream) => stream,
                Err(e) if e.kind() == ErrorKind::ConnectionRefused => return Attempt::Closed,
                Err(e) => return Attempt::Unreachable(how(&format_args!("cannot be connected to: {e}"))),
            };
            let (Some(request), mut stream) = (request, stream) else {
                return Attempt::Good;
            };
            match http::ask(&mut stream, &request.get(port)).await {
                Ok((200..400, _)) => Attempt::Good,
                Ok((status, _)) => {
                    Attempt::Bad(how(&format_args!("answered {status} to GET {}", request.path())))
                }
                Err(e) => Attempt::Bad(how(&e)),
            }
        });
        let silent = |_| {
            Attempt::Bad(how(&format_args!(
                "did not answer within {} s",
                TIMEOUT.as_secs()
            )))
        };
        match asked.await.unwrap_or_else(silent) {
            Attempt::Closed => {}
            unreachable @ Attempt::Unreachable(_) => last = unreachable,
            told => return Ok(told),
        }
    }
    Ok(last)
}

/// The addresses at which a listening address is reached from the same network.
fn reached_at(listened: IpAddr) -> Vec<IpAddr> {
    match listened.to_canonical() {
        IpAddr::V4(four) if four.is_unspecified() => vec![Ipv4Addr::LOCALHOST.into()],
        // It usually accepts IPv4 too, which may be the only protocol there is.
        IpAddr::V6(six) if six.is_unspecified() => {
            vec![Ipv6Addr::LOCALHOST.into(), Ipv4Addr::LOCALHOST.into()]
        }
        other => vec![other],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wildcard_listener_is_reached_at_localhost() {
        let at = |text: &str| -> Vec<String> {
            reached_at(text.parse().unwrap())
                .iter()
                .map(ToString::to_string)
                .collect()
        };
        assert_eq!(at("0.0.0.0"), ["127.0.0.1"]);
        assert_eq!(at("::"), ["::1", "127.0.0.1"]);
        assert_eq!(at("::ffff:0.0.0.0"), ["127.0.0.1"]);
        assert_eq!(at("::ffff:10.0.0.2"), ["10.0.0.2"]);
        assert_eq!(at("fd07::2"), ["fd07::2"]);
    }

    #[test]
    fn addresses_are_kept_once_and_bounded() {
        let mut addresses = Vec::new();
        for n in (0..100u8).chain([97]) {
            note(&mut addresses, Ipv4Addr::new(10, 0, 0, n).into());
        }
        let last: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        assert_eq!(last.len(), MAX_ADDRESSES);
        assert_eq!(last[MAX_ADDRESSES - 3..], ["10.0.0.98", "10.0.0.99", "10.0.0.97"]);
    }
}
