//! Forwards connections to a pod's `localhost` on the host to the guest's `localhost`.
//!
//! Invariant: once the forwarder has ended, it holds no resource of the pod.

use std::io;
use std::net::TcpListener as StdListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use thaw_network::pod;
use thaw_protocol::handshake::FORWARD_PORT;
use tokio::io::{AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::Semaphore;
use tokio::task::{JoinHandle, JoinSet};

use crate::handshake;

/// Maximum number of connections at once; others wait.
const MOST: usize = 32;
/// How long a guest may take to accept a connection.
const PATIENCE: Duration = Duration::from_secs(10);

/// A forwarder. It runs until it is dropped.
#[derive(Debug)]
pub(super) struct Loopback(JoinHandle<()>);

impl Loopback {
    /// Forwards connections to `listener` to the guest behind this vsock socket. Must be called within the runtime.
    pub(super) fn bring(listener: StdListener, vsock: PathBuf) -> io::Result<Loopback> {
        listener.set_nonblocking(true)?;
        let listener = TcpListener::from_std(listener)?;
        Ok(Loopback(tokio::spawn(serve(listener, vsock))))
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn serve(listener: TcpListener, vsock: PathBuf) {
    let (room, vsock) = (Arc::new(Semaphore::new(MOST)), Arc::new(vsock));
    // Dropping the set ends its connections.
    let mut connections = JoinSet::new();
    loop {
        // The semaphore is never closed.
        let Ok(place) = room.clone().acquire_owned().await else {
            return;
        };
        while connections.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((connection, _)) => {
                let vsock = vsock.clone();
                connections.spawn(async move {
                    let port = pod::original_port(&connection);
                    let brought = async { bring(connection, port?, &vsock).await };
                    if let Err(e) = brought.await {
                        tracing::debug!("a connection to a pod's localhost: {e}");
                    }
                    drop(place);
                });
            }
            Err(e) => {
                tracing::warn!("a pod's localhost: {e}");
                // Short of descriptors or memory: others may free some.
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn bring(mut connection: TcpStream, port: u16, vsock: &Path) -> io::Result<()> {
    let vsock = vsock.to_owned();
    let connect = move || handshake::connect(&vsock, FORWARD_PORT, PATIENCE);
    let guest = tokio::task::spawn_blocking(connect)
        .await
        .map_err(io::Error::other)??;
    guest.set_nonblocking(true)?;
    let mut guest = UnixStream::from_std(guest)?;
    guest.write_u16(port).await?;
    copy_bidirectional(&mut connection, &mut guest).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;

    #[tokio::test]
    async fn the_guest_is_told_the_port_and_then_has_the_connection() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vsock.sock");
        let vmm = UnixListener::bind(&path).unwrap();
        let guest = std::thread::spawn(move || {
            let (mut stream, _) = vmm.accept().unwrap();
            let mut line = [0; 13];
            stream.read_exact(&mut line).unwrap();
            assert_eq!(&line, b"CONNECT 1025\n");
            stream.write_all(b"OK 7\n").unwrap();
            let mut said = [0; 6];
            stream.read_exact(&mut said).unwrap();
            assert_eq!(said, *b"\x1f\x90ping");
            stream.write_all(b"pong").unwrap();
        });
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (connection, _) = listener.accept().await.unwrap();
        client.write_all(b"ping").await.unwrap();
        let brought = tokio::spawn(async move { bring(connection, 8080, &path).await });
        let mut answer = String::new();
        tokio::io::AsyncReadExt::read_to_string(&mut client, &mut answer)
            .await
            .unwrap();
        assert_eq!(answer, "pong");
        drop(client);
        brought.await.unwrap().unwrap();
        guest.join().unwrap();
    }
}
