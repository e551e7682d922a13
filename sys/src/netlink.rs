//! Netlink (netlink(7)): sockets, and the encoding of messages and attributes.
//!
//! Invariants: a socket stays in the network namespace it was opened in, whichever thread uses it; an answer is matched to its request
//! by number; reading an answer never panics, however it is cut.

use std::io;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType};

// include/uapi/linux/netlink.h
pub const REQUEST: u16 = 1;
pub const ACKNOWLEDGE: u16 = 4;
pub const DUMP: u16 = 0x300;
/// Replaces an existing entry.
pub const REPLACE: u16 = 0x100;
/// Fails if it exists already.
pub const EXCLUSIVE: u16 = 0x200;
pub const CREATE: u16 = 0x400;
pub const APPEND: u16 = 0x800;
/// The multicast group of changes to links.
const LINK_EVENTS: u32 = 1;
const ERROR: u16 = 2;
const DONE: u16 = 3;
const NESTED: u16 = 0x8000;
/// Flags of an attribute's type.
const TYPE_MASK: u16 = 0x3fff;
/// Bytes of a message's header, and of an attribute's.
const HEADER: usize = 16;
const ATTRIBUTE: usize = 4;
/// The kernel's own datagrams are at most half of that.
const BUFFER: usize = 64 << 10;
/// The default of `net.core.wmem_max`, which the kernel doubles.
const SEND_BUFFER: usize = 212_992;

/// A list of encoded attributes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attributes {
    bytes: Vec<u8>,
}

impl Attributes {
    /// Appends an attribute, padded to four bytes.
    pub fn bytes(mut self, kind: u16, value: &[u8]) -> Self {
        self.put(kind, value);
        self
    }

