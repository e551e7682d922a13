//! One connection between a client's unix socket and a guest port.
//!
//! ```text
//!  Greeting ──CONNECT──> Requested ──RESPONSE──> Open ──both sides of the guest shut──> Draining ──> gone
//!                            └─RST─> gone          └─RST─> Draining
//! ```
//!
//! Each direction ends separately: a client that shuts down its writing side still receives from the guest, and the other way round. A
//! client that is slow to greet, read or write delays only its own connection.

use std::io;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use rustix::net::{RecvFlags, SendFlags, recv, send};
use thaw_protocol::handshake::GUEST_CID;
use vm_memory::VolatileSlice;
use vmm_sys_util::epoll::EventSet;

use super::credit::{BUFFER, ReceiveBuffer, SendCredit};
use super::packet::{HOST_CID, Header, Op, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, STREAM};
use crate::virtio::guest_io;

/// Longest `CONNECT` line, newline included. It has room for ten digits and some space.
const LONGEST_LINE: usize = 32;

/// A connection. Its host port identifies it.
#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
    host_port: u32,
    state: State,
}

#[derive(Debug)]
enum State {
    /// Waits for the client's `CONNECT` line.
    Greeting,
    /// Waits for the guest's answer. `asked`: the request has been sent to the guest.
    Requested { guest_port: u32, asked: bool },
    /// Bytes flow.
    Open(Flow),
    /// The guest has ended the connection. The client still gets the bytes that the guest sent.
    Draining { guest_port: u32, buffer: ReceiveBuffer },
}

/// The two directions of an open connection.
#[derive(Debug)]
struct Flow {
    guest_port: u32,
    credit: SendCredit,
    buffer: ReceiveBuffer,
    /// The client may have sent bytes, or closed its sending side.
    readable: bool,
    /// The client has sent its last byte, so the guest must get `SHUTDOWN_SEND`.
    client_ended: bool,
    /// The client takes no more bytes, so the guest must get `SHUTDOWN_RECEIVE`.
    client_left: bool,
    /// Shutdown flags sent to the guest, and those received from it.
    told: u32,
    heard: u32,
    /// Credit requests: one was sent to the guest, and one from the guest is unanswered.
    asked_for_credit: bool,
    owes_credit: bool,
}

/// What to do with a connection after an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Keep,
    /// Keep it, and answer the guest's packet with a reset.
    KeepAndReset,
    /// Close it. The guest has ended it too, or never knew of it.
    Close,
    /// Close it, and send the guest a reset.
    CloseAndReset,
}

impl Connection {
    /// `stream` must be non-blocking.
    pub fn new(stream: UnixStream, host_port: u32) -> Connection {
        Connection {
            stream,
            host_port,
            state: State::Greeting,
        }
    }

    /// The guest's port, once the client has named it.
    pub fn guest_port(&self) -> Option<u32> {
        match &self.state {
            State::Greeting => None,
            State::Requested { guest_port, .. } | State::Draining { guest_port, .. } => Some(*guest_port),
            State::Open(flow) => Some(flow.guest_port),
        }
    }

    /// The guest's port, if the guest knows the connection and has not ended it.
    pub fn known_to_guest(&self) -> Option<u32> {
        match &self.state {
            State::Requested {
                guest_port,
                asked: true,
            } => Some(*guest_port),
            State::Open(flow) => Some(flow.guest_port),
            State::Greeting | State::Requested { .. } | State::Draining { .. } => None,
        }
    }

    /// Whether only the guest's last packet is missing. Such a connection may be closed to make room for a new one.
    pub fn is_lingering(&self) -> bool {
        matches!(&self.state, State::Open(flow) if flow.client_left && flow.client_ended)
    }

    /// The client's socket is ready.
    pub fn client_ready(&mut self, events: EventSet) -> Fate {
        let gone = events.intersects(EventSet::HANG_UP | EventSet::ERROR);
        match &mut self.state {
            State::Greeting => self.greet(gone),
            State::Requested { asked, .. } => match (gone, *asked) {
                (false, _) => Fate::Keep,
                (true, false) => Fate::Close,
                (true, true) => Fate::CloseAndReset,
            },
            State::Open(flow) => {
                flow.readable |= gone || events.intersects(EventSet::IN | EventSet::READ_HANG_UP);
                flow.client_left |= gone;
                flow.flush(&self.stream);
                Fate::Keep
            }
            State::Draining { buffer, .. } => drain(&self.stream, buffer),
        }
    }

