use std::io::{Read, Write};
use std::os::unix::net::UnixListener;

use thaw_protocol::control::DeviceId;
use vm_memory::{GuestAddress, GuestMemory as _};

use super::*;
use crate::virtio::event_loop::EventLoop;
use crate::virtio::testing::memory;

struct Fixture {
    muxer: Muxer,
    events: EventSink,
    path: std::path::PathBuf,
    _event_loop: EventLoop,
    _directory: tempfile::TempDir,
}

fn fixture() -> Fixture {
    let event_loop = EventLoop::new().unwrap();
    let events = EventSink::new().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vsock");
    let listener = UnixListener::bind(&path).unwrap();
    listener.set_nonblocking(true).unwrap();
    let mut muxer = Muxer::new(event_loop.registrar(DeviceId::Vsock), events.clone());
    muxer.listen(listener);
    Fixture {
        muxer,
        events,
        path,
        _event_loop: event_loop,
        _directory: directory,
    }
}

impl Fixture {
    fn dial(&mut self) -> UnixStream {
        let mut client = UnixStream::connect(&self.path).unwrap();
        client.set_nonblocking(true).unwrap();
        client.write_all(b"CONNECT 1024\n").unwrap();
        client
    }

    fn accept(&mut self) {
        self.muxer.host_ready(LISTENER, EventSet::IN);
        let ports: Vec<u32> = self.muxer.connections.keys().copied().collect();
        ports
            .into_iter()
            .for_each(|port| self.muxer.host_ready(port, EventSet::IN));
    }

    fn next(&mut self) -> Option<Header> {
        self.muxer
            .next_packet(&[memory().get_slice(GuestAddress(0), 4096).unwrap()])
    }

    fn all(&mut self) -> Vec<Header> {
        std::iter::from_fn(|| self.next()).collect()
    }

    fn answer(&mut self, request: &Header, op: Op) {
        let answer = Header {
            buffer: 65_536,
            ..back(request, op)
        };
        self.muxer.take_packet(&answer, &[]);
    }
}

/// A packet of the guest to the sender of `packet`.
fn back(packet: &Header, op: Op) -> Header {
    Header {
        source_cid: packet.destination_cid,
        destination_cid: packet.source_cid,
        source_port: packet.destination_port,
        destination_port: packet.source_port,
        ..header(0, 0, op)
    }
}

fn dial_from_guest(port: u32) -> Header {
    back(&header(port, 5000, Op::Request), Op::Request)
}

#[test]
fn clients_wait_until_the_driver_is_up() {
    let mut f = fixture();
    let mut clients: Vec<UnixStream> = (0..3).map(|_| f.dial()).collect();
    f.accept();
    assert!(f.next().is_none());
    f.muxer.open();
    f.accept();
    let requests = f.all();
    assert_eq!(requests.len(), 3);
    let ports: std::collections::BTreeSet<u32> = requests.iter().map(|r| r.source_port).collect();
    assert_eq!(ports.len(), 3, "each has a port of its own");
    for request in &requests {
        f.answer(request, Op::Response);
    }
    for client in &mut clients {
        let mut line = [0; 32];
        let n = client.read(&mut line).unwrap();
        assert!(line[..n].starts_with(b"OK 1073741"));
    }
}

#[test]
fn the_doorbell_rings_and_every_dial_is_reset() {
    let mut f = fixture();
    f.muxer.open();
    f.muxer.take_packet(&dial_from_guest(HANDSHAKE_PORT), &[]);
    assert!(matches!(f.events.take_new()[..], [Event::Doorbell { at: 1.. }]));
    f.muxer.take_packet(&dial_from_guest(80), &[]);
    assert!(f.events.take_new().is_empty());
    let resets = f.all();
    assert!(
        resets
            .iter()
            .all(|packet| packet.op == Some(Op::Reset) && packet.destination_port == 5000)
    );
    assert_eq!(
        resets.iter().map(|packet| packet.source_port).collect::<Vec<_>>(),
        [HANDSHAKE_PORT, 80]
    );
}

#[test]
fn packets_for_nobody_are_reset_but_resets_are_not() {
    let mut f = fixture();
    f.muxer.open();
    f.muxer
        .take_packet(&back(&header(77, 1024, Op::Data), Op::Data), &[]);
    assert_eq!(f.all().len(), 1);
    f.muxer
        .take_packet(&back(&header(77, 1024, Op::Data), Op::Reset), &[]);
    assert!(f.all().is_empty());
    let datagram = Header {
        kind: 3,
        ..dial_from_guest(HANDSHAKE_PORT)
    };
    f.muxer.take_packet(&datagram, &[]);
    assert_eq!(f.all()[0].kind, 3);
    assert!(f.events.take_new().is_empty());
}