    fn put(&mut self, kind: u16, value: &[u8]) {
        let length = u16::try_from(ATTRIBUTE + value.len()).unwrap_or(u16::MAX);
        debug_assert_eq!(usize::from(length), ATTRIBUTE + value.len());
        self.bytes.extend_from_slice(&length.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(value);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    /// Appends a number in network byte order, as netfilter expects.
    pub fn be32(self, kind: u16, value: u32) -> Self {
        self.bytes(kind, &value.to_be_bytes())
    }

    /// Appends a string and its terminating zero.
    pub fn text(self, kind: u16, value: &str) -> Self {
        self.bytes(kind, format!("{value}\0").as_bytes())
    }

    pub fn nest(self, kind: u16, inner: Attributes) -> Self {
        self.nest_raw(kind, &inner.bytes)
    }

    /// Nests attributes that were read, unchanged.
    pub fn nest_raw(self, kind: u16, inner: &[u8]) -> Self {
        self.bytes(kind | NESTED, inner)
    }

    /// The encoded attributes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// A request: a header, a fixed body, attributes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    kind: u16,
    flags: u16,
    payload: Vec<u8>,
}

impl Message {
    /// The length of `body` is a multiple of four.
    pub fn new(kind: u16, flags: u16, body: &[u8], attributes: Attributes) -> Message {
        let mut payload = body.to_vec();
        payload.extend_from_slice(&attributes.bytes);
        Message {
            kind,
            flags: REQUEST | flags,
            payload,
        }
    }

    fn write(&self, sequence: u32, more: u16, to: &mut Vec<u8>) {
        let length = (HEADER + self.payload.len()) as u32;
        to.extend_from_slice(&length.to_ne_bytes());
        to.extend_from_slice(&self.kind.to_ne_bytes());
        to.extend_from_slice(&(self.flags | more).to_ne_bytes());
        to.extend_from_slice(&sequence.to_ne_bytes());
        to.extend_from_slice(&0u32.to_ne_bytes());
        to.extend_from_slice(&self.payload);
    }
}

/// An open netlink socket.
#[derive(Debug)]
pub struct Socket {
    socket: OwnedFd,
    sequence: u32,
    buffer: Vec<u8>,
}

impl Socket {
    /// Opens a socket in the calling thread's network namespace, for links, addresses and routes.
    pub fn route() -> io::Result<Socket> {
        // Protocol 0 of the family is NETLINK_ROUTE.
        Socket::open(None)
    }

    /// The same, for nftables and connection tracking.
    pub fn netfilter() -> io::Result<Socket> {
        Socket::open(Some(rustix::net::netlink::NETFILTER))
    }

    /// The same, for the sockets of the namespace.
    pub fn diagnostics() -> io::Result<Socket> {
        Socket::open(Some(rustix::net::netlink::SOCK_DIAG))
    }

    /// The same, for events: it receives every change of a link from now on.
    pub fn link_events() -> io::Result<Socket> {
        let socket = Socket::open(None)?;
        rustix::net::bind(&socket.socket, &SocketAddrNetlink::new(0, LINK_EVENTS))?;
        Ok(socket)
    }

    /// Waits for events and passes kind and payload of each to `each`.
    ///
    /// # Errors
    /// `ENOBUFS`: the kernel dropped events that did not fit the socket's buffer.
    pub fn hear(&mut self, mut each: impl FnMut(u16, &[u8])) -> io::Result<()> {
        if let Some(length) = self.receive(RecvFlags::empty())? {
            for event in Answers(&self.buffer[..length]) {
                each(event.kind, event.payload);
            }
        }
        Ok(())
    }

    fn open(protocol: Option<Protocol>) -> io::Result<Socket> {
        let socket = rustix::net::socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            protocol,
        )?;
        // A transaction is one datagram. The size that every process may request is enough for the largest one.
        rustix::net::sockopt::set_socket_send_buffer_size(&socket, SEND_BUFFER)?;
        Ok(Socket {
            socket,
            sequence: 0,
            buffer: Vec::new(),
        })
    }

    /// Sends a request and returns the kernel's verdict.
    pub fn request(&mut self, message: &Message) -> io::Result<()> {
        self.batch(std::slice::from_ref(message))
    }

    /// Sends messages in one system call. The kernel tries them all, in order.
    ///
    /// # Errors
    /// The first error of any.
    pub fn batch(&mut self, messages: &[Message]) -> io::Result<()> {
        self.batch_until(messages, messages.len().saturating_sub(1))
    }

    /// The same, for a batch in which the message at index `last` is the last that the kernel acknowledges.
    pub fn batch_until(&mut self, messages: &[Message], last: usize) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(messages.iter().map(|m| HEADER + m.payload.len()).sum());
        let first = self.sequence.wrapping_add(1);
        for (n, message) in messages.iter().enumerate() {
            self.sequence = self.sequence.wrapping_add(1);
            message.write(self.sequence, if n == last { ACKNOWLEDGE } else { 0 }, &mut bytes);
        }
        let acknowledged = first.wrapping_add(last as u32);
        self.send(&bytes)?;
        let mut verdict = Err(io::Error::from(io::ErrorKind::UnexpectedEof));
        // The kernel has processed the messages and queued its answers before the send returned.
        while let Some(length) = self.receive(RecvFlags::DONTWAIT)? {
            for answer in Answers(&self.buffer[..length]) {
                let ours = answer.sequence.wrapping_sub(first) < messages.len() as u32;
                match answer.error() {
                    Some(Err(error)) if ours => verdict = Err(error),
                    Some(Ok(())) if answer.sequence == acknowledged => verdict = Ok(()),
                    _ => continue,
                }
                if verdict.is_err() {
                    self.drain()?;
                    return verdict;
                }
            }
        }
        verdict
    }

