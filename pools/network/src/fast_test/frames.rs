//! Frames on a link, and the parts of received frames that are compared.

use super::*;

pub(super) fn sum(bytes: &[u8], start: u32) -> u32 {
    let words = bytes
        .chunks(2)
        .map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)));
    words.fold(start, |sum, word| sum + word)
}

pub(super) fn folded(mut sum: u32) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// The host's view of a frame. `None` if the host drops it, because of its header or because it is not from the slot.
pub(super) fn taken(mut frame: Vec<u8>, slot: Ipv4Addr) -> Option<Vec<u8>> {
    let header = frame.get(ETHERNET..ETHERNET + HEADER)?;
    let length = usize::from(header[0] & 15) * 4;
    let total = usize::from(u16::from_be_bytes([header[2], header[3]]));
    let is_forged = header[12..16] != slot.octets();
    let whole = frame.get(ETHERNET..ETHERNET + length.max(HEADER))?;
    let is_right = folded(sum(whole, 0)) == 0 && total >= length && total <= frame.len() - ETHERNET;
    frame.truncate(ETHERNET + total);
    (is_right && !is_forged).then_some(frame)
}

/// Whether the frame may come from the namespace's kernel. Our packets have one fixed number, but the kernel draws the numbers of its ICMP
/// messages at random, and one in 65,536 equals ours.
pub(super) fn may_be_the_namespaces(frame: &[u8]) -> bool {
    is_icmp(frame) || frame.get(ETHERNET + 4..ETHERNET + 6) != Some(&NUMBER.to_be_bytes())
}

/// The frame without its random number, and with whether its header checksum is right in the checksum's place.
pub(super) fn without_number(frame: &mut [u8]) {
    let length = frame.get(ETHERNET).map_or(0, |first| usize::from(first & 15) * 4);
    let Some(header) = frame.get_mut(ETHERNET..ETHERNET + length.max(HEADER)) else {
        return;
    };
    let is_right = folded(sum(header, 0)) == 0;
    header[4..6].fill(0);
    header[10..12].copy_from_slice(&[0, is_right.into()]);
}

/// Whether it depends on the time: rate-limited errors of the namespace, and answers that contain the time.
pub(super) fn depends_on_time(frame: &[u8]) -> bool {
    const INTERNET_CONTROL: u8 = 0xc0;
    const TIMESTAMP_REPLY: u8 = 14;
    let is_error = frame.get(ETHERNET + 1) == Some(&INTERNET_CONTROL);
    is_icmp(frame) && (is_error || frame.get(ETHERNET + HEADER) == Some(&TIMESTAMP_REPLY))
}

pub(super) fn is_icmp(frame: &[u8]) -> bool {
    frame.get(ETHERNET + 9) == Some(&ICMP)
}

/// The frame as it is sent.
pub(super) fn frame(packet: &Packet, from: Ipv4Addr, to: Ipv4Addr, port: u16) -> Vec<u8> {
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

/// An IPv4 header without its checksum; each option is four zero bytes.
pub(super) fn header(
    protocol: u8,
    ttl: u8,
    body: usize,
    options: u8,
    from: Ipv4Addr,
    to: Ipv4Addr,
) -> Vec<u8> {
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

pub(super) fn body(packet: &Packet, from: Ipv4Addr, to: Ipv4Addr, port: u16) -> (u8, Vec<u8>) {
    let payload: Vec<u8> = (0..packet.payload as u8).map(|n| n ^ 0x5a).collect();
    // The guest's own port of a conversation is its number, and so is the peer's.
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
