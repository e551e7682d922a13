//! Forwards the host's connections to this guest's `localhost`. The host connects to [`FORWARD_PORT`], sends a TCP port, and is then
//! connected to the program that listens on that port.
//!
//! Invariant: at most [`MAX_CONNECTIONS`] connections are served at once, and others wait. A connection whose port refuses
//! is closed.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, copy_bidirectional};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use crate::listener::{Accepting, Connection};
use crate::warning;

/// Most connections served at once.
const MAX_CONNECTIONS: usize = 64;
/// Limit for a connected host to send the port.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Serves forever.
pub async fn serve(listener: Accepting) {
    let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        // The semaphore is never closed.
        let Ok(place) = room.clone().acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok(connection) => {
                tokio::spawn(async move {
                    // On failure the host sees that the connection closes.
                    let _ = forward(connection).await;
                    drop(place);
                });
            }
            Err(e) => {
                warning!("forwarding: accept: {e}");
                // Descriptors or memory are short; others may release some.
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn forward(mut connection: Box<dyn Connection>) -> io::Result<()> {
    let port = tokio::time::timeout(TIMEOUT, connection.read_u16()).await??;
    let mut to = connect(port).await?;
    copy_bidirectional(&mut connection, &mut to).await.map(drop)
}

/// Tries IPv4 first, as `localhost` resolves.
async fn connect(port: u16) -> io::Result<TcpStream> {
    let v4 = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    match TcpStream::connect(v4).await {
        Ok(stream) => Ok(stream),
        Err(_) => TcpStream::connect(SocketAddr::from((Ipv6Addr::LOCALHOST, port))).await,
    }
}
