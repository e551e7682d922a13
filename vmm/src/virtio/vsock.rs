//! virtio-vsock (virtio 1.2 §5.10): the host dials the guest through one listening unix socket.
//!
//! A client connects, sends `CONNECT <port>\n`, and gets `OK <host port>\n` once the guest has accepted; then bytes flow both
//! ways. Until the driver is up, clients wait in the socket's backlog, which bounds them. The guest cannot connect to the
//! host: every attempt is answered with a reset, and one to the handshake port is the doorbell.
//!
//! | file | contents |
//! |---|---|
//! | `packet` | the header on the wire |
//! | `credit` | how much each side may send (§5.10.6.3) |
//! | `connection` | one connection's life, as a state machine |
//! | `muxer` | all connections, and which one sends next |
//! | this file | the queues |

mod connection;
mod credit;
mod muxer;
mod packet;

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::Arc;

use rustix::net::sockopt::{socket_acceptconn, socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketType};
use thaw_protocol::control::Backend;
use thaw_protocol::handshake::GUEST_CID;
use virtio_bindings::virtio_ids::VIRTIO_ID_VSOCK;
use vmm_sys_util::epoll::EventSet;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use self::muxer::Muxer;
use self::packet::Header;
use super::chain::Chain;
use super::config::{Config, ConfigSpace};
use super::device::{Activation, AttachError, DeviceError, DeviceSpec, Saved, VirtioDevice, one_descriptor};
use super::event_loop::Registrar;
use super::guest_io;
use super::queue::{Answer, Ended};
use super::state::{DeviceState, QueueRecord, VsockState};
use crate::events::EventSink;
use crate::memory::GuestMemory;

const QUEUE_SIZES: [u16; 3] = [256, 256, 16];
const RX: usize = 0;
const TX: usize = 1;
const EVENT: usize = 2;

/// `struct virtio_vsock_config` (§5.10.4).
#[derive(FromBytes, Immutable, IntoBytes)]
#[repr(C)]
struct VsockConfig {
    guest_cid: u64,
}

/// The device. The third queue, for events, only holds the driver's buffers. When a thaw ends connections, each is reset by its own packet,
/// which the guest handles in order with later packets. A transport reset would be handled by another work item of the guest, and could
/// also end a connection made since.
pub struct Vsock {
    config: Config<VsockConfig>,
    active: Option<Activation>,
    /// The connections. Its listening socket is the device's backend.
    muxer: Muxer,
    /// Set while transmission waits until the guest has read the resets that it caused.
    transmit_paused: bool,
}

impl Vsock {
    pub fn new(registrar: Registrar, events: EventSink) -> Vsock {
        let guest_cid = GUEST_CID.into();
        Vsock {
            config: Config::new(VsockConfig { guest_cid }),
            active: None,
            muxer: Muxer::new(registrar, events),
            transmit_paused: false,
        }
    }

    /// Gives the guest the waiting packets while it has buffers.
    fn receive(&mut self) -> Result<(), DeviceError> {
        let Some(active) = self.active.as_mut() else {
            return Ok(());
        };
        active.queues[RX].serve_while(&mut self.muxer, Muxer::has_packets, |muxer, memory, chain| {
            Ok::<_, DeviceError>(fill(memory, &chain, muxer))
        })?;
        if self.transmit_paused && !self.muxer.owes_too_many_resets() {
            self.transmit_paused = false;
            active.queues[TX].kick_again();
        }
        Ok(())
    }

    /// Takes packets from the guest.
    fn transmit(&mut self) -> Result<(), DeviceError> {
        let Some(active) = self.active.as_mut() else {
            return Ok(());
        };
        let listens = |muxer: &Muxer| !muxer.owes_too_many_resets();
        let ended = active.queues[TX].serve_while(&mut self.muxer, listens, |muxer, memory, chain| {
            take(memory, &chain, muxer);
            Ok::<_, DeviceError>(Answer::Done(0))
        })?;
        self.transmit_paused |= ended == Ended::Stopped;
        Ok(())
    }
}

/// Writes the next packet into a receive buffer. A buffer that is too small or outside memory is returned empty.
fn fill(memory: &GuestMemory, chain: &Chain, muxer: &mut Muxer) -> Answer {
    let Ok(slices) = chain.writable(memory) else {
        return Answer::Done(0);
    };
    let room = guest_io::part(&slices, Header::SIZE, muxer::MAX_PAYLOAD);
    if room.is_empty() {
        return Answer::Done(0);
    }
    match muxer.next_packet(&room) {
        Some(header) => {
            guest_io::copy_in(&slices, 0, &header.to_bytes());
            Answer::Done(Header::SIZE as u32 + header.length)
        }
        // There was no packet after all.
        None => Answer::Stop,
    }
}

