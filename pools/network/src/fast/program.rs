//! The two BPF programs of all slots: one for packets that a guest sends, one for packets sent to it.
//!
//! The filter that runs a program passes the number of the frame's slot, whose [`Wiring`] is in the table of slots. So a node has two
//! programs to verify and to free, not two for each sandbox.
//!
//! They do what the slot's namespace would do: on the way out the guest's address becomes the slot's, on the way in the slot's becomes
//! the guest's; one hop is counted; the frame gets the MAC addresses of the next interface. The translation is the same for every
//! connection, so there is no state.
//!
//! Invariant: a packet is redirected only if the namespace's rules ([`crate::slot`]) would accept it regardless of earlier packets. Every
//! other packet is passed on to them unchanged: it is not IPv4, has options, is a fragment, has no hop left, is from a wrong address, is to
//! or from an address for which the rules depend on the connection, or is neither TCP, UDP nor ICMP.

use std::net::Ipv4Addr;

use crate::{GATEWAY_MAC, GUEST_ADDRESS, GUEST_MAC, HOST_ADDRESS, HOST_MAC, PREFIX, TAP_INDEX, UPLINK_MAC};
use Register::{R0, R1, R2, R3, R4, R5, R6, R7, R8, R9, R10};
use thaw_sys::bpf::Table;
use thaw_sys::bpf::assembler::{Assembler, Helper, Operation, Register, Size, When};
use thaw_sys::prefix::Prefix;

/// A slot's entry in the table: words of 32 bits, which the programs read at the offsets below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Wiring {
    /// The slot's address and that of the host's end, in network byte order.
    slot: u32,
    host: u32,
    /// The index of the uplink in its namespace.
    uplink: u32,
    /// The difference to add to a header's checksum when the guest's address becomes the slot's, and the reverse.
    outward: u32,
    inward: u32,
}

const SLOT: i16 = 0;
const HOST: i16 = 4;
const UPLINK: i16 = 8;
const OUTWARD: i16 = 12;
const INWARD: i16 = 16;

impl Wiring {
    pub fn new(slot: Ipv4Addr, host: Ipv4Addr, uplink: u32) -> Wiring {
        Wiring {
            slot: raw(slot),
            host: raw(host),
            uplink,
            outward: difference(GUEST_ADDRESS, slot),
            inward: difference(slot, GUEST_ADDRESS),
        }
    }
}

/// The direction of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Out,
    In,
}

// `struct __sk_buff`.
const PROTOCOL: i16 = 16;
const VLAN_PRESENT: i16 = 20;
const CLASS: i16 = 72;
const DATA: i16 = 76;
const DATA_END: i16 = 80;
// Offsets in a frame.
const IP: i16 = 14;
const VERSION: i16 = IP;
const FRAGMENT: i16 = IP + 6;
const TTL: i16 = IP + 8;
const IP_PROTOCOL: i16 = IP + 9;
const IP_CHECKSUM: i16 = 10;
const SOURCE: i16 = 12;
const DESTINATION: i16 = 16;
const TRANSPORT: i16 = IP + 20;
const TCP_FLAGS: i16 = TRANSPORT + 13;
const TCP_CHECKSUM: i16 = TRANSPORT + 16;
const UDP_CHECKSUM: i16 = TRANSPORT + 6;
/// The header that an ICMP error is about.
const INNER: i16 = TRANSPORT + 8;
/// Least bytes of a frame: up to the end of the shortest transport header, of TCP's, of an inner header.
const SHORTEST: i32 = TRANSPORT as i32 + 8;
const WITH_TCP: i32 = TRANSPORT as i32 + 20;
const WITH_INNER: i32 = INNER as i32 + 20;

const IPV4: u32 = (libc::ETH_P_IP as u16).to_be() as u32;
/// Version 4, a header of five words: no options.
const PLAIN: u32 = 0x45;
/// More fragments, or not the first.
const IS_FRAGMENT: u32 = 0x3fffu16.to_be() as u32;
const ICMP: u32 = 1;
const TCP: u32 = 6;
const UDP: u32 = 17;
const SYN: u32 = 0x02;
const SYN_OR_ACK: i32 = 0x12;
const ECHOES: [u32; 2] = [0, 8];
/// Unreachable, time exceeded, parameter problem.
const ERRORS: [u32; 3] = [3, 11, 12];
/// `BPF_F_PSEUDO_HDR`, of four bytes; with `BPF_F_MARK_MANGLED_0`: 0 means no checksum.
const TCP_SUM: u32 = 0x14;
const UDP_SUM: u32 = 0x34;
/// The place on the stack for the address of the slot's [`Wiring`].
const WIRING: i16 = -16;
/// `TC_ACT_OK`: continue as without this program; `TC_ACT_SHOT`: drop.
const PASS: u32 = 0;
const DROP: u32 = 2;

