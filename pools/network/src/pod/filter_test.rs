//! Frames as a guest's driver writes them to the tap of a pod, and the frames that arrive at the other end of the pod's interface.

use std::net::{Ipv4Addr, UdpSocket};
use std::num::NonZeroU32;

use rustix::net::{AddressFamily, Protocol, SocketFlags, SocketType};

use super::super::tests::{HOST4, HOST6, POD4, POD6, attach, on_a_host, pod};
use super::super::{Error, PodNetwork};
use super::*;
use crate::testbed::PATIENCE;
use thaw_sys::bpf;

use rules::may_be_sent;

#[path = "filter_test/rules.rs"]
mod rules;

const OTHER4: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 6);
const OTHER6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x88, 0, 0, 0, 0, 0, 6);
const OTHER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 6];
const NOBODY4: Ipv4Addr = Ipv4Addr::UNSPECIFIED;
const NOBODY6: Ipv6Addr = Ipv6Addr::UNSPECIFIED;
const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMP: u8 = 1;
const IGMP: u8 = 2;
const ICMPV6: u8 = 58;

/// A pod with a guest's tap, and a peer that sees everything that comes from it.
struct Link {
    attached: PodNetwork,
    seen: UdpSocket,
    sent: u32,
}

impl Link {
    fn new() -> Link {
        let attached = attach(&pod()).unwrap().unwrap();
        let every = u32::from((libc::ETH_P_ALL as u16).to_be());
        let protocol = NonZeroU32::new(every).map(Protocol::from_raw);
        let (family, flags) = (AddressFamily::PACKET, SocketFlags::CLOEXEC);
        let seen = rustix::net::socket_with(family, SocketType::RAW, flags, protocol).unwrap();
        // Every kind of socket is read and awaited in the same way.
        let seen = UdpSocket::from(seen);
        seen.set_read_timeout(Some(PATIENCE)).unwrap();
        Link {
            attached,
            seen,
            sent: 0,
        }
    }

    fn mac(&self) -> [u8; 6] {
        self.attached.config().unwrap().mac
    }

    /// Sends a frame: a destination that no interface has, unique to this frame, then these bytes.
    fn send(&mut self, frame: &[u8]) -> [u8; 6] {
        self.sent += 1;
        let [a, b, c, d] = self.sent.to_be_bytes();
        let destination = [2, 0xee, a, b, c, d];
        let written = [&[0; 12][..], &destination, frame].concat();
        rustix::io::write(self.attached.tap().unwrap(), &written).unwrap();
        destination
    }

    /// Whether a frame arrives at the other end, before a later frame that certainly passes.
    fn passes(&mut self, frame: &[u8]) -> bool {
        self.passing(&[frame.to_vec()])[0]
    }

    /// Which of some frames pass; there must be no more than fit into a socket.
    fn passing(&mut self, frames: &[Vec<u8>]) -> Vec<bool> {
        let looked_for: Vec<_> = frames.iter().map(|frame| self.send(frame)).collect();
        let last = self.send(&ethernet(self.mac(), 0x0800, &ipv4(POD4, TCP, &[0; 20])));
        let (mut found, mut bytes) = (vec![false; frames.len()], [0; 2000]);
        loop {
            let length = self.seen.recv(&mut bytes).unwrap();
            if bytes[..length].starts_with(&last) {
                return found;
            }
            let is_it = |looked_for: &[u8; 6]| bytes[..length].starts_with(looked_for);
            if let Some(at) = looked_for.iter().position(is_it) {
                found[at] = true;
            }
        }
    }

    fn check(&mut self, from: [u8; 6], kind: u16, cases: &[(&str, bool, Vec<u8>)]) {
        for (what, passes, packet) in cases {
            assert_eq!(self.passes(&ethernet(from, kind, packet)), *passes, "{what}");
        }
    }
}

fn ethernet(from: [u8; 6], kind: u16, packet: &[u8]) -> Vec<u8> {
    [&from[..], &kind.to_be_bytes(), packet].concat()
}

