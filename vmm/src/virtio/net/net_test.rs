use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixDatagram;

use thaw_protocol::control::DeviceId;

use super::*;
use crate::virtio::event_loop::EventLoop;
use crate::virtio::interrupt::{CONFIG_CHANGE, USED_BUFFER};
use crate::virtio::testing::{Buf, NOWHERE, Rig};

#[path = "rate_limit_test.rs"]
mod rate_limit;

const MERGE: u64 = 1 << b::VIRTIO_NET_F_MRG_RXBUF;

/// A device on one end of a datagram pair, which keeps frames apart as a tap does; and the other end.
struct Wire {
    rig: Rig<Net>,
    peer: UnixDatagram,
    _event_loop: EventLoop,
}

impl Wire {
    fn new(features: u64) -> Wire {
        let event_loop = EventLoop::new().unwrap();
        let mut net = Net::new(DEFAULT_MAC, event_loop.registrar(DeviceId::Net));
        let (ours, peer) = UnixDatagram::pair().unwrap();
        peer.set_nonblocking(true).unwrap();
        let tap = Tap::with_frames(ours.into()).unwrap();
        net.registrar
            .add(tap.as_raw_fd(), TAP, EventSet::empty())
            .unwrap();
        net.backend = Some(tap);
        Wire {
            rig: Rig::new(net, features),
            peer,
            _event_loop: event_loop,
        }
    }

    /// Freezes the device, and thaws it on another wire.
    fn thaw(&mut self) -> Wire {
        let event_loop = EventLoop::new().unwrap();
        let net = Net::new(DEFAULT_MAC, event_loop.registrar(DeviceId::Net));
        let mut rig = Rig::thaw(self.rig.freeze(), net);
        let (ours, peer) = UnixDatagram::pair().unwrap();
        peer.set_nonblocking(true).unwrap();
        let tap = Tap::with_frames(ours.into()).unwrap();
        rig.device
            .registrar
            .add(tap.as_raw_fd(), TAP, EventSet::empty())
            .unwrap();
        rig.device.backend = Some(tap);
        rig.device.watch();
        Wire {
            rig,
            peer,
            _event_loop: event_loop,
        }
    }

    fn arrive(&mut self) {
        self.rig.device.backend_ready(TAP, EventSet::IN).unwrap();
    }