/// The program for frames that arrive at a tap. `barred`: networks for which the namespace must decide.
pub(super) fn outward(slots: &Table<Wiring>, barred: &[Prefix]) -> Vec<u64> {
    write(slots, barred, Way::Out)
}

/// The program for frames that arrive at an uplink.
pub(super) fn inward(slots: &Table<Wiring>, barred: &[Prefix]) -> Vec<u64> {
    write(slots, barred, Way::In)
}

fn raw(address: Ipv4Addr) -> u32 {
    u32::from_ne_bytes(address.octets())
}

fn halves(address: Ipv4Addr) -> [u32; 2] {
    let [a, b, c, d] = address.octets();
    [u16::from_ne_bytes([a, b]), u16::from_ne_bytes([c, d])].map(u32::from)
}

/// The difference to add to a header's checksum, before it is complemented, when one address replaces another (RFC 1624, 3).
fn difference(old: Ipv4Addr, new: Ipv4Addr) -> u32 {
    let old: u32 = halves(old).iter().map(|half| 0xffff - half).sum();
    old + halves(new).iter().sum::<u32>()
}

/// The same for one hop less.
const HOP: u32 = 0xffff - u16::from_ne_bytes([1, 0]) as u32;

/// Loads a word of the slot's wiring.
fn load_wiring(a: &mut Assembler, to: Register, offset: i16) {
    a.load(Size::Eight, to, R10, WIRING);
    a.load(Size::Four, to, to, offset);
}

/// Loads the address that is translated and its replacement.
fn load_addresses(a: &mut Assembler, way: Way, old: Register, new: Register) {
    let (slots, guests) = match way {
        Way::Out => (new, old),
        Way::In => (old, new),
    };
    a.set(guests, raw(GUEST_ADDRESS));
    load_wiring(a, slots, SLOT);
}

/// Offsets in a frame and in a slot's wiring, which depend on the direction.
struct Offsets {
    /// The address that is translated.
    own: i16,
    /// The address of the other side.
    other: i16,
    /// The address that is translated in the header that an ICMP error is about.
    inner: i16,
    /// Field of the wiring with the difference that the translation adds to a header's checksum.
    difference: i16,
}

impl Way {
    fn offsets(self) -> Offsets {
        match self {
            Way::Out => Offsets {
                own: IP + SOURCE,
                other: IP + DESTINATION,
                inner: INNER + DESTINATION,
                difference: OUTWARD,
            },
            Way::In => Offsets {
                own: IP + DESTINATION,
                other: IP + SOURCE,
                inner: INNER + SOURCE,
                difference: INWARD,
            },
        }
    }
}

fn write(slots: &Table<Wiring>, barred: &[Prefix], way: Way) -> Vec<u64> {
    let mut a = Assembler::default();
    find_slot(&mut a, slots);
    check_frame(&mut a, way);
    check_own_address(&mut a, way);
    check_peer(&mut a, barred, way);
    check_protocol(&mut a, way);
    check_host_connection(&mut a, way);
    translate_transport_checksum(&mut a, way);
    translate_inner_header(&mut a, way);
    translate_header(&mut a, way);
    redirect(&mut a, way);
    a.label("drop");
    a.set(R0, DROP);
    a.end();
    a.label("pass");
    a.set(R0, PASS);
    a.end();
    a.finish()
}

/// Keeps the program's context in `R6` and the address of the slot's wiring on the stack.
fn find_slot(a: &mut Assembler, slots: &Table<Wiring>) {
    a.copy(R6, R1);
    a.load(Size::Four, R1, R6, CLASS);
    a.look_up(slots.number(), R1);
    a.jump_when_null(R0, "pass");
    a.store(Size::Eight, R10, WIRING, R0);
}