fn arp(operation: u8, mac: [u8; 6], sender: Ipv4Addr, target: Ipv4Addr) -> Vec<u8> {
    let begin = [0, 1, 8, 0, 6, 4, 0, operation];
    [&begin[..], &mac, &sender.octets(), &[0; 6], &target.octets()].concat()
}

fn ipv4(from: Ipv4Addr, protocol: u8, within: &[u8]) -> Vec<u8> {
    fragment4(from, protocol, 0, within)
}

fn fragment4(from: Ipv4Addr, protocol: u8, offset: u16, within: &[u8]) -> Vec<u8> {
    let length = (20 + within.len() as u16).to_be_bytes();
    let [o, p] = offset.to_be_bytes();
    let begin = [0x45, 0, length[0], length[1], 0, 0, o, p, 64, protocol, 0, 0];
    [&begin[..], &from.octets(), &HOST4.octets(), within].concat()
}

fn ipv6(from: Ipv6Addr, next: u8, within: &[u8]) -> Vec<u8> {
    let length = (within.len() as u16).to_be_bytes();
    let begin = [0x60, 0, 0, 0, length[0], length[1], next, 255];
    [&begin[..], &from.octets(), &HOST6.octets(), within].concat()
}

fn udp(from: u16, to: u16) -> Vec<u8> {
    [from.to_be_bytes(), to.to_be_bytes(), [0, 8], [0, 0]].concat()
}

/// An ICMPv6 message with a target, as in neighbour discovery.
fn message(kind: u8, target: Ipv6Addr) -> Vec<u8> {
    [&[kind, 0, 0, 0, 0, 0, 0, 0][..], &target.octets()].concat()
}

fn after(header: [u8; 8], within: &[u8]) -> Vec<u8> {
    [&header[..], within].concat()
}

#[test]
fn frames_of_another_mac_or_kind_are_dropped() {
    on_a_host(|| {
        let mut link = Link::new();
        let mac = link.mac();
        let packet = ipv4(POD4, TCP, &[0; 20]);
        link.check(mac, 0x0800, &[("own", true, packet.clone())]);
        link.check(OTHER_MAC, 0x0800, &[("another MAC", false, packet.clone())]);
        let tagged = [&[0, 5, 8, 0][..], &packet].concat();
        for kind in [0x8100, 0x88a8, 0x88cc, 0x8863, 0x8847, 46] {
            link.check(mac, kind, &[("another kind", false, tagged.clone())]);
        }
        link.check(mac, 0x86dd, &[("IPv4 as IPv6", false, packet)]);
        link.check(mac, 0x0800, &[("no header", false, vec![0x45; 8])]);
    });
}

#[test]
fn arp_of_other_addresses_is_dropped() {
    on_a_host(|| {
        let mut link = Link::new();
        let mac = link.mac();
        let mut token_ring = arp(1, mac, POD4, HOST4);
        token_ring[1] = 6;
        link.check(
            mac,
            0x0806,
            &[
                ("request", true, arp(1, mac, POD4, HOST4)),
                ("reply", true, arp(2, mac, POD4, HOST4)),
                ("gratuitous", true, arp(1, mac, POD4, POD4)),
                ("own probe", true, arp(1, mac, NOBODY4, POD4)),
                ("probe of another's", false, arp(1, mac, NOBODY4, OTHER4)),
                ("reply of nobody", false, arp(2, mac, NOBODY4, POD4)),
                ("another sender", false, arp(1, mac, OTHER4, HOST4)),
                ("another's reply", false, arp(2, mac, HOST4, OTHER4)),
                ("another MAC within", false, arp(2, OTHER_MAC, POD4, HOST4)),
                ("RARP's operation", false, arp(3, mac, POD4, HOST4)),
                ("another network", false, token_ring),
                ("cut", false, arp(1, mac, POD4, HOST4)[..27].to_vec()),
            ],
        );
    });
}

