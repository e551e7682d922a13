//! The host's side of [`thaw_protocol::handshake`], which gives a guest its identity; and connections to a guest's vsock.
//!
//! If the handshake fails, the machine must be destroyed: no program of the user has run in it.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::net::SocketType;
use thaw_protocol::handshake::{
    Acknowledgement, FromAgent, Greeting, HANDSHAKE_PORT, HANDSHAKE_VERSION, Identity, Network, Time,
    read_answer, read_quiesced, write_frame,
};
use thaw_protocol::packet::PacketError;

use crate::error::{Error, ErrorKind};
use crate::trace::monotonic_ns;

/// Bytes of fresh entropy each guest gets.
const ENTROPY: usize = 64;

/// How far a guest's clock may be off, in addition to half the measured round trip.
const CLOCK_MARGIN: Duration = Duration::from_millis(10);

/// The identity and size that a guest is to get.
#[derive(Clone, Debug)]
pub struct Wanted {
    pub hostname: String,
    pub network: Option<Network>,
    /// CPUs online.
    pub cpus: u8,
    /// Total memory, MiB.
    pub memory_mib: u32,
    /// Whether the guest is thawed only to record which pages a sandbox touches.
    pub rehearsal: bool,
    /// Whether to accept a guest whose kernel command line weakens it for a test.
    pub test_hooks: bool,
}

/// The result of a handshake.
#[derive(Clone, Debug)]
pub struct Performed {
    pub acknowledgement: Acknowledgement,
    /// CLOCK_MONOTONIC nanoseconds of the host, for when the guest accepted the connection and when the acknowledgement arrived.
    pub connected: u64,
    pub acknowledged: u64,
    pub clock: Clock,
}

/// The guest's wall clock, from its acknowledgement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clock {
    /// By how many nanoseconds, at least, the clock is behind (negative) or ahead of the possible range.
    pub off_ns: i64,
    /// How long the guest waited for the reply when it asked for the time, nanoseconds.
    pub round_trip_ns: u64,
}

impl Clock {
    /// The guest read its clock (`guest`) after the host sent it the time (`told`) and before the acknowledgement arrived (`arrived`). All
    /// are CLOCK_REALTIME nanoseconds.
    fn of(told: u64, arrived: u64, guest: u64, round_trip_ns: u64) -> Clock {
        let nearest = guest.clamp(told, arrived.max(told));
        Clock {
            off_ns: i64::try_from(i128::from(guest) - i128::from(nearest)).unwrap_or(i64::MAX),
            round_trip_ns,
        }
    }

    /// Whether the clock is within the promised margin.
    pub fn is_right(&self) -> bool {
        u128::from(self.off_ns.unsigned_abs()) <= CLOCK_MARGIN.as_nanos() + u128::from(self.round_trip_ns / 2)
    }
}

/// Gives the guest behind the vsock socket at `path` its identity, and waits until that is in force. Blocks, for at most `limit` per step.
pub fn perform(path: &Path, wanted: Wanted, limit: Duration) -> Result<Performed, Error> {
    let mut stream = connect(path, HANDSHAKE_PORT, limit).map_err(|e| {
        let failure = failed(format!("cannot reach the agent: {e}"));
        match e.kind() {
            io::ErrorKind::InvalidData => failure,
            _ => failure.lost(),
        }
    })?;
    let connected = monotonic_ns();
    let random = |e: io::Error| Error::system("cannot read random bytes", &e);
    let nonce = crate::random::<16>().map_err(random)?;
    let identity = Identity {
        version: HANDSHAKE_VERSION,
        nonce,
        entropy: crate::random::<ENTROPY>().map_err(random)?.to_vec(),
        machine_id: crate::random::<16>().map_err(random)?,
        hostname: wanted.hostname,
        network: wanted.network,
        cpus: wanted.cpus,
        memory_mib: wanted.memory_mib,
        rehearsal: wanted.rehearsal,
    };
    let greeting = Greeting::Become(Box::new(identity));
    write_frame(&mut stream, &greeting).map_err(|e| unheard("cannot send the identity", &e))?;
    let (answer, told) = acknowledgement(&mut stream)?;
    let (arrived, acknowledged) = (wall_clock_ns(), monotonic_ns());
    check(&answer, &nonce, wanted.test_hooks)?;
    let clock = Clock::of(told, arrived, answer.wall_clock_ns, answer.time_round_trip_ns);
    Ok(Performed {
        acknowledgement: answer,
        connected,
        acknowledged,
        clock,
    })
}