/// Passes frames that are not plain IPv4 packets for this end, or have no hop left.
fn check_frame(a: &mut Assembler, way: Way) {
    let [b0, b1, b2, b3, b4, b5] = match way {
        Way::Out => GATEWAY_MAC,
        Way::In => UPLINK_MAC,
    };
    a.load(Size::Four, R1, R6, PROTOCOL);
    a.jump_when(R1, When::NotEqual, IPV4, "pass");
    a.load(Size::Four, R1, R6, VLAN_PRESENT);
    a.jump_when(R1, When::NotEqual, 0, "pass");
    bounds(a, SHORTEST, "pass");
    a.load(Size::Four, R1, R7, 0);
    a.jump_when(R1, When::NotEqual, u32::from_ne_bytes([b0, b1, b2, b3]), "pass");
    a.load(Size::Two, R1, R7, 4);
    a.jump_when(R1, When::NotEqual, u16::from_ne_bytes([b4, b5]).into(), "pass");
    a.load(Size::One, R1, R7, VERSION);
    a.jump_when(R1, When::NotEqual, PLAIN, "pass");
    a.load(Size::Two, R1, R7, FRAGMENT);
    a.jump_when(R1, When::Any, IS_FRAGMENT, "pass");
    a.load(Size::One, R1, R7, TTL);
    a.jump_when(R1, When::AtMost, 1, "pass");
}

/// Passes packets from or for another address than the translated one. Keeps the protocol in `R9`.
fn check_own_address(a: &mut Assembler, way: Way) {
    a.load(Size::Four, R1, R7, way.offsets().own);
    load_addresses(a, way, R2, R3);
    a.jump_when_register(R1, When::NotEqual, R2, "pass");
    a.load(Size::One, R9, R7, IP_PROTOCOL);
}

/// Passes packets to or from addresses for which the rules depend on the connection or admit nothing.
fn check_peer(a: &mut Assembler, barred: &[Prefix], way: Way) {
    if way == Way::In {
        // An ICMP error may come from any address: the packet it contains shows that it is for the guest.
        a.jump_when(R9, When::NotEqual, ICMP, "no error");
        a.load(Size::One, R1, R7, TRANSPORT);
        for kind in ERRORS {
            a.jump_when(R1, When::Equal, kind, "error");
        }
        a.label("no error");
    }
    a.load(Size::Four, R2, R7, way.offsets().other);
    load_wiring(a, R1, HOST);
    a.jump_when_register(R2, When::Equal, R1, "host");
    a.host_order(R2);
    let guests = Prefix::around(HOST_ADDRESS, PREFIX);
    for prefix in barred.iter().copied().chain(guests) {
        a.copy(R1, R2);
        a.operate(Operation::And, R1, prefix.mask().to_bits() as i32);
        a.jump_when(R1, When::Equal, prefix.first().to_bits(), "pass");
    }
}

/// Continues with the checks of each protocol.
fn check_protocol(a: &mut Assembler, way: Way) {
    a.jump_when(R9, When::Equal, TCP, "tcp");
    a.jump_when(R9, When::Equal, UDP, "udp");
    a.jump_when(R9, When::NotEqual, ICMP, "pass");
    a.load(Size::One, R1, R7, TRANSPORT);
    for kind in ECHOES {
        a.jump_when(R1, When::Equal, kind, "header");
    }
    if way == Way::Out {
        for kind in ERRORS {
            a.jump_when(R1, When::Equal, kind, "error");
        }
    }
    a.jump("pass");
}

/// Only the host begins connections between the two, so a guest's SYN is passed to the rules. The host's rules deny a guest's answers
/// without a connection.
fn check_host_connection(a: &mut Assembler, way: Way) {
    a.label("host");
    a.jump_when(R9, When::NotEqual, TCP, "pass");
    if way == Way::Out {
        bounds(a, WITH_TCP, "pass");
        a.load(Size::One, R1, R7, TCP_FLAGS);
        a.operate(Operation::And, R1, SYN_OR_ACK);
        a.jump_when(R1, When::Equal, SYN, "pass");
    }
}

/// Updates the checksum of TCP or UDP, which covers the address.
fn translate_transport_checksum(a: &mut Assembler, way: Way) {
    a.label("tcp");
    bounds(a, WITH_TCP, "pass");
    a.set(R2, TCP_CHECKSUM as u32);
    a.set(R5, TCP_SUM);
    a.jump("checksum");
    a.label("udp");
    a.set(R2, UDP_CHECKSUM as u32);
    a.set(R5, UDP_SUM);
    a.label("checksum");
    a.copy(R1, R6);
    load_addresses(a, way, R3, R4);
    a.call(Helper::L4ChecksumReplace);
    a.jump_when(R0, When::NotEqual, 0, "pass");
    // The call may have moved the packet, whose length is unchanged.
    bounds(a, SHORTEST, "drop");
    a.jump("header");
}

