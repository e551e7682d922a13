//! Connections that are open at a freeze: they continue in the original, and are reset in the clone.

use super::*;
use crate::virtio::state::{DeviceState, ResetRecord, VsockState};

/// A connection that the guest has accepted. Also returns its host port.
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

/// Freezes the fixture's device, and thaws it with another socket.
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
fn connections_from_before_the_freeze_are_reset_in_the_clone() {
    let mut f = fixture();
    let (mut client, old) = connect(&mut f);
    let buffers: Vec<_> = (0..4).map(|_| f.lend()).collect();

    let mut thawed = thaw(&mut f);
    // A client connects before the guest runs.
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

    // The frozen original continues.
    f.send(&guest_packet(Op::Data, 1024, old, b"still here"));
    let n = client.read(&mut line).unwrap();
    assert_eq!(&line[..n], b"still here");
    assert!(f.rig.used(RX).is_empty());
}

#[test]
fn bytes_sent_before_the_freeze_arrive_once() {
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
