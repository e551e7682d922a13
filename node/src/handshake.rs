//! Making a guest this sandbox: the host's side of [`thaw_protocol::handshake`], and connecting to a guest's vsock.
//!
//! Fail-closed: an error here means the machine must be destroyed, and nothing of the user's has run in it.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::net::SocketType;
use thaw_protocol::handshake::{
    Acknowledgement, HANDSHAKE_PORT, HANDSHAKE_VERSION, Identity, Network, read_frame, write_frame,
};

use crate::exit::{ExitCode, Failure};

/// Bytes of fresh entropy each guest gets.
const ENTROPY: usize = 64;

/// What a guest is to be.
#[derive(Clone, Debug)]
pub struct Wanted {
    pub hostname: String,
    pub network: Option<Network>,
}

/// Gives the guest behind the vsock socket at `path` its identity and waits for it to be in force. Blocks, for at most
/// `limit` per step.
pub fn perform(path: &Path, wanted: Wanted, limit: Duration) -> Result<Acknowledgement, Failure> {
    let failed = |what: String| Failure::new(ExitCode::HandshakeFailed, what);
    let mut stream =
        connect(path, HANDSHAKE_PORT, limit).map_err(|e| failed(format!("cannot reach the agent: {e}")))?;
    let random = |e: io::Error| Failure::system("cannot read random bytes", &e);
    let nonce = crate::random::<16>().map_err(random)?;
    let identity = Identity {
        version: HANDSHAKE_VERSION,
        nonce,
        entropy: crate::random::<ENTROPY>().map_err(random)?.to_vec(),
        machine_id: crate::random::<16>().map_err(random)?,
        hostname: wanted.hostname,
        network: wanted.network,
        // Last: it is stale as soon as it is read.
        wall_clock_ns: wall_clock_ns(),
    };
    write_frame(&mut stream, &identity).map_err(|e| failed(format!("cannot send the identity: {e}")))?;
    let answer: Acknowledgement =
        read_frame(&mut stream).map_err(|e| failed(format!("no acknowledgement of the identity: {e}")))?;
    check(&answer, &nonce)?;
    Ok(answer)
}

fn check(answer: &Acknowledgement, nonce: &[u8; 16]) -> Result<(), Failure> {
    let failed = |what: String| Err(Failure::new(ExitCode::HandshakeFailed, what));
    if answer.version != HANDSHAKE_VERSION {
        return failed(format!(
            "the agent speaks handshake version {}, not {HANDSHAKE_VERSION}",
            answer.version
        ));
    }
    if answer.nonce != *nonce {
        return failed("the agent acknowledged another identity than it was sent".into());
    }
    match &answer.failure {
        Some(reason) => failed(format!("the agent could not apply its identity: {reason}")),
        None => Ok(()),
    }
}

/// Connects to a port of the guest: `CONNECT <port>\n`, answered `OK <host port>\n`.
pub fn connect(path: &Path, port: u32, limit: Duration) -> io::Result<UnixStream> {
    let socket = thaw_pools::vmm::connect(path, SocketType::STREAM).map_err(io::Error::other)?;
    let mut stream = UnixStream::from(socket);
    stream.set_read_timeout(Some(limit))?;
    stream.set_write_timeout(Some(limit))?;
    stream.write_all(format!("CONNECT {port}\n").as_bytes())?;
    let mut line = [0u8; 32];
    for at in 0..line.len() {
        // Byte by byte: what follows the line is the peer's.
        match stream.read_exact(&mut line[at..at + 1]) {
            Ok(()) => {}
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset
                ) =>
            {
                let refused = format!("nothing listens on port {port} of the guest");
                return Err(io::Error::new(io::ErrorKind::ConnectionRefused, refused));
            }
            Err(e) => return Err(e),
        }
        if line[at] == b'\n' {
            let answered = line[..at]
                .strip_prefix(b"OK ")
                .is_some_and(|n| n.iter().all(u8::is_ascii_digit));
            return if answered {
                Ok(stream)
            } else {
                Err(io::Error::other("the VMM answered nonsense"))
            };
        }
    }
    Err(io::Error::other("the VMM answered nonsense"))
}

fn wall_clock_ns() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .ok()
        .and_then(|since| u64::try_from(since.as_nanos()).ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    /// An agent behind a socket, which answers what `change` makes of a good acknowledgement.
    fn with_agent(
        change: impl FnOnce(&mut Acknowledgement) + Send + 'static,
    ) -> Result<Acknowledgement, Failure> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vsock.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let agent = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut line = [0u8; 13];
            stream.read_exact(&mut line).unwrap();
            assert_eq!(&line, b"CONNECT 1023\n");
            stream.write_all(b"OK 5000\n").unwrap();
            let identity: Identity = read_frame(&mut stream).unwrap();
            assert!(identity.entropy.len() >= thaw_protocol::handshake::MIN_ENTROPY);
            assert!(identity.wall_clock_ns > 0);
            let mut answer = Acknowledgement {
                version: HANDSHAKE_VERSION,
                nonce: identity.nonce,
                failure: None,
                agent_started: 1,
                agent_ready: 2,
            };
            change(&mut answer);
            write_frame(&mut stream, &answer).unwrap();
            identity
        });
        let wanted = Wanted {
            hostname: "h".into(),
            network: None,
        };
        let result = perform(&path, wanted, Duration::from_secs(5));
        assert_eq!(agent.join().unwrap().hostname, "h");
        result
    }

    #[test]
    fn a_right_acknowledgement_is_taken_and_any_other_refused() {
        assert_eq!(with_agent(|_| ()).unwrap().agent_ready, 2);
        let refused = |change: fn(&mut Acknowledgement)| with_agent(change).unwrap_err();
        assert!(refused(|a| a.nonce[0] ^= 1).what.contains("another identity"));
        assert!(refused(|a| a.version += 1).what.contains("version"));
        assert!(
            refused(|a| a.failure = Some("no clock".into()))
                .what
                .contains("no clock")
        );
        assert_eq!(refused(|a| a.nonce[0] ^= 1).code, ExitCode::HandshakeFailed);
    }

    #[test]
    fn a_port_nobody_listens_on_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vsock.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let vmm = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut line = [0u8; 10];
            stream.read_exact(&mut line).unwrap();
        });
        let error = connect(&path, 99999, Duration::from_secs(5)).unwrap_err();
        vmm.join().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }
}
