//! The rules of the filter once more, as its documentation states them, for the frames of tests.

use super::*;

/// Whether a frame, from its destination on, may be sent. `None` if it is truncated or of a kind that is never sent.
pub(super) fn may_be_sent(mac: [u8; 6], frame: &[u8]) -> Option<bool> {
    let (ethernet, packet) = frame.split_at_checked(14)?;
    if ethernet[6..12] != mac {
        return None;
    }
    match u16::from_be_bytes([ethernet[12], ethernet[13]]) {
        0x0806 => may_be_sent_arp(mac, packet),
        0x0800 => may_be_sent_ipv4(packet),
        0x86dd => may_be_sent_ipv6(mac, packet),
        _ => None,
    }
}

pub(super) fn may_be_sent_arp(mac: [u8; 6], packet: &[u8]) -> Option<bool> {
    let arp = packet.get(..28)?;
    let (sender, target) = (&arp[14..18], &arp[24..28]);
    let is_own = sender == POD4.octets();
    let is_probe = arp[7] == 1 && sender == [0; 4] && target == POD4.octets();
    let is_known = arp[..7] == [0, 1, 8, 0, 6, 4, 0] && [1, 2].contains(&arp[7]);
    Some(is_known && arp[8..14] == mac && (is_own || is_probe))
}

pub(super) fn may_be_sent_ports(udp: &[u8]) -> Option<bool> {
    let ports = udp.get(..4)?;
    let port = |at| u16::from_be_bytes([ports[at], ports[at + 1]]);
    Some(![67, 547].contains(&port(0)) && ![68, 546].contains(&port(2)))
}

pub(super) fn may_be_sent_ipv4(packet: &[u8]) -> Option<bool> {
    let header = packet.get(..20)?;
    let words = usize::from(header[0] & 15);
    if header[0] >> 4 != 4 || words < 5 || header[12..16] != POD4.octets() {
        return None;
    }
    let is_later = u16::from_be_bytes([header[6], header[7]]) & 0x1fff != 0;
    let upper = packet.get(words * 4..).unwrap_or_default();
    match header[9] {
        _ if is_later => Some(true),
        UDP => may_be_sent_ports(upper),
        ICMP => upper.first().map(|kind| ![5, 9].contains(kind)),
        IGMP => upper.first().map(|kind| *kind != 0x11),
        _ => Some(true),
    }
}

pub(super) fn may_be_sent_ipv6(mac: [u8; 6], packet: &[u8]) -> Option<bool> {
    let (header, upper) = packet.split_at_checked(40)?;
    let own = [POD6.octets(), link_local(mac).octets()];
    let is_own = |address: &[u8]| own.iter().any(|own| own == address);
    let (is_nobody, from) = (header[8..24] == [0; 16], is_own(&header[8..24]));
    if header[0] >> 4 != 6 || !(is_nobody || from) {
        return None;
    }
    let is_report = |kind: &u8| [131, 132, 143].contains(kind);
    let between = |next: u8| [43, 51, 60, 135, 139, 140, 253, 254].contains(&next);
    let harmless = |kind: &u8| [1, 2, 3, 4, 128, 129].contains(kind);
    match header[6] {
        ICMPV6 => match upper.first()? {
            kind if is_report(kind) => Some(true),
            135 if from => Some(true),
            135 => Some(is_own(upper.get(8..24)?)),
            136 if from => Some(is_own(upper.get(8..24)?)),
            133 => Some(from),
            kind => Some(from && harmless(kind)),
        },
        0 => Some(upper.get(..9)?[..2] == [ICMPV6, 0] && is_report(&upper[8])),
        _ if is_nobody => None,
        44 => {
            let (fragment, upper) = upper.split_at_checked(8)?;
            let is_later = u16::from_be_bytes([fragment[2], fragment[3]]) & 0xfff8 != 0;
            match fragment[0] {
                _ if is_later => Some(true),
                next if between(next) || next == 0 || next == 44 => None,
                UDP => may_be_sent_ports(upper),
                ICMPV6 => upper.first().map(harmless),
                _ => Some(true),
            }
        }
        UDP => may_be_sent_ports(upper),
        next => Some(!between(next)),
    }
}
