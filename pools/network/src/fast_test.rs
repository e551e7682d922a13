//! What the fast path does with a packet is what the namespace's rules do with it: the same packets through a slot that has one and
//! through a slot that has left it, whose addresses and rules are the same.
//!
//! A packet is put where a guest or the host would have put it, and what comes out on either side is compared byte by byte. The
//! host is deaf: a program drops what arrives at its end, so that nothing answers but the slot.
//!
//! Four differences there are:
//! - The fast path does not verify a header's checksum and length; the host drops what is wrong there.
//! - Of a packet that connection tracking does not understand, the namespace does not translate the address, so that the host takes it for
//!   forged, while the fast path does.
//! - What the guest sends the host of a TCP connection nobody knows, the fast path leaves to the host's rules.
//! - The guest's ICMP errors about TCP connections that the host has begun reach the host through the namespace alone.

use std::os::fd::{AsRawFd, FromRawFd};

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use rustix::io::Errno;
use rustix::thread::{CpuSet, UnshareFlags, sched_getcpu, sched_setaffinity};

use super::*;
use crate::tap::enter;
use crate::world::*;
use thaw_sys::bpf;
use thaw_sys::bpf::assembler::{Assembler, Register, Size, When};
use thaw_sys::netlink::Socket;
use thaw_sys::tc;

/// Sequences of packets; `THAW_PACKETS` says another number.
const SEQUENCES: usize = 1500;
const VNET_HEADER: usize = 12;
const PROTOCOL: i16 = 16;
const ETHERNET: usize = 14;
const HEADER: usize = 20;
/// The identification of the packets put there.
const NUMBER: u16 = 0x1234;
const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const SYN: u8 = 0x02;
const ACK: u8 = 0x10;
/// Where markers go and come from; they have options, so the fast path leaves them to the namespace.
const MARKED: u16 = 4;

/// Where a packet is put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// By the guest.
    Out,
    /// By the host, for the guest.
    In,
}

impl Way {
    fn back(self) -> Way {
        match self {
            Way::Out => Way::In,
            Way::In => Way::Out,
        }
    }
}

/// An address, as it depends on the slot.
#[derive(Clone, Copy, Debug)]
enum Who {
    Guest,
    Slot,
    HostEnd,
    Gateway,
    At(Ipv4Addr),
}

/// What is particular to a packet beside who it is from and to.
#[derive(Clone, Copy, Debug)]
struct Oddity {
    mac: bool,
    vlan: bool,
    ttl: u8,
    fragment: u16,
    options: u8,
    header_sum: bool,
    /// More or fewer bytes in its header than there are.
    length: i8,
}

const PLAIN: Oddity = Oddity {
    mac: false,
    vlan: false,
    ttl: 64,
    fragment: 0,
    options: 0,
    header_sum: false,
    length: 0,
};

/// What is behind the IPv4 header.
#[derive(Clone, Copy, Debug)]
enum Body {
    Tcp {
        flags: u8,
        seq: u32,
        ack: u32,
    },
    /// `sum`: 0 is none, 1 is right, 2 is wrong.
    Udp {
        sum: u8,
    },
    Echo {
        reply: bool,
    },
    /// About a packet the other way.
    Error {
        kind: u8,
        about: u8,
    },
    Other {
        protocol: u8,
    },
}

#[derive(Clone, Copy, Debug)]
struct Packet {
    way: Way,
    body: Body,
    odd: Oddity,
    payload: usize,
    /// Its checksum is wrong.
    broken: bool,
}

/// Packets of one connection, none like another's.
#[derive(Clone, Debug)]
struct Sequence {
    /// Who the guest speaks with.
    peer: Who,
    /// Who the guest says it is, or is taken for.
    own: Who,
    port: u16,
    packets: Vec<Packet>,
    /// Connection tracking understands each.
    is_sound: bool,
}

