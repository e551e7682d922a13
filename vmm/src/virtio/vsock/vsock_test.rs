use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use thaw_protocol::control::DeviceId;
use thaw_protocol::handshake::HANDSHAKE_PORT;

use super::connection::header;
use super::packet::{HOST_CID, Op};
use super::*;
use crate::virtio::event_loop::EventLoop;
use crate::virtio::state::{ResetRecord, VsockState};
use crate::virtio::testing::{Buf, NOWHERE, Rig, Shared, open_gate};

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
    /// Gives the device a receive buffer as Linux 6.1 does: header and data apart.
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
fn a_dial_before_there_are_receive_buffers_is_told_when_there_are() {
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
fn receive_buffers_without_room_come_back_empty_and_the_packet_waits() {
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
fn a_guest_that_does_not_read_its_resets_is_listened_to_no_further() {
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

/// A guest that sends back all it gets and closes when its peer ends, behind the real event loop: what edge-triggered
/// waits, credit and backpressure do together, both directions busy at once, the client reading slowly.
#[test]
fn a_megabyte_goes_through_the_event_loop_and_back() {
    const BYTES: usize = 1 << 20;
    let mut event_loop = EventLoop::new().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vsock");
    let mut vsock = Vsock::new(event_loop.registrar(DeviceId::Vsock), EventSink::new().unwrap());
    vsock
        .attach(Backend::Vsock, vec![UnixListener::bind(&path).unwrap().into()])
        .unwrap();
    let shared = Shared::new(vsock);
    let device = shared.device.clone();
    let mut rig = Rig::idle(shared);
    event_loop
        .serve(DeviceId::Vsock, device, rig.interrupt.clone(), rig.kicks())
        .unwrap();
    let _running = event_loop.start(open_gate()).unwrap();
    rig.activate(0);

    let client = std::thread::spawn(move || {
        let mut client = UnixStream::connect(path).unwrap();
        client.write_all(b"CONNECT 1024\n").unwrap();
        let mut writer = client.try_clone().unwrap();
        let (piled_up, start_reading) = std::sync::mpsc::channel();
        let writer = std::thread::spawn(move || {
            let content: Vec<u8> = (0..BYTES).map(|i| (i % 251) as u8).collect();
            let (first, rest) = content.split_at(400 << 10);
            writer.write_all(first).unwrap();
            piled_up.send(()).unwrap();
            writer.write_all(rest).unwrap();
            writer.shutdown(std::net::Shutdown::Write).unwrap();
        });
        // Until then what the guest sends piles up, more than the client's socket holds.
        start_reading.recv().unwrap();
        let mut all = Vec::new();
        client.read_to_end(&mut all).unwrap();
        writer.join().unwrap();
        all
    });

    let mut guest = Echo::new(&mut rig);
    while !guest.closed {
        rig.wait();
        guest.run(&mut rig);
    }
    let all = client.join().unwrap();
    let end = all.iter().position(|byte| *byte == b'\n').unwrap() + 1;
    assert!(all.starts_with(b"OK "));
    assert_eq!(all.len() - end, BYTES);
    assert!(
        all[end..]
            .iter()
            .enumerate()
            .all(|(i, byte)| *byte == (i % 251) as u8)
    );
}

/// The guest of the test above: it holds what it may not send yet.
struct Echo {
    lent: std::collections::HashMap<u16, [Buf; 2]>,
    send_buffer: Buf,
    held: std::collections::VecDeque<u8>,
    host_port: u32,
    taken: u32,
    sent: u32,
    host_forwarded: u32,
    peer_ended: bool,
    closed: bool,
}

impl Echo {
    const BUFFER: u32 = 64 * 1024;

    fn new(rig: &mut Rig<Shared<Vsock>>) -> Echo {
        let mut lent = std::collections::HashMap::new();
        for _ in 0..32 {
            let buffers = [rig.writable(Header::SIZE as u32), rig.writable(4096)];
            lent.insert(rig.submit(RX, &buffers), buffers);
        }
        rig.notify(RX);
        let send_buffer = rig.readable(&[0; Header::SIZE + 4096]);
        Echo {
            lent,
            send_buffer,
            held: Default::default(),
            host_port: 0,
            taken: 0,
            sent: 0,
            host_forwarded: 0,
            peer_ended: false,
            closed: false,
        }
    }

    fn run(&mut self, rig: &mut Rig<Shared<Vsock>>) {
        for (head, used) in rig.used(RX) {
            let buffers = self.lent.remove(&head).unwrap();
            let header: [u8; Header::SIZE] = rig.bytes(buffers[0]).try_into().unwrap();
            let data = rig.bytes(buffers[1])[..used as usize - Header::SIZE].to_vec();
            self.take(rig, &Header::from_bytes(&header), &data);
            self.lent.insert(rig.submit(RX, &buffers), buffers);
            rig.notify(RX);
        }
        self.send_held(rig);
    }

    fn take(&mut self, rig: &mut Rig<Shared<Vsock>>, header: &Header, data: &[u8]) {
        if header.op != Some(Op::Reset) {
            self.host_forwarded = header.forwarded;
        }
        match header.op.unwrap() {
            Op::Request => {
                self.host_port = header.source_port;
                self.send(rig, Op::Response, 0, &[]);
            }
            Op::Data => self.held.extend(data),
            Op::Shutdown => self.peer_ended = true,
            Op::CreditRequest => self.send(rig, Op::CreditUpdate, 0, &[]),
            Op::CreditUpdate => {}
            Op::Reset => self.closed = true,
            other => panic!("{other:?}"),
        }
        assert!(
            self.held.len() <= Echo::BUFFER as usize,
            "the host sent more than this guest can hold"
        );
    }

    fn send_held(&mut self, rig: &mut Rig<Shared<Vsock>>) {
        loop {
            let credit = credit::BUFFER - (self.sent - self.host_forwarded);
            let n = self.held.len().min(4096).min(credit as usize);
            if n == 0 {
                break;
            }
            let chunk: Vec<u8> = self.held.drain(..n).collect();
            self.taken += n as u32;
            self.sent += n as u32;
            self.send(rig, Op::Data, 0, &chunk);
        }
        if self.peer_ended && self.held.is_empty() {
            self.peer_ended = false;
            self.send(rig, Op::Shutdown, 3, &[]);
        }
    }

    /// Sends one packet and waits for its buffer: there is one.
    fn send(&mut self, rig: &mut Rig<Shared<Vsock>>, op: Op, flags: u32, payload: &[u8]) {
        let mut bytes = guest_packet(op, 1024, self.host_port, payload);
        bytes[32..36].copy_from_slice(&flags.to_le_bytes());
        bytes[36..40].copy_from_slice(&Echo::BUFFER.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.taken.to_le_bytes());
        rig.rewrite(self.send_buffer, &bytes);
        rig.submit(
            TX,
            &[Buf {
                length: bytes.len() as u32,
                ..self.send_buffer
            }],
        );
        rig.notify(TX);
        while rig.used(TX).is_empty() {
            rig.wait();
        }
        // The interrupt may have been for a packet too.
        rig.interrupt.line().write(1).unwrap();
    }
}

/// A connection the guest has accepted, on the host port returned.
fn connect(f: &mut Fixture) -> (UnixStream, u32) {
    let buffers = f.lend();
    let mut client = UnixStream::connect(&f.path).unwrap();
    client.write_all(b"CONNECT 1024\n").unwrap();
    f.host_ready(LISTENER);
    f.host_ready(1 << 30);
    let used = f.rig.used(RX);
    let (request, _) = f.packet(buffers, used[0].1);
    f.send(&guest_packet(Op::Response, 1024, request.source_port, &[]));
    let mut line = [0; 64];
    assert!(client.read(&mut line).unwrap() > 0);
    (client, request.source_port)
}

/// The fixture's device frozen, and thawed behind another socket.
fn thaw(f: &mut Fixture) -> Fixture {
    let other = fixture();
    let frozen = f.rig.freeze();
    let event_loop = EventLoop::new().unwrap();
    let mut vsock = Vsock::new(event_loop.registrar(DeviceId::Vsock), other.events.clone());
    assert!(!vsock.is_backed());
    let rig = {
        let path = other.path.with_extension("thawed");
        vsock
            .attach(Backend::Vsock, vec![UnixListener::bind(path).unwrap().into()])
            .unwrap();
        Rig::thaw(frozen, vsock)
    };
    Fixture {
        rig,
        path: other.path.with_extension("thawed"),
        _event_loop: event_loop,
        ..other
    }
}

#[test]
fn connections_of_before_the_freeze_are_reset_before_any_new_one_and_the_frozen_guest_keeps_its_own() {
    let mut f = fixture();
    let (mut client, old) = connect(&mut f);
    let buffers: Vec<_> = (0..4).map(|_| f.lend()).collect();

    let mut thawed = thaw(&mut f);
    // Somebody dials before the guest runs.
    let mut newcomer = UnixStream::connect(&thawed.path).unwrap();
    newcomer.write_all(b"CONNECT 1024\n").unwrap();
    thawed.rig.start_work();
    thawed.host_ready(LISTENER);
    thawed.host_ready(old + 1);
    let used = thawed.rig.used(RX);
    let (reset, _) = thawed.packet(buffers[0], used[0].1);
    assert_eq!(
        (reset.op, reset.source_port, reset.destination_port),
        (Some(Op::Reset), old, 1024)
    );
    let (request, _) = thawed.packet(buffers[1], used[1].1);
    assert_eq!((request.op, request.destination_port), (Some(Op::Request), 1024));
    assert_ne!(
        request.source_port, old,
        "no port the guest knows is used for another connection"
    );
    assert_eq!(used.len(), 2);
    thawed.send(&guest_packet(Op::Response, 1024, request.source_port, &[]));
    let mut line = [0; 64];
    assert!(newcomer.read(&mut line).unwrap() > 0);

    // The one that was frozen goes on.
    f.send(&guest_packet(Op::Data, 1024, old, b"still here"));
    let n = client.read(&mut line).unwrap();
    assert_eq!(&line[..n], b"still here");
    assert!(f.rig.used(RX).is_empty());
}

#[test]
fn what_the_guest_sent_before_the_freeze_arrives_once_at_the_frozen_one_s_client() {
    let mut f = fixture();
    let (mut client, port) = connect(&mut f);
    let buffers = f.lend();
    let packet = f.rig.readable(&guest_packet(Op::Data, 1024, port, b"last words"));
    f.rig.submit(TX, &[packet]);

    let mut thawed = thaw(&mut f);
    let mut line = [0; 64];
    let n = client.read(&mut line).unwrap();
    assert_eq!(&line[..n], b"last words");
    assert!(!thawed.rig.kicked(TX));
    thawed.rig.start_work();
    assert_eq!(thawed.rig.used(TX).len(), 1, "used before the freeze");
    let used = thawed.rig.used(RX);
    assert_eq!(used.len(), 1);
    assert_eq!(thawed.packet(buffers, used[0].1).0.op, Some(Op::Reset));
}

#[test]
fn resets_owed_at_the_freeze_are_told_after_the_thaw() {
    let mut f = fixture();
    f.send(&guest_packet(Op::Request, 4000, 80, &[]));
    let mut thawed = thaw(&mut f);
    let buffers = thawed.lend();
    thawed.rig.start_work();
    let used = thawed.rig.used(RX);
    let (reset, _) = thawed.packet(buffers, used[0].1);
    assert_eq!(
        (reset.op, reset.source_port, reset.destination_port),
        (Some(Op::Reset), 80, 4000)
    );
}

#[test]
fn a_client_the_guest_never_heard_of_is_not_in_the_state() {
    let mut f = fixture();
    let mut client = UnixStream::connect(&f.path).unwrap();
    client.write_all(b"CONNECT 1024\n").unwrap();
    f.host_ready(LISTENER);
    f.host_ready(1 << 30);
    let state = f.rig.freeze().state;
    assert!(state.of::<VsockState>().unwrap().connections.is_empty());
}

#[test]
fn states_no_guest_can_have_are_refused() {
    let device = fixture().rig.device;
    let state = |resets: usize, connections: usize, next_port| VsockState {
        resets: vec![
            ResetRecord {
                host_port: 1,
                guest_port: 2,
                kind: 3
            };
            resets
        ],
        connections: vec![(1, 2); connections],
        next_port,
    };
    let state = |resets, connections, next_port| DeviceState::from(state(resets, connections, next_port));
    device.check(&state(2, 2, 1 << 30), Some(&[])).unwrap();
    for (bad, up) in [
        (state(0, 0, 7), true),
        (state(0, 1024, 1 << 30), true),
        (state(4000, 0, 1 << 30), true),
        (state(1, 0, 1 << 30), false),
        (DeviceState::Plain, true),
    ] {
        assert!(device.check(&bad, up.then_some(&[])).is_err());
    }
}