/// Sends the agent the time once, and waits for its acknowledgement. Returns that and the time sent.
fn acknowledgement(stream: &mut UnixStream) -> Result<(Acknowledgement, u64), Error> {
    let mut told = 0;
    loop {
        let said = read_answer(stream).map_err(|e| unheard("no acknowledgement of the identity", &e))?;
        match said {
            FromAgent::Acknowledged(answer) => return Ok((*answer, told)),
            FromAgent::WhatTime if told == 0 => {
                // Read last, because it is stale as soon as it is read.
                told = wall_clock_ns();
                let time = Time { wall_clock_ns: told };
                write_frame(stream, &time).map_err(|e| unheard("cannot tell the guest the time", &e))?;
            }
            FromAgent::WhatTime => return Err(failed("the agent asked the time twice".into())),
        }
    }
}

/// Stops every workload of the guest behind the vsock socket at `path`. Blocks, for at most `limit` per step.
pub fn quiesce(path: &Path, limit: Duration) -> Result<(), Error> {
    let stopped = greet(path, &Greeting::Quiesce, limit);
    stopped.map_err(|reason| failed(format!("the workloads cannot be stopped: {reason}")))
}

/// Resumes the workloads.
pub fn resume(path: &Path, limit: Duration) -> Result<(), Error> {
    let resumed = greet(path, &Greeting::Continue, limit);
    resumed.map_err(|reason| failed(format!("the workloads cannot be let go on: {reason}")))
}

fn greet(path: &Path, greeting: &Greeting, limit: Duration) -> Result<(), String> {
    let mut stream =
        connect(path, HANDSHAKE_PORT, limit).map_err(|e| format!("cannot reach the agent: {e}"))?;
    write_frame(&mut stream, greeting).map_err(|e| e.to_string())?;
    let answer = read_quiesced(&mut stream).map_err(|e| format!("the agent does not answer: {e}"))?;
    match answer.failure {
        Some(reason) => Err(reason),
        None => Ok(()),
    }
}

fn failed(what: String) -> Error {
    Error::new(ErrorKind::HandshakeFailed, what)
}

/// The error for a step that the agent did not perform: it has ended, does not answer, or sent an invalid answer.
fn unheard(what: &str, error: &PacketError) -> Error {
    let failure = match error {
        // What a socket's timeout is.
        PacketError::Io(why) if why.kind() == io::ErrorKind::WouldBlock => failed(format!("{what} in time")),
        _ => failed(format!("{what}: {error}")),
    };
    match error {
        PacketError::Version(_) => {
            failure.remedy("freeze or build it again with this Thaw, or run it with the release that made it")
        }
        PacketError::Closed | PacketError::Io(_) => failure.lost(),
        _ => failure,
    }
}

fn check(answer: &Acknowledgement, nonce: &[u8; 16], test_hooks: bool) -> Result<(), Error> {
    if answer.nonce != *nonce {
        return Err(failed(
            "the agent acknowledged another identity than it was sent".into(),
        ));
    }
    if let Some(reason) = &answer.failure {
        return Err(failed(format!(
            "the agent could not apply its identity: {reason}"
        )));
    }
    if answer.test_hooks && !test_hooks {
        return Err(failed("a test hook in the guest weakened its identity".into())
            .remedy("this template is for tests alone: remove it, or use thawd --test-templates"));
    }
    Ok(())
}