#[test]
fn ipv4_of_others_and_dhcp_service_are_dropped() {
    on_a_host(|| {
        let mut link = Link::new();
        let mac = link.mac();
        let mut optional = ipv4(POD4, UDP, &after([1; 8], &udp(67, 1000)));
        optional[0] = 0x47;
        let mut short = ipv4(POD4, TCP, &[0; 20]);
        short[0] = 0x44;
        link.check(
            mac,
            0x0800,
            &[
                ("TCP", true, ipv4(POD4, TCP, &[0; 20])),
                ("ICMP", true, ipv4(POD4, ICMP, &[8, 0, 0, 0, 0, 0, 0, 0])),
                ("UDP", true, ipv4(POD4, UDP, &udp(1000, 53))),
                ("a later fragment", true, fragment4(POD4, UDP, 5, &udp(67, 68))),
                (
                    "ICMP's redirect",
                    false,
                    ipv4(POD4, ICMP, &[5, 1, 0, 0, 0, 0, 0, 0]),
                ),
                (
                    "ICMP's router",
                    false,
                    ipv4(POD4, ICMP, &[9, 0, 0, 0, 0, 0, 0, 0]),
                ),
                (
                    "IGMP's report",
                    true,
                    ipv4(POD4, IGMP, &[0x22, 0, 0, 0, 0, 0, 0, 0]),
                ),
                (
                    "IGMP's query",
                    false,
                    ipv4(POD4, IGMP, &[0x11, 0, 0, 0, 0, 0, 0, 0]),
                ),
                ("another's", false, ipv4(OTHER4, TCP, &[0; 20])),
                ("nobody's", false, ipv4(NOBODY4, UDP, &udp(68, 67))),
                ("DHCP server", false, ipv4(POD4, UDP, &udp(67, 1000))),
                ("to a DHCP client", false, ipv4(POD4, UDP, &udp(1000, 68))),
                (
                    "DHCP's first fragment",
                    false,
                    fragment4(POD4, UDP, 0x2000, &udp(67, 68)),
                ),
                ("DHCP after options", false, optional),
                ("UDP without ports", false, ipv4(POD4, UDP, &[])),
                ("a header too short", false, short),
            ],
        );
    });
}

#[test]
fn ipv6_and_discovery_of_others_are_dropped() {
    on_a_host(|| {
        let mut link = Link::new();
        let mac = link.mac();
        let local = link_local(mac);
        let of = |from, kind, target| ipv6(from, ICMPV6, &message(kind, target));
        let mut cases = vec![
            ("TCP", true, ipv6(POD6, TCP, &[0; 20])),
            ("UDP", true, ipv6(POD6, UDP, &udp(1000, 53))),
            ("echo", true, of(POD6, 128, NOBODY6)),
            ("solicitation", true, of(local, 135, HOST6)),
            ("own advertisement", true, of(POD6, 136, POD6)),
            ("own link-local", true, of(local, 136, local)),
            ("router's solicitation", true, of(local, 133, NOBODY6)),
            ("looks for own duplicate", true, of(NOBODY6, 135, POD6)),
            ("another's", false, ipv6(OTHER6, TCP, &[0; 20])),
            ("nobody's TCP", false, ipv6(NOBODY6, TCP, &[0; 20])),
            ("nobody's UDP", false, ipv6(NOBODY6, UDP, &udp(546, 547))),
            ("nobody's advertisement", false, of(NOBODY6, 136, POD6)),
            ("another's duplicate", false, of(NOBODY6, 135, OTHER6)),
            ("another's advertisement", false, of(POD6, 136, OTHER6)),
            ("router's advertisement", false, of(local, 134, NOBODY6)),
            ("redirect", false, of(local, 137, OTHER6)),
            ("query of listeners", false, of(local, 130, NOBODY6)),
            ("DHCP server", false, ipv6(POD6, UDP, &udp(547, 1000))),
            ("to a DHCP client", false, ipv6(POD6, UDP, &udp(1000, 546))),
            ("cut", false, of(POD6, 136, POD6)[..40 + 8 + 15].to_vec()),
        ];
        for report in REPORTS {
            cases.push(("report of listeners", true, of(NOBODY6, report as u8, NOBODY6)));
        }
        link.check(mac, 0x86dd, &cases);
    });
}