    fn received(&self) -> Option<Vec<u8>> {
        let mut frame = vec![0; 70_000];
        match self.peer.recv(&mut frame) {
            Ok(n) => {
                frame.truncate(n);
                Some(frame)
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => None,
            Err(e) => panic!("{e}"),
        }
    }

    fn watches_tap(&self) -> bool {
        self.rig.device.backend.as_ref().unwrap().watches(EventSet::IN)
    }
}

/// A header and a frame of `length` bytes.
fn frame(length: usize) -> Vec<u8> {
    let mut frame = vec![0; HEADER];
    frame.extend((0..length).map(|i| (i % 251) as u8));
    frame
}

#[test]
fn a_frame_is_sent_as_it_is() {
    let mut wire = Wire::new(0);
    let sent = frame(1000);
    let (a, b) = (
        wire.rig.readable(&sent[..HEADER]),
        wire.rig.readable(&sent[HEADER..]),
    );
    assert_eq!(wire.rig.request(TX, &[a, b]), 0);
    assert_eq!(wire.received().unwrap(), sent);
    assert_eq!(wire.rig.interrupt.reasons(), USED_BUFFER);
}

#[test]
fn frames_without_a_backend_are_dropped_and_buffers_returned() {
    let event_loop = EventLoop::new().unwrap();
    let mut rig = Rig::new(Net::new(DEFAULT_MAC, event_loop.registrar(DeviceId::Net)), 0);
    for _ in 0..10 {
        let buffer = rig.readable(&frame(100));
        rig.submit(TX, &[buffer]);
    }
    rig.kick(TX).unwrap();
    assert_eq!(rig.used(TX).len(), 10);
    let buffer = rig.writable(2000);
    rig.submit(RX, &[buffer]);
    rig.kick(RX).unwrap();
    assert!(rig.used(RX).is_empty());
}

#[test]
fn what_is_no_frame_is_dropped() {
    let mut wire = Wire::new(0);
    let short = wire.rig.readable(&[0; HEADER]);
    let outside = Buf {
        address: NOWHERE,
        length: 100,
        write: false,
    };
    let wrong_way = wire.rig.writable(100);
    let huge = wire.rig.readable(&frame(66_000));
    for buffer in [short, outside, wrong_way, huge] {
        assert_eq!(wire.rig.request(TX, &[buffer]), 0);
    }
    assert!(wire.received().is_none());
}

#[test]
fn a_full_tap_holds_frames_back_until_it_has_room() {
    let mut wire = Wire::new(0);
    let mut submitted = 0;
    // A datagram socket takes a few frames, then refuses more.
    while !wire.rig.device.transmit_blocked {
        let buffer = wire.rig.readable(&frame(500));
        wire.rig.submit(TX, &[buffer]);
        submitted += 1;
        wire.rig.kick(TX).unwrap();
        assert!(submitted < 250, "the socket never filled");
    }
    assert!(wire.rig.device.backend.as_ref().unwrap().watches(EventSet::OUT));
    assert_eq!(
        wire.rig.used(TX).len(),
        submitted - 1,
        "the frame that did not fit is still the queue's"
    );
    wire.rig.kick(TX).unwrap();
    assert!(wire.rig.used(TX).is_empty());
    while wire.received().is_some() {}
    wire.rig.device.backend_ready(TAP, EventSet::OUT).unwrap();
    assert_eq!(wire.rig.used(TX).len(), 1);
    assert!(!wire.rig.device.backend.as_ref().unwrap().watches(EventSet::OUT));
}

#[test]
fn a_frame_arrives_in_one_buffer_and_says_so() {
    let mut wire = Wire::new(0);
    let (head, tail) = (wire.rig.writable(100), wire.rig.writable(1900));
    wire.rig.submit(RX, &[head, tail]);
    wire.peer.send(&frame(1000)).unwrap();
    wire.arrive();
    assert_eq!(
        wire.rig.used(RX).iter().map(|(_, n)| *n).collect::<Vec<_>>(),
        [HEADER as u32 + 1000]
    );
    let got = [wire.rig.bytes(head), wire.rig.bytes(tail)].concat();
    assert_eq!(got[HEADER - 2..HEADER], [1, 0], "num_buffers");
    assert_eq!(got[HEADER..HEADER + 1000], frame(1000)[HEADER..]);
    assert_eq!(wire.rig.interrupt.reasons(), USED_BUFFER);
}

#[test]
fn large_frame_is_spread_over_mergeable_buffers() {
    let mut wire = Wire::new(MERGE);
    let buffers: Vec<Buf> = (0..6).map(|_| wire.rig.writable(1500)).collect();
    let heads: Vec<u16> = buffers
        .iter()
        .map(|buffer| wire.rig.submit(RX, &[*buffer]))
        .collect();
    wire.peer.send(&frame(4000)).unwrap();
    wire.peer.send(&frame(50)).unwrap();
    wire.arrive();
    let total = HEADER as u32 + 4000;
    assert_eq!(
        wire.rig.used(RX),
        [
            (heads[0], 1500),
            (heads[1], 1500),
            (heads[2], total - 3000),
            (heads[3], HEADER as u32 + 50)
        ]
    );
    let got: Vec<u8> = buffers[..3]
        .iter()
        .flat_map(|buffer| wire.rig.bytes(*buffer))
        .collect();
    assert_eq!(got[HEADER - 2..HEADER], [3, 0]);
    assert_eq!(got[HEADER..total as usize], frame(4000)[HEADER..]);
}

#[test]
fn without_buffers_the_tap_is_not_watched_until_some_come() {
    let mut wire = Wire::new(0);
    assert!(wire.watches_tap());
    wire.peer.send(&frame(100)).unwrap();
    wire.arrive();
    assert!(!wire.watches_tap());
    let (first, second) = (wire.rig.writable(2000), wire.rig.writable(2000));
    wire.rig.submit(RX, &[first]);
    wire.rig.submit(RX, &[second]);
    wire.rig.kick(RX).unwrap();
    assert_eq!(wire.rig.used(RX).len(), 1, "the frame waited in the tap");
    assert!(wire.watches_tap());
}

#[test]
fn frame_too_large_for_its_buffer_is_dropped() {
    let mut wire = Wire::new(0);
    let buffer = wire.rig.writable(500);
    wire.rig.submit(RX, &[buffer]);
    wire.peer.send(&frame(1000)).unwrap();
    wire.peer.send(&frame(100)).unwrap();
    wire.arrive();
    assert_eq!(
        wire.rig.used(RX).iter().map(|(_, n)| *n).collect::<Vec<_>>(),
        [HEADER as u32 + 100]
    );
}

#[test]
fn useless_receive_buffers_come_back_empty() {
    let mut wire = Wire::new(MERGE);
    let (tiny, wrong_way) = (wire.rig.writable(4), wire.rig.readable(&[0; 100]));
    for buffer in [
        tiny,
        wrong_way,
        Buf {
            address: NOWHERE,
            length: 2000,
            write: true,
        },
    ] {
        wire.rig.submit(RX, &[buffer]);
    }
    wire.peer.send(&frame(100)).unwrap();
    wire.arrive();
    assert_eq!(
        wire.rig.used(RX).iter().map(|(_, n)| *n).collect::<Vec<_>>(),
        [0, 0, 0]
    );
    assert!(!wire.watches_tap());
}

#[test]
fn a_corrupt_ring_stops_the_device() {
    let mut wire = Wire::new(0);
    wire.rig.submit_loop(TX);
    assert!(matches!(wire.rig.kick(TX), Err(DeviceError::Queue(_))));
    wire.rig.set_available(RX, 1000);
    assert!(matches!(
        wire.rig.device.backend_ready(TAP, EventSet::IN),
        Err(DeviceError::Queue(_))
    ));
}

#[test]
fn a_reset_device_does_not_watch_its_tap() {
    let mut wire = Wire::new(0);
    wire.rig.device.reset();
    assert!(!wire.watches_tap());
    wire.rig.device.backend_ready(TAP, EventSet::IN).unwrap();
    wire.rig.activate(0);
    assert!(wire.watches_tap());
}

/// A tap that is removed when the test ends. `None` without the right to make one.
fn tap(name: &str) -> Option<OwnedFd> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/net/tun")
        .ok()?;
    // SAFETY: an all-zero ifreq is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as i16;
    // SAFETY: TUNSETIFF reads and writes an ifreq.
    let done = unsafe { libc::ioctl(file.as_fd().as_raw_fd(), 0x4004_54ca, &mut request) };
    (done == 0).then(|| file.into())
}

