//! The handshake of `thaw_protocol::handshake`, guest side: read one identity, put it in force, open the API's port,
//! acknowledge. Fail-closed: whatever cannot be applied is named in the acknowledgement and no port is opened.

use std::io;

use thaw_protocol::handshake::{
    Acknowledgement, HANDSHAKE_VERSION, Identity, MIN_ENTROPY, Network, read_frame, write_frame,
};

use crate::error::{Error, Result};
use crate::listener::Stream;
use crate::{clock, entropy, identity, info, network};

/// Moments of the start, CLOCK_BOOTTIME nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Handshake {
    /// `main` began.
    pub started: u64,
    /// The doorbell was rung.
    pub ready: u64,
}

/// What an identity is applied to: the guest, or a test's record.
pub trait Apply {
    fn entropy(&mut self, bytes: &[u8]) -> Result<()>;
    fn wall_clock(&mut self, ns: u64) -> Result<()>;
    fn hostname(&mut self, name: &str, network: Option<&Network>) -> Result<()>;
    fn machine_id(&mut self, id: [u8; 16]) -> Result<()>;
    fn network(&mut self, network: &Network) -> Result<()>;
}

/// The guest this agent is PID 1 of.
#[derive(Clone, Copy, Debug)]
pub struct Guest;

impl Apply for Guest {
    fn entropy(&mut self, bytes: &[u8]) -> Result<()> {
        entropy::reseed(bytes)
    }

    fn wall_clock(&mut self, ns: u64) -> Result<()> {
        clock::set_wall_clock(ns)
    }

    fn hostname(&mut self, name: &str, network: Option<&Network>) -> Result<()> {
        identity::set_hostname(name)?;
        let addresses: Vec<_> = network.iter().flat_map(|n| &n.addresses).map(|a| a.ip).collect();
        identity::write_etc(name, &addresses, network.map_or(&[], |n| &n.nameservers))
    }

    fn machine_id(&mut self, id: [u8; 16]) -> Result<()> {
        identity::set_machine_id(id)
    }

    fn network(&mut self, network: &Network) -> Result<()> {
        network::configure(network)
    }
}

/// Reads an identity from `stream`, applies it to `guest`, and acknowledges. What `open` returns listens before the
/// acknowledgement is sent, and is returned.
pub fn answer<T>(
    mut stream: impl Stream,
    times: &Handshake,
    guest: &mut impl Apply,
    open: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let identity: Identity = read_frame(&mut Reader(&mut stream))
        .map_err(|e| Error::Invalid(format!("no identity was read: {e}")))?;
    let outcome = apply(&identity, guest).and_then(|()| open());
    let acknowledgement = Acknowledgement {
        version: HANDSHAKE_VERSION,
        nonce: identity.nonce,
        failure: outcome.as_ref().err().map(Error::to_string),
        agent_started: times.started,
        agent_ready: times.ready,
    };
    write_frame(&mut Reader(&mut stream), &acknowledgement)
        .map_err(|e| Error::State(format!("the acknowledgement was not sent: {e}")))?;
    outcome
}

fn apply(identity: &Identity, guest: &mut impl Apply) -> Result<()> {
    if identity.version != HANDSHAKE_VERSION {
        return Err(Error::Invalid(format!(
            "handshake version {}: this guest image speaks version {HANDSHAKE_VERSION}; use the image made with this host's Thaw",
            identity.version
        )));
    }
    if identity.entropy.len() < MIN_ENTROPY {
        return Err(Error::Invalid(format!(
            "entropy: {} bytes, at least {MIN_ENTROPY} are needed",
            identity.entropy.len()
        )));
    }
    guest.entropy(&identity.entropy)?;
    guest.wall_clock(identity.wall_clock_ns)?;
    guest.hostname(&identity.hostname, identity.network.as_ref())?;
    guest.machine_id(identity.machine_id)?;
    if let Some(network) = &identity.network {
        guest.network(network)?;
    }
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
