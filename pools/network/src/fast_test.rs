//! The fast path treats a packet as the namespace's rules do. The same packets go through a slot with a fast path and through a slot that
//! has left it; both have the same addresses and rules.
//!
//! A packet is sent where a guest or the host would send it, and the output on both sides is compared byte by byte. The host is deaf: a
//! program drops everything that arrives at its end, so that only the slot answers.
//!
//! There are four differences:
//! - The fast path does not verify a header's checksum and length; the host drops packets in which they are wrong.
//! - The namespace does not translate the address of a packet that connection tracking does not understand, so the host considers it
//!   forged. The fast path translates it.
//! - The fast path leaves packets from the guest to the host that belong to no known TCP connection to the host's rules.
//! - The guest's ICMP errors about TCP connections that the host has begun reach the host only through the namespace.

use std::os::fd::{AsRawFd, FromRawFd};

use rustix::io::Errno;
use rustix::thread::{CpuSet, UnshareFlags, sched_getcpu, sched_setaffinity};

use super::*;
use crate::tap::enter;
use crate::testbed::*;
use thaw_sys::bpf;
use thaw_sys::bpf::assembler::{Assembler, Register, Size, When};
use thaw_sys::netlink::Socket;
use thaw_sys::tc;

use frames::{depends_on_time, frame, may_be_the_namespaces, taken, without_number};
use sequences::*;

#[path = "fast_test/frames.rs"]
mod frames;
#[path = "fast_test/sequences.rs"]
mod sequences;

/// Number of sequences of packets; `THAW_PACKETS` overrides it.
const SEQUENCES: usize = 1500;
const VNET_HEADER: usize = 12;
const PROTOCOL: i16 = 16;
const ETHERNET: usize = 14;
const HEADER: usize = 20;
/// The identification of the packets that the test sends.
const NUMBER: u16 = 0x1234;
const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const SYN: u8 = 0x02;
const ACK: u8 = 0x10;
/// Where markers enter and leave. They have options, so the fast path leaves them to the namespace.
const MARKED: u16 = 4;

/// A slot whose two ends this test controls.
struct Bench {
    slot: NetworkSlot,
    host: OwnedFd,
    own: Ipv4Addr,
    host_end: Ipv4Addr,
    markers: u16,
}

/// Frames that came out.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Outcome {
    host: Vec<Vec<u8>>,
    guest: Vec<Vec<u8>>,
}

impl Outcome {
    /// Whether everything that came out here also came out there.
    fn is_within(&self, all: &Outcome) -> bool {
        let within = |some: &[Vec<u8>], all: &[Vec<u8>]| some.iter().all(|frame| all.contains(frame));
        within(&self.host, &all.host) && within(&self.guest, &all.guest)
    }
}

impl Bench {
    /// A host in the thread's namespace; the slot's range has room for only one slot.
    fn new(world: &mut World, is_fast: bool) -> Bench {
        let setup = Setup {
            range: "198.18.0.0/30".parse().unwrap(),
            ..world.setup.clone()
        };
        world.networks = Networks::new(setup);
        let slot = world.slot();
        let uplink = slot.uplink.as_ref().unwrap();
        assert!(uplink.is_fast());
        if !is_fast {
            uplink.turn_off_fast_path();
        }
        let (own, host_end) = (uplink.address(), uplink.host_address());
        let mut route = Socket::route().unwrap();
        let index = link::index(&mut route, &host::Host::link_name(0)).unwrap();
        deafen(&mut route, index);
        // Its ICMP errors have no rate limit; otherwise their order would matter.
        within(&slot.namespace, || {
            std::fs::write("/proc/sys/net/ipv4/icmp_ratemask", "0").unwrap();
        });
        Bench {
            host: packet_socket(index),
            slot,
            own,
            host_end,
            markers: 0,
        }
    }

    fn address(&self, who: Who) -> Ipv4Addr {
        match who {
            Who::Guest => GUEST_ADDRESS,
            Who::Slot => self.own,
            Who::HostEnd => self.host_end,
            Who::Gateway => HOST_ADDRESS,
            Who::At(address) => address,
        }
    }

