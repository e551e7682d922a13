//! The filter of the frames that a pod's guest sends: a BPF program that sees every frame of its tap and redirects or drops it.
//!
//! The guest is on an Ethernet that it shares with other pods, so it could answer for them, act as their router, or assign them addresses.
//! A frame is passed only if all of this holds:
//! - It has no VLAN tag, is ARP, IPv4 or IPv6, and is from the pod's MAC.
//! - ARP is a request or a reply, of Ethernet and IPv4, and its sender has the pod's MAC and an address of the pod. A probe, whose
//!   sender has no address yet, asks for an address of the pod.
//! - IPv4 is from an address of the pod. It is no ICMP redirect or router advertisement, and no IGMP query.
//! - IPv6 is from an address of the pod, which include the link-local one of its MAC. From the unspecified address only reports of
//!   multicast listeners pass, and solicitations of an address of the pod, which look for duplicates.
//! - ICMPv6 is an error, an echo, a report of multicast listeners, or neighbour discovery: a router or neighbour solicitation, or the
//!   advertisement of an address of the pod. So no guest is a router, redirects, or queries listeners.
//! - UDP is neither from a DHCP server's port nor to a client's, of either family.
//!
//! Invariants: between IPv6 and the checked header there is at most a fragment header, or hop-by-hop options of 8 bytes before reports of
//! listeners. Frames with other extension headers are dropped, and frames that end within a checked header. Of a fragmented packet the
//! first fragment is checked; fragmented neighbour discovery is dropped. Later fragments of a packet whose first was dropped have no
//! effect.
//!
//! The program sees what the guest wrote. A checksum that the guest left unfinished is written when the frame leaves the host, at the place
//! that the header before the frame names; no program sees that header.

use std::net::{IpAddr, Ipv6Addr};

use crate::MAX_POD_ADDRESSES;
use crate::error::PodError;
use Register::{R0, R1, R2, R3, R4, R6, R7, R8, R9, R10};
use thaw_sys::bpf::assembler::{Assembler, Helper, Operation, Register, Size, When};

/// The addresses that a guest may send from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    mac: [u8; 6],
    v4: Vec<[u8; 4]>,
    v6: Vec<[u8; 16]>,
}

impl Identity {
    /// # Errors
    /// If there are more addresses than a program can compare.
    pub fn new(mac: [u8; 6], addresses: impl IntoIterator<Item = IpAddr>) -> Result<Identity, PodError> {
        let mut identity = Identity {
            mac,
            v4: Vec::new(),
            v6: vec![link_local(mac).octets()],
        };
        for address in addresses {
            match address {
                IpAddr::V4(v4) => identity.v4.push(v4.octets()),
                IpAddr::V6(v6) => identity.v6.push(v6.octets()),
            }
        }
        let most = identity.v4.len().max(identity.v6.len());
        match most > MAX_POD_ADDRESSES {
            true => Err(PodError::Addresses { count: most }),
            false => Ok(identity),
        }
    }
}

/// The link-local address of a MAC (RFC 4291, appendix A).
fn link_local(mac: [u8; 6]) -> Ipv6Addr {
    let [a, b, c, d, e, f] = mac;
    Ipv6Addr::from([0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f])
}

/// `vlan_present` of `struct __sk_buff`: the kernel has removed a tag.
const VLAN_PRESENT: i16 = 20;
/// The place on the stack for a copy of the checked bytes, and its size.
const COPY: i16 = -48;
// Bytes of headers, and offsets after them.
const ETHERNET: u32 = 14;
const ARP: u32 = 28;
const IPV4: u32 = 20;
const IPV6: u32 = 40;
const EXTENSION: u32 = 8;
const AFTER_IPV6: u32 = ETHERNET + IPV6;
const AFTER_EXTENSION: u32 = AFTER_IPV6 + EXTENSION;
/// The target of a neighbour solicitation or advertisement.
const TARGET: u32 = AFTER_IPV6 + 8;

const REQUEST: u32 = 1;
const REPLY: u32 = 2;
const UDP: u32 = 17;
const ICMP: u32 = 1;
const IGMP: u32 = 2;
const ICMPV6: u32 = 58;
/// ICMP messages that only routers send: redirects, and advertisements (RFC 1256).
const ROUTERS_ICMP: [u32; 2] = [5, 9];
/// A sender of queries becomes its network's querier (RFC 3376).
const IGMP_QUERY: u32 = 0x11;
const HOP_BY_HOP: u32 = 0;
const FRAGMENT: u32 = 44;
/// Routing, authentication, destination, mobility, HIP, Shim6, experiments.
const EXTENSIONS: [u32; 8] = [43, 51, 60, 135, 139, 140, 253, 254];
/// Unreachable, too big, time exceeded, parameter problem, and echoes.
const MESSAGES: [u32; 6] = [1, 2, 3, 4, 128, 129];
/// A listener's report, that it is done, and a report of version 2.
const REPORTS: [u32; 3] = [131, 132, 143];
const ROUTER_SOLICITATION: u32 = 133;
const SOLICITATION: u32 = 135;
const ADVERTISEMENT: u32 = 136;
/// A server's and a client's, of either family.
const DHCP_SOURCES: [u16; 2] = [67, 547];
const DHCP_DESTINATIONS: [u16; 2] = [68, 546];
/// `TC_ACT_SHOT`.
const DROP: u32 = 2;

