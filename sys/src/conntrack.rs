//! Connection tracking (ctnetlink): reads the kernel's table of connections, ends some of them, and adds them to the table of another
//! network namespace that did not see them begin.
//!
//! Hand-written on [`crate::netlink`]: the maintained crates cover routes and addresses, not this subsystem.

use std::io;
use std::net::Ipv4Addr;

use crate::netlink::{Attributes, CREATE, EXCLUSIVE, Message, Parsed, Socket};
use crate::nft::GENERIC;
use crate::nft::rule::{TCP, UDP};

// include/uapi/linux/netfilter/nfnetlink_conntrack.h
const SUBSYSTEM: u16 = 1;
const NEW: u16 = 0;
const GET: u16 = 1;
const DELETE: u16 = 2;
const TUPLE_ORIGINAL: u16 = 1;
const TUPLE_REPLY: u16 = 2;
const STATUS: u16 = 3;
const PROTOCOL_INFORMATION: u16 = 4;
const NAT_SOURCE: u16 = 6;
const TIMEOUT: u16 = 7;
const ID: u16 = 12;
const NAT_DESTINATION: u16 = 13;
const TUPLE_IP: u16 = 1;
const TUPLE_PROTOCOL: u16 = 2;
const SOURCE: u16 = 1;
const DESTINATION: u16 = 2;
const PROTOCOL_NUMBER: u16 = 1;
const PROTOCOL_SOURCE_PORT: u16 = 2;
const PROTOCOL_PORT: u16 = 3;
const INFORMATION_TCP: u16 = 1;
const TCP_STATE: u16 = 1;
const TCP_FLAGS_ORIGINAL: u16 = 4;
const TCP_FLAGS_REPLY: u16 = 5;
const NAT_FIRST: u16 = 1;
const NAT_LAST: u16 = 2;
/// `IPS_*`: an answer was seen; the connection is worth keeping; it is in the table.
const SEEN_REPLY: u32 = 2;
const ASSURED: u32 = 4;
const CONFIRMED: u32 = 8;
/// `IP_CT_TCP_FLAG_BE_LIBERAL`, as value and mask: a namespace that joins in the middle does not know the sequence numbers.
const LIBERAL: [u8; 2] = [8, 8];
/// IPv4.
const FAMILY: [u8; GENERIC] = [libc::AF_INET as u8, 0, 0, 0];

/// One direction of a connection. Ports are 0 for protocols without ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuple {
    pub source: Ipv4Addr,
    pub destination: Ipv4Addr,
    pub protocol: u8,
    pub source_port: u16,
    pub port: u16,
}

/// A connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connection {
    /// The direction from the initiator.
    pub original: Tuple,
    pub reply: Tuple,
    /// The original direction as the kernel names it.
    named: Vec<u8>,
    id: Option<[u8; 4]>,
    status: u32,
    /// Seconds left, as the kernel writes them.
    timeout: Option<[u8; 4]>,
    tcp_state: Option<[u8; 1]>,
}

impl Connection {
    /// The addresses at its ends: its initiator, the address that the initiator called, and the address that answers.
    pub fn ends(&self) -> [Ipv4Addr; 3] {
        let Connection { original, reply, .. } = self;
        [original.source, original.destination, reply.source]
    }

    /// Whether either of its ends has this address.
    pub fn concerns(&self, address: Ipv4Addr) -> bool {
        self.ends().contains(&address)
    }
}

impl Tuple {
    fn read(attributes: Parsed<'_>) -> Option<Tuple> {
        let addresses = attributes.nested(TUPLE_IP)?;
        let protocol = attributes.nested(TUPLE_PROTOCOL)?;
        let [number] = protocol.array(PROTOCOL_NUMBER)?;
        let port = |kind| protocol.array(kind).map_or(0, u16::from_be_bytes);
        Some(Tuple {
            source: Ipv4Addr::from_octets(addresses.array(SOURCE)?),
            destination: Ipv4Addr::from_octets(addresses.array(DESTINATION)?),
            protocol: number,
            source_port: port(PROTOCOL_SOURCE_PORT),
            port: port(PROTOCOL_PORT),
        })
    }

    fn written(self) -> Attributes {
        let addresses = Attributes::default()
            .bytes(SOURCE, &self.source.octets())
            .bytes(DESTINATION, &self.destination.octets());
        let protocol = Attributes::default()
            .bytes(PROTOCOL_NUMBER, &[self.protocol])
            .bytes(PROTOCOL_SOURCE_PORT, &self.source_port.to_be_bytes())
            .bytes(PROTOCOL_PORT, &self.port.to_be_bytes());
        Attributes::default()
            .nest(TUPLE_IP, addresses)
            .nest(TUPLE_PROTOCOL, protocol)
    }

    fn answered(self) -> Tuple {
        Tuple {
            source: self.destination,
            destination: self.source,
            protocol: self.protocol,
            source_port: self.port,
            port: self.source_port,
        }
    }
}

