//! Carries the TCP connections of guests whose network policy has domains, if they ask for a host that the policy allows.
//!
//! | module | contents |
//! |---|---|
//! | here | one relay for each such sandbox, for the connections that its slot's rules hand over |
//! | [`first_bytes`] | which host a connection asks for |
//!
//! The slot hands over each connection to an address that only a name allows. The relay connects to that address from within the slot's
//! namespace, reads what the guest sends first, and carries both directions unless it must refuse. A refused connection, and one that fails
//! or loses its relay, ends with a reset, so that nothing cut off looks complete.
//!
//! Invariants: unless the server speaks first, no byte of a guest reaches it before the name is checked; connections of a guest and of all
//! guests, what is kept of each, and the time until its name is known are bounded; a guest occupies one thread for blocking work at most.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use rustix::net::sockopt;
use thaw_network::Connector;
use thaw_network::names::Names;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{Mutex, Semaphore};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::timeout;

use crate::blocking::blocking;
use crate::dns::places::Places;
use crate::error::{Error, ErrorKind};

pub mod first_bytes;
#[cfg(test)]
mod test_hello;

/// Most connections of one guest.
const MOST_OF_A_GUEST: usize = 256;
/// Connections of all guests. Each takes two descriptors, 64 KiB at most, and what the kernel keeps ([`KERNEL_BUFFER`]).
static ALL: Semaphore = Semaphore::const_new(2048);
/// Limit for the server to accept.
const CONNECT_LIMIT: Duration = Duration::from_secs(30);
/// Limit for the guest, or on some ports the server, to send something that says what the connection is.
const OPENING_LIMIT: Duration = Duration::from_secs(60);
/// Most pieces in which a guest may send that, as all bytes are read again with each.
const MOST_PIECES: usize = 64;
const PIECE: usize = 4096;
/// What is kept of each direction.
const BUFFER: usize = 16 << 10;
/// What the kernel keeps for each socket and direction, which it doubles, but no more than `net.core.rmem_max` and `wmem_max`. By itself it
/// would keep several MiB for a guest that does not read.
const KERNEL_BUFFER: usize = 256 << 10;
/// Pause after a failure of the listening socket.
const PAUSE: Duration = Duration::from_millis(100);
/// A peer that is gone is noticed after this time without packets, and this many questions.
const ALIVE: Duration = Duration::from_secs(60);
const QUESTIONS: u32 = 4;
/// Ports on which a client speaks first, and by TLS or HTTP alone.
const WEB: [u16; 2] = [80, 443];

/// Where a guest may connect to.
#[async_trait]
pub(crate) trait Gate: Send + Sync {
    /// Whether a name may lead to this address.
    fn reaches(&self, address: Ipv4Addr) -> bool;
    /// Whether the policy in force allows a name: in lower case, without a dot at its end.
    async fn allows(&self, name: &str) -> Result<bool, Error>;
    /// A new socket in the network of the slot.
    async fn socket(&self) -> Result<TcpSocket, Error>;
    /// Counts a connection that was refused.
    fn count_refused(&self);
}

/// The gate of a slot.
#[derive(Debug)]
pub(crate) struct SlotGate {
    pub names: Names,
    pub connector: Arc<Connector>,
}

#[async_trait]
impl Gate for SlotGate {
    fn reaches(&self, address: Ipv4Addr) -> bool {
        self.names.may_lead_to(address)
    }

    async fn allows(&self, name: &str) -> Result<bool, Error> {
        let (names, name) = (self.names.clone(), name.to_owned());
        // A change of the policy has it locked for longer.
        blocking(move || Ok(names.allows_connection(&name))).await
    }

    async fn socket(&self) -> Result<TcpSocket, Error> {
        let connector = self.connector.clone();
        let socket = blocking(move || Ok(connector.socket()?)).await?;
        Ok(TcpSocket::from_std_stream(socket))
    }

    fn count_refused(&self) {
        self.names.count_refused_connection();
    }
}

/// Carries the connections of one guest until it is dropped, which ends them.
#[derive(Debug)]
pub(crate) struct Relay(AbortHandle);

