//! One end of the stream to thaw-share. Messages are sent from guest memory, and replies received into it, without a copy in this process.
//!
//! Invariant: the stream consists of whole frames, whatever the guest does. A message or reply has the length that its header states. If
//! the driver is reset meanwhile, its memory is no longer read or written: zeros are sent instead, and the reply is discarded. At most
//! [`OUTSTANDING`] requests are unanswered; the rest stay in their queues.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

use fuse_backend_rs::abi::fuse_abi::OutHeader;
use thaw_protocol::share::{HeaderError, OUTSTANDING, ReplyHeader, RequestHeader};
use vm_memory::{ByteValued, VolatileSlice};

use super::request::Request;
use crate::memory::GuestMemory;
use crate::virtio::guest_io::{self, MAX_SLICES};

/// Size of the buffer for bytes that are discarded, or zeros that are sent.
const SCRATCH: usize = 4096;
/// Room for the reply to this process's own message.
const OPENING_ROOM: u32 = 4096;

/// A reply. Its bytes are in guest memory.
#[derive(Debug)]
pub struct Reply {
    pub request: Request,
    pub length: u32,
    /// What the guest opened by this request, if it is handed over.
    pub file: Option<OwnedFd>,
}

/// Why the relay can no longer be used.
#[derive(Debug, thiserror::Error)]
pub enum Broken {
    #[error("thaw-share has ended")]
    Closed,
    #[error("the relay: {0}")]
    Io(io::Error),
    #[error("thaw-share sent {0}")]
    Header(#[from] HeaderError),
    #[error("thaw-share answered request {0}, which nobody asked")]
    Unasked(u32),
    #[error("thaw-share sent {length} bytes where there is room for {room}")]
    TooLong { length: u32, room: u32 },
    #[error("thaw-share sent {0} bytes behind the last reply that was due")]
    More(usize),
    #[error("thaw-share did not take over from the one before: error {0}")]
    Refused(i32),
}

/// The result of an operation that does not wait.
#[derive(Debug)]
pub enum Step<T> {
    Done(T),
    /// Nothing more can be done until the socket is ready.
    Blocked,
}

/// A message being sent.
#[derive(Debug)]
struct Sending {
    header: RequestHeader,
    /// Bytes of header and message that have been sent.
    sent: usize,
    /// `None` if the driver was reset, or the message is this process's own.
    request: Option<Request>,
    /// This process's own message; else empty.
    ours: Vec<u8>,
}

/// This process's own message. The guest does not see the reply.
#[derive(Debug)]
struct Opening {
    id: u32,
    /// The part of its reply's header that has come.
    reply: Vec<u8>,
}

/// A reply being received.
#[derive(Debug)]
enum Receiving {
    Header {
        bytes: [u8; ReplyHeader::BYTES],
        /// May be more than a header: the rest are bytes of the only reply that is due.
        got: usize,
        file: Option<OwnedFd>,
    },
    Body {
        id: u32,
        length: u32,
        got: usize,
        file: Option<OwnedFd>,
        /// `None` if the driver was reset, or the message is this process's own.
        request: Option<Request>,
    },
}

impl Receiving {
    const START: Receiving = Receiving::Header {
        bytes: [0; ReplyHeader::BYTES],
        got: 0,
        file: None,
    };
}

/// The stream to thaw-share.
#[derive(Debug)]
pub struct Relay {
    socket: OwnedFd,
    next_id: u32,
    sending: Option<Sending>,
    receiving: Receiving,
    /// Unanswered requests by ID, with the room for the reply. The request is `None` if its driver was reset.
    waiting: HashMap<u32, (u32, Option<Request>)>,
    /// While it is unanswered, nothing else is sent.
    opening: Option<Opening>,
}

impl Relay {
    /// A relay over `socket`, which must be non-blocking.
    pub fn new(socket: OwnedFd) -> Relay {
        Relay {
            socket,
            next_id: 0,
            sending: None,
            receiving: Receiving::START,
            waiting: HashMap::new(),
            opening: None,
        }
    }

    /// A relay to a thaw-share that takes over: `init`, the guest's INIT, is sent before any request.
    pub fn resume(socket: OwnedFd, init: Vec<u8>) -> Relay {
        let mut relay = Relay::new(socket);
        relay.opening = Some(Opening {
            id: relay.next_id,
            reply: Vec::new(),
        });
        relay.sending = Some(Sending {
            header: RequestHeader {
                id: relay.next_id,
                length: init.len() as u32,
                room: OPENING_ROOM,
            },
            sent: 0,
            request: None,
            ours: init,
        });
        relay.next_id += 1;
        relay
    }