/// Takes a packet from the guest. One that is shorter than its header is dropped.
fn take(memory: &GuestMemory, chain: &Chain, muxer: &mut Muxer) {
    let Ok(slices) = chain.readable(memory) else {
        return;
    };
    let mut raw = [0; Header::SIZE];
    if guest_io::copy_out(&slices, 0, &mut raw) == Header::SIZE {
        let payload = guest_io::part(&slices, Header::SIZE, usize::MAX);
        muxer.take_packet(&Header::from_bytes(&raw), &payload);
    }
}

impl VirtioDevice for Vsock {
    fn spec(&self) -> DeviceSpec {
        DeviceSpec {
            device_type: VIRTIO_ID_VSOCK,
            // None: without feature bits, only stream sockets are supported (§5.10.3).
            features: 0,
            queue_sizes: &QUEUE_SIZES,
        }
    }

    fn config(&self) -> Arc<ConfigSpace> {
        self.config.space()
    }

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        self.active = Some(activation);
        self.muxer.open();
        Ok(())
    }

    fn reset(&mut self) {
        self.active = None;
        self.transmit_paused = false;
        self.muxer.close();
    }

    fn attach(&mut self, backend: Backend, fds: Vec<OwnedFd>) -> Result<(), AttachError> {
        let Backend::Vsock = backend else {
            return Err(AttachError::WrongKind("virtio-vsock takes a listening socket"));
        };
        self.muxer.listen(listener(one_descriptor(fds)?)?);
        Ok(())
    }

    fn is_backed(&self) -> bool {
        self.muxer.has_listener()
    }

    /// Takes the packets that the guest has sent, so that a clone does not get packets of connections it never had.
    fn save(&mut self) -> Saved {
        if let Err(error) = self.transmit() {
            tracing::warn!(%error, "vsock stopped until the guest resets it");
            if let Some(active) = &self.active {
                active.queues[TX].interrupt().fail();
            }
            self.reset();
        }
        let mut queues = self.active.as_ref().map(Activation::save_queues);
        if let Some(queues) = &mut queues {
            // Buffers that wait for packets are not work.
            queues[RX].has_work = false;
            queues[EVENT].has_work = false;
        }
        Saved {
            state: self.muxer.save().into(),
            queues,
        }
    }

    fn check(&self, state: &DeviceState, queues: Option<&[QueueRecord]>) -> Result<(), String> {
        muxer::check(state.of::<VsockState>()?, queues.is_some())
    }

    fn restore(&mut self, activation: Option<Activation>, state: &DeviceState) -> Result<(), DeviceError> {
        if let Ok(state) = state.of::<VsockState>() {
            self.muxer.restore(state);
        }
        let Some(activation) = activation else {
            return Ok(());
        };
        if self.muxer.has_packets() {
            activation.queues[RX].kick_again();
        }
        self.activate(activation)
    }

    fn queue_ready(&mut self, queue: usize) -> Result<(), DeviceError> {
        match queue {
            RX => self.receive(),
            TX => {
                self.transmit()?;
                self.receive()
            }
            _ => Ok(()),
        }
    }

    fn backend_ready(&mut self, token: u32, events: EventSet) -> Result<(), DeviceError> {
        self.muxer.host_ready(token, events);
        self.receive()
    }
}

/// Checks that a descriptor is a unix socket that clients can connect to.
fn listener(fd: OwnedFd) -> Result<UnixListener, AttachError> {
    let domain = socket_domain(&fd).map_err(AttachError::system("the vsock descriptor is not a socket"))?;
    let kind = socket_type(&fd).map_err(AttachError::system("getsockopt"))?;
    let listening = socket_acceptconn(&fd).map_err(AttachError::system("getsockopt"))?;
    if domain != AddressFamily::UNIX || kind != SocketType::STREAM || !listening {
        return Err(AttachError::Invalid(
            "vsock takes a listening unix stream socket".into(),
        ));
    }
    let listener = UnixListener::from(fd);
    listener
        .set_nonblocking(true)
        .map_err(AttachError::system("fcntl of the listening socket"))?;
    Ok(listener)
}

#[cfg(test)]
#[path = "vsock/vsock_test.rs"]
mod tests;