impl Drop for Relay {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Relay {
    /// Carries the connections that arrive at this socket, which does not block. Must be called within the runtime.
    ///
    /// # Errors
    /// The socket cannot be registered.
    pub fn start(listener: std::net::TcpListener, gate: impl Gate + 'static) -> Result<Relay, Error> {
        let listener = TcpListener::from_std(listener).map_err(|e| {
            Error::new(
                ErrorKind::NetworkUnavailable,
                format!("cannot wait for connections of a guest: {e}"),
            )
        })?;
        let carrying = Carrying {
            gate: Arc::new(gate),
            places: Arc::new(Places::among(&ALL)),
            gate_turn: Arc::default(),
        };
        Ok(Relay(tokio::spawn(carrying.serve(listener)).abort_handle()))
    }
}

#[derive(Clone)]
struct Carrying {
    gate: Arc<dyn Gate>,
    places: Arc<Places>,
    /// Held while the gate is asked.
    gate_turn: Arc<Mutex<()>>,
}

impl Carrying {
    async fn serve(self, listener: TcpListener) {
        // Dropped with this future, so that no connection outlives the relay.
        let mut carried = JoinSet::new();
        loop {
            while carried.try_join_next().is_some() {}
            if carried.len() >= MOST_OF_A_GUEST {
                // The next ones wait in the kernel, which has a bound for them.
                carried.join_next().await;
                continue;
            }
            match listener.accept().await {
                Ok((client, _)) => {
                    let carrying = self.clone();
                    carried.spawn(async move { carrying.carry(client).await });
                }
                Err(e) => {
                    tracing::debug!("cannot accept a connection of a guest: {e}");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }

    async fn carry(&self, client: TcpStream) {
        let Ok(to) = sockopt::ip_original_dst(&client) else {
            return;
        };
        if let Err(e) = self.carry_to(client, to).await {
            tracing::debug!(%to, "a connection of a guest ended: {e}");
        }
    }

    async fn carry_to(&self, mut client: TcpStream, to: SocketAddrV4) -> io::Result<()> {
        reset_when_closed(&client, true)?;
        let Some(_place) = self.places.take() else {
            return Err(io::Error::other("the node carries as many as it can"));
        };
        if !self.gate.reaches(*to.ip()) {
            return Err(self.refused("no name may lead to its address"));
        }
        let socket = {
            let _turn = self.gate_turn.lock().await;
            self.gate.socket().await.map_err(io::Error::other)?
        };
        let mut server = timeout(CONNECT_LIMIT, socket.connect(to.into())).await??;
        reset_when_closed(&server, true)?;
        for stream in [&client, &server] {
            set_up(stream)?;
        }
        let opening = self.opening(&mut client, &server, WEB.contains(&to.port()));
        let opening = timeout(OPENING_LIMIT, opening).await??;
        server.write_all(&opening).await?;
        drop(opening);
        tokio::io::copy_bidirectional_with_sizes(&mut client, &mut server, BUFFER, BUFFER).await?;
        reset_when_closed(&client, false)?;
        reset_when_closed(&server, false)
    }

    /// What the guest sends first, once its name is checked; nothing if the server speaks first.
    async fn opening(&self, client: &mut TcpStream, server: &TcpStream, is_web: bool) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let (mut piece, mut byte) = ([0; PIECE], [0; 1]);
        for _ in 0..MOST_PIECES {
            let length = tokio::select! {
                // What the guest has sent is checked, whatever the server sends.
                biased;
                length = client.read(&mut piece) => length?,
                length = server.peek(&mut byte), if bytes.is_empty() && !is_web => match length? {
                    0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                    _ => return Ok(bytes),
                },
            };
            if length == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            bytes.extend_from_slice(&piece[..length]);
            let Some(opening) = first_bytes::read(&bytes, is_web).map_err(|why| self.refused(why))? else {
                continue;
            };
            let Some(name) = opening.name else {
                return Ok(opening.bytes);
            };
            let _turn = self.gate_turn.lock().await;
            return match self.gate.allows(&name).await.map_err(io::Error::other)? {
                true => Ok(opening.bytes),
                false => Err(self.refused("its host is not allowed")),
            };
        }
        Err(self.refused("it begins in too many pieces"))
    }

    fn refused(&self, why: impl ToString) -> io::Error {
        self.gate.count_refused();
        io::Error::new(io::ErrorKind::PermissionDenied, why.to_string())
    }
}

fn reset_when_closed(stream: &TcpStream, reset: bool) -> io::Result<()> {
    Ok(sockopt::set_socket_linger(
        stream.as_fd(),
        reset.then_some(Duration::ZERO),
    )?)
}

/// Has the kernel notice that the peer is gone, send small pieces at once, and bound what it keeps.
fn set_up(stream: &TcpStream) -> io::Result<()> {
    sockopt::set_socket_recv_buffer_size(stream.as_fd(), KERNEL_BUFFER)?;
    sockopt::set_socket_send_buffer_size(stream.as_fd(), KERNEL_BUFFER)?;
    sockopt::set_tcp_nodelay(stream.as_fd(), true)?;
    sockopt::set_socket_keepalive(stream.as_fd(), true)?;
    sockopt::set_tcp_keepidle(stream.as_fd(), ALIVE)?;
    sockopt::set_tcp_keepintvl(stream.as_fd(), ALIVE)?;
    Ok(sockopt::set_tcp_keepcnt(stream.as_fd(), QUESTIONS)?)
}

#[cfg(test)]
#[path = "relay_test.rs"]
mod tests;
