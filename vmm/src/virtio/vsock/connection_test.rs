use std::io::{Read, Write};

use super::*;
use crate::virtio::testing::memory;
use vm_memory::{GuestAddress, GuestMemory as _};

const HOST: u32 = 1 << 30;
const GUEST: u32 = 1024;

/// A connection and its client.
struct Pair {
    connection: Connection,
    client: UnixStream,
}

/// Memory that the guest would provide for a payload.
fn room(bytes: usize) -> VolatileSlice<'static> {
    memory().get_slice(GuestAddress(0), bytes).unwrap()
}

fn payload(bytes: &[u8]) -> VolatileSlice<'static> {
    let slice = room(bytes.len().max(1));
    slice.copy_from(bytes);
    slice
}

fn from_guest(op: Op) -> Header {
    Header {
        source_port: GUEST,
        destination_port: HOST,
        buffer: 65_536,
        ..header(HOST, GUEST, op)
    }
}

fn data(length: usize) -> Header {
    Header {
        length: length as u32,
        ..from_guest(Op::Data)
    }
}

fn shutdown(flags: u32) -> Header {
    Header {
        flags,
        ..from_guest(Op::Shutdown)
    }
}

impl Pair {
    fn new() -> Pair {
        let (ours, client) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        client.set_nonblocking(true).unwrap();
        Pair {
            connection: Connection::new(ours, HOST),
            client,
        }
    }

    /// A connection that the guest has accepted.
    fn open() -> Pair {
        let mut pair = Pair::new();
        pair.client.write_all(b"CONNECT 1024\n").unwrap();
        assert_eq!(pair.ready(EventSet::IN), Fate::Keep);
        assert_eq!(pair.next().unwrap().op, Some(Op::Request));
        assert_eq!(pair.take(&from_guest(Op::Response), &[]), Fate::Keep);
        assert_eq!(pair.read(), format!("OK {HOST}\n").as_bytes());
        pair
    }

    fn ready(&mut self, events: EventSet) -> Fate {
        self.connection.client_ready(events)
    }

    fn take(&mut self, header: &Header, bytes: &[u8]) -> Fate {
        self.connection.take_packet(header, &[payload(bytes)])
    }

    fn next(&mut self) -> Option<Header> {
        self.connection.next_packet(&[room(4096)])
    }

    fn next_data(&mut self) -> (Option<Header>, Vec<u8>) {
        let room = room(4096);
        let header = self.connection.next_packet(&[room]);
        let mut bytes = vec![0; header.map_or(0, |h| h.length as usize)];
        room.copy_to(&mut bytes[..]);
        (header, bytes)
    }

    /// The bytes that the client can read now.
    fn read(&mut self) -> Vec<u8> {
        let mut all = Vec::new();
        let mut some = [0; 65_536];
        while let Ok(n @ 1..) = self.client.read(&mut some) {
            all.extend_from_slice(&some[..n]);
        }
        all
    }

    fn client_sees_end(&mut self) -> bool {
        matches!(self.client.read(&mut [0; 16]), Ok(0))
    }
}

#[test]
fn a_greeting_may_come_in_pieces_and_data_behind_it_is_not_lost() {
    let mut pair = Pair::new();
    pair.client.write_all(b"CONN").unwrap();
    assert_eq!(pair.ready(EventSet::IN), Fate::Keep);
    assert!(!pair.connection.has_packet());
    pair.client.write_all(b"ECT 1024\nhello").unwrap();
    assert_eq!(pair.ready(EventSet::IN), Fate::Keep);
    let request = pair.next().unwrap();
    assert_eq!(
        (request.op, request.source_port, request.destination_port),
        (Some(Op::Request), HOST, GUEST)
    );
    assert!(pair.next().is_none(), "it asks once");
    pair.take(&from_guest(Op::Response), &[]);
    let (header, bytes) = pair.next_data();
    assert_eq!((header.unwrap().op, bytes), (Some(Op::Data), b"hello".to_vec()));
}

