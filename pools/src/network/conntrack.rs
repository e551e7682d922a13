//! Ending connections that a policy does not allow any more (ctnetlink).

use std::io;
use std::net::Ipv4Addr;

use super::GUEST_ADDRESS;
use crate::netlink::{Attributes, Message, Parsed, Socket};
use crate::nft::GENERIC;

// include/uapi/linux/netfilter/nfnetlink_conntrack.h
const SUBSYSTEM: u16 = 1;
const GET: u16 = 1;
const DELETE: u16 = 2;
const TUPLE_ORIGINAL: u16 = 1;
const ID: u16 = 12;
const TUPLE_IP: u16 = 1;
const TUPLE_PROTOCOL: u16 = 2;
const SOURCE: u16 = 1;
const DESTINATION: u16 = 2;
const PROTOCOL_NUMBER: u16 = 1;
const PROTOCOL_PORT: u16 = 3;
/// IPv4.
const FAMILY: [u8; GENERIC] = [libc::AF_INET as u8, 0, 0, 0];

/// A connection as the kernel names it.
#[derive(Debug, PartialEq, Eq)]
struct Entry {
    tuple: Vec<u8>,
    id: Option<[u8; 4]>,
}

/// Ends every connection the guest of the socket's namespace has begun to where `denied` says so: address, protocol, port
/// (0 where the protocol has none). How many that were.
pub(super) fn end(socket: &mut Socket, denied: impl Fn(Ipv4Addr, u8, u16) -> bool) -> io::Result<usize> {
    let mut found = Vec::new();
    let message = Message::new(SUBSYSTEM << 8 | GET, 0, &FAMILY, Attributes::default());
    socket.dump(&message, |_, payload| found.extend(entry(payload, &denied)))?;
    let mut ended = 0;
    for Entry { tuple, id } in found {
        let mut attributes = Attributes::default().nest_raw(TUPLE_ORIGINAL, &tuple);
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

/// The entry of a dump, if it is to be ended.
fn entry(payload: &[u8], denied: impl Fn(Ipv4Addr, u8, u16) -> bool) -> Option<Entry> {
    let attributes = Parsed(payload.get(GENERIC..)?);
    let tuple = attributes.get(TUPLE_ORIGINAL)?;
    let addresses = Parsed(tuple).nested(TUPLE_IP)?;
    let source = Ipv4Addr::from_octets(addresses.array(SOURCE)?);
    let destination = Ipv4Addr::from_octets(addresses.array(DESTINATION)?);
    let protocol = Parsed(tuple).nested(TUPLE_PROTOCOL)?;
    let [number] = protocol.array(PROTOCOL_NUMBER)?;
    let port = protocol.array(PROTOCOL_PORT).map_or(0, u16::from_be_bytes);
    (source == GUEST_ADDRESS && denied(destination, number, port)).then(|| Entry {
        tuple: tuple.to_vec(),
        id: attributes.array(ID),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dumped(source: Ipv4Addr) -> Vec<u8> {
        let addresses = Attributes::default()
            .bytes(SOURCE, &source.octets())
            .bytes(DESTINATION, &[192, 0, 2, 1]);
        let protocol = Attributes::default()
            .bytes(PROTOCOL_NUMBER, &[6])
            .bytes(PROTOCOL_PORT, &443u16.to_be_bytes());
        let tuple = Attributes::default()
            .nest(TUPLE_IP, addresses)
            .nest(TUPLE_PROTOCOL, protocol);
        let attributes = Attributes::default()
            .nest(TUPLE_ORIGINAL, tuple)
            .bytes(ID, &[1, 2, 3, 4]);
        [&FAMILY[..], attributes.as_bytes()].concat()
    }

    #[test]
    fn only_what_the_guest_began_and_is_denied_is_ended() {
        let to = |to, protocol, port| (to, protocol, port) == (Ipv4Addr::new(192, 0, 2, 1), 6, 443);
        let found = entry(&dumped(GUEST_ADDRESS), to).unwrap();
        assert_eq!(found.id, Some([1, 2, 3, 4]));
        assert_eq!(entry(&dumped(GUEST_ADDRESS), |_, _, _| false), None);
        assert_eq!(entry(&dumped(Ipv4Addr::new(192, 0, 2, 9)), |_, _, _| true), None);
    }

    proptest::proptest! {
        #[test]
        fn reading_any_bytes_does_not_panic(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..128)) {
            entry(&bytes, |_, _, _| true);
        }
    }
}