    /// Sends a dump request and passes kind and payload of each answer to `each`.
    pub fn dump(&mut self, message: &Message, mut each: impl FnMut(u16, &[u8])) -> io::Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut bytes = Vec::new();
        message.write(self.sequence, DUMP, &mut bytes);
        self.send(&bytes)?;
        loop {
            let Some(length) = self.receive(RecvFlags::empty())? else {
                return Err(io::ErrorKind::UnexpectedEof.into());
            };
            for answer in Answers(&self.buffer[..length]) {
                match answer.error() {
                    _ if answer.sequence != self.sequence => {}
                    Some(verdict) => return verdict,
                    None if answer.kind == DONE => return Ok(()),
                    None => each(answer.kind, answer.payload),
                }
            }
        }
    }

    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        let kernel = SocketAddrNetlink::new(0, 0);
        rustix::net::sendto(&self.socket, bytes, SendFlags::empty(), &kernel)?;
        Ok(())
    }

    /// Receives a datagram into the buffer and returns its length; `None` if `flags` forbid waiting and there is no datagram.
    fn receive(&mut self, flags: RecvFlags) -> io::Result<Option<usize>> {
        self.buffer.resize(BUFFER, 0);
        let buffer = self.buffer.as_mut_slice();
        match rustix::io::retry_on_intr(|| rustix::net::recv(&self.socket, &mut *buffer, flags)) {
            Ok((length, _)) => Ok(Some(length)),
            Err(Errno::AGAIN) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    fn drain(&mut self) -> io::Result<()> {
        while self.receive(RecvFlags::DONTWAIT)?.is_some() {}
        Ok(())
    }
}

/// One message of the kernel.
#[derive(Clone, Copy, Debug)]
struct Answer<'a> {
    kind: u16,
    sequence: u32,
    payload: &'a [u8],
}

impl Answer<'_> {
    /// The verdict, if this message is one.
    fn error(&self) -> Option<io::Result<()>> {
        if self.kind != ERROR {
            return None;
        }
        let code = self.payload.first_chunk().map_or(0, |b| i32::from_ne_bytes(*b));
        Some(match code {
            0 => Ok(()),
            code => Err(io::Error::from_raw_os_error(code.saturating_neg())),
        })
    }
}

/// The messages of a datagram.
struct Answers<'a>(&'a [u8]);

impl<'a> Iterator for Answers<'a> {
    type Item = Answer<'a>;

    fn next(&mut self) -> Option<Answer<'a>> {
        let bytes = self.0;
        let length = u32::from_ne_bytes(*bytes.first_chunk()?) as usize;
        let payload = bytes.get(HEADER..length)?;
        self.0 = bytes.get(length.next_multiple_of(4)..).unwrap_or(&[]);
        Some(Answer {
            kind: u16::from_ne_bytes(*bytes.get(4..)?.first_chunk()?),
            sequence: u32::from_ne_bytes(*bytes.get(8..)?.first_chunk()?),
            payload,
        })
    }
}

/// Attributes that were received: iterates over kinds, without their flags, and values.
#[derive(Clone, Copy, Debug)]
pub struct Parsed<'a>(pub &'a [u8]);

impl<'a> Parsed<'a> {
    /// The first of a kind.
    pub fn get(self, kind: u16) -> Option<&'a [u8]> {
        self.into_iter().find(|(k, _)| *k == kind).map(|(_, value)| value)
    }

    /// The attributes nested in the first of a kind.
    pub fn nested(self, kind: u16) -> Option<Parsed<'a>> {
        self.get(kind).map(Parsed)
    }

    /// A value of exactly this number of bytes.
    pub fn array<const N: usize>(self, kind: u16) -> Option<[u8; N]> {
        self.get(kind)?.try_into().ok()
    }
}

impl<'a> IntoIterator for Parsed<'a> {
    type Item = (u16, &'a [u8]);
    type IntoIter = ParsedIter<'a>;

    fn into_iter(self) -> ParsedIter<'a> {
        ParsedIter(self.0)
    }
}

#[derive(Clone, Copy, Debug)]
pub struct ParsedIter<'a>(&'a [u8]);

impl<'a> Iterator for ParsedIter<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<(u16, &'a [u8])> {
        let bytes = self.0;
        let length = usize::from(u16::from_ne_bytes(*bytes.first_chunk()?));
        let kind = u16::from_ne_bytes(*bytes.get(2..)?.first_chunk()?) & TYPE_MASK;
        let value = bytes.get(ATTRIBUTE..length)?;
        self.0 = bytes.get(length.next_multiple_of(4)..).unwrap_or(&[]);
        Some((kind, value))
    }
}

#[cfg(test)]
#[path = "netlink_test.rs"]
mod tests;
