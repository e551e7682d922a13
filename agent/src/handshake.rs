//! The guest's side of `thaw_protocol::handshake`: one greeting per connection, for the life of the guest.
//!
//! [`Greeting::Become`] fails closed: the acknowledgement names the first step that failed, no later step runs,
//! no port is opened, and stopped workloads stay stopped. The order of the steps matters: entropy before
//! anything that could use it, then the clock, the identity, the size, and the workloads last.

use std::io;

use thaw_protocol::handshake::{
    Acknowledgement, FromAgent, Greeting, HANDSHAKE_VERSION, Identity, MIN_ENTROPY, Network, Quiesced, Time,
    read_frame, read_greeting, write_frame,
};
use thaw_protocol::packet::PacketError;

use crate::error::{Error, Result};
use crate::listener::Stream;
use crate::{clock, info};

/// Times of the start, in nanoseconds of CLOCK_BOOTTIME.
#[derive(Clone, Copy, Debug)]
pub struct Handshake {
    /// When `main` began.
    pub started: u64,
    /// When the doorbell was rung.
    pub ready: u64,
}

/// The target of a greeting: the guest, or a test's recording of it.
pub trait Apply {
    fn entropy(&mut self, bytes: &[u8]) -> Result<()>;
    fn wall_clock(&mut self, ns: u64) -> Result<()>;
    fn hostname(&mut self, name: &str, network: Option<&Network>) -> Result<()>;
    fn machine_id(&mut self, id: [u8; 16]) -> Result<()>;
    /// Without a network, the interface goes down. Connections of containers that lead out of the guest end.
    fn network(&mut self, network: Option<&Network>) -> Result<()>;
    /// Brings CPUs online until there are `count`.
    fn cpus(&mut self, count: u8) -> Result<()>;
    /// Waits until there are `mib` MiB of memory, and raises the kernel's limits accordingly.
    fn memory(&mut self, mib: u32) -> Result<()>;
    /// Writes a new content to the file that changes at every thaw.
    fn generation(&mut self) -> Result<()>;
    /// Stops every workload. Has no effect if they are stopped already.
    fn quiesce(&mut self) -> Result<()>;
    /// Continues the workloads that [`Apply::quiesce`] stopped. Has no effect if none is stopped.
    fn release(&mut self) -> Result<()>;
    /// Whether a word for tests on the kernel's command line weakens any of the above.
    fn test_hooks(&self) -> bool;
}

/// Reads one greeting from `stream`, applies it to `guest`, and answers. With an identity, `open` is called
/// before the acknowledgement is sent, and its value is returned; other greetings return `None`.
///
/// # Errors
/// The greeting could not be read, applied or answered. If it could not be applied, the answer says why.
pub fn answer<T>(
    mut stream: impl Stream,
    times: &Handshake,
    guest: &mut impl Apply,
    open: impl FnOnce(&Identity) -> Result<T>,
) -> Result<Option<T>> {
    let greeting = read_greeting(&mut Reader(&mut stream));
    let received = clock::boottime_ns();
    let acknowledgement = |nonce, failure, time_round_trip_ns, test_hooks| Acknowledgement {
        version: HANDSHAKE_VERSION,
        nonce,
        failure,
        agent_started: times.started,
        agent_ready: times.ready,
        received,
        applied: clock::boottime_ns(),
        time_round_trip_ns,
        wall_clock_ns: clock::wall_clock_ns(),
        test_hooks,
    };
    let greeting = match greeting {
        Ok(greeting) => greeting,
        Err(PacketError::Version(e)) => {
            let e = Error::Invalid(format!("{e}; use the guest image made with this host's Thaw"));
            let refusal = acknowledgement([0; 16], Some(e.to_string()), 0, guest.test_hooks());
            reply(&mut stream, &FromAgent::Acknowledged(Box::new(refusal)))?;
            return Err(e);
        }
        Err(e) => return Err(Error::Invalid(format!("no greeting was read: {e}"))),
    };
    match greeting {
        Greeting::Become(identity) => {
            let mut time_round_trip_ns = 0;
            let time = || ask_time(&mut stream, &mut time_round_trip_ns);
            let outcome = apply(&identity, guest, time)
                .and_then(|()| open(&identity))
                .and_then(|opened| {
                    guest.release()?;
                    Ok(opened)
                });
            let failure = outcome.as_ref().err().map(Error::to_string);
            let said = acknowledgement(identity.nonce, failure, time_round_trip_ns, guest.test_hooks());
            reply(&mut stream, &FromAgent::Acknowledged(Box::new(said)))?;
            outcome.map(Some)
        }
        Greeting::Quiesce => say_done(&mut stream, guest.quiesce()),
        Greeting::Continue => say_done(&mut stream, guest.release()),
    }
}

fn say_done<T>(stream: &mut impl Stream, outcome: Result<()>) -> Result<Option<T>> {
    let answer = Quiesced {
        version: HANDSHAKE_VERSION,
        failure: outcome.as_ref().err().map(Error::to_string),
    };
    reply(stream, &answer)?;
    outcome.map(|()| None)
}

fn reply(stream: &mut impl Stream, answer: &impl serde::Serialize) -> Result<()> {
    write_frame(&mut Reader(stream), answer)
        .map_err(|e| Error::State(format!("the answer was not sent: {e}")))
}

/// Asks the host for the time, in nanoseconds since the Unix epoch. The answer is wrong by at most half of
/// `round_trip`.
fn ask_time(stream: &mut impl Stream, round_trip: &mut u64) -> Result<u64> {
    let asked = clock::boottime_ns();
    reply(stream, &FromAgent::WhatTime)?;
    let time: Time = read_frame(&mut Reader(stream))
        .map_err(|e| Error::Invalid(format!("the host did not tell the time: {e}")))?;
    *round_trip = clock::boottime_ns().saturating_sub(asked);
    Ok(time.wall_clock_ns.saturating_add(*round_trip / 2))
}

fn apply(identity: &Identity, guest: &mut impl Apply, time: impl FnOnce() -> Result<u64>) -> Result<()> {
    if identity.entropy.len() < MIN_ENTROPY {
        return Err(Error::Invalid(format!(
            "entropy: {} bytes, at least {MIN_ENTROPY} are needed",
            identity.entropy.len()
        )));
    }
    guest.entropy(&identity.entropy)?;
    guest.wall_clock(time()?)?;
    guest.hostname(&identity.hostname, identity.network.as_ref())?;
    guest.machine_id(identity.machine_id)?;
    guest.network(identity.network.as_ref())?;
    guest.cpus(identity.cpus)?;
    guest.memory(identity.memory_mib)?;
    guest.generation()?;
    info!("this guest is {}", identity.hostname);
    Ok(())
}

/// `read_frame` and `write_frame` require sized readers.
struct Reader<'a, S>(&'a mut S);

impl<S: Stream> io::Read for Reader<'_, S> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.0.read(buf)
    }
}

impl<S: Stream> io::Write for Reader<'_, S> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.0.write(buf)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl<T: Stream + ?Sized> Stream for Box<T> {}

#[cfg(test)]
#[path = "handshake_test.rs"]
mod tests;
