use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use thaw_protocol::control::DeviceId;
use thaw_protocol::handshake::HANDSHAKE_PORT;

use super::connection::header;
use super::packet::{HOST_CID, Op};
use super::*;
use crate::virtio::event_loop::EventLoop;
use crate::virtio::testing::{Buf, NOWHERE, Rig};

#[path = "echo_test.rs"]
mod echo;
#[path = "freeze_test.rs"]
mod freeze;

const LISTENER: u32 = 0;

struct Fixture {
    rig: Rig<Vsock>,
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
    let mut vsock = Vsock::new(event_loop.registrar(DeviceId::Vsock), events.clone());
    vsock
        .attach(Backend::Vsock, vec![UnixListener::bind(&path).unwrap().into()])
        .unwrap();
    Fixture {
        rig: Rig::new(vsock, 0),
        events,
        path,
        _event_loop: event_loop,
        _directory: directory,
    }
}

fn guest_packet(op: Op, guest_port: u32, host_port: u32, payload: &[u8]) -> Vec<u8> {
    let header = Header {
        source_cid: u64::from(GUEST_CID),
        destination_cid: HOST_CID,
        source_port: guest_port,
        destination_port: host_port,
        length: payload.len() as u32,
        buffer: 65_536,
        ..header(0, 0, op)
    };
    [&header.to_bytes()[..], payload].concat()
}

impl Fixture {
    /// Gives the device a receive buffer as Linux 6.1 does: header and data in separate descriptors.
    fn lend(&mut self) -> [Buf; 2] {
        let buffers = [self.rig.writable(Header::SIZE as u32), self.rig.writable(4096)];
        self.rig.submit(RX, &buffers);
        buffers
    }

    fn packet(&self, buffers: [Buf; 2], used: u32) -> (Header, Vec<u8>) {
        let header: [u8; Header::SIZE] = self.rig.bytes(buffers[0]).try_into().unwrap();
        let mut data = self.rig.bytes(buffers[1]);
        data.truncate(used as usize - Header::SIZE);
        (Header::from_bytes(&header), data)
    }

    fn send(&mut self, bytes: &[u8]) {
        let (a, b) = bytes.split_at(bytes.len().min(Header::SIZE));
        let mut chain = vec![self.rig.readable(a)];
        if !b.is_empty() {
            chain.push(self.rig.readable(b));
        }
        assert_eq!(self.rig.request(TX, &chain), 0);
    }

    fn host_ready(&mut self, token: u32) {
        self.rig.device.backend_ready(token, EventSet::IN).unwrap();
    }
}

#[test]
fn a_client_dials_speaks_and_is_answered_through_the_queues() {
    let mut f = fixture();
    let (first, second) = (f.lend(), f.lend());
    let mut client = UnixStream::connect(&f.path).unwrap();
    client.write_all(b"CONNECT 1024\n").unwrap();
    f.host_ready(LISTENER);
    f.host_ready(1 << 30);
    let used = f.rig.used(RX);
    let (request, _) = f.packet(first, used[0].1);
    assert_eq!((request.op, request.destination_port), (Some(Op::Request), 1024));

    f.send(&guest_packet(Op::Response, 1024, request.source_port, &[]));
    let mut line = [0; 64];
    let n = client.read(&mut line).unwrap();
    assert_eq!(line[..n], *format!("OK {}\n", request.source_port).as_bytes());

    client.write_all(b"ping").unwrap();
    f.host_ready(request.source_port);
    let used = f.rig.used(RX);
    let (packet, data) = f.packet(second, used[0].1);
    assert_eq!(
        (packet.op, packet.length, &data[..]),
        (Some(Op::Data), 4, &b"ping"[..])
    );

    f.send(&guest_packet(Op::Data, 1024, request.source_port, b"pong"));
    let n = client.read(&mut line).unwrap();
    assert_eq!(line[..n], *b"pong");
}

#[test]
fn dial_without_receive_buffers_waits_for_them() {
    let mut f = fixture();
    let mut client = UnixStream::connect(&f.path).unwrap();
    client.write_all(b"CONNECT 7\n").unwrap();
    f.host_ready(LISTENER);
    f.host_ready(1 << 30);
    assert!(f.rig.used(RX).is_empty());
    let buffers = f.lend();
    f.rig.kick(RX).unwrap();
    let used = f.rig.used(RX);
    assert_eq!(f.packet(buffers, used[0].1).0.destination_port, 7);
}

