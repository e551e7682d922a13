//! Reads that miss: their bytes are not in the cache yet, so they wait while the bytes are requested from the node over the miss socket
//! ([`thaw_protocol::miss`]). virtio-fs and disks that are images use it.
//!
//! Invariant: a request waits for an answer, not for a socket. Without a socket it goes on waiting, and every unanswered question is sent
//! again over the next one. A wait ends when the bytes are there, or when the node reports that it cannot get them; the log then names blob
//! and offset. If the node reports the bytes as present and they are not, the request asks again, at most [`MAX_ROUNDS`] times.

mod parked;

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use thaw_imagefs::fs::MissingRange;
use thaw_log::LogLimit;
use thaw_protocol::miss::{Filled, Miss};
use thaw_protocol::packet::{self, PacketError};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use self::parked::ParkedReads;
pub use self::parked::{Request, Resumed};
use super::device::{AttachError, DeviceError, one_descriptor};
use super::event_loop::Registrar;
use super::state::QueueRecord;

/// How often a request asks again for bytes that the node reported as present but that are missing.
const MAX_ROUNDS: u32 = 8;
/// Most answers taken from the socket before others get their turn.
const ANSWERS: usize = 64;
/// Most unanswered questions of [`Misses::fetch`] at once.
const AT_ONCE: usize = 16;

/// The epoll that waits for the socket.
#[derive(Debug)]
pub enum Waits {
    /// The device's own epoll, with this data.
    Epoll(std::sync::Arc<Epoll>, u64),
    /// The event loop, with this token.
    Loop(Registrar, u32),
}

impl Waits {
    fn control(&self, operation: ControlOperation, socket: RawFd, events: EventSet) -> io::Result<()> {
        match self {
            Waits::Epoll(epoll, data) => epoll.ctl(operation, socket, EpollEvent::new(events, *data)),
            Waits::Loop(registrar, token) => match operation {
                ControlOperation::Add => registrar.add(socket, *token, events),
                ControlOperation::Modify => registrar.modify(socket, *token, events),
                ControlOperation::Delete => registrar.remove(socket),
            },
        }
    }
}

/// Takes the one descriptor, which must be a SEQPACKET socket, and makes it non-blocking.
pub fn packet_socket(fds: Vec<OwnedFd>) -> Result<OwnedFd, AttachError> {
    let socket = one_descriptor(fds)?;
    let kind =
        rustix::net::sockopt::socket_type(&socket).map_err(AttachError::system("the socket's type"))?;
    if kind != rustix::net::SocketType::SEQPACKET {
        return Err(AttachError::Invalid(
            "the socket must be of type SEQPACKET".into(),
        ));
    }
    rustix::io::ioctl_fionbio(&socket, true).map_err(AttachError::system("FIONBIO of the socket"))?;
    Ok(socket)
}

/// The requests that wait, and the socket.
pub struct Misses {
    waits: Waits,
    socket: Option<OwnedFd>,
    /// The events of the socket that are waited for.
    waited: EventSet,
    parked: ParkedReads,
    log: LogLimit,
}

impl Misses {
    pub fn new(waits: Waits) -> Misses {
        Misses {
            waits,
            socket: None,
            waited: EventSet::empty(),
            parked: ParkedReads::default(),
            log: LogLimit::default(),
        }
    }

    /// Whether a request with this head waits already. If so, the driver made a descriptor available that is in use.
    pub fn has(&self, queue: usize, head: u16) -> bool {
        self.parked.has(queue, head)
    }

    /// The heads of the waiting requests, by queue and index.
    pub fn heads(&self) -> Vec<(usize, u16)> {
        self.parked.heads()
    }

    /// Drops all requests, because the driver has reset the device.
    pub fn clear(&mut self) {
        self.parked.clear();
        // Fails only for a descriptor that is not a socket.
        let _ = self.wait_for(EventSet::empty());
    }

    /// Parks a request until all `ranges`, of which there must be at least one, are answered; [`Self::ask`] must follow. Returns the
    /// request as an error if it has asked too often; it must then be refused.
    pub fn park(&mut self, request: Request, ranges: &[MissingRange]) -> Result<(), Request> {
        if request.rounds > MAX_ROUNDS {
            let range = ranges.first();
            if let Some(dropped) = self.log.pass() {
                tracing::error!(
                    blob = range.map(|range| hex(&range.blob)),
                    offset = range.map(|range| range.offset),
                    rounds = request.rounds,
                    dropped,
                    "a read of an image failed: its bytes were promised, and never came"
                );
            }
            return Err(request);
        }
        self.parked.park(request, ranges);
        Ok(())
    }

    /// Takes a new socket. Every unanswered question is sent over it.
    pub fn connect(&mut self, socket: OwnedFd) {
        self.disconnect();
        self.socket = Some(socket);
        if let Err(error) = self.ask() {
            tracing::error!(%error, "the miss socket cannot be waited for");
            self.disconnect();
        }
    }

    /// Drops the socket. Its unanswered questions are sent again over the next one.
    fn disconnect(&mut self) {
        // Closing the socket would do, unless the descriptor was duplicated.
        let _ = self.wait_for(EventSet::empty());
        self.socket = None;
        self.parked.ask_again();
    }

