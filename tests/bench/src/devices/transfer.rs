//! How the guest and the server exchange bytes over a connection: the guest sends a byte that says which way, then [`BYTES`] go that way.
//! The server answers with one byte when it has taken all.

use std::io::{self, Read, Write};
use std::time::{Duration, Instant};

/// Bytes of one transfer.
pub const BYTES: usize = 16 << 20;
/// Bytes of one call.
pub const CALL: usize = 128 << 10;
const TAKE: u8 = b't';
const SEND: u8 = b's';
/// Only a guest that failed listens later than that.
const PATIENCE: Duration = Duration::from_secs(300);
const RETRY: Duration = Duration::from_millis(200);

/// The guest's side: sends to the server.
pub fn outward(connection: &mut (impl Read + Write)) -> io::Result<()> {
    connection.write_all(&[TAKE])?;
    send(connection)?;
    connection.read_exact(&mut [0])
}

/// The guest's side: takes from the server.
pub fn inward(connection: &mut (impl Read + Write)) -> io::Result<()> {
    connection.write_all(&[SEND])?;
    take(connection)
}

/// The server's side, until the guest ends the connection.
pub fn serve(connection: &mut (impl Read + Write)) -> io::Result<()> {
    let mut command = [0];
    while connection.read(&mut command)? > 0 {
        match command[0] {
            SEND => send(connection)?,
            _ => {
                take(connection)?;
                connection.write_all(&[0])?;
            }
        }
    }
    Ok(())
}

/// Connects to a guest as soon as it listens, says so with a byte, and serves it until its end, all on a thread.
pub fn call<C: Read + Write>(connect: impl Fn() -> io::Result<C> + Send + 'static) {
    std::thread::spawn(move || {
        let until = Instant::now() + PATIENCE;
        while Instant::now() < until {
            match connect() {
                Ok(mut guest) => return guest.write_all(&[0]).and_then(|()| serve(&mut guest)),
                Err(_) => std::thread::sleep(RETRY),
            }
        }
        Err(io::ErrorKind::TimedOut.into())
    });
}

/// The guest's side of [`call`]: waits until the host serves.
pub fn wait_for_host(connection: &mut impl Read) -> io::Result<()> {
    connection.read_exact(&mut [0])
}

fn send(to: &mut impl Write) -> io::Result<()> {
    let bytes = vec![1; CALL];
    (0..BYTES / CALL).try_for_each(|_| to.write_all(&bytes))
}

fn take(from: &mut impl Read) -> io::Result<()> {
    let mut buffer = vec![0; CALL];
    (0..BYTES / CALL).try_for_each(|_| from.read_exact(&mut buffer))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn guest_and_server_agree() {
        let (mut guest, mut server) = UnixStream::pair().unwrap();
        let serving = std::thread::spawn(move || serve(&mut server));
        outward(&mut guest).unwrap();
        inward(&mut guest).unwrap();
        outward(&mut guest).unwrap();
        drop(guest);
        serving.join().unwrap().unwrap();
    }
}
