//! A TCP socket that listens, and the connections that come there: of the API ([`super::tcp`]) and of metrics ([`super::scrape`]).
//!
//! Invariants: there are never more connections than [`Most`] says, in all and of one origin; one for which there is no room is
//! closed and counted.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::daemon::Daemon;
use super::server::{ACCEPT_AGAIN, Connections, linger};

/// After so long of silence a peer is asked whether it lives, and how long what is sent may stay unacknowledged.
const ASKED: Duration = Duration::from_secs(60);
/// The part of an IPv6 address that says whose it is: a host may take any address of its network, which is a /64.
const NETWORK: u128 = u128::MAX << 64;

/// Most connections at once.
#[derive(Clone, Copy, Debug)]
pub struct Most {
    pub in_all: usize,
    /// Of one IPv4 address, or of one /64 of IPv6.
    pub of_one: usize,
}

/// A TCP socket that listens.
#[derive(Debug)]
pub struct Listener(TcpListener);

impl Listener {
    /// Listens at an address. Within a tokio runtime.
    pub async fn open(address: SocketAddr) -> std::io::Result<Listener> {
        TcpListener::bind(address).await.map(Listener)
    }

    /// Where it listens.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.0.local_addr()
    }

    /// Has `serve` serve each connection until `stopped`, and then waits as long as those that are served may take. `serve` is told
    /// the peer's address.
    pub async fn serve<F: Future<Output = ()> + Send + 'static>(
        self,
        daemon: &Daemon,
        most: Most,
        mut stopped: watch::Receiver<()>,
        lingers: Duration,
        serve: impl Fn(TcpStream, IpAddr) -> F,
    ) {
        let mut connections = Connections::new(most.in_all, most.of_one);
        loop {
            let accepted = tokio::select! {
                accepted = self.0.accept() => accepted,
                _ = stopped.changed() => break,
            };
            connections.reap();
            let (stream, address) = match accepted {
                Ok((stream, from)) => (stream, from.ip().to_canonical()),
                Err(e) => {
                    tracing::warn!("cannot accept a connection: {e}");
                    tokio::time::sleep(ACCEPT_AGAIN).await;
                    continue;
                }
            };
            let origin = origin(address);
            if !connections.has_room(&origin) {
                // It is closed without a word: over TLS there is no way to say one.
                daemon.metrics.connection_refused();
            } else if let Err(e) = patient(&stream) {
                tracing::debug!(%address, "a connection was not served: {e}");
            } else {
                let (serving, connected) = (serve(stream, address), daemon.metrics.connected());
                connections.add(origin, async move {
                    serving.await;
                    drop(connected);
                });
            }
        }
        drop(self.0);
        linger(connections, lingers).await;
    }
}

/// What tells one host's connections from another's.
fn origin(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & NETWORK).into(),
        address => address,
    }
}

/// Has the kernel find out that a peer is gone.
fn patient(stream: &TcpStream) -> std::io::Result<()> {
    use rustix::net::sockopt;
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, ASKED)?;
    sockopt::set_tcp_user_timeout(stream, ASKED.as_millis() as u32)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_one_ipv6_network_are_one_origin() {
        let of = |text: &str| origin(text.parse().unwrap());
        assert_eq!(of("2001:db8:1:2::1"), of("2001:db8:1:2:ffff:ffff:ffff:ffff"));
        assert_ne!(of("2001:db8:1:2::1"), of("2001:db8:1:3::1"));
        assert_ne!(of("192.0.2.1"), of("192.0.2.2"));
        assert_eq!(of("::ffff:192.0.2.1"), of("192.0.2.1"));
        assert_ne!(of("::ffff:192.0.2.1"), of("::ffff:192.0.2.2"));
    }
}