#[test]
fn discovery_behind_extension_headers_is_dropped() {
    on_a_host(|| {
        let mut link = Link::new();
        let (mac, own) = (link.mac(), message(136, POD6));
        let alert = [ICMPV6, 0, 5, 2, 0, 0, 1, 0];
        let more = |next: u8| [next, 0, 0, 1, 0, 0, 0, 1];
        let later = |next: u8| [next, 0, 0, 8, 0, 0, 0, 1];
        let fragment = |header, within: &[u8]| ipv6(POD6, 44, &after(header, within));
        let hop = |header, within: &[u8]| ipv6(POD6, 0, &after(header, within));
        let mut cases = vec![
            ("report", true, hop(alert, &message(143, NOBODY6))),
            ("advertisement after an alert", false, hop(alert, &own)),
            ("query", false, hop(alert, &message(130, NOBODY6))),
            (
                "UDP after an alert",
                false,
                hop([UDP, 0, 5, 2, 0, 0, 1, 0], &udp(547, 546)),
            ),
            (
                "more options",
                false,
                hop([ICMPV6, 1, 1, 12, 0, 0, 0, 0], &message(143, NOBODY6)),
            ),
            ("fragment of TCP", true, fragment(more(TCP), &[0; 20])),
            ("fragment of UDP", true, fragment(more(UDP), &udp(1000, 53))),
            (
                "fragment of an echo",
                true,
                fragment(more(ICMPV6), &message(128, NOBODY6)),
            ),
            ("later fragment", true, fragment(later(ICMPV6), &own)),
            ("fragmented advertisement", false, fragment(more(ICMPV6), &own)),
            (
                "alone in a fragment",
                false,
                fragment([ICMPV6, 0, 0, 0, 0, 0, 0, 1], &own),
            ),
            ("fragment of nothing", false, fragment(more(ICMPV6), &[])),
            ("fragment of DHCP", false, fragment(more(UDP), &udp(547, 546))),
            (
                "fragment of a fragment",
                false,
                fragment(more(44), &later(ICMPV6)),
            ),
            (
                "fragment of options",
                false,
                fragment(more(60), &after([ICMPV6, 0, 1, 4, 0, 0, 0, 0], &own)),
            ),
        ];
        for header in EXTENSIONS {
            let within = after([ICMPV6, 0, 1, 4, 0, 0, 0, 0], &own);
            cases.push(("extension", false, ipv6(POD6, header as u8, &within)));
        }
        link.check(mac, 0x86dd, &cases);
    });
}

/// Frames that may be sent, of each kind.
fn every_kind(mac: [u8; 6]) -> Vec<Vec<u8>> {
    let local = link_local(mac);
    let alert = [ICMPV6, 0, 5, 2, 0, 0, 1, 0];
    let first = |next: u8| [next, 0, 0, 1, 0, 0, 0, 1];
    let mut optional = ipv4(POD4, UDP, &after([1; 8], &udp(1000, 53)));
    optional[0] = 0x47;
    let packets = [
        (0x0806, arp(1, mac, POD4, HOST4)),
        (0x0806, arp(2, mac, POD4, HOST4)),
        (0x0806, arp(1, mac, NOBODY4, POD4)),
        (0x0800, ipv4(POD4, TCP, &[0; 20])),
        (0x0800, ipv4(POD4, UDP, &udp(66, 69))),
        (0x0800, ipv4(POD4, ICMP, &[8, 0, 0, 0, 0, 0, 0, 0])),
        (0x0800, ipv4(POD4, IGMP, &[0x16, 0, 0, 0, 0, 0, 0, 0])),
        (0x0800, fragment4(POD4, UDP, 0x2000, &udp(1000, 53))),
        (0x0800, optional),
        (0x86dd, ipv6(POD6, TCP, &[0; 20])),
        (0x86dd, ipv6(POD6, UDP, &udp(1000, 53))),
        (0x86dd, ipv6(POD6, ICMPV6, &message(128, NOBODY6))),
        (0x86dd, ipv6(local, ICMPV6, &message(135, HOST6))),
        (0x86dd, ipv6(NOBODY6, ICMPV6, &message(135, POD6))),
        (0x86dd, ipv6(POD6, ICMPV6, &message(136, POD6))),
        (0x86dd, ipv6(local, ICMPV6, &message(133, NOBODY6))),
        (0x86dd, ipv6(NOBODY6, 0, &after(alert, &message(143, NOBODY6)))),
        (0x86dd, ipv6(POD6, 44, &after(first(UDP), &udp(1000, 53)))),
        (
            0x86dd,
            ipv6(POD6, 44, &after(first(ICMPV6), &message(128, NOBODY6))),
        ),
    ];
    packets.map(|(kind, packet)| ethernet(mac, kind, &packet)).into()
}

