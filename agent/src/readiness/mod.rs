//! Whether a container is ready: whether a TCP port it listens on takes connections, or answers over HTTP.
//!
//! Nothing is polled for. The kernel tells when the port is listened on ([`listens`]); then it is connected to from within
//! the container's network. Who refuses the connection has closed the port, so the next is waited for. Only an answer over
//! HTTP that is not good, and a connection that ends without one, have no event that says when to ask again: the period is
//! for those. Invariant: a probe ends with its container's first process, or when its time is over, whatever the container
//! does; what it had goes with it. What only an `exec` listens on counts like anything else in the container's cgroup.

mod bpf;
mod http;
mod listens;
mod network;

use std::fmt::Display;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use thaw_protocol::agent::readiness::ExpectReadyRequest;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use crate::error::{Error, Result};
use crate::reaper::{Child, ExitCode};
use http::{Question, Said};
use listens::Listens;
use network::Network;

/// Longest that is waited for one connection and its answer: who accepted it may be gone.
const PATIENCE: Duration = Duration::from_secs(10);
/// Most addresses that are kept of one port; the oldest go first.
const MOST_ADDRESSES: usize = 8;
/// After so many addresses where nobody listened any more, the next are tried once a period.
const MOST_CLOSED: u32 = 32;
/// Longest period.
const LONGEST_PERIOD: Duration = Duration::from_secs(60);

/// What became of a probe.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    Ready,
    /// The container's first process ended before.
    Exited(ExitCode),
    /// And what was seen last.
    TimedOut(String),
}

/// A probe of a container that is not started yet.
#[derive(Debug)]
pub struct Expected {
    port: u16,
    question: Option<Question>,
    period: Duration,
    listens: Listens,
}

/// What came of one connection.
enum Attempt {
    Good,
    /// Nobody listens there any more.
    Closed,
    /// Perhaps by another address. And why.
    Unreachable(String),
    /// And how.
    Bad(String),
}

impl Expected {
    /// From now on it is seen what the processes of a cgroup listen on. Within the runtime.
    pub fn new(request: &ExpectReadyRequest, cgroup: &Path) -> Result<Self> {
        let port = u16::try_from(request.port).ok().filter(|port| *port != 0);
        let port = port.ok_or_else(|| Error::Invalid(format!("there is no TCP port {}", request.port)))?;
        let period = Duration::from_millis(request.period_ms.into());
        if period.is_zero() || period > LONGEST_PERIOD {
            return Err(Error::Invalid(format!(
                "a period is 1 to {} ms, not {}",
                LONGEST_PERIOD.as_millis(),
                request.period_ms
            )));
        }
        let question = request
            .http
            .as_ref()
            .map(|http| Question::new(&http.path, &http.host));
        Ok(Expected {
            port,
            question: question.transpose()?,
            period,
            listens: Listens::watch(cgroup, port)?,
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
        let seen = bad.unwrap_or_else(|| network.what_listens(self.port));
        Ok(Outcome::TimedOut(seen))
    }

    /// Waits until the probe holds; what was bad last is in `bad`.
    async fn hold(&mut self, network: &Network, bad: &mut Option<String>) -> Result<()> {
        let (mut addresses, mut closed) = (Vec::new(), 0);
        loop {
            tokio::select! {
                told = self.listens.next() => told?.into_iter().for_each(|a| note(&mut addresses, a)),
                // They listen there, and what they answer may become good.
                () = sleep(self.period), if !addresses.is_empty() => {}
            }
            let mut open = Vec::new();
            for address in addresses {
                match attempt(network, address, self.port, self.question.as_ref()).await? {
                    Attempt::Good => return Ok(()),
                    Attempt::Closed => closed += 1,
                    Attempt::Unreachable(how) | Attempt::Bad(how) => {
                        *bad = Some(how);
                        open.push(address);
                    }
                }
            }
            addresses = open;
            if closed >= MOST_CLOSED {
                sleep(self.period).await;
            }
        }
    }
}

/// Keeps each address once, the newest last.
fn note(addresses: &mut Vec<IpAddr>, address: IpAddr) {
    addresses.retain(|there| *there != address);
    addresses.push(address);
    if addresses.len() > MOST_ADDRESSES {
        addresses.remove(0);
    }
}

/// Connects to who listens on an address, and asks if there is a question.
async fn attempt(
    network: &Network,
    listened: IpAddr,
    port: u16,
    question: Option<&Question>,
) -> Result<Attempt> {
    let mut last = Attempt::Closed;
    for address in reached_at(listened) {
        let address = SocketAddr::new(address, port);
        let how = |how: &dyn Display| format!("{address} {how}");
        let socket = network.socket(&address).await?;
        let asked = timeout(PATIENCE, async {
            let stream = match socket.connect(address).await {
                // Where nobody listens a socket may be given that very port, and so reach itself.
                Ok(stream) if stream.local_addr().is_ok_and(|own| own == address) => return Attempt::Closed,
                Ok(stream) => stream,
                Err(e) if e.kind() == ErrorKind::ConnectionRefused => return Attempt::Closed,
                Err(e) => return Attempt::Unreachable(how(&format_args!("cannot be connected to: {e}"))),
            };
            let Some(question) = question else {
                return Attempt::Good;
            };
            match ask(stream, question, port).await {
                Ok(200..400) => Attempt::Good,
                Ok(status) => {
                    Attempt::Bad(how(&format_args!("answered {status} to GET {}", question.path())))
                }
                Err(e) => Attempt::Bad(how(&e)),
            }
        });
        let silent = |_| {
            Attempt::Bad(how(&format_args!(
                "did not answer within {} s",
                PATIENCE.as_secs()
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

/// The status of the answer, or what there was instead.
async fn ask(mut stream: TcpStream, question: &Question, port: u16) -> Result<u16, &'static str> {
    let broke = |_| "broke the connection off";
    stream.write_all(&question.request(port)).await.map_err(broke)?;
    let mut answer = Vec::with_capacity(1024);
    loop {
        let read = stream.read_buf(&mut answer).await.map_err(broke)?;
        match http::said(&answer) {
            Said::Status(status) => return Ok(status),
            Said::Nonsense => return Err("answered something that is not HTTP"),
            Said::Unfinished if read == 0 => return Err("closed the connection without an answer"),
            Said::Unfinished if answer.len() > http::MOST => return Err("did not come to a status"),
            Said::Unfinished => {}
        }
    }
}

/// Where from the same network one reaches who listens on this.
fn reached_at(listened: IpAddr) -> Vec<IpAddr> {
    match listened.to_canonical() {
        IpAddr::V4(four) if four.is_unspecified() => vec![Ipv4Addr::LOCALHOST.into()],
        // IPv4 too, most often; it may be all there is.
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
    fn whoever_listens_everywhere_is_reached_at_home() {
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
    fn few_addresses_are_kept_each_once() {
        let mut addresses = Vec::new();
        for n in (0..100u8).chain([97]) {
            note(&mut addresses, Ipv4Addr::new(10, 0, 0, n).into());
        }
        let last: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        assert_eq!(last.len(), MOST_ADDRESSES);
        assert_eq!(
            last[MOST_ADDRESSES - 3..],
            ["10.0.0.98", "10.0.0.99", "10.0.0.97"]
        );
    }
}