fn peers() -> impl Strategy<Value = Who> {
    prop_oneof![
        6 => any::<u32>().prop_map(|bits| Who::At(Ipv4Addr::from_bits(bits))),
        6 => Just(Who::At(OUTSIDE)),
        3 => Just(Who::HostEnd),
        1 => Just(Who::Gateway),
        1 => Just(Who::Slot),
        1 => Just(Who::Guest),
        4 => proptest::sample::select(vec![
            Ipv4Addr::LOCALHOST,
            Ipv4Addr::new(0, 1, 2, 3),
            Ipv4Addr::new(169, 254, 169, 254),
            Ipv4Addr::new(224, 0, 0, 1),
            Ipv4Addr::BROADCAST,
            Ipv4Addr::new(168, 63, 129, 16),
            Ipv4Addr::new(10, 219, 0, 3),
            Ipv4Addr::new(198, 18, 0, 3),
            Ipv4Addr::new(198, 18, 0, 4),
            HOST,
        ])
        .prop_map(Who::At),
    ]
}

fn packet(way: Way, body: Body) -> Packet {
    Packet {
        way,
        body,
        odd: PLAIN,
        payload: 9,
        broken: false,
    }
}

/// A beginning, what the other side says to it, and one more.
fn conversation() -> impl Strategy<Value = (Vec<Packet>, bool)> {
    let way = prop_oneof![Just(Way::Out), Just(Way::In)];
    let kind = 0..4u8;
    let answer = prop_oneof![Just(0u8), Just(1), Just(3), Just(11), Just(12)];
    (way, kind, answer, 0..3usize, 0..80usize).prop_map(|(way, kind, answer, length, payload)| {
        let tcp = |flags, seq, ack| Body::Tcp { flags, seq, ack };
        let (begin, reply, end) = match kind {
            0 => (tcp(SYN, 100, 0), tcp(SYN | ACK, 300, 101), tcp(ACK, 101, 301)),
            1 => (Body::Udp { sum: 1 }, Body::Udp { sum: 0 }, Body::Udp { sum: 1 }),
            2 => (
                Body::Echo { reply: false },
                Body::Echo { reply: true },
                Body::Echo { reply: false },
            ),
            _ => (tcp(ACK, 100, 7), tcp(ACK, 7, 100), tcp(ACK, 100, 7)),
        };
        let protocol = match kind {
            1 => UDP,
            2 => ICMP,
            _ => TCP,
        };
        let reply = match answer {
            0 | 1 => reply,
            kind => Body::Error {
                kind,
                about: protocol,
            },
        };
        let mut packets = vec![packet(way, begin), packet(way.back(), reply), packet(way, end)];
        // What was answered by an error does not go on.
        packets.truncate(if answer > 1 { length.min(1) + 1 } else { length + 1 });
        // Segments that carry nothing stay within the other's window.
        let carries = !matches!(begin, Body::Tcp { .. });
        packets
            .iter_mut()
            .for_each(|packet| packet.payload = if carries { payload } else { 0 });
        (packets, true)
    })
}

/// One packet with something unusual about it.
fn single() -> impl Strategy<Value = (Vec<Packet>, bool)> {
    let way = prop_oneof![Just(Way::Out), Just(Way::In)];
    let body = prop_oneof![
        (any::<u8>(), any::<u32>(), any::<u32>()).prop_map(|(flags, seq, ack)| Body::Tcp { flags, seq, ack }),
        Just(Body::Tcp {
            flags: SYN,
            seq: 5,
            ack: 0
        }),
        Just(Body::Tcp {
            flags: ACK,
            seq: 5,
            ack: 9
        }),
        (0..3u8).prop_map(|sum| Body::Udp { sum }),
        any::<bool>().prop_map(|reply| Body::Echo { reply }),
        (any::<u8>(), prop_oneof![Just(TCP), Just(UDP), Just(ICMP)]).prop_map(|(kind, about)| Body::Error {
            kind: kind % 20,
            about
        }),
        any::<u8>().prop_map(|protocol| Body::Other { protocol }),
    ];
    let odd = (
        proptest::bool::weighted(0.05),
        proptest::bool::weighted(0.05),
        prop_oneof![4 => Just(64u8), 1 => 0..4u8, 1 => Just(255)],
        prop_oneof![4 => Just(0u16), 1 => Just(0x4000), 1 => any::<u16>()],
        prop_oneof![5 => Just(0u8), 1 => 1..11u8],
        proptest::bool::weighted(0.05),
        prop_oneof![8 => Just(0i8), 1 => -30..30i8],
    );
    (way, body, odd, 0..80usize, proptest::bool::weighted(0.05)).prop_map(
        |(way, body, odd, payload, broken)| {
            let (mac, vlan, ttl, fragment, options, header_sum, length) = odd;
            let odd = Oddity {
                mac,
                vlan,
                ttl,
                fragment,
                options,
                // The host sends none that is wrong.
                header_sum: header_sum && way == Way::Out,
                length: if way == Way::Out { length } else { 0 },
            };
            let packet = Packet {
                way,
                body,
                odd,
                payload,
                broken,
            };
            (vec![packet], is_sound(&packet))
        },
    )
}