/// Connects to a port of the guest: sends `CONNECT <port>\n` and expects `OK <host port>\n`.
pub fn connect(path: &Path, port: u32, limit: Duration) -> io::Result<UnixStream> {
    let socket = thaw_pools::vmm::connect(path, SocketType::STREAM).map_err(io::Error::other)?;
    let mut stream = UnixStream::from(socket);
    stream.set_read_timeout(Some(limit))?;
    stream.set_write_timeout(Some(limit))?;
    stream.write_all(format!("CONNECT {port}\n").as_bytes())?;
    let mut line = [0u8; 32];
    for at in 0..line.len() {
        // Byte by byte, because the bytes after the line belong to the caller.
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
                Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "the VMM answered nonsense",
                ))
            };
        }
    }
    Err(io::Error::new(
        io::ErrorKind::InvalidData,
        "the VMM answered nonsense",
    ))
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
    use thaw_protocol::handshake::{Quiesced, read_frame};

    /// Runs the handshake with an agent that answers a good acknowledgement changed by `change`.
    fn with_agent(change: impl FnOnce(&mut Acknowledgement) + Send + 'static) -> Result<Performed, Error> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vsock.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let agent = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut line = [0u8; 13];
            stream.read_exact(&mut line).unwrap();
            assert_eq!(&line, b"CONNECT 1023\n");
            stream.write_all(b"OK 5000\n").unwrap();
            let Greeting::Become(identity) = read_frame(&mut stream).unwrap() else {
                panic!("another greeting");
            };
            assert!(identity.entropy.len() >= thaw_protocol::handshake::MIN_ENTROPY);
            write_frame(&mut stream, &FromAgent::WhatTime).unwrap();
            let time: Time = read_frame(&mut stream).unwrap();
            assert!(time.wall_clock_ns > 0);
            let mut answer = Acknowledgement {
                version: HANDSHAKE_VERSION,
                nonce: identity.nonce,
                failure: None,
                agent_started: 1,
                agent_ready: 2,
                received: 3,
                applied: 4,
                time_round_trip_ns: 5,
                wall_clock_ns: wall_clock_ns(),
                test_hooks: false,
            };
            change(&mut answer);
            write_frame(&mut stream, &FromAgent::Acknowledged(Box::new(answer))).unwrap();
            identity
        });
        let wanted = Wanted {
            hostname: "h".into(),
            network: None,
            cpus: 1,
            memory_mib: 128,
            rehearsal: false,
            test_hooks: false,
        };
        let result = perform(&path, wanted, Duration::from_secs(5));
        assert_eq!(agent.join().unwrap().hostname, "h");
        result
    }

    #[test]
    fn a_right_acknowledgement_is_taken_and_any_other_refused() {
        let performed = with_agent(|_| ()).unwrap();
        assert_eq!(performed.acknowledgement.agent_ready, 2);
        assert!(performed.clock.is_right(), "{:?}", performed.clock);
        assert!(performed.acknowledged >= performed.connected);
        let refused = |change: fn(&mut Acknowledgement)| with_agent(change).unwrap_err();
        assert!(refused(|a| a.nonce[0] ^= 1).what.contains("another identity"));
        assert!(refused(|a| a.version += 1).what.contains("version"));
        assert!(
            refused(|a| a.failure = Some("no clock".into()))
                .what
                .contains("no clock")
        );
        assert!(refused(|a| a.test_hooks = true).what.contains("test hook"));
        assert_eq!(refused(|a| a.nonce[0] ^= 1).kind, ErrorKind::HandshakeFailed);
    }

    #[test]
    fn clock_within_margin_and_half_round_trip_is_right() {
        let ms = 1_000_000;
        // The time was sent at 1000 and acknowledged at 1100; asking took 40: 20 each way.
        let clock = |guest: u64| Clock::of(1000 * ms, 1100 * ms, guest * ms, 40 * ms);
        assert_eq!(
            clock(1050),
            Clock {
                off_ns: 0,
                round_trip_ns: 40 * ms
            }
        );
        for (guest, right) in [
            (1000, true),
            (1100, true),
            (970, true),
            (1130, true),
            (969, false),
            (1131, false),
        ] {
            assert_eq!(clock(guest).is_right(), right, "{guest} ms");
        }
        assert!(
            !Clock::of(0, 0, u64::MAX, 0).is_right(),
            "no clock is far enough off to look right"
        );
    }

    #[test]
    fn workloads_are_stopped_or_it_is_said_why_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vsock.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let agent = std::thread::spawn(move || {
            let mut seen = Vec::new();
            for failure in [None, Some("a process in D".to_owned())] {
                let (mut stream, _) = listener.accept().unwrap();
                let mut line = [0u8; 13];
                stream.read_exact(&mut line).unwrap();
                stream.write_all(b"OK 5000\n").unwrap();
                seen.push(read_frame::<Greeting>(&mut stream).unwrap());
                let version = HANDSHAKE_VERSION;
                write_frame(&mut stream, &Quiesced { version, failure }).unwrap();
            }
            seen
        });
        resume(&path, Duration::from_secs(5)).unwrap();
        let refused = quiesce(&path, Duration::from_secs(5)).unwrap_err();
        assert!(refused.what.contains("a process in D"), "{refused}");
        assert_eq!(agent.join().unwrap(), [Greeting::Continue, Greeting::Quiesce]);
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
