//! Connections as the kernel tracks them (ctnetlink): ending those that are not allowed any more, and telling a slot's
//! namespace of those it has not seen.

use std::io;
use std::net::Ipv4Addr;

use super::GUEST_ADDRESS;
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
/// `IPS_*` that say whether an answer came and whether it is worth keeping; and that it is there at all.
const SEEN_REPLY: u32 = 2;
const ASSURED: u32 = 4;
const CONFIRMED: u32 = 8;
/// `IP_CT_TCP_FLAG_BE_LIBERAL`, and that it is meant: sequence numbers of a namespace that begins in the middle say nothing.
const LIBERAL: [u8; 2] = [8, 8];
/// IPv4.
const FAMILY: [u8; GENERIC] = [libc::AF_INET as u8, 0, 0, 0];

/// One direction of a connection. Ports are 0 where the protocol has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tuple {
    pub source: Ipv4Addr,
    pub destination: Ipv4Addr,
    pub protocol: u8,
    pub source_port: u16,
    pub port: u16,
}

/// A connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Connection {
    /// Of whoever began it.
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
    /// The addresses at its ends: who began it, who that called, and who answers.
    pub fn ends(&self) -> [Ipv4Addr; 3] {
        let Connection { original, reply, .. } = self;
        [original.source, original.destination, reply.source]
    }

    /// Whether an address is at either end of it.
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
pub(super) fn find(socket: &mut Socket, which: impl Fn(&Connection) -> bool) -> io::Result<Vec<Connection>> {
    let mut found = Vec::new();
    let message = Message::new(SUBSYSTEM << 8 | GET, 0, &FAMILY, Attributes::default());
    socket.dump(&message, |_, payload| found.extend(read(payload).filter(&which)))?;
    Ok(found)
}

/// Ends every connection of the socket's namespace that `which` picks. How many that were.
pub(super) fn end(socket: &mut Socket, which: impl Fn(&Connection) -> bool) -> io::Result<usize> {
    let mut ended = 0;
    for Connection { named, id, .. } in find(socket, which)? {
        let mut attributes = Attributes::default().nest_raw(TUPLE_ORIGINAL, &named);
        if let Some(id) = id {
            attributes = attributes.bytes(ID, &id);
        }
        let message = Message::new(SUBSYSTEM << 8 | DELETE, 0, &FAMILY, attributes);
        match socket.request(&message) {
            Ok(()) => ended += 1,
            // It ended by itself.
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(ended)
}

/// Tells a slot's namespace of the connections `which` picks of those the host has with the slot at `own`: as if it had seen
/// them from their beginning, so that it knows who began them, and translates them.
pub(super) fn hand_over(
    host: &mut Socket,
    slot: &mut Socket,
    own: Ipv4Addr,
    which: impl Fn(&Connection) -> bool,
) -> io::Result<()> {
    let tracked = |connection: &Connection| {
        matches!(connection.original.protocol, TCP | UDP) && connection.concerns(own) && which(connection)
    };
    for connection in find(host, tracked)? {
        let Some(attributes) = within(&connection, own) else {
            continue;
        };
        let message = Message::new(SUBSYSTEM << 8 | NEW, CREATE | EXCLUSIVE, &FAMILY, attributes);
        match slot.request(&message) {
            // It has seen it.
            Err(e) if e.raw_os_error() == Some(libc::EEXIST) => {}
            told => told?,
        }
    }
    Ok(())
}

/// A connection of the host as the namespace of the slot at `own` would have it.
fn within(connection: &Connection, own: Ipv4Addr) -> Option<Attributes> {
    let (original, kind, to) = if connection.original.source == own {
        let original = Tuple {
            source: GUEST_ADDRESS,
            ..connection.original
        };
        (original, NAT_SOURCE, own)
    } else if connection.reply.source == own {
        (connection.reply.answered(), NAT_DESTINATION, GUEST_ADDRESS)
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
mod tests {
    use super::*;

    const SLOT: Ipv4Addr = Ipv4Addr::new(100, 64, 0, 2);
    const HOST: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 1);
    const REMOTE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

    fn tuple(source: Ipv4Addr, source_port: u16, destination: Ipv4Addr, port: u16) -> Tuple {
        Tuple {
            source,
            destination,
            protocol: TCP,
            source_port,
            port,
        }
    }

    fn dumped(original: Tuple, reply: Tuple) -> Connection {
        let tcp = Attributes::default().bytes(TCP_STATE, &[3]);
        let attributes = Attributes::default()
            .nest(TUPLE_ORIGINAL, original.written())
            .nest(TUPLE_REPLY, reply.written())
            .be32(STATUS, 0x18e)
            .be32(TIMEOUT, 432_000)
            .nest(
                PROTOCOL_INFORMATION,
                Attributes::default().nest(INFORMATION_TCP, tcp),
            )
            .bytes(ID, &[1, 2, 3, 4]);
        read(&[&FAMILY[..], attributes.as_bytes()].concat()).unwrap()
    }

    #[test]
    fn a_connection_is_read_as_it_is_written() {
        let original = tuple(SLOT, 40_000, REMOTE, 443);
        let reply = tuple(REMOTE, 443, HOST, 40_001);
        let read = dumped(original, reply);
        assert_eq!((read.original, read.reply), (original, reply));
        assert_eq!((read.id, read.tcp_state), (Some([1, 2, 3, 4]), Some([3])));
        assert!(read.concerns(SLOT) && read.concerns(REMOTE) && !read.concerns(GUEST_ADDRESS));
    }

    /// What a namespace is told: who began it, and who answers whom.
    fn told(connection: &Connection) -> (Tuple, Tuple, Option<Ipv4Addr>, Option<Ipv4Addr>) {
        let attributes = within(connection, SLOT).unwrap();
        let parsed = Parsed(attributes.as_bytes());
        let tuple = |kind| Tuple::read(parsed.nested(kind).unwrap()).unwrap();
        let to = |kind| parsed.nested(kind)?.array(NAT_FIRST).map(Ipv4Addr::from_octets);
        assert_eq!(parsed.array(STATUS), Some(0xeu32.to_be_bytes()));
        (
            tuple(TUPLE_ORIGINAL),
            tuple(TUPLE_REPLY),
            to(NAT_SOURCE),
            to(NAT_DESTINATION),
        )
    }

    #[test]
    fn a_namespace_is_told_who_began_what() {
        let out = dumped(tuple(SLOT, 40_000, REMOTE, 443), tuple(REMOTE, 443, HOST, 40_001));
        let guests = tuple(GUEST_ADDRESS, 40_000, REMOTE, 443);
        assert_eq!(told(&out), (guests, guests.answered(), Some(SLOT), None));
        // Published: begun elsewhere, to a port of the host.
        let published = dumped(tuple(REMOTE, 50_000, HOST, 8080), tuple(SLOT, 80, REMOTE, 50_000));
        let theirs = tuple(REMOTE, 50_000, SLOT, 80);
        assert_eq!(
            told(&published),
            (theirs, theirs.answered(), None, Some(GUEST_ADDRESS))
        );
        let elsewhere = dumped(tuple(REMOTE, 1, HOST, 2), tuple(HOST, 2, REMOTE, 1));
        assert_eq!(within(&elsewhere, SLOT), None);
    }

    proptest::proptest! {
        #[test]
        fn reading_any_bytes_does_not_panic(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..128)) {
            read(&bytes);
        }
    }
}
