//! The guest's loopback, for the host: whoever connects to [`FORWARD_PORT`] says a port, and talks from then on to what
//! listens there on this guest's `localhost`, of TCP.
//!
//! Invariant: at most [`MOST`] connections are served at once, and others wait; one whose port nobody listens on is closed.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, copy_bidirectional};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use crate::listener::{Accepting, Connection};
use crate::warning;

/// Connections served at once.
const MOST: usize = 64;
/// How long a host that has connected may take to say which port it wants.
const PATIENCE: Duration = Duration::from_secs(10);

/// Serves for ever.
pub async fn serve(listener: Accepting) {
    let room = Arc::new(Semaphore::new(MOST));
    loop {
        // It is never closed.
        let Ok(place) = room.clone().acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok(connection) => {
                tokio::spawn(async move {
                    // Whoever is refused sees the end of the connection.
                    let _ = forward(connection).await;
                    drop(place);
                });
            }
            Err(e) => {
                warning!("forwarding: accept: {e}");
                // Short of descriptors or memory: others may give some back.
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn forward(mut connection: Box<dyn Connection>) -> io::Result<()> {
    let port = tokio::time::timeout(PATIENCE, connection.read_u16()).await??;
    let mut to = connect(port).await?;
    copy_bidirectional(&mut connection, &mut to).await.map(drop)
}

/// IPv4 first, as `localhost` is.
async fn connect(port: u16) -> io::Result<TcpStream> {
    let v4 = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    match TcpStream::connect(v4).await {
        Ok(stream) => Ok(stream),
        Err(_) => TcpStream::connect(SocketAddr::from((Ipv6Addr::LOCALHOST, port))).await,
    }
}
