//! Random sequences of packets, each of one connection.

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use super::*;

/// Where a packet is put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Sent by the guest.
    Out,
    /// Sent by the host to the guest.
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

/// An address, some of which depend on the slot.
#[derive(Clone, Copy, Debug)]
pub(super) enum Who {
    Guest,
    Slot,
    HostEnd,
    Gateway,
    At(Ipv4Addr),
}

/// The properties of a packet besides its source and destination.
#[derive(Clone, Copy, Debug)]
pub(super) struct Oddity {
    pub(super) mac: bool,
    pub(super) vlan: bool,
    pub(super) ttl: u8,
    pub(super) fragment: u16,
    pub(super) options: u8,
    pub(super) header_sum: bool,
    /// The number of bytes by which the length in its header is wrong.
    pub(super) length: i8,
}

pub(super) const PLAIN: Oddity = Oddity {
    mac: false,
    vlan: false,
    ttl: 64,
    fragment: 0,
    options: 0,
    header_sum: false,
    length: 0,
};

/// The content after the IPv4 header.
#[derive(Clone, Copy, Debug)]
pub(super) enum Body {
    Tcp {
        flags: u8,
        seq: u32,
        ack: u32,
    },
    /// `sum`: 0 is absent, 1 is right, 2 is wrong.
    Udp {
        sum: u8,
    },
    Echo {
        reply: bool,
    },
    /// About a packet in the other direction.
    Error {
        kind: u8,
        about: u8,
    },
    Other {
        protocol: u8,
    },
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Packet {
    pub(super) way: Way,
    pub(super) body: Body,
    pub(super) odd: Oddity,
    pub(super) payload: usize,
    /// Its checksum is wrong.
    pub(super) broken: bool,
}

/// Packets of one connection. No two sequences use the same connection.
#[derive(Clone, Debug)]
pub(super) struct Sequence {
    /// The guest's peer.
    pub(super) peer: Who,
    /// The guest's own address, as it states it or as its peer assumes it.
    pub(super) own: Who,
    pub(super) port: u16,
    pub(super) packets: Vec<Packet>,
    /// Connection tracking understands each packet.
    pub(super) is_sound: bool,
}

pub(super) fn peers() -> impl Strategy<Value = Who> {
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

pub(super) fn packet(way: Way, body: Body) -> Packet {
    Packet {
        way,
        body,
        odd: PLAIN,
        payload: 9,
        broken: false,
    }
}

/// A first packet, the other side's answer, and one more packet.
pub(super) fn conversation() -> impl Strategy<Value = (Vec<Packet>, bool)> {
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
        // A packet that was answered by an error has no successors.
        packets.truncate(if answer > 1 { length.min(1) + 1 } else { length + 1 });
        // Segments without data stay within the other side's window.
        let carries = !matches!(begin, Body::Tcp { .. });
        packets
            .iter_mut()
            .for_each(|packet| packet.payload = if carries { payload } else { 0 });
        (packets, true)
    })
}

/// One packet with something unusual about it.
pub(super) fn single() -> impl Strategy<Value = (Vec<Packet>, bool)> {
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
                // The host sends no wrong checksum.
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

/// Whether connection tracking accepts it as the first packet of a connection.
pub(super) fn is_sound(packet: &Packet) -> bool {
    let begins = match packet.body {
        Body::Tcp { flags, .. } => matches!(flags & 0x3f, SYN | ACK | 0x18),
        Body::Udp { sum } => sum < 2,
        Body::Echo { reply } => !reply,
        Body::Error { .. } => false,
        // Connection tracking inspects these protocols and requires a header.
        Body::Other { protocol } => ![1, 6, 17, 33, 47, 58, 132, 136].contains(&protocol),
    };
    begins && !packet.broken && packet.odd.length == 0
}

/// Whether the guest sends it to the host without beginning a connection.
pub(super) fn is_for_the_host_to_decide(packet: &Packet) -> bool {
    let begins = matches!(packet.body, Body::Tcp { flags, .. } if flags & (SYN | ACK) == SYN);
    packet.way == Way::Out && matches!(packet.body, Body::Tcp { .. }) && !begins
}

/// Whether it is an ICMP error about TCP from the guest.
pub(super) fn is_error_about_tcp(packet: &Packet) -> bool {
    packet.way == Way::Out && matches!(packet.body, Body::Error { about: TCP, .. })
}

pub(super) fn sequences(number: usize) -> Vec<Sequence> {
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
            // A conversation has two directions, and one party cannot be forged in both.
            own: own.filter(|_| packets.len() == 1).unwrap_or(usual),
            port: 1024u16.wrapping_add(number as u16),
            packets,
            is_sound,
        }
    };
    (0..number).map(sequence).collect()
}