    fn play(&mut self, sequence: &Sequence) -> Vec<Outcome> {
        let own = |way| match (way, sequence.packets.len()) {
            (_, 1) => sequence.own,
            (Way::Out, _) => Who::Guest,
            (Way::In, _) => Who::Slot,
        };
        let mut outcomes = Vec::new();
        for packet in &sequence.packets {
            let (ours, theirs) = (self.address(own(packet.way)), self.address(sequence.peer));
            let (from, to) = match packet.way {
                Way::Out => (ours, theirs),
                Way::In => (theirs, ours),
            };
            self.put(packet.way, &frame(packet, from, to, sequence.port));
            outcomes.push(self.outcome());
        }
        outcomes
    }

    fn put(&self, way: Way, frame: &[u8]) {
        let put = match way {
            Way::Out => rustix::io::write(&self.slot.tap, &[&[0; VNET_HEADER], frame].concat()),
            Way::In => rustix::io::write(&self.host, frame),
        };
        // The tap refuses frames that are too short for its header.
        if !matches!(put, Ok(_) | Err(Errno::INVAL)) {
            panic!("{put:?}");
        }
    }

    /// All frames that came out, up to a marker on each side, because queues keep their order.
    fn outcome(&mut self) -> Outcome {
        let mut outcome = Outcome {
            host: Vec::new(),
            guest: Vec::new(),
        };
        for way in [Way::In, Way::Out] {
            self.mark(way, &mut outcome);
        }
        let host = std::mem::take(&mut outcome.host);
        outcome.host = host
            .into_iter()
            .filter_map(|frame| taken(frame, self.own))
            .collect();
        for frames in [&mut outcome.guest, &mut outcome.host] {
            frames.retain(|frame| !depends_on_time(frame));
            frames
                .iter_mut()
                .filter(|frame| may_be_the_namespaces(frame))
                .for_each(|frame| without_number(frame));
        }
        outcome
    }

    fn mark(&mut self, way: Way, outcome: &mut Outcome) {
        self.markers = self.markers.wrapping_add(1);
        let mut marker = packet(way, Body::Udp { sum: 0 });
        marker.odd.options = 1;
        let (from, to) = match way {
            Way::Out => (GUEST_ADDRESS, OUTSIDE),
            Way::In => (OUTSIDE, self.own),
        };
        let mut marked = frame(&marker, from, to, MARKED);
        let end = marked.len();
        marked[end - 2..].copy_from_slice(&self.markers.to_be_bytes());
        self.put(way, &marked);
        let is_marker =
            |frame: &[u8]| frame.get(ETHERNET) == Some(&0x46) && frame.ends_with(&marked[end - 9..]);
        let began = std::time::Instant::now();
        loop {
            assert!(began.elapsed() < PATIENCE, "a marker was lost");
            let mut frame = vec![0; 4096];
            let read = match way {
                Way::Out => rustix::io::read(&self.host, &mut frame[..]),
                Way::In => rustix::io::read(&self.slot.tap, &mut frame[..]),
            };
            match read {
                Ok(length) => frame.truncate(length),
                Err(Errno::AGAIN) => {
                    std::thread::yield_now();
                    continue;
                }
                Err(e) => panic!("{e}"),
            }
            let (frame, frames) = match way {
                Way::Out => (frame, &mut outcome.host),
                Way::In => (frame.split_off(VNET_HEADER), &mut outcome.guest),
            };
            if is_marker(&frame) {
                return;
            }
            if frame[12..14] == [0x08, 0x00] {
                frames.push(frame);
            }
        }
    }
}

/// Makes packets that arrive at an interface visible only to packet sockets and ARP.
fn deafen(route: &mut Socket, link: u32) {
    let mut a = Assembler::default();
    a.load(Size::Four, Register::R1, Register::R1, PROTOCOL);
    a.jump_when(
        Register::R1,
        When::Equal,
        (libc::ETH_P_ARP as u16).to_be().into(),
        "pass",
    );
    a.set(Register::R0, 2);
    a.end();
    a.label("pass");
    a.set(Register::R0, 0);
    a.end();
    let program = bpf::load(&a.finish()).unwrap();
    tc::add_ingress(route, link).unwrap();
    tc::run(route, link, program.as_raw_fd(), 1).unwrap();
}

