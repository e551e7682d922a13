//! All connections of a guest: the client of each, and the order in which they send.
//!
//! Invariants: there are at most [`MAX_CONNECTIONS`]. A connection with something to send is in the line once. Resets owed to the guest are
//! bounded by [`MAX_RESETS`] plus the connections (including those of the frozen guest), because the guest's packets are not taken while it
//! leaves its resets unread.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};

use rustix::time::{ClockId, clock_gettime};
use thaw_log::LogLimit;
use thaw_protocol::control::Event;
use thaw_protocol::handshake::{GUEST_CID, HANDSHAKE_PORT};
use vm_memory::VolatileSlice;
use vmm_sys_util::epoll::EventSet;

use super::connection::{Connection, Fate, header};
use super::packet::{HOST_CID, Header, Op, STREAM};
use crate::events::EventSink;
use crate::virtio::event_loop::Registrar;
use crate::virtio::state::{ResetRecord, VsockState};

/// Most connections at once. Further clients are closed.
pub const MAX_CONNECTIONS: usize = 1023;
/// When this many resets are owed to the guest, its packets wait.
pub const MAX_RESETS: usize = 1024;
/// Most bytes of payload in one packet, as in Linux.
pub const MAX_PAYLOAD: usize = 64 * 1024;

/// Host ports, which are also event-loop tokens. The range avoids ports that people choose.
const FIRST_PORT: u32 = 1 << 30;
const LAST_PORT: u32 = (1 << 31) - 1;
/// Token of the listening socket.
const LISTENER: u32 = 0;

/// The connections, and the socket that clients connect to.
pub struct Muxer {
    registrar: Registrar,
    events: EventSink,
    listener: Option<UnixListener>,
    /// The driver is up.
    open: bool,
    /// The event loop watches the listener.
    accepting: bool,
    /// The last accept failed for lack of descriptors. The client waits in the backlog.
    stalled: bool,
    connections: HashMap<u32, Entry>,
    next_port: u32,
    /// Connections with something to send, in order.
    line: VecDeque<u32>,
    resets: VecDeque<Header>,
    log: LogLimit,
}

struct Entry {
    connection: Connection,
    in_line: bool,
}

impl Muxer {
    pub fn new(registrar: Registrar, events: EventSink) -> Muxer {
        Muxer {
            registrar,
            events,
            listener: None,
            open: false,
            accepting: false,
            stalled: false,
            connections: HashMap::new(),
            next_port: FIRST_PORT,
            line: VecDeque::new(),
            resets: VecDeque::new(),
            log: LogLimit::default(),
        }
    }

    /// Takes clients from `listener` instead of an earlier one. Existing connections stay.
    pub fn listen(&mut self, listener: UnixListener) {
        self.pause_accepting();
        self.listener = Some(listener);
        self.resume_accepting();
    }

    /// The driver is up: clients are accepted.
    pub fn open(&mut self) {
        self.open = true;
        self.resume_accepting();
    }

    /// The driver is gone, and all connections with it. New clients wait in the backlog.
    pub fn close(&mut self) {
        self.open = false;
        self.pause_accepting();
        self.connections.clear();
        self.line.clear();
        self.resets.clear();
    }

    /// Whether there is a socket for clients to connect to.
    pub fn has_listener(&self) -> bool {
        self.listener.is_some()
    }

    /// The packets that a clone must send its guest. Changes nothing.
    pub fn save(&self) -> VsockState {
        let reset = |reset: &Header| ResetRecord {
            host_port: reset.source_port,
            guest_port: reset.destination_port,
            kind: reset.kind,
        };
        let mut connections: Vec<_> = self
            .connections
            .iter()
            .filter_map(|(port, entry)| Some((*port, entry.connection.known_to_guest()?)))
            .collect();
        connections.sort_unstable();
        VsockState {
            resets: self.resets.iter().map(reset).collect(),
            connections,
            next_port: self.next_port,
        }
    }