/// The connections of the socket's namespace that `which` picks.
pub fn find(socket: &mut Socket, which: impl Fn(&Connection) -> bool) -> io::Result<Vec<Connection>> {
    let mut found = Vec::new();
    let message = Message::new(SUBSYSTEM << 8 | GET, 0, &FAMILY, Attributes::default());
    socket.dump(&message, |_, payload| found.extend(read(payload).filter(&which)))?;
    Ok(found)
}

/// Ends every connection of the socket's namespace that `which` picks, and returns how many.
pub fn end(socket: &mut Socket, which: impl Fn(&Connection) -> bool) -> io::Result<usize> {
    let mut ended = 0;
    for Connection { named, id, .. } in find(socket, which)? {
        let mut attributes = Attributes::default().nest_raw(TUPLE_ORIGINAL, &named);
        if let Some(id) = id {
            attributes = attributes.bytes(ID, &id);
        }
        let message = Message::new(SUBSYSTEM << 8 | DELETE, 0, &FAMILY, attributes);
        match socket.request(&message) {
            Ok(()) => ended += 1,
            // It ended by itself meanwhile.
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(ended)
}

/// How a namespace translates addresses: `inside` is seen as `outside` from the host.
#[derive(Clone, Copy, Debug)]
pub struct Translation {
    pub inside: Ipv4Addr,
    pub outside: Ipv4Addr,
}

/// Adds connections of the host to the table of `namespace`, as if it had seen them begin: it then knows which side began each, and
/// translates it. Of the host's TCP and UDP connections with `translation.outside`, `which` picks those to add.
pub fn hand_over(
    host: &mut Socket,
    namespace: &mut Socket,
    translation: Translation,
    which: impl Fn(&Connection) -> bool,
) -> io::Result<()> {
    let tracked = |connection: &Connection| {
        matches!(connection.original.protocol, TCP | UDP)
            && connection.concerns(translation.outside)
            && which(connection)
    };
    for connection in find(host, tracked)? {
        let Some(attributes) = within(&connection, translation) else {
            continue;
        };
        let message = Message::new(SUBSYSTEM << 8 | NEW, CREATE | EXCLUSIVE, &FAMILY, attributes);
        match namespace.request(&message) {
            // The namespace has seen it.
            Err(e) if e.raw_os_error() == Some(libc::EEXIST) => {}
            told => told?,
        }
    }
    Ok(())
}

/// A connection of the host as the namespace would have it. `None` if it is not with `translation.outside`.
fn within(connection: &Connection, translation: Translation) -> Option<Attributes> {
    let Translation { inside, outside } = translation;
    let (original, kind, to) = if connection.original.source == outside {
        let original = Tuple {
            source: inside,
            ..connection.original
        };
        (original, NAT_SOURCE, outside)
    } else if connection.reply.source == outside {
        (connection.reply.answered(), NAT_DESTINATION, inside)
    } else {
        return None;
    };
    let translated = Attributes::default()
        .bytes(NAT_FIRST, &to.octets())
        .bytes(NAT_LAST, &to.octets());
    let status = CONFIRMED | connection.status & (SEEN_REPLY | ASSURED);
    let mut attributes = Attributes::default()
        .nest(TUPLE_ORIGINAL, original.written())
        .nest(TUPLE_REPLY, original.answered().written())
        .be32(STATUS, status)
        .bytes(TIMEOUT, &connection.timeout?)
        .nest(kind, translated);
    if let Some(state) = connection.tcp_state {
        let tcp = Attributes::default()
            .bytes(TCP_STATE, &state)
            .bytes(TCP_FLAGS_ORIGINAL, &LIBERAL)
            .bytes(TCP_FLAGS_REPLY, &LIBERAL);
        let information = Attributes::default().nest(INFORMATION_TCP, tcp);
        attributes = attributes.nest(PROTOCOL_INFORMATION, information);
    }
    Some(attributes)
}

/// The connection of an answer to a dump.
fn read(payload: &[u8]) -> Option<Connection> {
    let attributes = Parsed(payload.get(GENERIC..)?);
    let tcp = attributes
        .nested(PROTOCOL_INFORMATION)
        .and_then(|information| information.nested(INFORMATION_TCP));
    Some(Connection {
        original: Tuple::read(attributes.nested(TUPLE_ORIGINAL)?)?,
        reply: Tuple::read(attributes.nested(TUPLE_REPLY)?)?,
        named: attributes.get(TUPLE_ORIGINAL)?.to_vec(),
        id: attributes.array(ID),
        status: attributes.array(STATUS).map_or(0, u32::from_be_bytes),
        timeout: attributes.array(TIMEOUT),
        tcp_state: tcp.and_then(|tcp| tcp.array(TCP_STATE)),
    })
}

#[cfg(test)]
#[path = "conntrack_test.rs"]
mod tests;
