//! One end of the stream to thaw-share: messages are sent from guest memory and replies received into it, without a copy in
//! this process.
//!
//! Invariant: the stream consists of whole frames, whatever the guest does. A message or reply has the length in its header. If
//! the driver is reset meanwhile, its memory is neither read nor written any more: zeros are sent instead, and the reply is
//! thrown away. At most [`OUTSTANDING`] requests are unanswered; the rest stay in their queues.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

use fuse_backend_rs::abi::fuse_abi::OutHeader;
use thaw_protocol::share::{HeaderError, OUTSTANDING, ReplyHeader, RequestHeader};
use vm_memory::{ByteValued, VolatileSlice};

use crate::memory::GuestMemory;
use crate::virtio::chain::Chain;
use crate::virtio::guest_io::{self, MAX_SLICES};

/// Bytes thrown away, or zeros sent, at a time.
const SCRATCH: usize = 4096;
/// Room for the reply of a message of ours.
const OPENING_ROOM: u32 = 4096;

/// A request that is to be answered, or whose chain is to be given back.
#[derive(Debug)]
pub struct Request {
    pub queue: usize,
    pub chain: Chain,
    /// Bytes of the message.
    pub length: u32,
    /// Bytes its reply may have; 0: none is due.
    pub room: u32,
}

/// Why the relay is of no use any more.
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
    #[error("thaw-share did not take over from the one before: error {0}")]
    Refused(i32),
}

/// What can be done without waiting.
#[derive(Debug)]
pub enum Step<T> {
    Done(T),
    /// Nothing more, until the socket is ready.
    Blocked,
}

/// A message on its way out.
#[derive(Debug)]
struct Sending {
    header: RequestHeader,
    /// Bytes of header and message that are gone.
    sent: usize,
    /// None: the driver was reset, or it is ours.
    request: Option<Request>,
    /// A message of ours; else empty.
    ours: Vec<u8>,
}

/// A message of ours, whose reply the guest does not see.
#[derive(Debug)]
struct Opening {
    id: u32,
    /// The header of its reply, as far as it has come.
    reply: Vec<u8>,
}

/// A reply on its way in.
#[derive(Debug)]
enum Receiving {
    Header {
        bytes: [u8; ReplyHeader::BYTES],
        got: usize,
    },
    Body {
        id: u32,
        length: u32,
        got: usize,
        /// None: the driver was reset, or it is ours.
        request: Option<Request>,
    },
}

impl Receiving {
    const START: Receiving = Receiving::Header {
        bytes: [0; ReplyHeader::BYTES],
        got: 0,
    };
}

/// The stream.
#[derive(Debug)]
pub struct Relay {
    socket: OwnedFd,
    next_id: u32,
    sending: Option<Sending>,
    receiving: Receiving,
    /// By id, with the room its reply has; none of a driver that was reset.
    waiting: HashMap<u32, (u32, Option<Request>)>,
    /// Nothing else is sent before it is answered.
    opening: Option<Opening>,
}

impl Relay {
    /// Over a socket that does not wait.
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

    /// The same, to one that takes over: this message, the guest's INIT, is sent before anything else may begin.
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

    /// Has both ends find it closed.
    pub fn shut_down(&self) {
        // One that is closed already is what is wanted.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }

    /// Whether [`Self::send`] waits for the socket.
    pub fn is_sending(&self) -> bool {
        self.sending.is_some()
    }

    /// Whether another request may begin.
    pub fn has_room(&self) -> bool {
        self.sending.is_none() && self.opening.is_none() && self.waiting.len() < OUTSTANDING
    }

    /// Whether a chain with this head is on its way: the driver made a descriptor available that is in use.
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

    /// Takes a request, while [`Self::has_room`]; [`Self::send`] is to come. Lengths are within their bounds.
    pub fn begin(&mut self, request: Request) {
        // Never one that waits: there are far fewer of those.
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

    /// Sends what was begun. Done: nothing is left to send, and the request that gets no reply, if it was one, is given back.
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

    /// Takes one reply: how long it is, and whose, if the driver was not reset. The bytes are in guest memory.
    pub fn receive(&mut self, memory: Option<&GuestMemory>) -> Result<Step<Option<(Request, u32)>>, Broken> {
        loop {
            let read = match &mut self.receiving {
                Receiving::Header { bytes, got } if *got < bytes.len() => {
                    guest_io::read_some(self.socket.as_fd(), &[], &mut bytes[*got..])
                }
                Receiving::Header { bytes, .. } => {
                    let ReplyHeader { id, length } = ReplyHeader::decode(bytes)?;
                    let (room, request) = self.waiting.remove(&id).ok_or(Broken::Unasked(id))?;
                    self.receiving = Receiving::Body {
                        id,
                        length,
                        got: 0,
                        request,
                    };
                    if length > room {
                        return Err(Broken::TooLong { length, room });
                    }
                    continue;
                }
                Receiving::Body { id, length, got, .. } if *got == *length as usize => {
                    let length = *length;
                    if let Some(opening) = self.opening.take_if(|opening| opening.id == *id) {
                        opening.check()?;
                    }
                    return match std::mem::replace(&mut self.receiving, Receiving::START) {
                        Receiving::Body { request, .. } => {
                            Ok(Step::Done(request.map(|request| (request, length))))
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

    /// The driver was reset: its memory and its chains are not touched any more.
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

    /// Ends the relay: the requests that are still to be answered.
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
    /// What of its reply is looked at.
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
    /// Sends as much as the socket takes now.
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

fn io_error(error: io::Error) -> Broken {
    match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Broken::Closed,
        _ => Broken::Io(error),
    }
}