    /// Queues a reset for each connection that the guest knows. The resets go out before any other packet.
    pub fn restore(&mut self, state: &VsockState) {
        let owed = state.resets.iter().map(|reset| Header {
            kind: reset.kind,
            ..header(reset.host_port, reset.guest_port, Op::Reset)
        });
        let ended = state
            .connections
            .iter()
            .map(|(host_port, guest_port)| header(*host_port, *guest_port, Op::Reset));
        self.resets = owed.chain(ended).collect();
        self.next_port = state.next_port;
    }

    /// A host descriptor is ready.
    pub fn host_ready(&mut self, token: u32, events: EventSet) {
        if token == LISTENER {
            return self.accept();
        }
        if let Some(entry) = self.connections.get_mut(&token) {
            let fate = entry.connection.client_ready(events);
            self.settle(token, fate);
        }
        if self.stalled {
            self.accept();
        }
    }

    fn accept(&mut self) {
        self.stalled = false;
        while let Some(listener) = self.listener.as_ref().filter(|_| self.accepting) {
            match listener.accept() {
                Ok((stream, _)) => self.admit(stream),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    // Most likely out of descriptors. Tried again at the next client or the next event of a connection.
                    if let Some(dropped) = self.log.pass() {
                        tracing::warn!(%error, dropped, "cannot accept a vsock client");
                    }
                    self.stalled = true;
                    return;
                }
            }
        }
    }

    fn admit(&mut self, stream: UnixStream) {
        if self.connections.len() >= MAX_CONNECTIONS && !self.evict() {
            if let Some(dropped) = self.log.pass() {
                tracing::warn!(
                    dropped,
                    "a vsock client was refused: {MAX_CONNECTIONS} connections are open"
                );
            }
            return;
        }
        let port = self.free_port();
        let events = EventSet::IN | EventSet::OUT | EventSet::READ_HANG_UP | EventSet::EDGE_TRIGGERED;
        let watched = stream
            .set_nonblocking(true)
            .and_then(|()| self.registrar.add(stream.as_raw_fd(), port, events));
        match watched {
            // The event loop also reports what is already ready, such as a greeting.
            Ok(()) => {
                let connection = Connection::new(stream, port);
                self.connections.insert(
                    port,
                    Entry {
                        connection,
                        in_line: false,
                    },
                );
            }
            Err(error) => {
                if let Some(dropped) = self.log.pass() {
                    tracing::warn!(%error, dropped, "a vsock client was refused");
                }
            }
        }
    }

    /// Closes a connection that the client has left but the guest has not closed. Returns whether there was one.
    fn evict(&mut self) -> bool {
        let lingering = self
            .connections
            .iter()
            .find(|(_, entry)| entry.connection.is_lingering());
        match lingering.map(|(port, _)| *port) {
            Some(port) => {
                self.settle(port, Fate::CloseAndReset);
                true
            }
            None => false,
        }
    }

    fn free_port(&mut self) -> u32 {
        loop {
            let port = self.next_port;
            self.next_port = if port == LAST_PORT { FIRST_PORT } else { port + 1 };
            if !self.connections.contains_key(&port) {
                return port;
            }
        }
    }

    /// Takes a packet from the guest.
    pub fn take_packet(&mut self, packet: &Header, payload: &[VolatileSlice<'_>]) {
        if packet.source_cid != u64::from(GUEST_CID) || packet.destination_cid != HOST_CID {
            return;
        }
        if packet.kind != STREAM {
            return self.refuse(packet);
        }
        if packet.op == Some(Op::Request) {
            return self.dialled(packet);
        }
        let port = packet.destination_port;
        match self.connections.get_mut(&port) {
            Some(entry) => match entry.connection.take_packet(packet, payload) {
                Fate::KeepAndReset => {
                    self.refuse(packet);
                    self.settle(port, Fate::Keep);
                }
                fate => self.settle(port, fate),
            },
            None => self.refuse(packet),
        }
    }

    /// The guest tried to connect to the host.
    fn dialled(&mut self, packet: &Header) {
        if packet.destination_port == HANDSHAKE_PORT {
            let now = clock_gettime(ClockId::Monotonic);
            self.events.send(Event::Doorbell {
                at: now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64,
            });
        }
        self.refuse(packet);
    }

    /// Answers a packet with a reset, unless it is one itself.
    fn refuse(&mut self, packet: &Header) {
        if packet.op != Some(Op::Reset) {
            let mut reset = header(packet.destination_port, packet.source_port, Op::Reset);
            // The reset has the type of the packet that was not understood (§5.10.6.4).
            reset.kind = packet.kind;
            self.resets.push_back(reset);
        }
    }

    /// Applies a [`Fate`] to a connection after an event.
    fn settle(&mut self, port: u32, fate: Fate) {
        let Some(entry) = self.connections.get_mut(&port) else {
            return;
        };
        match fate {
            Fate::Keep | Fate::KeepAndReset => {
                if entry.connection.has_packet() && !entry.in_line {
                    entry.in_line = true;
                    self.line.push_back(port);
                }
            }
            Fate::Close | Fate::CloseAndReset => {
                if fate == Fate::CloseAndReset
                    && let Some(guest_port) = entry.connection.guest_port()
                {
                    self.resets.push_back(header(port, guest_port, Op::Reset));
                }
                // If it is in line, its turn is skipped. The event loop forgets a closed socket by itself.
                self.connections.remove(&port);
            }
        }
    }

    /// Whether the guest must read resets before its packets are taken.
    pub fn owes_too_many_resets(&self) -> bool {
        self.resets.len() >= MAX_RESETS
    }

    /// Whether [`Self::next_packet`] may have a packet.
    pub fn has_packets(&self) -> bool {
        !self.resets.is_empty() || !self.line.is_empty()
    }

    /// The next packet for the guest. Its payload is written to `room`.
    pub fn next_packet(&mut self, room: &[VolatileSlice<'_>]) -> Option<Header> {
        if let Some(reset) = self.resets.pop_front() {
            return Some(reset);
        }
        while let Some(port) = self.line.pop_front() {
            let Some(entry) = self.connections.get_mut(&port) else {
                continue;
            };
            entry.in_line = false;
            let packet = entry.connection.next_packet(room);
            self.settle(port, Fate::Keep);
            if packet.is_some() {
                return packet;
            }
        }
        None
    }

    fn resume_accepting(&mut self) {
        if self.accepting || !self.open {
            return;
        }
        if let Some(listener) = &self.listener {
            let events = EventSet::IN | EventSet::EDGE_TRIGGERED;
            match self.registrar.add(listener.as_raw_fd(), LISTENER, events) {
                Ok(()) => self.accepting = true,
                Err(error) => {
                    if let Some(dropped) = self.log.pass() {
                        tracing::warn!(%error, dropped, "cannot wait for vsock clients");
                    }
                }
            }
        }
    }

    fn pause_accepting(&mut self) {
        if std::mem::take(&mut self.accepting)
            && let Some(listener) = &self.listener
        {
            // Fails only for a descriptor that is not watched.
            let _ = self.registrar.remove(listener.as_raw_fd());
        }
    }
}

/// Whether [`Muxer::save`] can have returned this state. `up`: the driver is up.
pub fn check(state: &VsockState, up: bool) -> Result<(), String> {
    let VsockState {
        resets,
        connections,
        next_port,
    } = state;
    if !(FIRST_PORT..=LAST_PORT).contains(next_port) {
        return Err(format!("{next_port} is not a host port"));
    }
    // A clone owes its source's resets and one for each connection, and sends them before it owes others.
    if connections.len() > MAX_CONNECTIONS || resets.len() > MAX_RESETS + 2 * MAX_CONNECTIONS {
        return Err(format!(
            "{} connections and {} resets are more than there can be",
            connections.len(),
            resets.len()
        ));
    }
    if !up && (!connections.is_empty() || !resets.is_empty()) {
        return Err("a driver that is not up has connections".into());
    }
    Ok(())
}

#[cfg(test)]
#[path = "muxer_test.rs"]
mod tests;