#[test]
fn a_real_tap_is_taken_and_given_the_negotiated_offloads() {
    let Some(fd) = tap("thawtest%d") else {
        thaw_test_skip::skip("no right to make a tap here");
        return;
    };
    let event_loop = EventLoop::new().unwrap();
    let net = Net::new(DEFAULT_MAC, event_loop.registrar(DeviceId::Net));
    let features = net.spec().features;
    let mut rig = Rig::new(net, features);
    let mac = [2, 0, 0, 0, 0, 9];
    // As if the earlier tap had been full.
    rig.device.transmit_blocked = true;
    rig.device
        .attach(Backend::Tap { mac, prepared: false }, vec![fd])
        .unwrap();
    assert_eq!(rig.device.config().bytes()[..6], mac);
    assert_eq!(rig.interrupt.reasons(), CONFIG_CHANGE);
    let tap = rig.device.backend.as_mut().unwrap();
    assert!(tap.watches(EventSet::IN));
    tap.set_offloads(features).unwrap();
    tap.set_offloads(0).unwrap();
    assert!(!tap.is_gone());
    assert!(rig.kicked(TX), "frames that waited are looked at");
}

#[test]
fn other_backends_are_refused() {
    let event_loop = EventLoop::new().unwrap();
    let mut net = Net::new(DEFAULT_MAC, event_loop.registrar(DeviceId::Net));
    assert!(matches!(
        net.attach(Backend::Vsock, vec![]),
        Err(AttachError::WrongKind(_))
    ));
    let (a, _b) = UnixDatagram::pair().unwrap();
    assert!(matches!(
        net.attach(
            Backend::Tap {
                mac: [0; 6],
                prepared: false
            },
            vec![a.into()]
        ),
        Err(AttachError::Invalid(_))
    ));
}