    /// Waits for these events of the socket from now on; with none, the socket is not watched.
    fn wait_for(&mut self, events: EventSet) -> Result<(), DeviceError> {
        let Some(socket) = self.socket.as_ref().filter(|_| events != self.waited) else {
            return Ok(());
        };
        let operation = match (self.waited.is_empty(), events.is_empty()) {
            (true, _) => ControlOperation::Add,
            (false, true) => ControlOperation::Delete,
            (false, false) => ControlOperation::Modify,
        };
        self.waited = events;
        self.waits
            .control(operation, socket.as_raw_fd(), events)
            .map_err(|error| DeviceError::System {
                what: "epoll_ctl",
                error,
            })
    }

    /// Sends questions until the socket is full or none are left.
    pub fn ask(&mut self) -> Result<(), DeviceError> {
        while let (Some(socket), Some(miss)) = (&self.socket, self.parked.next_unsent()) {
            match packet::send(socket, miss, &[]) {
                Ok(()) => {
                    let id = miss.id;
                    self.parked.sent(id);
                }
                Err(PacketError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => {
                    tracing::warn!(%error, "the miss socket is gone; reads wait for the next one");
                    self.disconnect();
                }
            }
        }
        // Waits only for answers that are due: after a reset or a failure, late answers could stay unread for ever.
        let mut events = EventSet::empty();
        if self.parked.has_questions() {
            events |= EventSet::IN;
        }
        if self.parked.next_unsent().is_some() {
            events |= EventSet::OUT;
        }
        self.wait_for(events)
    }

    /// Takes answers. Returns the requests that need no further one. [`Self::ask`] must follow.
    pub fn answers(&mut self) -> Vec<Resumed> {
        let mut resumed = Vec::new();
        for _ in 0..ANSWERS {
            let Some(socket) = &self.socket else { break };
            match packet::receive::<Filled>(socket) {
                Ok((filled, _)) => resumed.extend(self.parked.answered(filled)),
                Err(PacketError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(PacketError::Closed) => {
                    tracing::info!("the miss socket was closed; reads wait for the next one");
                    self.disconnect();
                }
                Err(error) => {
                    tracing::warn!(%error, "the miss socket is not usable; reads wait for the next one");
                    self.disconnect();
                }
            }
        }
        resumed
    }

    /// Requests these ranges, once each, and waits until they are filled. Only for a machine that has not run yet, because its device must
    /// request nothing else meanwhile. The error is a sentence; it is also returned if there is no socket or the socket was closed.
    pub fn fetch(&mut self, ranges: &[MissingRange]) -> Result<(), String> {
        let mut unsent: Vec<Miss> = ranges
            .iter()
            .flat_map(parked::pieces)
            .map(|(blob, offset, length)| Miss {
                id: self.parked.number(),
                blob,
                offset,
                length,
            })
            .collect();
        unsent.reverse();
        let mut sent: Vec<Miss> = Vec::new();
        while !unsent.is_empty() || !sent.is_empty() {
            let Some(socket) = &self.socket else {
                return Err("there is no miss socket to ask for them over".into());
            };
            while let Some(miss) = unsent.last().filter(|_| sent.len() < AT_ONCE) {
                match packet::send(socket, miss, &[]) {
                    Ok(()) => sent.extend(unsent.pop()),
                    Err(PacketError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) => return Err(format!("the miss socket: {error}")),
                }
            }
            let mut events = PollFlags::IN;
            if sent.is_empty() {
                events |= PollFlags::OUT;
            }
            match poll(&mut [PollFd::new(socket, events)], None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(format!("the miss socket: {error}")),
            }
            match packet::receive::<Filled>(socket) {
                Ok((Filled { id, result }, _)) => {
                    if let Some(at) = sent.iter().position(|miss| miss.id == id) {
                        let miss = sent.swap_remove(at);
                        result.map_err(|reason| describe(&miss, &reason))?;
                    }
                }
                Err(PacketError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(format!("the miss socket: {error}")),
            }
        }
        Ok(())
    }
}

/// Whether requests with these heads could wait in a queue. `queue` is `None` if the device is not active.
pub fn check_heads(index: usize, heads: &[u16], queue: Option<&QueueRecord>) -> Result<(), String> {
    let mut seen = HashSet::new();
    let impossible = heads
        .iter()
        .find(|head| !queue.is_some_and(|queue| queue.ready && **head < queue.size) || !seen.insert(**head));
    match impossible {
        Some(head) => Err(format!(
            "head {head} cannot wait in queue {index}, or waits twice"
        )),
        None => Ok(()),
    }
}

/// Describes which bytes the node cannot get, and why.
fn describe(miss: &Miss, reason: &str) -> String {
    format!(
        "bytes {}..{} of blob {}: {reason}",
        miss.offset,
        miss.offset + u64::from(miss.length),
        hex(&miss.blob)
    )
}

/// A digest in hexadecimal.
pub fn hex(digest: &[u8; 32]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
