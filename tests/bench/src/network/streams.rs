//! Connections whose throughput is measured.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Bytes of one transfer.
pub const BYTES: usize = 64 << 20;
/// Bytes of one call.
const CALL: usize = 128 << 10;
/// Only a connection that is broken takes that long for a call.
const PATIENCE: Duration = Duration::from_secs(20);

/// Both ends of a connection.
pub struct Connection {
    client: TcpStream,
    server: TcpStream,
}

impl Connection {
    /// Accepts the connection that `connect` makes to `listener`.
    pub fn open(
        listener: &TcpListener,
        connect: impl FnOnce() -> Result<TcpStream, String>,
    ) -> Result<Connection, String> {
        let failed = |e: std::io::Error| format!("a connection: {e}");
        let client = connect()?;
        let (server, _) = listener.accept().map_err(failed)?;
        for end in [&client, &server] {
            end.set_read_timeout(Some(PATIENCE)).map_err(failed)?;
            end.set_write_timeout(Some(PATIENCE)).map_err(failed)?;
        }
        Ok(Connection { client, server })
    }

    /// How long [`BYTES`] take from the client to the server.
    pub fn outward(&self) -> Result<Duration, String> {
        transfer(&self.client, &self.server)
    }

    /// How long [`BYTES`] take from the server to the client.
    pub fn inward(&self) -> Result<Duration, String> {
        transfer(&self.server, &self.client)
    }
}

fn transfer(mut from: &TcpStream, mut to: &TcpStream) -> Result<Duration, String> {
    let failed = |e: std::io::Error| format!("a transfer: {e}");
    let began = Instant::now();
    std::thread::scope(|scope| {
        let sender = scope.spawn(move || {
            let bytes = vec![1; CALL];
            (0..BYTES / CALL).try_for_each(|_| from.write_all(&bytes))
        });
        let mut buffer = vec![0; CALL];
        let mut left = BYTES;
        while left > 0 {
            match to.read(&mut buffer).map_err(failed)? {
                0 => return Err("a transfer: the connection was closed".to_owned()),
                length => left -= length,
            }
        }
        let sent = sender.join().map_err(|_| "the sender panicked".to_owned())?;
        sent.map_err(failed)
    })?;
    Ok(began.elapsed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_go_both_ways_over_one_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let connect = || TcpStream::connect(address).map_err(|e| e.to_string());
        let connection = Connection::open(&listener, connect).unwrap();
        assert!(connection.outward().unwrap() > Duration::ZERO);
        assert!(connection.inward().unwrap() > Duration::ZERO);
    }
}