    /// Reads the `CONNECT` line and no byte beyond it.
    fn greet(&mut self, gone: bool) -> Fate {
        let mut line = [0; LONGEST_LINE];
        let peeked = match recv(&self.stream, &mut line[..], RecvFlags::PEEK) {
            Ok((_, n)) => n,
            Err(rustix::io::Errno::AGAIN) if !gone => return Fate::Keep,
            Err(_) => return Fate::Close,
        };
        let Some(end) = line[..peeked].iter().position(|byte| *byte == b'\n') else {
            // Zero bytes mean the end of the stream. A full buffer without a newline is no valid line.
            let more = peeked > 0 && peeked < LONGEST_LINE && !gone;
            return if more { Fate::Keep } else { Fate::Close };
        };
        let Some(guest_port) = parse(&line[..end]).filter(|_| !gone) else {
            return Fate::Close;
        };
        match recv(&self.stream, &mut line[..=end], RecvFlags::empty()) {
            Ok((_, n)) if n == end + 1 => {
                self.state = State::Requested {
                    guest_port,
                    asked: false,
                };
                Fate::Keep
            }
            _ => Fate::Close,
        }
    }

    /// Takes a packet from the guest for this connection. `payload` may be longer or shorter than the header states.
    pub fn take_packet(&mut self, header: &Header, payload: &[VolatileSlice<'_>]) -> Fate {
        if self.guest_port() != Some(header.source_port) {
            return Fate::KeepAndReset;
        }
        match &mut self.state {
            State::Greeting | State::Requested { asked: false, .. } => Fate::KeepAndReset,
            State::Requested { .. } => self.answered(header),
            State::Open(flow) => {
                let end = flow.take_packet(&self.stream, header, payload);
                self.guest_done(end)
            }
            State::Draining { .. } if header.op == Some(Op::Reset) => Fate::Keep,
            State::Draining { .. } => Fate::KeepAndReset,
        }
    }

    /// Handles the guest's answer to the request.
    fn answered(&mut self, header: &Header) -> Fate {
        match header.op {
            Some(Op::Response) => {}
            Some(Op::Reset) => return Fate::Close,
            _ => return Fate::CloseAndReset,
        }
        let greeting = format!("OK {}\n", self.host_port);
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        // Nothing was sent to this client before, so its socket has room unless the client left.
        match send(&self.stream, greeting.as_bytes(), flags) {
            Ok(n) if n == greeting.len() => {}
            _ => return Fate::CloseAndReset,
        }
        let mut flow = Flow::new(header.source_port);
        flow.credit.update(header.buffer, header.forwarded);
        self.state = State::Open(flow);
        Fate::Keep
    }

    /// Handles an open connection that the guest has ended: closes it, or drains it if bytes are left for the client.
    fn guest_done(&mut self, end: End) -> Fate {
        let reset = match end {
            End::No => return Fate::Keep,
            End::Violation => return Fate::CloseAndReset,
            End::Reset => false,
            End::Shutdown => true,
        };
        if let State::Open(flow) = &mut self.state
            && !flow.client_left
            && !flow.buffer.is_empty()
        {
            let buffer = std::mem::take(&mut flow.buffer);
            self.state = State::Draining {
                guest_port: flow.guest_port,
                buffer,
            };
            return if reset { Fate::KeepAndReset } else { Fate::Keep };
        }
        if reset { Fate::CloseAndReset } else { Fate::Close }
    }

    /// Whether [`Self::next_packet`] may have a packet.
    pub fn has_packet(&self) -> bool {
        match &self.state {
            State::Requested { asked, .. } => !asked,
            State::Open(flow) => flow.has_packet(),
            State::Greeting | State::Draining { .. } => false,
        }
    }

    /// The next packet for the guest, its payload read into `room`.
    pub fn next_packet(&mut self, room: &[VolatileSlice<'_>]) -> Option<Header> {
        match &mut self.state {
            State::Requested { guest_port, asked } if !*asked => {
                *asked = true;
                Some(header(self.host_port, *guest_port, Op::Request))
            }
            State::Open(flow) => flow.next_packet(&self.stream, self.host_port, room),
            _ => None,
        }
    }
}

/// Whether and how the guest ended a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    No,
    /// It sent something that the specification forbids.
    Violation,
    /// It sent a reset.
    Reset,
    /// It neither sends nor receives any more, and waits for a reset.
    Shutdown,
}

impl Flow {
    fn new(guest_port: u32) -> Flow {
        Flow {
            guest_port,
            credit: SendCredit::default(),
            buffer: ReceiveBuffer::default(),
            // The client may have written behind its greeting.
            readable: true,
            client_ended: false,
            client_left: false,
            told: 0,
            heard: 0,
            asked_for_credit: false,
            owes_credit: false,
        }
    }