/// A frame with each byte wrong in several ways, and cut at each length.
fn wrong(frame: &[u8]) -> Vec<Vec<u8>> {
    let with = |at: usize, byte: u8| {
        let mut wrong = frame.to_vec();
        wrong[at] = byte;
        wrong
    };
    let bytes = frame.iter().enumerate().flat_map(|(at, byte)| {
        [
            0,
            0xff,
            byte ^ 1,
            byte ^ 2,
            byte ^ 4,
            byte ^ 0x80,
            byte.wrapping_add(1),
        ]
        .map(|byte| with(at, byte))
    });
    // Truncated copies of the frame itself. Without a whole header it would not be a frame.
    let cut = (8..frame.len()).map(|length| frame[..length].to_vec());
    bytes.chain(cut).collect()
}

#[test]
fn mutated_frames_pass_only_by_the_rules() {
    on_a_host(|| {
        let mut link = Link::new();
        let mac = link.mac();
        let (mut sent, mut passed) = (0, 0);
        for frame in every_kind(mac) {
            assert!(link.passes(&frame), "{frame:02x?}");
            for frames in wrong(&frame).chunks(32) {
                for (frame, passes) in frames.iter().zip(link.passing(frames)) {
                    let whole = [&[2; 6][..], frame].concat();
                    assert_eq!(
                        Some(passes),
                        may_be_sent(mac, &whole).or(Some(false)),
                        "{frame:02x?}"
                    );
                    sent += 1;
                    passed += u32::from(passes);
                }
            }
        }
        assert!(
            sent > 8000 && passed > 1000 && sent - passed > 1000,
            "{passed} of {sent}"
        );
    });
}

#[test]
fn most_addresses_load_and_one_more_is_refused() {
    let all = |count: u16| {
        let v4 = (0..count).map(|n| IpAddr::V4(Ipv4Addr::from_bits(n.into())));
        let v6 = (1..count).map(|n| IpAddr::V6(Ipv6Addr::from_bits(n.into())));
        Identity::new(OTHER_MAC, v4.chain(v6))
    };
    let most = MAX_POD_ADDRESSES as u16;
    assert_eq!(
        all(most + 1),
        Err(PodError::Addresses {
            count: MAX_POD_ADDRESSES + 1
        })
    );
    let identity = all(most).unwrap();
    on_a_host(|| drop(bpf::load(&program(&identity, 1)).unwrap()));
}

#[test]
fn pod_of_too_many_addresses_is_refused_unchanged() {
    use crate::testbed::within;
    use thaw_sys::{link, netlink::Socket, tc};
    on_a_host(|| {
        let pod = pod();
        within(&pod, || {
            let mut route = Socket::route().unwrap();
            let eth0 = link::index(&mut route, "eth0").unwrap();
            for n in 0..MAX_POD_ADDRESSES as u32 {
                let address = Ipv4Addr::from_bits(Ipv4Addr::new(10, 89, 0, 0).to_bits() + n);
                link::add_address(&mut route, eth0, address, 32).unwrap();
            }
        });
        let why = attach(&pod).unwrap_err();
        assert!(matches!(why, Error::Pod(PodError::Addresses { .. })), "{why}");
        within(&pod, || {
            let mut route = Socket::route().unwrap();
            assert!(tc::with_ingress(&mut route).unwrap().is_empty());
            link::index(&mut route, crate::POD_TAP).unwrap_err();
        });
    });
}