#[test]
fn packets_of_other_addresses_are_ignored() {
    let mut f = fixture();
    f.muxer.open();
    f.muxer.take_packet(
        &Header {
            source_cid: 9,
            ..dial_from_guest(HANDSHAKE_PORT)
        },
        &[],
    );
    f.muxer.take_packet(
        &Header {
            destination_cid: 9,
            ..dial_from_guest(HANDSHAKE_PORT)
        },
        &[],
    );
    assert!(f.all().is_empty());
    assert!(f.events.take_new().is_empty());
}

#[test]
fn a_flood_of_dials_makes_the_guest_wait() {
    let mut f = fixture();
    f.muxer.open();
    let mut dials = 0;
    while !f.muxer.owes_too_many_resets() {
        f.muxer.take_packet(&dial_from_guest(80), &[]);
        dials += 1;
        assert!(dials <= MAX_RESETS);
    }
    f.next();
    assert!(!f.muxer.owes_too_many_resets());
}

#[test]
fn connections_take_turns() {
    let mut f = fixture();
    f.muxer.open();
    let mut clients: Vec<UnixStream> = (0..2).map(|_| f.dial()).collect();
    f.accept();
    for request in f.all() {
        f.answer(&request, Op::Response);
    }
    for client in &mut clients {
        client.write_all(&[1; 20_000]).unwrap();
    }
    f.accept();
    let order: Vec<u32> = f.all().iter().map(|packet| packet.source_port).collect();
    assert!(order.len() >= 10);
    assert!(order[..8].windows(2).all(|two| two[0] != two[1]), "{order:?}");
}

#[test]
fn a_refused_client_sees_its_socket_close() {
    let mut f = fixture();
    f.muxer.open();
    let mut client = f.dial();
    f.accept();
    let request = f.next().unwrap();
    f.answer(&request, Op::Reset);
    // It waits: a process that another test is starting may hold a copy of the other end for a moment.
    client.set_nonblocking(false).unwrap();
    assert!(matches!(client.read(&mut [0; 8]), Ok(0)));
    assert!(f.muxer.connections.is_empty());
    assert!(f.all().is_empty(), "a reset is not answered");
}

#[test]
fn driver_reset_closes_connections_and_later_clients_wait() {
    let mut f = fixture();
    f.muxer.open();
    let mut client = f.dial();
    f.accept();
    f.muxer.close();
    assert!(matches!(client.read(&mut [0; 8]), Ok(0) | Err(_)));
    assert!(!f.muxer.has_packets());
    let _waiting = f.dial();
    f.accept();
    assert!(!f.muxer.has_packets());
    f.muxer.open();
    f.accept();
    assert_eq!(f.all().len(), 1);
}

#[test]
fn connections_are_bounded_and_one_whose_client_left_makes_room() {
    let mut f = fixture();
    f.muxer.open();
    let mut clients = Vec::new();
    for _ in 0..MAX_CONNECTIONS {
        let (ours, client) = UnixStream::pair().unwrap();
        f.muxer.admit(ours);
        clients.push(client);
    }
    assert_eq!(f.muxer.connections.len(), MAX_CONNECTIONS);
    let (ours, mut refused) = UnixStream::pair().unwrap();
    f.muxer.admit(ours);
    assert!(matches!(refused.read(&mut [0; 8]), Ok(0)));

    // One connection gets as far as waiting for the guest's last packet.
    clients[0].write_all(b"CONNECT 1024\n").unwrap();
    f.accept();
    let request = f.next().unwrap();
    f.answer(&request, Op::Response);
    // Dropping it is not enough: a process that another test is starting may hold a copy of the descriptor for a moment.
    clients.remove(0).shutdown(std::net::Shutdown::Both).unwrap();
    f.muxer
        .host_ready(request.source_port, EventSet::IN | EventSet::HANG_UP);
    assert_eq!(f.next().unwrap().op, Some(Op::Shutdown));
    let (ours, _client) = UnixStream::pair().unwrap();
    f.muxer.admit(ours);
    assert_eq!(f.muxer.connections.len(), MAX_CONNECTIONS);
    assert_eq!(f.next().unwrap().op, Some(Op::Reset));
}

#[test]
fn ports_in_use_are_passed_over_when_they_wrap() {
    let mut f = fixture();
    f.muxer.open();
    let _clients = [f.dial(), f.dial()];
    f.accept();
    f.muxer.next_port = LAST_PORT;
    assert_eq!(f.muxer.free_port(), LAST_PORT);
    assert_eq!(f.muxer.free_port(), FIRST_PORT + 2);
}

#[test]
fn stale_events_are_nobody_s() {
    let mut f = fixture();
    f.muxer.open();
    f.muxer.host_ready(FIRST_PORT + 99, EventSet::IN);
    assert!(!f.muxer.has_packets());
}