/// The program for frames that arrive at a tap: it redirects those that may be sent to the interface with index `to`.
pub(super) fn program(identity: &Identity, to: u32) -> Vec<u64> {
    let mut a = Assembler::default();
    a.copy(R6, R1);
    a.load(Size::Four, R1, R6, VLAN_PRESENT);
    a.jump_when(R1, When::NotEqual, 0, "drop");
    fetch(&mut a, 0, ETHERNET);
    same(&mut a, 6, &identity.mac, "drop");
    a.load(Size::Two, R1, R10, COPY + 12);
    a.jump_when(R1, When::Equal, wire(libc::ETH_P_IP as u16), "ipv4");
    a.jump_when(R1, When::Equal, wire(libc::ETH_P_IPV6 as u16), "ipv6");
    a.jump_when(R1, When::NotEqual, wire(libc::ETH_P_ARP as u16), "drop");
    arp(&mut a, identity);
    ipv4(&mut a, identity);
    ipv6(&mut a, identity);
    icmpv6(&mut a, identity);
    fragment(&mut a);
    ports(&mut a);

    a.label("send");
    a.set(R1, to);
    a.set(R2, 0);
    a.call(Helper::Redirect);
    a.end();
    a.label("drop");
    a.set(R0, DROP);
    a.end();
    a.finish()
}

fn arp(a: &mut Assembler, identity: &Identity) {
    fetch(a, ETHERNET, ARP);
    same(a, 0, &[0, 1, 8, 0, 6, 4], "drop");
    same(a, 8, &identity.mac, "drop");
    a.load(Size::Two, R1, R10, COPY + 6);
    a.jump_when(R1, When::Equal, wire(REPLY as u16), "sender");
    a.jump_when(R1, When::NotEqual, wire(REQUEST as u16), "drop");
    same(a, 14, &[0; 4], "sender");
    one_of(a, 24, &identity.v4, "send");
    a.jump("drop");
    a.label("sender");
    one_of(a, 14, &identity.v4, "send");
    a.jump("drop");
}

fn ipv4(a: &mut Assembler, identity: &Identity) {
    a.label("ipv4");
    fetch(a, ETHERNET, IPV4);
    a.load(Size::One, R7, R10, COPY);
    version(a, 0x40);
    one_of(a, 12, &identity.v4, "own ipv4");
    a.jump("drop");
    a.label("own ipv4");
    // Length of the header in words; at least five.
    a.operate(Operation::And, R7, 0x0f);
    a.jump_when(R7, When::AtMost, 4, "drop");
    a.add(R7, R7);
    a.add(R7, R7);
    a.operate(Operation::Add, R7, ETHERNET as i32);
    a.load(Size::One, R8, R10, COPY + 9);
    a.load(Size::Two, R1, R10, COPY + 6);
    // Not the first fragment.
    a.jump_when(R1, When::Any, wire(0x1fff), "send");
    a.copy(R2, R7);
    a.jump_when(R8, When::Equal, UDP, "ports");
    for (protocol, barred, within) in [(ICMP, &ROUTERS_ICMP[..], "icmp"), (IGMP, &[IGMP_QUERY], "igmp")] {
        a.jump_when(R8, When::NotEqual, protocol, within);
        a.copy(R2, R7);
        fetch_there(a, 1);
        a.load(Size::One, R1, R10, COPY);
        any_of(a, R1, barred, "drop");
        a.jump("send");
        a.label(within);
    }
    a.jump("send");
}

/// `R9`: the packet is from the unspecified address. `R8`: its content.
fn ipv6(a: &mut Assembler, identity: &Identity) {
    a.label("ipv6");
    fetch(a, ETHERNET, IPV6);
    a.load(Size::One, R7, R10, COPY);
    version(a, 0x60);
    a.load(Size::One, R8, R10, COPY + 6);
    a.set(R9, 1);
    same(a, 8, &[0; 16], "from somebody");
    a.jump("within");
    a.label("from somebody");
    a.set(R9, 0);
    one_of(a, 8, &identity.v6, "within");
    a.jump("drop");

    a.label("within");
    a.jump_when(R8, When::Equal, ICMPV6, "icmpv6");
    a.jump_when(R8, When::Equal, HOP_BY_HOP, "hop by hop");
    a.jump_when(R9, When::NotEqual, 0, "drop");
    a.jump_when(R8, When::Equal, FRAGMENT, "fragment");
    a.label("upper");
    a.set(R2, AFTER_IPV6);
    a.jump_when(R8, When::Equal, UDP, "ports");
    any_of(a, R8, &EXTENSIONS, "drop");
    a.jump("send");

    a.label("hop by hop");
    fetch(a, AFTER_IPV6, EXTENSION + 1);
    same(a, 0, &[ICMPV6 as u8, 0], "drop");
    a.load(Size::One, R1, R10, COPY + EXTENSION as i16);
    any_of(a, R1, &REPORTS, "send");
    a.jump("drop");
}