    pub fn socket(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    /// Shuts the socket down, so that both ends find it closed.
    pub fn shut_down(&self) {
        // If it is closed already, the goal is reached.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }

    /// Whether [`Self::send`] is waiting for the socket.
    pub fn is_sending(&self) -> bool {
        self.sending.is_some()
    }

    /// Whether another request may begin.
    pub fn has_room(&self) -> bool {
        self.sending.is_none() && self.opening.is_none() && self.waiting.len() < OUTSTANDING
    }

    /// Whether no reply is due.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && matches!(self.receiving, Receiving::Header { got: 0, .. })
    }

    /// Whether a chain with this head is unanswered. If so, the driver made a descriptor available that is in use.
    pub fn has(&self, queue: usize, head: u16) -> bool {
        let of_waiting = self.waiting.values().filter_map(|(_, request)| request.as_ref());
        let of_sending = self.sending.iter().filter_map(|sending| sending.request.as_ref());
        let of_receiving = match &self.receiving {
            Receiving::Body { request, .. } => request.as_ref(),
            Receiving::Header { .. } => None,
        };
        of_waiting
            .chain(of_sending)
            .chain(of_receiving)
            .any(|request| request.queue == queue && request.chain.head() == head)
    }

    /// Takes a request; [`Self::send`] must follow. Only while [`Self::has_room`]. The lengths must be within their bounds.
    pub fn begin(&mut self, request: Request) {
        // Skips the IDs of unanswered requests, of which there are far fewer than IDs.
        while self.waiting.contains_key(&self.next_id) {
            self.next_id = self.next_id.wrapping_add(1);
        }
        let header = RequestHeader {
            id: self.next_id,
            length: request.length,
            room: request.room,
        };
        self.next_id = self.next_id.wrapping_add(1);
        self.sending = Some(Sending {
            header,
            sent: 0,
            request: Some(request),
            ours: Vec::new(),
        });
    }

    /// Continues sending. `Done` means that nothing is left to send; it contains the request if no reply to it is due.
    pub fn send(&mut self, memory: Option<&GuestMemory>) -> Result<Step<Option<Request>>, Broken> {
        while let Some(sending) = &mut self.sending {
            let total = RequestHeader::BYTES + sending.header.length as usize;
            if sending.sent < total {
                match sending.some(&self.socket, memory) {
                    Ok(sent) => sending.sent += sent,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Step::Blocked),
                    Err(error) => return Err(io_error(error)),
                }
                continue;
            }
            let Sending { header, request, .. } = match self.sending.take() {
                Some(sending) => sending,
                None => break,
            };
            if header.room == 0 {
                return Ok(Step::Done(request));
            }
            self.waiting.insert(header.id, (header.room, request));
        }
        Ok(Step::Done(None))
    }

    /// Receives one reply, or `None` if the driver was reset.
    pub fn receive(&mut self, memory: Option<&GuestMemory>) -> Result<Step<Option<Reply>>, Broken> {
        loop {
            let read = match &mut self.receiving {
                Receiving::Header { bytes, got, file } if *got < bytes.len() => {
                    let reply = place_of_only_reply(&self.waiting, memory).filter(|_| *got == 0);
                    let mut slices = vec![VolatileSlice::from(&mut bytes[*got..])];
                    slices.extend(reply.into_iter().flatten());
                    slices.truncate(MAX_SLICES);
                    // A descriptor comes with the first byte of a reply. More are closed by the kernel.
                    guest_io::receive_some(self.socket.as_fd(), &slices).map(|(read, came)| {
                        *file = file.take().or(came);
                        read
                    })
                }
                Receiving::Header { .. } => {
                    self.header_has_come()?;
                    continue;
                }
                Receiving::Body { id, length, got, .. } if *got == *length as usize => {
                    let length = *length;
                    if let Some(opening) = self.opening.take_if(|opening| opening.id == *id) {
                        opening.check()?;
                    }
                    return match std::mem::replace(&mut self.receiving, Receiving::START) {
                        Receiving::Body { request, file, .. } => {
                            Ok(Step::Done(request.map(|request| Reply {
                                request,
                                length,
                                file,
                            })))
                        }
                        Receiving::Header { .. } => {
                            unreachable!("it was a body, and nothing else changes it")
                        }
                    };
                }
                Receiving::Body {
                    id,
                    length,
                    got,
                    request,
                    ..
                } => {
                    let rest = *length as usize - *got;
                    let place = request.as_ref().zip(memory);
                    let place = place.and_then(|(request, memory)| request.chain.writable(memory).ok());
                    match place {
                        Some(slices) => {
                            let mut slices = guest_io::part(&slices, *got, rest);
                            slices.truncate(MAX_SLICES);
                            guest_io::read_some(self.socket.as_fd(), &slices, &mut [])
                        }
                        None => {
                            let mut thrown_away = [0; SCRATCH];
                            let most = rest.min(SCRATCH);
                            let read =
                                guest_io::read_some(self.socket.as_fd(), &[], &mut thrown_away[..most]);
                            let opening = self.opening.as_mut().filter(|opening| opening.id == *id);
                            if let (Ok(n), Some(opening)) = (&read, opening) {
                                opening.take(&thrown_away[..*n]);
                            }
                            read
                        }
                    }
                }
            };
            match (read, &mut self.receiving) {
                (Ok(0), _) => return Err(Broken::Closed),
                (Ok(n), Receiving::Header { got, .. } | Receiving::Body { got, .. }) => *got += n,
                (Err(error), _) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Step::Blocked),
                (Err(error), _) => return Err(io_error(error)),
            }
        }
    }