/// Whether connection tracking takes it for the first packet of something.
fn is_sound(packet: &Packet) -> bool {
    let begins = match packet.body {
        Body::Tcp { flags, .. } => matches!(flags & 0x3f, SYN | ACK | 0x18),
        Body::Udp { sum } => sum < 2,
        Body::Echo { reply } => !reply,
        Body::Error { .. } => false,
        // Those that connection tracking looks into want a header.
        Body::Other { protocol } => ![1, 6, 17, 33, 47, 58, 132, 136].contains(&protocol),
    };
    begins && !packet.broken && packet.odd.length == 0
}

/// What the guest sends the host, and begins nothing.
fn is_for_the_host_to_decide(packet: &Packet) -> bool {
    let begins = matches!(packet.body, Body::Tcp { flags, .. } if flags & (SYN | ACK) == SYN);
    packet.way == Way::Out && matches!(packet.body, Body::Tcp { .. }) && !begins
}

/// What the guest sends that is an ICMP error about TCP.
fn is_error_about_tcp(packet: &Packet) -> bool {
    packet.way == Way::Out && matches!(packet.body, Body::Error { about: TCP, .. })
}

fn sequences(number: usize) -> Vec<Sequence> {
    let own = prop_oneof![12 => Just(None), 1 => peers().prop_map(Some)];
    let packets = prop_oneof![conversation(), single()];
    let strategy = (peers(), own, packets);
    let mut runner = TestRunner::deterministic();
    let sequence = |number: usize| {
        let (peer, own, (packets, is_sound)) = strategy.new_tree(&mut runner).unwrap().current();
        let usual = match packets[0].way {
            Way::Out => Who::Guest,
            Way::In => Who::Slot,
        };
        Sequence {
            peer: match peer {
                Who::HostEnd if is_for_the_host_to_decide(&packets[0]) => Who::At(OUTSIDE),
                peer => peer,
            },
            // A conversation has two ways, and one party cannot be forged in both.
            own: own.filter(|_| packets.len() == 1).unwrap_or(usual),
            port: 1024u16.wrapping_add(number as u16),
            packets,
            is_sound,
        }
    };
    (0..number).map(sequence).collect()
}

fn sum(bytes: &[u8], start: u32) -> u32 {
    let words = bytes
        .chunks(2)
        .map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)));
    words.fold(start, |sum, word| sum + word)
}

fn folded(mut sum: u32) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// A slot whose two ends are in this test's hands.
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
    /// Whether all that came out here did there.
    fn is_within(&self, all: &Outcome) -> bool {
        let within = |some: &[Vec<u8>], all: &[Vec<u8>]| some.iter().all(|frame| all.contains(frame));
        within(&self.host, &all.host) && within(&self.guest, &all.guest)
    }
}

impl Bench {
    /// In the thread's namespace, a host; the slot's range is for one slot alone.
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
        // Its errors are not counted: which of them came first would decide.
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
        // The tap takes no frame that is too short for its header.
        if !matches!(put, Ok(_) | Err(Errno::INVAL)) {
            panic!("{put:?}");
        }
    }

    /// All that came out, once a marker each way has: queues keep their order.
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

/// What the host makes of a frame: what it drops is none, because of its header or because it is not from the slot.
fn taken(mut frame: Vec<u8>, slot: Ipv4Addr) -> Option<Vec<u8>> {
    let header = frame.get(ETHERNET..ETHERNET + HEADER)?;
    let length = usize::from(header[0] & 15) * 4;
    let total = usize::from(u16::from_be_bytes([header[2], header[3]]));
    let is_forged = header[12..16] != slot.octets();
    let whole = frame.get(ETHERNET..ETHERNET + length.max(HEADER))?;
    let is_right = folded(sum(whole, 0)) == 0 && total >= length && total <= frame.len() - ETHERNET;
    frame.truncate(ETHERNET + total);
    (is_right && !is_forged).then_some(frame)
}