/// Sends and receives whole frames of an interface, except those that it has sent.
fn packet_socket(link: u32) -> OwnedFd {
    let kind = libc::SOCK_RAW | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    let every = (libc::ETH_P_ALL as u16).to_be();
    // SAFETY: socket(2) takes only numbers.
    let fd = unsafe { libc::socket(libc::AF_PACKET, kind, every.into()) };
    assert!(fd >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the kernel has just created this descriptor for us, and nothing else uses it.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: sockaddr_ll consists of integers, so all zeroes is a valid value.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = every;
    address.sll_ifindex = link as i32;
    let on = 1i32;
    // SAFETY: both calls read their arguments, of the stated sizes, before they return.
    let done = unsafe {
        libc::setsockopt(
            fd,
            libc::SOL_PACKET,
            libc::PACKET_IGNORE_OUTGOING,
            std::ptr::from_ref(&on).cast(),
            size_of_val(&on) as u32,
        ) | libc::bind(
            fd,
            std::ptr::from_ref(&address).cast(),
            size_of_val(&address) as u32,
        )
    };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
    socket
}

/// Plays the sequences on a host of its own; `None` if this host does not allow it.
fn play_all(is_fast: bool, sequences: &[Sequence]) -> Option<Vec<Vec<Outcome>>> {
    thaw_test_skip::beside(|| {
        if let Err(e) = enter(UnshareFlags::NEWNET) {
            thaw_test_skip::skip(format!("this host cannot {}: {}", e.step.name(), e.error));
            return None;
        }
        if let Err(e) = try_fast_path() {
            thaw_test_skip::skip(e);
            return None;
        }
        // One processor does its work in order.
        let mut one = CpuSet::new();
        one.set(sched_getcpu());
        sched_setaffinity(None, &one).unwrap();
        let mut world = World::with(FastPathSetting::Auto);
        let mut bench = Bench::new(&mut world, is_fast);
        Some(sequences.iter().map(|sequence| bench.play(sequence)).collect())
    })
}

#[test]
fn fast_path_and_nftables_agree_on_any_packet() {
    let number = std::env::var("THAW_PACKETS").map_or(SEQUENCES, |number| number.parse().unwrap());
    let sequences = sequences(number);
    let (Some(fast), Some(slow)) = (play_all(true, &sequences), play_all(false, &sequences)) else {
        return;
    };
    let mut forwarded = 0;
    for ((sequence, fast), slow) in sequences.iter().zip(fast).zip(slow) {
        let said =
            |number: usize| format!("packet {number} of {sequence:?}\nfast: {fast:x?}\nslow: {slow:x?}");
        // A dropped first packet creates no connection, so the following packets are not understood.
        let began = slow.first().is_some_and(|first| match sequence.packets[0].way {
            Way::Out => !first.host.is_empty(),
            Way::In => !first.guest.is_empty(),
        });
        let is_of_host = matches!(sequence.peer, Who::HostEnd);
        for (number, (fast, slow)) in fast.iter().zip(&slow).enumerate() {
            let packet = &sequence.packets[number];
            if is_of_host && is_error_about_tcp(packet) {
                assert!(fast.is_within(slow), "{}", said(number));
            } else if sequence.is_sound && (number == 0 || began) {
                assert!(fast == slow, "{}", said(number));
                forwarded += usize::from(!fast.host.is_empty() || !fast.guest.is_empty());
            } else if !(is_of_host && is_for_the_host_to_decide(packet)) {
                // What is translated in either is so in both, and nothing is said that the namespace would not say.
                assert!(slow.is_within(fast), "{}", said(number));
            }
        }
    }
    // Many packets were forwarded, so the two paths did not agree merely by dropping everything.
    assert!(
        forwarded > number / 4,
        "{forwarded} of {number} sequences came out anywhere"
    );
}
