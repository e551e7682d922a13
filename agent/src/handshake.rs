//! The handshake of `thaw_protocol::handshake`, guest side: one greeting a connection, for the life of the guest.
//!
//! [`Greeting::Become`] is fail-closed: whatever cannot be applied is named in the acknowledgement, nothing after it is
//! touched, no port is opened and no stopped workload goes on. Its order is the promise: entropy before anything that
//! could use it, the clock, then identity, then size, and last of all the workloads.

use std::io;

use thaw_protocol::handshake::{
    Acknowledgement, FromAgent, Greeting, HANDSHAKE_VERSION, Identity, MIN_ENTROPY, Network, Quiesced, Time,
    read_frame, read_greeting, write_frame,
};
use thaw_protocol::packet::PacketError;

use crate::error::{Error, Result};
use crate::listener::Stream;
use crate::{clock, info};

/// Moments of the start, CLOCK_BOOTTIME nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Handshake {
    /// `main` began.
    pub started: u64,
    /// The doorbell was rung.
    pub ready: u64,
}

/// What a greeting acts on: the guest, or a test's record.
pub trait Apply {
    fn entropy(&mut self, bytes: &[u8]) -> Result<()>;
    fn wall_clock(&mut self, ns: u64) -> Result<()>;
    fn hostname(&mut self, name: &str, network: Option<&Network>) -> Result<()>;
    fn machine_id(&mut self, id: [u8; 16]) -> Result<()>;
    /// None: the interface goes down.
    fn network(&mut self, network: Option<&Network>) -> Result<()>;
    /// Brings CPUs online until there are `count`.
    fn cpus(&mut self, count: u8) -> Result<()>;
    /// Waits until there are `mib` MiB of memory, and raises the kernel's limits to what they allow.
    fn memory(&mut self, mib: u32) -> Result<()>;
    /// Stops every workload; being stopped already is no error.
    fn quiesce(&mut self) -> Result<()>;
    /// Lets what [`Apply::quiesce`] stopped go on; nothing being stopped is no error.
    fn release(&mut self) -> Result<()>;
    /// Whether a test's word on the kernel's command line weakens any of the above.
    fn test_hooks(&self) -> bool;
}

/// Reads one greeting from `stream`, acts on `guest`, and answers. After an identity what `open` returns is there before
/// the acknowledgement is sent, and is returned; other greetings return none.
///
/// # Errors
/// The greeting could not be read, obeyed or answered. What could not be obeyed was answered with the reason.
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

/// Asks the host the time: nanoseconds since the Unix epoch, now, wrong by at most half of `round_trip`.
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
    info!("this guest is {}", identity.hostname);
    Ok(())
}

/// `read_frame` and `write_frame` want sized readers.
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
