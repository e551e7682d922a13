//! TCP connections of a network namespace (sock_diag(7)): lists them, and ends some. Listening sockets are none.
//!
//! Hand-written on [`crate::netlink`]: two messages of one fixed form.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::netlink::{Attributes, Message, Socket};

// include/uapi/linux/sock_diag.h and inet_diag.h
const BY_FAMILY: u16 = 20;
const DESTROY: u16 = 21;
/// Bytes of `struct inet_diag_req_v2` and of `struct inet_diag_sockid` in it.
const REQUEST: usize = 56;
const IDENTITY: usize = 48;
/// Where a `struct inet_diag_msg` has the socket's inode, which is 0 if no process has the socket.
const INODE: usize = 68;
const IPV4: u8 = libc::AF_INET as u8;
const IPV6: u8 = libc::AF_INET6 as u8;
/// States, of include/net/tcp_states.h.
const ESTABLISHED: u8 = 1;
const SYN_SENT: u8 = 2;
const SYN_RECEIVED: u8 = 3;
const FIN_WAIT_1: u8 = 4;
const FIN_WAIT_2: u8 = 5;
const CLOSE_WAIT: u8 = 8;
const LAST_ACK: u8 = 9;
const CLOSING: u8 = 11;
/// The states that are listed, as the kernel takes them.
const LISTED: u32 = 1 << ESTABLISHED
    | 1 << SYN_SENT
    | 1 << SYN_RECEIVED
    | 1 << FIN_WAIT_1
    | 1 << FIN_WAIT_2
    | 1 << CLOSE_WAIT
    | 1 << LAST_ACK
    | 1 << CLOSING;

/// One end of a connection. An IPv4 address that an IPv6 socket uses is an IPv4 address here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    pub local: SocketAddr,
    pub remote: SocketAddr,
    family: u8,
    /// How the kernel names it, with a cookie that no later socket has.
    identity: [u8; IDENTITY],
}

/// Lists the connections of the socket's namespace, at most `most`.
pub fn list(socket: &mut Socket, most: usize) -> io::Result<Vec<Connection>> {
    let mut found = Vec::new();
    for family in [IPV4, IPV6] {
        let request = request(family, LISTED, &[0; IDENTITY]);
        let message = Message::new(BY_FAMILY, 0, &request, Attributes::default());
        let outcome = socket.dump(&message, |_, payload| {
            if found.len() < most {
                found.extend(read(payload));
            }
        });
        match outcome {
            // This kernel lists no sockets, or none of this family.
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => {}
            outcome => outcome?,
        }
    }
    Ok(found)
}

/// Ends a connection: calls that wait on its socket fail with `ECONNABORTED`, and the peer gets a reset, if there is a route. Has no effect
/// if the connection has ended.
///
/// # Errors
/// `EOPNOTSUPP`: the kernel has no `CONFIG_INET_DIAG_DESTROY`.
pub fn end(socket: &mut Socket, connection: &Connection) -> io::Result<()> {
    let request = request(connection.family, LISTED, &connection.identity);
    match socket.request(&Message::new(DESTROY, 0, &request, Attributes::default())) {
        // Nothing has these addresses any more, or only another socket.
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ESTALE)) => Ok(()),
        outcome => outcome,
    }
}

/// A `struct inet_diag_req_v2`.
fn request(family: u8, states: u32, identity: &[u8; IDENTITY]) -> [u8; REQUEST] {
    let mut request = [0; REQUEST];
    request[0] = family;
    request[1] = libc::IPPROTO_TCP as u8;
    request[4..8].copy_from_slice(&states.to_ne_bytes());
    request[8..].copy_from_slice(identity);
    request
}

/// The connection of an answer to a dump, a `struct inet_diag_msg`.
fn read(payload: &[u8]) -> Option<Connection> {
    let [family, state] = *payload.first_chunk()?;
    let identity: [u8; IDENTITY] = *payload.get(4..)?.first_chunk()?;
    let inode = u32::from_ne_bytes(*payload.get(INODE..)?.first_chunk()?);
    // The kernel only remembers that it was closed here, and ends no such socket.
    if state == FIN_WAIT_2 && inode == 0 {
        return None;
    }
    let port = |at: usize| Some(u16::from_be_bytes(*identity.get(at..)?.first_chunk()?));
    Some(Connection {
        local: SocketAddr::new(address(family, *identity.get(4..)?.first_chunk()?)?, port(0)?),
        remote: SocketAddr::new(address(family, *identity.get(20..)?.first_chunk()?)?, port(2)?),
        family,
        identity,
    })
}

fn address(family: u8, bytes: [u8; 16]) -> Option<IpAddr> {
    match family {
        IPV4 => Some(Ipv4Addr::from_octets(*bytes.first_chunk()?).into()),
        IPV6 => Some(Ipv6Addr::from_octets(bytes).to_canonical()),
        _ => None,
    }
}

#[cfg(test)]
#[path = "connections_test.rs"]
mod tests;
