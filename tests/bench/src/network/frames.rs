//! A guest as its tap sees it: whole frames, each behind a header of virtio-net.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;

use thaw_network::{GATEWAY_MAC, GUEST_ADDRESS, GUEST_MAC, NetworkSlot};

/// `virtio_net_hdr_v1`, of a frame that wants nothing.
const HEADER: usize = 12;
const ETHERNET: usize = 14;
const IP: usize = 20;
const UDP: usize = 8;
const UDP_PROTOCOL: u8 = 17;

/// The guest of a slot.
pub struct Guest {
    tap: OwnedFd,
    port: u16,
    buffer: Vec<u8>,
}

impl Guest {
    /// That of a slot, which speaks from one port.
    pub fn of(slot: &NetworkSlot, port: u16) -> io::Result<Guest> {
        Ok(Guest {
            tap: slot.tap.try_clone()?,
            port,
            buffer: vec![0; 2048],
        })
    }

    /// A datagram to somewhere, as a frame.
    pub fn datagram(&self, to: Ipv4Addr, port: u16, bytes: usize) -> Vec<u8> {
        let mut udp = Vec::with_capacity(UDP + bytes);
        udp.extend(self.port.to_be_bytes());
        udp.extend(port.to_be_bytes());
        udp.extend(((UDP + bytes) as u16).to_be_bytes());
        udp.extend([0, 0]);
        udp.resize(UDP + bytes, 1);
        let mut pseudo = [GUEST_ADDRESS.octets(), to.octets()].concat();
        pseudo.extend([0, UDP_PROTOCOL]);
        pseudo.extend(((UDP + bytes) as u16).to_be_bytes());
        let sum = sum(&[pseudo, udp.clone()].concat());
        udp[6..8].copy_from_slice(&sum.to_be_bytes());

        let mut ip = vec![0x45, 0];
        ip.extend(((IP + udp.len()) as u16).to_be_bytes());
        // Not to be cut; 64 hops.
        ip.extend([0, 0, 0x40, 0, 64, UDP_PROTOCOL, 0, 0]);
        ip.extend(GUEST_ADDRESS.octets());
        ip.extend(to.octets());
        let header = self::sum(&ip);
        ip[10..12].copy_from_slice(&header.to_be_bytes());

        let mut frame = vec![0; HEADER];
        frame.extend(GATEWAY_MAC);
        frame.extend(GUEST_MAC);
        frame.extend([8, 0]);
        frame.extend(ip);
        frame.extend(udp);
        frame
    }

    pub fn send(&self, frame: &[u8]) -> io::Result<()> {
        rustix::io::write(&self.tap, frame)?;
        Ok(())
    }

    /// Takes a frame, if there is one. Whether it was a datagram for this guest.
    pub fn receive(&mut self) -> Result<bool, String> {
        let length = match rustix::io::read(&self.tap, &mut self.buffer) {
            Ok(length) => length,
            Err(rustix::io::Errno::AGAIN) => return Ok(false),
            Err(e) => return Err(format!("read a frame: {e}")),
        };
        let frame = self.buffer.get(HEADER..length).unwrap_or_default();
        let protocol = frame.get(ETHERNET + 9);
        let to = frame.get(ETHERNET + 16..ETHERNET + IP);
        Ok(protocol == Some(&UDP_PROTOCOL) && to == Some(&GUEST_ADDRESS.octets()))
    }
}

/// The Internet checksum of what is there.
fn sum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|pair| {
        let low = pair.get(1).copied().unwrap_or(0);
        u32::from(u16::from_be_bytes([pair[0], low]))
    });
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_with_its_checksum_sums_to_nothing() {
        // RFC 1071's own example, and a header of everyday.
        assert_eq!(sum(&[0, 1, 0xf2, 3, 0xf4, 0xf5, 0xf6, 0xf7]), !0xddf2);
        let mut header = vec![0x45, 0, 0, 0x73, 0, 0, 0x40, 0, 0x40, 0x11, 0, 0];
        header.extend([192, 168, 0, 1, 192, 168, 0, 199]);
        let whole = sum(&header);
        assert_eq!(whole, 0xb861);
        header[10..12].copy_from_slice(&whole.to_be_bytes());
        assert_eq!(sum(&header), 0);
    }
}