    fn take_packet(&mut self, stream: &UnixStream, header: &Header, payload: &[VolatileSlice<'_>]) -> End {
        let before = self.credit.available();
        self.credit.update(header.buffer, header.forwarded);
        self.asked_for_credit &= self.credit.available() <= before;
        match header.op {
            Some(Op::Data) => self.take_data(stream, header.length, payload),
            Some(Op::Shutdown) => self.hear_shutdown(stream, header.flags),
            Some(Op::Reset) => End::Reset,
            Some(Op::CreditUpdate) => End::No,
            Some(Op::CreditRequest) => {
                self.owes_credit = true;
                End::No
            }
            Some(Op::Request | Op::Response) | None => End::Violation,
        }
    }

    /// Takes bytes for the client. Writes as many as the socket takes at once; the rest goes to the buffer.
    fn take_data(&mut self, stream: &UnixStream, length: u32, payload: &[VolatileSlice<'_>]) -> End {
        let payload = guest_io::part(payload, 0, length as usize);
        if guest_io::total(&payload) < length as usize
            || length > self.buffer.room()
            || self.heard & SHUTDOWN_SEND != 0
        {
            return End::Violation;
        }
        let mut passed = 0;
        if self.buffer.is_empty() && !self.client_left {
            passed = self.pass_on(stream, &payload);
        }
        if self.client_left {
            self.buffer.pass(length - passed);
            return End::No;
        }
        if passed < length {
            let mut rest = vec![0; (length - passed) as usize];
            guest_io::copy_out(&payload, passed as usize, &mut rest);
            self.buffer.hold(&rest);
            // Tries to write now: the socket reports room only after it has refused a write.
            self.flush(stream);
        }
        End::No
    }

    /// Writes to the client straight from guest memory. Returns how many bytes it took.
    fn pass_on(&mut self, stream: &UnixStream, payload: &[VolatileSlice<'_>]) -> u32 {
        if payload.is_empty() {
            return 0;
        }
        let now = &payload[..payload.len().min(guest_io::MAX_SLICES)];
        match guest_io::send_some(stream.as_fd(), now) {
            Ok(n) => {
                self.buffer.pass(n as u32);
                n as u32
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => 0,
            Err(_) => {
                self.client_left = true;
                0
            }
        }
    }

    fn hear_shutdown(&mut self, stream: &UnixStream, flags: u32) -> End {
        self.heard |= flags & (SHUTDOWN_RECEIVE | SHUTDOWN_SEND);
        if self.heard == SHUTDOWN_RECEIVE | SHUTDOWN_SEND {
            return End::Shutdown;
        }
        if self.heard == SHUTDOWN_RECEIVE {
            // Makes later writes of the client fail with EPIPE. Fails only on a socket that the client closed.
            let _ = stream.shutdown(Shutdown::Read);
        }
        self.flush(stream);
        End::No
    }

    /// Writes the held bytes to the client, then closes the writing side if the guest has ended its own.
    fn flush(&mut self, stream: &UnixStream) {
        if self.client_left {
            return discard(&mut self.buffer);
        }
        match write_held(stream, &mut self.buffer) {
            Ok(true) if self.heard & SHUTDOWN_SEND != 0 => {
                // Fails only on a socket the client closed.
                let _ = stream.shutdown(Shutdown::Write);
            }
            Ok(_) => {}
            Err(_) => {
                self.client_left = true;
                discard(&mut self.buffer);
            }
        }
    }

    /// Shutdown flags that the guest must still get.
    fn owed_shutdown(&self) -> u32 {
        let send = if self.client_ended { SHUTDOWN_SEND } else { 0 };
        let receive = if self.client_left { SHUTDOWN_RECEIVE } else { 0 };
        (send | receive) & !self.told
    }

    fn reads_client(&self) -> bool {
        self.readable && !self.client_ended && self.heard & SHUTDOWN_RECEIVE == 0
    }

    fn has_packet(&self) -> bool {
        self.owed_shutdown() != 0
            || self.owes_credit
            || self.buffer.worth_telling()
            || self.reads_client() && (self.credit.available() > 0 || !self.asked_for_credit)
    }

    fn next_packet(
        &mut self,
        stream: &UnixStream,
        host_port: u32,
        room: &[VolatileSlice<'_>],
    ) -> Option<Header> {
        let mut packet = header(host_port, self.guest_port, Op::CreditUpdate);
        if let Some(length) = self.read_client(stream, room) {
            self.credit.spend(length);
            (packet.op, packet.length) = (Some(Op::Data), length);
        } else if self.owed_shutdown() != 0 {
            self.told |= self.owed_shutdown();
            (packet.op, packet.flags) = (Some(Op::Shutdown), self.told);
        } else if self.owes_credit || self.buffer.worth_telling() {
            packet.op = Some(Op::CreditUpdate);
        } else if self.reads_client() && self.credit.available() == 0 && !self.asked_for_credit {
            self.asked_for_credit = true;
            packet.op = Some(Op::CreditRequest);
        } else {
            return None;
        }
        self.owes_credit = false;
        packet.forwarded = self.buffer.announce();
        Some(packet)
    }

    /// Reads as much from the client as credit and `room` allow. `None` if there is nothing now, or never will be.
    fn read_client(&mut self, stream: &UnixStream, room: &[VolatileSlice<'_>]) -> Option<u32> {
        let most = self.credit.available();
        if !self.reads_client() || most == 0 {
            return None;
        }
        let mut room = guest_io::part(room, 0, most as usize);
        room.truncate(guest_io::MAX_SLICES);
        match guest_io::read_some(stream.as_fd(), &room, &mut []) {
            Ok(0) => self.client_ended = true,
            Ok(n) => return Some(n as u32),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => self.readable = false,
            Err(_) => {
                self.client_ended = true;
                self.client_left = true;
            }
        }
        None
    }
}

/// Writes the guest's last bytes to a client. The connection is closed when none are left.
fn drain(stream: &UnixStream, buffer: &mut ReceiveBuffer) -> Fate {
    match write_held(stream, buffer) {
        Ok(false) => Fate::Keep,
        Ok(true) | Err(_) => Fate::Close,
    }
}

/// Writes the held bytes while the client takes them. Returns whether none are left.
fn write_held(stream: &UnixStream, buffer: &mut ReceiveBuffer) -> io::Result<bool> {
    while !buffer.is_empty() {
        match send(stream, buffer.front(), SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(n) => buffer.release(n),
            Err(rustix::io::Errno::AGAIN) => return Ok(false),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(true)
}

fn discard(buffer: &mut ReceiveBuffer) {
    while !buffer.is_empty() {
        buffer.release(buffer.front().len());
    }
}

/// A header from the host, without payload.
pub fn header(host_port: u32, guest_port: u32, op: Op) -> Header {
    Header {
        source_cid: HOST_CID,
        destination_cid: u64::from(GUEST_CID),
        source_port: host_port,
        destination_port: guest_port,
        length: 0,
        kind: STREAM,
        op: Some(op),
        flags: 0,
        buffer: BUFFER,
        forwarded: 0,
    }
}

/// The port of a `CONNECT <port>` line.
fn parse(line: &[u8]) -> Option<u32> {
    let line = std::str::from_utf8(line).ok()?;
    let mut words = line.split_ascii_whitespace();
    let port = words
        .next()
        .filter(|word| word.eq_ignore_ascii_case("connect"))
        .and(words.next())?;
    if words.next().is_some() || !port.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    // VMADDR_PORT_ANY is no valid port.
    port.parse().ok().filter(|port| *port != u32::MAX)
}

#[cfg(test)]
#[path = "connection_test.rs"]
mod tests;