#[test]
fn the_doorbell_rings_once_and_leaves_a_reset() {
    let mut f = fixture();
    let buffers = f.lend();
    f.send(&guest_packet(Op::Request, 4000, HANDSHAKE_PORT, &[]));
    assert_eq!(f.events.take_new().len(), 1);
    let used = f.rig.used(RX);
    let (reset, _) = f.packet(buffers, used[0].1);
    assert_eq!(
        (reset.op, reset.source_port, reset.destination_port),
        (Some(Op::Reset), HANDSHAKE_PORT, 4000)
    );
}

#[test]
fn header_and_data_may_share_a_buffer() {
    let mut f = fixture();
    let one = f.rig.writable(Header::SIZE as u32 + 100);
    f.rig.submit(RX, &[one]);
    let packet = f.rig.readable(&guest_packet(Op::Request, 4000, 80, &[]));
    f.rig.request(TX, &[packet]);
    assert_eq!(f.rig.used(RX)[0].1, Header::SIZE as u32);
}

#[test]
fn receive_buffers_without_room_come_back_empty() {
    let mut f = fixture();
    let (tiny, wrong_way) = (f.rig.writable(Header::SIZE as u32), f.rig.readable(&[0; 100]));
    for buffer in [
        tiny,
        wrong_way,
        Buf {
            address: NOWHERE,
            length: 4096,
            write: true,
        },
    ] {
        f.rig.submit(RX, &[buffer]);
    }
    f.send(&guest_packet(Op::Request, 4000, 80, &[]));
    assert_eq!(
        f.rig.used(RX).iter().map(|(_, n)| *n).collect::<Vec<_>>(),
        [0, 0, 0]
    );
    f.lend();
    f.rig.kick(RX).unwrap();
    assert_eq!(f.rig.used(RX).len(), 1);
}

#[test]
fn packets_that_are_none_are_lost_and_the_device_goes_on() {
    let mut f = fixture();
    f.lend();
    let short = f.rig.readable(&[0; Header::SIZE - 1]);
    let wrong_way = f.rig.writable(100);
    let outside = Buf {
        address: NOWHERE,
        length: 44,
        write: false,
    };
    for buffer in [short, wrong_way, outside] {
        f.rig.request(TX, &[buffer]);
    }
    assert!(f.rig.used(RX).is_empty());
    f.send(&guest_packet(Op::Request, 4000, 80, &[]));
    assert_eq!(f.rig.used(RX).len(), 1);
}

#[test]
fn guest_that_does_not_read_its_resets_is_not_heard() {
    let mut f = fixture();
    let packet = f.rig.readable(&guest_packet(Op::Request, 4000, 80, &[]));
    for _ in 0..muxer::MAX_RESETS {
        f.rig.request(TX, &[packet]);
    }
    f.rig.submit(TX, &[packet]);
    f.rig.kick(TX).unwrap();
    assert!(f.rig.used(TX).is_empty());
    f.lend();
    f.rig.kick(RX).unwrap();
    assert_eq!(f.rig.used(RX).len(), 1);
    assert!(f.rig.kicked(TX), "transmission is taken up again");
    f.rig.kick(TX).unwrap();
    assert_eq!(f.rig.used(TX).len(), 1);
}

#[test]
fn corrupt_rings_stop_the_device() {
    let mut f = fixture();
    f.rig.submit_loop(TX);
    assert!(matches!(f.rig.kick(TX), Err(DeviceError::Queue(_))));
}

#[test]
fn a_reset_drops_every_connection() {
    let mut f = fixture();
    f.lend();
    let mut client = UnixStream::connect(&f.path).unwrap();
    client.write_all(b"CONNECT 1024\n").unwrap();
    f.host_ready(LISTENER);
    f.host_ready(1 << 30);
    f.rig.device.reset();
    assert!(matches!(client.read(&mut [0; 8]), Ok(0)));
    f.rig.kick(TX).unwrap();
    f.host_ready(1 << 30);
}

#[test]
fn the_guest_s_address_is_in_the_configuration() {
    assert_eq!(fixture().rig.device.config().bytes(), 3u64.to_le_bytes());
}

#[test]
fn only_a_listening_unix_stream_socket_will_do() {
    let mut f = fixture();
    let mut attach = |fd: OwnedFd| f.rig.device.attach(Backend::Vsock, vec![fd]).unwrap_err();
    assert!(matches!(
        attach(UnixStream::pair().unwrap().0.into()),
        AttachError::Invalid(_)
    ));
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    assert!(matches!(attach(tcp.into()), AttachError::Invalid(_)));
    assert!(matches!(
        attach(tempfile::tempfile().unwrap().into()),
        AttachError::System { .. }
    ));
    let error = f.rig.device.attach(Backend::Pmem, vec![]).unwrap_err();
    assert!(matches!(error, AttachError::WrongKind(_)));
}