fn icmpv6(a: &mut Assembler, identity: &Identity) {
    a.label("icmpv6");
    fetch(a, AFTER_IPV6, 1);
    a.load(Size::One, R8, R10, COPY);
    any_of(a, R8, &REPORTS, "send");
    a.jump_when(R8, When::Equal, SOLICITATION, "solicitation");
    a.jump_when(R9, When::NotEqual, 0, "drop");
    a.jump_when(R8, When::Equal, ADVERTISEMENT, "own target");
    a.jump_when(R8, When::Equal, ROUTER_SOLICITATION, "send");
    any_of(a, R8, &MESSAGES, "send");
    a.jump("drop");
    a.label("solicitation");
    a.jump_when(R9, When::Equal, 0, "send");
    a.label("own target");
    fetch(a, TARGET, 16);
    one_of(a, 0, &identity.v6, "send");
    a.jump("drop");
}

fn fragment(a: &mut Assembler) {
    a.label("fragment");
    fetch(a, AFTER_IPV6, EXTENSION);
    a.load(Size::One, R8, R10, COPY);
    a.load(Size::Two, R1, R10, COPY + 2);
    // Not the first.
    a.jump_when(R1, When::Any, wire(0xfff8), "send");
    any_of(a, R8, &EXTENSIONS, "drop");
    any_of(a, R8, &[HOP_BY_HOP, FRAGMENT], "drop");
    a.set(R2, AFTER_EXTENSION);
    a.jump_when(R8, When::Equal, UDP, "ports");
    a.jump_when(R8, When::NotEqual, ICMPV6, "send");
    fetch(a, AFTER_EXTENSION, 1);
    a.load(Size::One, R1, R10, COPY);
    any_of(a, R1, &MESSAGES, "send");
    a.jump("drop");
}

/// Checks the ports of UDP, whose header begins at `R2`.
fn ports(a: &mut Assembler) {
    a.label("ports");
    fetch_there(a, 4);
    for (at, barred) in [(0, DHCP_SOURCES), (2, DHCP_DESTINATIONS)] {
        a.load(Size::Two, R1, R10, COPY + at);
        any_of(a, R1, &barred.map(wire), "drop");
    }
}

/// A number in network byte order, as a load of two bytes reads it.
fn wire(number: u16) -> u32 {
    number.to_be().into()
}

/// Copies bytes of the frame, which may be anywhere in the kernel's buffers; drops a frame that has fewer.
fn fetch(a: &mut Assembler, at: u32, bytes: u32) {
    a.set(R2, at);
    fetch_there(a, bytes);
}

/// The same, at the offset in `R2`.
fn fetch_there(a: &mut Assembler, bytes: u32) {
    debug_assert!(bytes <= COPY.unsigned_abs().into());
    a.copy(R1, R6);
    a.copy(R3, R10);
    a.operate(Operation::Add, R3, COPY.into());
    a.set(R4, bytes);
    a.call(Helper::LoadBytes);
    a.jump_when(R0, When::NotEqual, 0, "drop");
}

/// Compares an even number of bytes, two at a time: the kernel wants loads from the stack aligned.
fn same(a: &mut Assembler, at: i16, bytes: &[u8], otherwise: &'static str) {
    for (n, pair) in bytes.chunks_exact(2).enumerate() {
        a.load(Size::Two, R1, R10, COPY + at + 2 * n as i16);
        let number = u16::from_ne_bytes([pair[0], pair[1]]);
        a.jump_when(R1, When::NotEqual, number.into(), otherwise);
    }
}

fn one_of<const N: usize>(a: &mut Assembler, at: i16, addresses: &[[u8; N]], then: &'static str) {
    for address in addresses {
        same(a, at, address, "next");
        a.jump(then);
        a.label("next");
    }
}

fn any_of(a: &mut Assembler, register: Register, numbers: &[u32], then: &'static str) {
    for number in numbers {
        a.jump_when(register, When::Equal, *number, then);
    }
}

/// Checks the version in a header's first byte, which is in `R7`.
fn version(a: &mut Assembler, version: u32) {
    a.copy(R1, R7);
    a.operate(Operation::And, R1, 0xf0);
    a.jump_when(R1, When::NotEqual, version, "drop");
}

#[cfg(test)]
#[path = "filter_test.rs"]
mod tests;