/// Whether the namespace's kernel may have made the frame. Ours have one number, but the kernel draws the numbers of its ICMP messages,
/// and one in 65,536 of them is ours.
fn may_be_the_namespaces(frame: &[u8]) -> bool {
    is_icmp(frame) || frame.get(ETHERNET + 4..ETHERNET + 6) != Some(&NUMBER.to_be_bytes())
}

/// Without its number, which its maker has drawn, and with whether its header's sum is right in the sum's place.
fn without_number(frame: &mut [u8]) {
    let length = frame.get(ETHERNET).map_or(0, |first| usize::from(first & 15) * 4);
    let Some(header) = frame.get_mut(ETHERNET..ETHERNET + length.max(HEADER)) else {
        return;
    };
    let is_right = folded(sum(header, 0)) == 0;
    header[4..6].fill(0);
    header[10..12].copy_from_slice(&[0, is_right.into()]);
}

/// Whether it depends on the time: errors of the namespace, which the kernel sends so often and no more, and answers with the time.
fn depends_on_time(frame: &[u8]) -> bool {
    const INTERNET_CONTROL: u8 = 0xc0;
    const TIMESTAMP_REPLY: u8 = 14;
    let is_error = frame.get(ETHERNET + 1) == Some(&INTERNET_CONTROL);
    is_icmp(frame) && (is_error || frame.get(ETHERNET + HEADER) == Some(&TIMESTAMP_REPLY))
}

fn is_icmp(frame: &[u8]) -> bool {
    frame.get(ETHERNET + 9) == Some(&ICMP)
}

/// The frame as it is put there.
fn frame(packet: &Packet, from: Ipv4Addr, to: Ipv4Addr, port: u16) -> Vec<u8> {
    let odd = packet.odd;
    let (protocol, body) = body(packet, from, to, port);
    let (to_mac, from_mac) = match packet.way {
        Way::Out => (GATEWAY_MAC, GUEST_MAC),
        Way::In => (UPLINK_MAC, HOST_MAC),
    };
    let mut frame = [to_mac, from_mac].concat();
    if odd.mac {
        frame[5] ^= 1;
    }
    if odd.vlan {
        frame.extend([0x81, 0, 0, 7]);
    }
    frame.extend([0x08, 0]);
    let start = frame.len();
    frame.extend(header(protocol, odd.ttl, body.len(), odd.options, from, to));
    let total = (frame.len() - start + body.len()) as i32 + i32::from(odd.length);
    frame[start + 2..start + 4].copy_from_slice(&(total.max(0) as u16).to_be_bytes());
    frame[start + 6..start + 8].copy_from_slice(&odd.fragment.to_be_bytes());
    let whole = folded(sum(&frame[start..], 0)) ^ u16::from(odd.header_sum);
    frame[start + 10..start + 12].copy_from_slice(&whole.to_be_bytes());
    frame.extend(body);
    frame
}

/// An IPv4 header without its checksum; each option is four bytes of nothing.
fn header(protocol: u8, ttl: u8, body: usize, options: u8, from: Ipv4Addr, to: Ipv4Addr) -> Vec<u8> {
    let length = HEADER + usize::from(options) * 4;
    let mut header = vec![0x45 + options, 0];
    header.extend(((length + body) as u16).to_be_bytes());
    header.extend(NUMBER.to_be_bytes());
    header.extend([0, 0, ttl, protocol, 0, 0]);
    header.extend(from.octets());
    header.extend(to.octets());
    header.resize(length, 1);
    header
}