#[test]
fn bad_greetings_close_the_connection() {
    for line in [
        &b"GET / HTTP/1.1\n"[..],
        b"CONNECT\n",
        b"CONNECT x\n",
        b"CONNECT 4294967296\n",
        b"CONNECT 4294967295\n",
        b"CONNECT -1\n",
        b"CONNECT 1 2\n",
        b"\n",
        &[0xff; 40],
        &[b'C'; 32],
    ] {
        let mut pair = Pair::new();
        pair.client.write_all(line).unwrap();
        assert_eq!(pair.ready(EventSet::IN), Fate::Close, "{line:?}");
    }
    let mut pair = Pair::new();
    pair.client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(pair.ready(EventSet::IN | EventSet::READ_HANG_UP), Fate::Close);
}

#[test]
fn client_that_leaves_early_resets_only_a_guest_that_was_asked() {
    let mut pair = Pair::new();
    pair.client.write_all(b"CONNECT 1024\n").unwrap();
    pair.ready(EventSet::IN);
    assert_eq!(pair.ready(EventSet::IN | EventSet::HANG_UP), Fate::Close);
    let mut pair = Pair::new();
    pair.client.write_all(b"CONNECT 1024\n").unwrap();
    pair.ready(EventSet::IN);
    pair.next().unwrap();
    assert_eq!(pair.ready(EventSet::IN | EventSet::HANG_UP), Fate::CloseAndReset);
}

#[test]
fn a_refused_request_closes_without_an_answer() {
    let mut pair = Pair::new();
    pair.client.write_all(b"CONNECT 1024\n").unwrap();
    pair.ready(EventSet::IN);
    pair.next().unwrap();
    assert_eq!(pair.take(&from_guest(Op::Reset), &[]), Fate::Close);
    drop(pair.connection);
    // It waits: a process that another test is starting may hold a copy of the other end for a moment.
    pair.client.set_nonblocking(false).unwrap();
    assert!(matches!(pair.client.read(&mut [0; 16]), Ok(0)));
}

#[test]
fn a_guest_that_guesses_a_port_is_reset_and_the_client_unharmed() {
    let mut pair = Pair::new();
    for op in [Op::Response, Op::Data, Op::Shutdown] {
        assert_eq!(pair.take(&from_guest(op), &[]), Fate::KeepAndReset);
    }
    pair.client.write_all(b"CONNECT 1024\n").unwrap();
    pair.ready(EventSet::IN);
    assert_eq!(
        pair.take(&from_guest(Op::Response), &[]),
        Fate::KeepAndReset,
        "not asked yet"
    );
    let wrong_port = Header {
        source_port: 99,
        ..from_guest(Op::Response)
    };
    pair.next().unwrap();
    assert_eq!(pair.take(&wrong_port, &[]), Fate::KeepAndReset);
    assert_eq!(
        pair.take(&from_guest(Op::Data), &[]),
        Fate::CloseAndReset,
        "an answer must be one"
    );
}

#[test]
fn bytes_flow_both_ways() {
    let mut pair = Pair::open();
    assert_eq!(pair.take(&data(5), b"hello"), Fate::Keep);
    assert_eq!(pair.read(), b"hello");
    pair.client.write_all(b"world").unwrap();
    pair.ready(EventSet::IN);
    let (header, bytes) = pair.next_data();
    assert_eq!(bytes, b"world");
    assert_eq!(header.unwrap().forwarded, 5, "every packet tells the credit");
    assert!(!pair.connection.has_packet() || pair.next().is_none());
}

#[test]
fn client_that_ends_its_writing_still_receives() {
    let mut pair = Pair::open();
    pair.client.write_all(b"last").unwrap();
    pair.client.shutdown(Shutdown::Write).unwrap();
    pair.ready(EventSet::IN | EventSet::READ_HANG_UP);
    assert_eq!(pair.next_data().1, b"last");
    let end = pair.next().unwrap();
    assert_eq!((end.op, end.flags), (Some(Op::Shutdown), SHUTDOWN_SEND));
    assert!(pair.next().is_none());
    assert_eq!(pair.take(&data(5), b"reply"), Fate::Keep);
    assert_eq!(pair.read(), b"reply");
    assert_eq!(pair.take(&shutdown(3), &[]), Fate::CloseAndReset);
}