    /// The header of a reply is complete: its bytes follow, or are there already.
    fn header_has_come(&mut self) -> Result<(), Broken> {
        let Receiving::Header { bytes, got, file } = &mut self.receiving else {
            return Ok(());
        };
        let ReplyHeader { id, length } = ReplyHeader::decode(bytes)?;
        let (got, file) = (*got - bytes.len(), file.take());
        let (room, request) = self.waiting.remove(&id).ok_or(Broken::Unasked(id))?;
        self.receiving = Receiving::Body {
            id,
            length,
            got,
            file,
            request,
        };
        if length > room {
            return Err(Broken::TooLong { length, room });
        }
        if got > length as usize {
            // No other reply is due.
            return Err(Broken::More(got - length as usize));
        }
        Ok(())
    }

    /// The driver was reset: its memory and chains are not touched any more.
    pub fn forget(&mut self) {
        if let Some(sending) = &mut self.sending {
            sending.request = None;
        }
        if let Receiving::Body { request, .. } = &mut self.receiving {
            *request = None;
        }
        for (_, request) in self.waiting.values_mut() {
            *request = None;
        }
    }

    /// Ends the relay. Returns the requests that must still be answered.
    pub fn close(self) -> Vec<Request> {
        let mut unanswered: Vec<Request> = self.waiting.into_values().filter_map(|(_, r)| r).collect();
        unanswered.extend(self.sending.and_then(|sending| sending.request));
        if let Receiving::Body { request, .. } = self.receiving {
            unanswered.extend(request);
        }
        unanswered
    }
}

impl Opening {
    /// Bytes of its reply that are examined.
    const HEADER: usize = size_of::<OutHeader>();

    fn take(&mut self, bytes: &[u8]) {
        let more = Self::HEADER - self.reply.len();
        self.reply.extend(&bytes[..bytes.len().min(more)]);
    }

    fn check(&self) -> Result<(), Broken> {
        let mut header = OutHeader::default();
        header.as_mut_slice()[..self.reply.len()].copy_from_slice(&self.reply);
        match header.error {
            0 => Ok(()),
            error => Err(Broken::Refused(error.wrapping_neg())),
        }
    }
}

impl Sending {
    /// Sends as many bytes as the socket takes now.
    fn some(&mut self, socket: &OwnedFd, memory: Option<&GuestMemory>) -> io::Result<usize> {
        let mut header = self.header.encode();
        let rest_of_header = &mut header[self.sent.min(RequestHeader::BYTES)..];
        let sent = self.sent.saturating_sub(RequestHeader::BYTES);
        let rest = self.header.length as usize - sent;
        let mut zeros = [0; SCRATCH];
        let message = self.request.as_ref().zip(memory);
        let message = message.and_then(|(request, memory)| request.chain.readable(memory).ok());
        let mut slices = Vec::new();
        if !rest_of_header.is_empty() {
            slices.push(VolatileSlice::from(rest_of_header));
        }
        match message {
            Some(message) => slices.extend(guest_io::part(&message, sent, rest)),
            None if !self.ours.is_empty() => slices.push(VolatileSlice::from(&mut self.ours[sent..])),
            None => slices.push(VolatileSlice::from(&mut zeros[..rest.min(SCRATCH)])),
        }
        slices.truncate(MAX_SLICES);
        match guest_io::send_some(socket.as_fd(), &slices) {
            Ok(0) => Err(io::ErrorKind::WriteZero.into()),
            other => other,
        }
    }
}

/// Where the driver wants the reply, if exactly one is due: its header and itself are then received by one call.
fn place_of_only_reply<'m>(
    waiting: &HashMap<u32, (u32, Option<Request>)>,
    memory: Option<&'m GuestMemory>,
) -> Option<Vec<VolatileSlice<'m>>> {
    let mut due = waiting.values();
    let (Some((room, Some(request))), None) = (due.next(), due.next()) else {
        return None;
    };
    let place = request.chain.writable(memory?).ok()?;
    Some(guest_io::part(&place, 0, *room as usize))
}

fn io_error(error: io::Error) -> Broken {
    match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Broken::Closed,
        _ => Broken::Io(error),
    }
}