fn body(packet: &Packet, from: Ipv4Addr, to: Ipv4Addr, port: u16) -> (u8, Vec<u8>) {
    let payload: Vec<u8> = (0..packet.payload as u8).map(|n| n ^ 0x5a).collect();
    // The guest's own port of a conversation is its number; the peer's is the same.
    let ports = [port.to_be_bytes(), port.to_be_bytes()].concat();
    let (protocol, mut bytes, at, has_addresses) = match packet.body {
        Body::Tcp { flags, seq, ack } => {
            let mut bytes = ports;
            bytes.extend(seq.to_be_bytes());
            bytes.extend(ack.to_be_bytes());
            bytes.extend([0x50, flags, 0xff, 0xff, 0, 0, 0, 0]);
            (TCP, bytes, Some(16), true)
        }
        Body::Udp { sum } => {
            let mut bytes = ports;
            bytes.extend((8 + payload.len() as u16).to_be_bytes());
            bytes.extend([0, 0]);
            (UDP, bytes, (sum > 0).then_some(6), true)
        }
        Body::Echo { reply } => {
            let mut bytes = vec![if reply { 0 } else { 8 }, 0, 0, 0];
            bytes.extend(port.to_be_bytes());
            bytes.extend([0, 1]);
            (ICMP, bytes, Some(2), false)
        }
        Body::Error { kind, about } => {
            let mut bytes = vec![kind, 0, 0, 0, 0, 0, 0, 0];
            let mut inner = header(about, 60, 8, 0, to, from);
            let whole = folded(sum(&inner, 0));
            inner[10..12].copy_from_slice(&whole.to_be_bytes());
            bytes.extend(inner);
            match about {
                ICMP => {
                    bytes.extend([8, 0, 0, 0]);
                    bytes.extend(port.to_be_bytes());
                    bytes.extend([0, 1]);
                }
                _ => {
                    bytes.extend(ports);
                    bytes.extend([0, 8, 0, 0]);
                }
            }
            (ICMP, bytes, Some(2), false)
        }
        Body::Other { protocol } => (protocol, Vec::new(), None, false),
    };
    bytes.extend(payload);
    if let Some(at) = at {
        let pseudo = if has_addresses {
            let length = bytes.len() as u32;
            sum(&from.octets(), sum(&to.octets(), u32::from(protocol) + length))
        } else {
            0
        };
        let wrong = packet.broken || matches!(packet.body, Body::Udp { sum: 2 });
        let whole = folded(sum(&bytes, pseudo)) ^ u16::from(wrong);
        bytes[at..at + 2].copy_from_slice(&whole.to_be_bytes());
    }
    (protocol, bytes)
}

/// What arrives at an interface is seen by packet sockets, and by nobody else but ARP.
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

/// Sends and sees whole frames of an interface, not those it has sent.
fn packet_socket(link: u32) -> OwnedFd {
    let kind = libc::SOCK_RAW | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    let every = (libc::ETH_P_ALL as u16).to_be();
    // SAFETY: socket(2) takes numbers alone.
    let fd = unsafe { libc::socket(libc::AF_PACKET, kind, every.into()) };
    assert!(fd >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the kernel has made this descriptor for us, and nobody else knows of it.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: sockaddr_ll is integers: all zeroes is a value of it.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = every;
    address.sll_ifindex = link as i32;
    let on = 1i32;
    // SAFETY: both calls read what they are given, of the sizes said, before they return.
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

/// On a host of its own; none where this one does not allow it.
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
        // What one processor does for us it does in order.
        let mut one = CpuSet::new();
        one.set(sched_getcpu());
        sched_setaffinity(None, &one).unwrap();
        let mut world = World::with(FastPathSetting::Auto);
        let mut bench = Bench::new(&mut world, is_fast);
        Some(sequences.iter().map(|sequence| bench.play(sequence)).collect())
    })
}

#[test]
fn the_fast_path_and_nftables_do_the_same_with_any_packet() {
    let number = std::env::var("THAW_PACKETS").map_or(SEQUENCES, |number| number.parse().unwrap());
    let sequences = sequences(number);
    let (Some(fast), Some(slow)) = (play_all(true, &sequences), play_all(false, &sequences)) else {
        return;
    };
    let mut forwarded = 0;
    for ((sequence, fast), slow) in sequences.iter().zip(fast).zip(slow) {
        let said =
            |number: usize| format!("packet {number} of {sequence:?}\nfast: {fast:x?}\nslow: {slow:x?}");
        // Of what was not let through there is no connection, so what follows it is understood no more.
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
    // Not all of them were dropped alike.
    assert!(
        forwarded > number / 4,
        "{forwarded} of {number} sequences came out anywhere"
    );
}