#[test]
fn guest_that_ends_its_writing_still_receives() {
    let mut pair = Pair::open();
    pair.take(&data(3), b"end");
    assert_eq!(pair.take(&shutdown(SHUTDOWN_SEND), &[]), Fate::Keep);
    assert_eq!(pair.read(), b"end");
    assert!(pair.client_sees_end());
    pair.client.write_all(b"more").unwrap();
    pair.ready(EventSet::IN);
    assert_eq!(pair.next_data().1, b"more");
    assert_eq!(
        pair.take(&data(1), b"x"),
        Fate::CloseAndReset,
        "nothing may follow its end"
    );
}

#[test]
fn a_guest_that_does_not_receive_is_sent_nothing() {
    let mut pair = Pair::open();
    pair.client.write_all(b"unheard").unwrap();
    assert_eq!(pair.take(&shutdown(SHUTDOWN_RECEIVE), &[]), Fate::Keep);
    pair.ready(EventSet::IN);
    assert!(pair.next().is_none());
    assert!(pair.client.write_all(b"x").is_err());
}

#[test]
fn a_client_that_left_is_told_to_the_guest_and_its_data_dropped() {
    let mut pair = Pair::open();
    let client = std::mem::replace(&mut pair.client, UnixStream::pair().unwrap().0);
    (&client).write_all(b"bye").unwrap();
    // Dropping it is not enough: a process that another test is starting may hold a copy of the descriptor for a moment.
    client.shutdown(Shutdown::Both).unwrap();
    assert_eq!(
        pair.ready(EventSet::IN | EventSet::READ_HANG_UP | EventSet::HANG_UP),
        Fate::Keep
    );
    assert_eq!(pair.next_data().1, b"bye");
    let end = pair.next().unwrap();
    assert_eq!(
        (end.op, end.flags),
        (Some(Op::Shutdown), SHUTDOWN_SEND | SHUTDOWN_RECEIVE)
    );
    assert!(pair.connection.is_lingering());
    for _ in 0..10 {
        assert_eq!(pair.take(&data(4096), &[1; 4096]), Fate::Keep);
    }
    assert_eq!(pair.take(&from_guest(Op::Reset), &[]), Fate::Close);
}

/// Fills a client's socket and then the connection's buffer. Returns all bytes sent.
fn fill(pair: &mut Pair, bytes: usize) -> Vec<u8> {
    let mut sent = Vec::new();
    while sent.len() < bytes {
        let chunk: Vec<u8> = (0..4096).map(|i| ((sent.len() + i) % 253) as u8).collect();
        assert_eq!(pair.take(&data(chunk.len()), &chunk), Fate::Keep);
        sent.extend(chunk);
    }
    sent
}

fn held(pair: &Pair) -> u32 {
    match &pair.connection.state {
        State::Open(flow) => BUFFER - flow.buffer.room(),
        State::Draining { buffer, .. } => BUFFER - buffer.room(),
        _ => 0,
    }
}

#[test]
fn a_slow_client_is_buffered_to_the_limit_and_loses_nothing() {
    let mut pair = Pair::open();
    let mut sent = Vec::new();
    while held(&pair) + 4096 <= BUFFER {
        sent.extend(fill(&mut pair, 4096));
    }
    let mut got = pair.read();
    while held(&pair) > 0 {
        pair.ready(EventSet::OUT);
        got.extend(pair.read());
    }
    assert_eq!(got.len(), sent.len());
    let told = pair.next().unwrap();
    assert_eq!(told.op, Some(Op::CreditUpdate));
    assert_eq!(told.forwarded as usize, sent.len());
}

#[test]
fn a_guest_that_sends_beyond_its_credit_is_reset() {
    let mut pair = Pair::open();
    while held(&pair) + 4096 <= BUFFER {
        fill(&mut pair, 4096);
    }
    assert_eq!(pair.take(&data(8192), &[0; 8192]), Fate::CloseAndReset);
}

#[test]
fn bytes_sent_before_the_guest_closed_reach_the_client() {
    for (last, fate) in [
        (shutdown(3), Fate::KeepAndReset),
        (from_guest(Op::Reset), Fate::Keep),
    ] {
        let mut pair = Pair::open();
        let mut sent = 0;
        while held(&pair) == 0 {
            sent += fill(&mut pair, 4096).len();
        }
        assert_eq!(pair.take(&last, &[]), fate);
        assert!(!pair.connection.has_packet());
        let mut got = 0;
        loop {
            got += pair.read().len();
            match pair.ready(EventSet::OUT) {
                Fate::Keep => {}
                Fate::Close => break,
                other => panic!("{other:?}"),
            }
        }
        got += pair.read().len();
        assert_eq!(got, sent);
    }
}

