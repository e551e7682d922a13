//! Netlink (netlink(7)): messages built and answers read by hand, for the few that networks need.
//!
//! Invariants: a socket stays in the network namespace it was opened in, whoever uses it; an answer is only taken for the
//! request it belongs to; what the kernel says is read without panic, however it is cut.

use std::io;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType};

// include/uapi/linux/netlink.h
pub(crate) const REQUEST: u16 = 1;
pub(crate) const ACKNOWLEDGE: u16 = 4;
pub(crate) const DUMP: u16 = 0x300;
/// Fails if it exists already.
pub(crate) const EXCLUSIVE: u16 = 0x200;
pub(crate) const CREATE: u16 = 0x400;
pub(crate) const APPEND: u16 = 0x800;
/// The group that is told of links.
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
/// `net.core.wmem_max` as Linux has it; it counts double.
const SEND_BUFFER: usize = 212_992;

/// Attributes one after the other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Attributes {
    bytes: Vec<u8>,
}

impl Attributes {
    /// Any bytes, padded to four.
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

    /// In the byte order of the network, as netfilter has numbers.
    pub fn be32(self, kind: u16, value: u32) -> Self {
        self.bytes(kind, &value.to_be_bytes())
    }

    /// Ended by a zero.
    pub fn text(self, kind: u16, value: &str) -> Self {
        self.bytes(kind, format!("{value}\0").as_bytes())
    }

    pub fn nest(self, kind: u16, inner: Attributes) -> Self {
        self.nest_raw(kind, &inner.bytes)
    }

    /// Attributes that were read, nested as they are.
    pub fn nest_raw(self, kind: u16, inner: &[u8]) -> Self {
        self.bytes(kind | NESTED, inner)
    }

    /// As they are sent.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// A request: a header, a fixed body, attributes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    kind: u16,
    flags: u16,
    payload: Vec<u8>,
}

impl Message {
    /// `body` is of a multiple of four bytes.
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
pub(crate) struct Socket {
    socket: OwnedFd,
    sequence: u32,
    buffer: Vec<u8>,
}

impl Socket {
    /// Of the calling thread's network namespace: links, addresses, routes.
    pub fn route() -> io::Result<Socket> {
        // Protocol 0 of the family is NETLINK_ROUTE.
        Socket::open(None)
    }

    /// The same: nftables and connection tracking.
    pub fn netfilter() -> io::Result<Socket> {
        Socket::open(Some(rustix::net::netlink::NETFILTER))
    }

    /// The same: told of every change of a link, from now on.
    pub fn link_events() -> io::Result<Socket> {
        let socket = Socket::open(None)?;
        rustix::net::bind(&socket.socket, &SocketAddrNetlink::new(0, LINK_EVENTS))?;
        Ok(socket)
    }

    /// Waits for what the kernel tells unasked, and gives some of it: kind and payload.
    ///
    /// # Errors
    /// `ENOBUFS`: there was more than was kept.
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
        // A transaction is one datagram. What the system grants anybody is enough for the largest there is.
        rustix::net::sockopt::set_socket_send_buffer_size(&socket, SEND_BUFFER)?;
        Ok(Socket {
            socket,
            sequence: 0,
            buffer: Vec::new(),
        })
    }

    /// Sends a request; the kernel's verdict.
    pub fn request(&mut self, message: &Message) -> io::Result<()> {
        self.batch(std::slice::from_ref(message))
    }

    /// Sends messages at once, in one system call: the first error of any, or that the last was done. The kernel tries
    /// them all, in order.
    pub fn batch(&mut self, messages: &[Message]) -> io::Result<()> {
        self.batch_until(messages, messages.len().saturating_sub(1))
    }

    /// The same, where the message at `last` is the last that the kernel acknowledges.
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
        // The kernel has done it all, and said so, before the call returned.
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

    /// Sends a dump request and gives each of its answers: kind and payload.
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

    /// One datagram into the buffer: how many bytes. None where there is none and the flags say not to wait.
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
    /// None where it is no verdict.
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

/// The attributes in `bytes`: kind, without its flags, and value.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parsed<'a>(pub &'a [u8]);

impl<'a> Parsed<'a> {
    /// The first of a kind.
    pub fn get(self, kind: u16) -> Option<&'a [u8]> {
        self.into_iter().find(|(k, _)| *k == kind).map(|(_, value)| value)
    }

    /// The attributes nested in the first of a kind.
    pub fn nested(self, kind: u16) -> Option<Parsed<'a>> {
        self.get(kind).map(Parsed)
    }

    /// A value of exactly so many bytes.
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
pub(crate) struct ParsedIter<'a>(&'a [u8]);

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
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_back() {
        let inner = Attributes::default().be32(1, 7).text(2, "name");
        let attributes = Attributes::default().bytes(3, b"abcde").nest(4, inner);
        let message = Message::new(9, CREATE, &[1, 2, 3, 4], attributes);
        let mut bytes = Vec::new();
        message.write(5, ACKNOWLEDGE, &mut bytes);
        message.write(6, 0, &mut bytes);
        let answers: Vec<_> = Answers(&bytes).collect();
        assert_eq!(answers.len(), 2);
        assert_eq!((answers[0].kind, answers[0].sequence), (9, 5));
        assert_eq!(bytes[6..8], (REQUEST | CREATE | ACKNOWLEDGE).to_ne_bytes());
        let parsed = Parsed(&answers[1].payload[4..]);
        assert_eq!(parsed.get(3), Some(&b"abcde"[..]));
        let inner = parsed.nested(4).unwrap();
        assert_eq!(inner.array(1), Some(7u32.to_be_bytes()));
        assert_eq!(inner.get(2), Some(&b"name\0"[..]));
        assert_eq!(inner.array::<2>(1), None);
    }

    #[test]
    fn the_kernel_refuses_what_is_nonsense_and_dumps_links() {
        let mut socket = Socket::route().unwrap();
        // RTM_DELLINK of no link.
        let message = Message::new(17, 0, &[0; 16], Attributes::default());
        socket.request(&message).unwrap_err();
        let mut links = 0;
        let message = Message::new(18, 0, &[0; 16], Attributes::default());
        socket.dump(&message, |_, _| links += 1).unwrap();
        assert!(links > 0);
    }

    proptest::proptest! {
        #[test]
        fn reading_any_bytes_ends_and_never_panics(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..192)) {
            let answers: Vec<_> = Answers(&bytes).inspect(|a| { a.error(); }).collect();
            assert!(answers.len() <= bytes.len());
            assert!(Parsed(&bytes).into_iter().count() <= bytes.len());
        }
    }
}