#[test]
fn buffers_held_for_frames_are_available_after_a_thaw() {
    let mut wire = Wire::new(MERGE);
    let buffers: Vec<Buf> = (0..6).map(|_| wire.rig.writable(1500)).collect();
    let heads: Vec<u16> = buffers
        .iter()
        .map(|buffer| wire.rig.submit(RX, &[*buffer]))
        .collect();
    wire.peer.send(&frame(100)).unwrap();
    wire.arrive();
    assert_eq!(wire.rig.used(RX).len(), 1);

    // The other five are popped but not used.
    let mut thawed = wire.thaw();
    assert!(!thawed.rig.kicked(RX), "buffers that wait are no work");
    thawed.rig.start_work();
    assert!(thawed.rig.used(RX).is_empty());
    for wire in [&mut thawed, &mut wire] {
        wire.peer.send(&frame(2000)).unwrap();
        wire.arrive();
        let first = HEADER as u32 + 2000 - 1500;
        assert_eq!(wire.rig.used(RX), [(heads[1], 1500), (heads[2], first)]);
        let got = [wire.rig.bytes(buffers[1]), wire.rig.bytes(buffers[2])].concat();
        assert_eq!(got[HEADER..HEADER + 2000], frame(2000)[HEADER..]);
        for _ in 0..3 {
            wire.peer.send(&frame(10)).unwrap();
        }
        wire.arrive();
        let rest: Vec<u16> = wire.rig.used(RX).iter().map(|(head, _)| *head).collect();
        assert_eq!(rest, heads[3..]);
        assert!(!wire.watches_tap() || wire.rig.used(RX).is_empty());
    }
}

#[test]
fn useless_buffer_between_good_ones_loses_none_at_a_freeze() {
    let mut wire = Wire::new(MERGE);
    let (a, bad, c) = (
        wire.rig.writable(1500),
        wire.rig.writable(4),
        wire.rig.writable(1500),
    );
    let heads = [a, bad, c].map(|buffer| wire.rig.submit(RX, &[buffer]));
    wire.arrive();
    assert!(wire.rig.used(RX).is_empty(), "the first good one is held");
    let mut thawed = wire.thaw();
    for wire in [&mut thawed, &mut wire] {
        for _ in 0..2 {
            wire.peer.send(&frame(10)).unwrap();
        }
        wire.arrive();
        let length = HEADER as u32 + 10;
        assert_eq!(
            wire.rig.used(RX),
            [(heads[0], length), (heads[1], 0), (heads[2], length)]
        );
    }
}

#[test]
fn frames_queued_at_the_freeze_are_sent_after_the_thaw() {
    let mut wire = Wire::new(0);
    let sent = frame(300);
    let buffer = wire.rig.readable(&sent);
    wire.rig.submit(TX, &[buffer]);
    let mut thawed = wire.thaw();
    assert!(thawed.received().is_none());
    thawed.rig.start_work();
    assert_eq!(thawed.received().unwrap(), sent);
    assert!(thawed.received().is_none());
    assert!(wire.received().is_none());
}
