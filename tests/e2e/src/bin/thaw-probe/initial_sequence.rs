//! TCP initial sequence numbers, read off the wire.
//!
//! The kernel makes one from a secret and the connection's addresses, and adds the time in units of 64 ns (RFC 6528,
//! net/core/secure_seq.c). So two guests with one secret have the same differences between the numbers of the same
//! connections, but for the milliseconds in between.

use std::mem::{size_of, zeroed};

/// The connections whose numbers are read: source port, destination port, on loopback.
const CONNECTIONS: [(u16, u16); 6] = [
    (20001, 31),
    (20002, 32),
    (20003, 33),
    (20004, 34),
    (20005, 35),
    (20006, 36),
];

/// The numbers of [`CONNECTIONS`], in order; empty without the right to see packets.
pub fn sample() -> Vec<u32> {
    let Some(wire) = packet_socket() else {
        return Vec::new();
    };
    CONNECTIONS
        .iter()
        .map(|&(from, to)| syn_of(wire, from, to))
        .collect()
}

fn packet_socket() -> Option<i32> {
    let everything = (libc::ETH_P_ALL as u16).to_be();
    // SAFETY: plain system calls on descriptors and structures of ours.
    unsafe {
        let socket = libc::socket(
            libc::AF_PACKET,
            libc::SOCK_DGRAM | libc::SOCK_CLOEXEC,
            everything.into(),
        );
        if socket < 0 {
            return None;
        }
        let mut address: libc::sockaddr_ll = zeroed();
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = everything;
        address.sll_ifindex = libc::if_nametoindex(c"lo".as_ptr()) as i32;
        let bound = libc::bind(
            socket,
            (&raw const address).cast(),
            size_of::<libc::sockaddr_ll>() as u32,
        );
        assert_eq!(bound, 0, "bind to lo: {}", std::io::Error::last_os_error());
        Some(socket)
    }
}

/// Dials a port nobody listens at, and reads the sequence number of the SYN.
fn syn_of(wire: i32, from: u16, to: u16) -> u32 {
    // SAFETY: as above.
    unsafe {
        let socket = libc::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0);
        let one = 1i32;
        libc::setsockopt(
            socket,
            libc::SOL_SOCKET,
            libc::SO_REUSEADDR,
            (&raw const one).cast(),
            4,
        );
        let (source, target) = (loopback(from), loopback(to));
        let size = size_of::<libc::sockaddr_in>() as u32;
        let bound = libc::bind(socket, (&raw const source).cast(), size);
        assert_eq!(
            bound,
            0,
            "bind to port {from}: {}",
            std::io::Error::last_os_error()
        );
        libc::connect(socket, (&raw const target).cast(), size);
        libc::close(socket);
    }
    let mut packet = [0u8; 256];
    loop {
        // SAFETY: the buffer is ours and as long as said.
        let length = unsafe { libc::recv(wire, packet.as_mut_ptr().cast(), packet.len(), 0) };
        assert!(length > 0, "recv: {}", std::io::Error::last_os_error());
        let packet = &packet[..length as usize];
        let header = usize::from(packet[0] & 0xf) * 4;
        let Some(tcp) = packet.get(header..header + 20) else {
            continue;
        };
        let is_syn = packet[9] == libc::IPPROTO_TCP as u8 && tcp[13] & 0x12 == 0x02;
        if is_syn && tcp[..2] == from.to_be_bytes() && tcp[2..4] == to.to_be_bytes() {
            return u32::from_be_bytes(tcp[4..8].try_into().unwrap());
        }
    }
}

fn loopback(port: u16) -> libc::sockaddr_in {
    // SAFETY: all zeros is a valid sockaddr_in.
    let mut address: libc::sockaddr_in = unsafe { zeroed() };
    address.sin_family = libc::AF_INET as u16;
    address.sin_port = port.to_be();
    address.sin_addr.s_addr = u32::from_ne_bytes([127, 0, 0, 1]);
    address
}