/// Translates the header inside an ICMP error. Its addresses are reversed. The checksum of that header stays the same, and so does that of
/// the whole.
fn translate_inner_header(a: &mut Assembler, way: Way) {
    let Offsets {
        inner, difference, ..
    } = way.offsets();
    a.label("error");
    bounds(a, WITH_INNER, "pass");
    a.load(Size::One, R1, R7, INNER);
    a.jump_when(R1, When::NotEqual, PLAIN, "pass");
    a.load(Size::Four, R1, R7, inner);
    load_addresses(a, way, R2, R3);
    a.jump_when_register(R1, When::NotEqual, R2, "pass");
    a.store(Size::Four, R7, inner, R3);
    load_wiring(a, R4, difference);
    adjust(a, INNER + IP_CHECKSUM, R4);
}

/// Writes the MAC addresses of the next interface, counts a hop and translates the address.
fn translate_header(a: &mut Assembler, way: Way) {
    let Offsets { own, difference, .. } = way.offsets();
    a.label("header");
    let (to, from) = match way {
        Way::Out => (HOST_MAC, UPLINK_MAC),
        Way::In => (GUEST_MAC, GATEWAY_MAC),
    };
    for (n, pair) in to
        .into_iter()
        .chain(from)
        .collect::<Vec<u8>>()
        .chunks_exact(2)
        .enumerate()
    {
        let number = u16::from_ne_bytes([pair[0], pair[1]]);
        a.store_number(Size::Two, R7, 2 * n as i16, number.into());
    }
    a.load(Size::One, R1, R7, TTL);
    a.operate(Operation::Add, R1, -1);
    a.store(Size::One, R7, TTL, R1);
    load_addresses(a, way, R2, R3);
    a.store(Size::Four, R7, own, R3);
    load_wiring(a, R4, difference);
    a.operate(Operation::Add, R4, HOP as i32);
    adjust(a, IP + IP_CHECKSUM, R4);
}

fn redirect(a: &mut Assembler, way: Way) {
    a.set(R2, 0);
    match way {
        Way::Out => {
            load_wiring(a, R1, UPLINK);
            a.call(Helper::RedirectPeer);
        }
        Way::In => {
            a.set(R1, TAP_INDEX);
            a.call(Helper::Redirect);
        }
    }
    a.end();
}

/// Loads the frame's start and end into `R7` and `R8`, and jumps if it has fewer bytes.
fn bounds(a: &mut Assembler, bytes: i32, otherwise: &'static str) {
    a.load(Size::Four, R7, R6, DATA);
    a.load(Size::Four, R8, R6, DATA_END);
    a.copy(R1, R7);
    a.operate(Operation::Add, R1, bytes);
    a.jump_when_above(R1, R8, otherwise);
}

/// Adds a difference, in a register other than `R2` and `R3`, to the checksum at an offset.
fn adjust(a: &mut Assembler, at: i16, difference: Register) {
    a.load(Size::Two, R2, R7, at);
    a.operate(Operation::Xor, R2, 0xffff);
    a.add(R2, difference);
    for _ in 0..2 {
        a.copy(R3, R2);
        a.operate(Operation::ShiftRight, R3, 16);
        a.operate(Operation::And, R2, 0xffff);
        a.add(R2, R3);
    }
    a.operate(Operation::Xor, R2, 0xffff);
    a.store(Size::Two, R7, at, R2);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(header: &[u8]) -> u16 {
        let mut sum: u32 = header
            .chunks(2)
            .map(|pair| u32::from(u16::from_ne_bytes([pair[0], pair[1]])))
            .sum();
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        sum as u16
    }

    proptest::proptest! {
        /// The arithmetic of [`adjust`], for any header whose address changes and that loses a hop.
        #[test]
        fn adjusted_header_checksum_stays_right(mut header: [u8; 20], old: u32, new: u32) {
            let (old, new) = (Ipv4Addr::from_bits(old), Ipv4Addr::from_bits(new));
            header[8] = header[8].max(2);
            header[12..16].copy_from_slice(&old.octets());
            header[10..12].copy_from_slice(&[0, 0]);
            let whole = !sum(&header);
            header[10..12].copy_from_slice(&whole.to_ne_bytes());
            header[8] -= 1;
            header[12..16].copy_from_slice(&new.octets());
            let mut adjusted = u32::from(whole ^ 0xffff) + difference(old, new) + HOP;
            for _ in 0..2 {
                adjusted = (adjusted & 0xffff) + (adjusted >> 16);
            }
            header[10..12].copy_from_slice(&((adjusted ^ 0xffff) as u16).to_ne_bytes());
            proptest::prop_assert_eq!(sum(&header), 0xffff);
        }
    }
}
