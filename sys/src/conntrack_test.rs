use super::*;

const GUEST: Ipv4Addr = Ipv4Addr::new(10, 219, 0, 2);
const SLOT: Ipv4Addr = Ipv4Addr::new(100, 64, 0, 2);
const HOST: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 1);
const REMOTE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const TRANSLATION: Translation = Translation {
    inside: GUEST,
    outside: SLOT,
};

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
fn connection_round_trips() {
    let original = tuple(SLOT, 40_000, REMOTE, 443);
    let reply = tuple(REMOTE, 443, HOST, 40_001);
    let read = dumped(original, reply);
    assert_eq!((read.original, read.reply), (original, reply));
    assert_eq!((read.id, read.tcp_state), (Some([1, 2, 3, 4]), Some([3])));
    assert!(read.concerns(SLOT) && read.concerns(REMOTE) && !read.concerns(GUEST));
}

/// The connection that a namespace gets: its original and reply direction, and the translated source and destination.
fn told(connection: &Connection) -> (Tuple, Tuple, Option<Ipv4Addr>, Option<Ipv4Addr>) {
    let attributes = within(connection, TRANSLATION).unwrap();
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
fn hand_over_keeps_the_originator() {
    let out = dumped(tuple(SLOT, 40_000, REMOTE, 443), tuple(REMOTE, 443, HOST, 40_001));
    let guests = tuple(GUEST, 40_000, REMOTE, 443);
    assert_eq!(told(&out), (guests, guests.answered(), Some(SLOT), None));
    // Published: begun elsewhere, to a port of the host.
    let published = dumped(tuple(REMOTE, 50_000, HOST, 8080), tuple(SLOT, 80, REMOTE, 50_000));
    let theirs = tuple(REMOTE, 50_000, SLOT, 80);
    assert_eq!(told(&published), (theirs, theirs.answered(), None, Some(GUEST)));
    let elsewhere = dumped(tuple(REMOTE, 1, HOST, 2), tuple(HOST, 2, REMOTE, 1));
    assert_eq!(within(&elsewhere, TRANSLATION), None);
}

proptest::proptest! {
    #[test]
    fn reading_any_bytes_does_not_panic(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..128)) {
        read(&bytes);
    }
}
