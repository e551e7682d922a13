//! A listening TCP socket and its connections: for the API over TCP, and for metrics.
//!
//! Invariants: there are never more connections than [`Most`] allows, in total and of one origin; a connection without room is closed and
//! counted.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::connection_set::{ACCEPT_RETRY, ConnectionSet};
use super::daemon::Daemon;

/// How long a peer may be silent before the kernel probes it, and how long sent data may stay unacknowledged.
const PEER_TIMEOUT: Duration = Duration::from_secs(60);
/// The part of an IPv6 address that identifies a host: a host may use any address of its /64.
const NETWORK: u128 = u128::MAX << 64;

/// Most connections at once.
#[derive(Clone, Copy, Debug)]
pub struct Most {
    pub in_all: usize,
    /// Of one IPv4 address, or of one /64 of IPv6.
    pub of_one: usize,
}

/// A listening TCP socket.
#[derive(Debug)]
pub struct Listener(TcpListener);

impl Listener {
    /// Listens at an address. Call it within a tokio runtime.
    pub async fn open(address: SocketAddr) -> std::io::Result<Listener> {
        TcpListener::bind(address).await.map(Listener)
    }

    /// Where it listens.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.0.local_addr()
    }

    /// Calls `serve` with each connection and its peer's address until `stopped`, then waits for the remaining connections.
    pub async fn serve<F: Future<Output = ()> + Send + 'static>(
        self,
        daemon: &Daemon,
        most: Most,
        mut stopped: watch::Receiver<()>,
        shutdown_timeout: Duration,
        serve: impl Fn(TcpStream, IpAddr) -> F,
    ) {
        let mut connections = ConnectionSet::new(most.in_all, most.of_one);
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
                    tokio::time::sleep(ACCEPT_RETRY).await;
                    continue;
                }
            };
            let origin = origin(address);
            if !connections.has_room(&origin) {
                // Closed without an answer: before a TLS handshake there is no way to send one.
                daemon.metrics.connection_refused();
            } else if let Err(e) = detect_dead_peer(&stream) {
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
        connections.finish(shutdown_timeout).await;
    }
}

/// The host that a connection comes from, as far as its address tells.
fn origin(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & NETWORK).into(),
        address => address,
    }
}

/// Makes the kernel notice a peer that is gone.
fn detect_dead_peer(stream: &TcpStream) -> std::io::Result<()> {
    use rustix::net::sockopt;
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, PEER_TIMEOUT)?;
    sockopt::set_tcp_user_timeout(stream, PEER_TIMEOUT.as_millis() as u32)?;
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