#[test]
fn the_end_follows_the_bytes_a_slow_client_has_yet_to_read() {
    let mut pair = Pair::open();
    while held(&pair) == 0 {
        fill(&mut pair, 4096);
    }
    pair.take(&shutdown(SHUTDOWN_SEND), &[]);
    while held(&pair) > 0 {
        assert!(!pair.read().is_empty());
        assert_eq!(pair.ready(EventSet::OUT), Fate::Keep);
    }
    pair.read();
    assert!(pair.client_sees_end());
}

#[test]
fn no_more_is_read_from_the_client_than_the_guest_can_hold() {
    let mut pair = Pair::open();
    pair.take(
        &Header {
            buffer: 100,
            ..from_guest(Op::CreditUpdate)
        },
        &[],
    );
    pair.client.write_all(&[7; 250]).unwrap();
    pair.ready(EventSet::IN);
    assert_eq!(pair.next_data().1.len(), 100);
    assert_eq!(pair.next().unwrap().op, Some(Op::CreditRequest));
    assert!(pair.next().is_none(), "it asks once");
    pair.take(
        &Header {
            buffer: 100,
            forwarded: 60,
            ..from_guest(Op::CreditUpdate)
        },
        &[],
    );
    assert_eq!(pair.next_data().1.len(), 60);
    pair.take(
        &Header {
            buffer: 100,
            forwarded: 160,
            ..from_guest(Op::CreditUpdate)
        },
        &[],
    );
    assert_eq!(pair.next_data().1.len(), 90);
}

#[test]
fn a_credit_request_is_answered() {
    let mut pair = Pair::open();
    pair.take(&from_guest(Op::CreditRequest), &[]);
    let answer = pair.next().unwrap();
    assert_eq!((answer.op, answer.buffer), (Some(Op::CreditUpdate), BUFFER));
}

#[test]
fn packets_that_lie_about_their_length_or_kind_are_violations() {
    assert_eq!(Pair::open().take(&data(100), &[0; 10]), Fate::CloseAndReset);
    assert_eq!(
        Pair::open().take(&from_guest(Op::Response), &[]),
        Fate::CloseAndReset
    );
    assert_eq!(
        Pair::open().take(
            &Header {
                op: None,
                ..from_guest(Op::Data)
            },
            &[]
        ),
        Fate::CloseAndReset
    );
}

proptest::proptest! {
    /// No sequence of packets and events panics, and the connection never holds more bytes than it announced room for.
    #[test]
    fn any_sequence_is_survived(
        steps in proptest::collection::vec((0u8..12, 0u32..5, 0u32..9000, proptest::num::u32::ANY), 0..60),
    ) {
        let mut pair = Pair::open();
        for (step, flags, length, wild) in steps {
            let op = [Op::Request, Op::Response, Op::Reset, Op::Shutdown, Op::Data, Op::CreditUpdate, Op::CreditRequest];
            let fate = match step {
                0..7 => {
                    let header = Header {
                        flags, length, forwarded: wild, buffer: wild % 70_000,
                        ..from_guest(op[usize::from(step)])
                    };
                    pair.take(&header, &vec![1; length as usize])
                }
                7 => { let _ = pair.client.write(&[2; 3000]); pair.ready(EventSet::IN) }
                8 => { pair.read(); pair.ready(EventSet::OUT) }
                9 => { let _ = pair.client.shutdown(Shutdown::Write); pair.ready(EventSet::IN | EventSet::READ_HANG_UP) }
                10 => pair.ready(EventSet::IN),
                _ => { pair.next(); Fate::Keep }
            };
            assert!(held(&pair) <= BUFFER);
            if matches!(fate, Fate::Close | Fate::CloseAndReset) {
                break;
            }
            // Announced packets come, and their number is bounded.
            for _ in 0..64 {
                if !pair.connection.has_packet() || pair.next().is_none() { break }
            }
            assert!(!pair.connection.has_packet() || pair.next().is_some());
        }
    }
}
