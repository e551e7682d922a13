//! A rtnetlink socket (rtnetlink(7)): requests are built and answers read by hand, for the dozen messages an agent needs.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::OwnedFd;

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with};

use crate::error::{Error, For, Result};

// include/uapi/linux/rtnetlink.h, netlink.h, if_link.h, if_addr.h, neighbour.h
pub const RTM_NEWLINK: u16 = 16;
pub const RTM_GETLINK: u16 = 18;
pub const RTM_NEWADDR: u16 = 20;
pub const RTM_DELADDR: u16 = 21;
pub const RTM_GETADDR: u16 = 22;
pub const RTM_NEWROUTE: u16 = 24;
pub const RTM_DELROUTE: u16 = 25;
pub const RTM_GETROUTE: u16 = 26;
pub const RTM_NEWNEIGH: u16 = 28;
/// Protocol 0 of the netlink family.
const NETLINK_ROUTE: Option<rustix::net::Protocol> = None;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLM_F_DUMP: u16 = 0x300;
/// Create, or replace what is there.
pub const NLM_F_REPLACE: u16 = 0x100 | 0x400;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;

/// A request under construction: header, fixed body, attributes.
#[derive(Debug)]
pub struct Request {
    bytes: Vec<u8>,
}

impl Request {
    pub fn new(kind: u16, flags: u16, body: &[u8]) -> Self {
        let mut bytes = vec![0u8; 16];
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        bytes[6..8].copy_from_slice(&(NLM_F_REQUEST | flags).to_ne_bytes());
        bytes.extend_from_slice(body);
        Request { bytes }
    }

    /// Appends an attribute, padded to four bytes.
    pub fn attribute(mut self, kind: u16, value: &[u8]) -> Self {
        self.bytes
            .extend_from_slice(&((4 + value.len()) as u16).to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(value);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
        self
    }

    fn finish(mut self, sequence: u32, flags: u16) -> Vec<u8> {
        let length = self.bytes.len() as u32;
        let all = u16::from_ne_bytes([self.bytes[6], self.bytes[7]]) | flags;
        self.bytes[0..4].copy_from_slice(&length.to_ne_bytes());
        self.bytes[6..8].copy_from_slice(&all.to_ne_bytes());
        self.bytes[8..12].copy_from_slice(&sequence.to_ne_bytes());
        self.bytes
    }
}

/// One message of a dump: its fixed body and attributes.
#[derive(Debug)]
pub struct Answer {
    pub body: Vec<u8>,
    pub attributes: Vec<(u16, Vec<u8>)>,
}

impl Answer {
    /// The first attribute of this kind.
    pub fn get(&self, kind: u16) -> Option<&[u8]> {
        self.attributes
            .iter()
            .find(|(k, _)| *k == kind)
            .map(|(_, v)| v.as_slice())
    }

    pub fn get_u32(&self, kind: u16) -> Option<u32> {
        self.get(kind)?.try_into().ok().map(u32::from_ne_bytes)
    }

    pub fn get_ip(&self, kind: u16) -> Option<IpAddr> {
        ip_from(self.get(kind)?)
    }
}

/// An address of 4 or 16 bytes.
pub fn ip_from(bytes: &[u8]) -> Option<IpAddr> {
    if let Ok(v4) = <[u8; 4]>::try_from(bytes) {
        return Some(Ipv4Addr::from(v4).into());
    }
    <[u8; 16]>::try_from(bytes)
        .ok()
        .map(|v6| Ipv6Addr::from(v6).into())
}

/// An address as an attribute has it.
pub fn ip_bytes(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

/// AF_INET or AF_INET6.
pub fn family(ip: IpAddr) -> u8 {
    match ip {
        IpAddr::V4(_) => libc::AF_INET as u8,
        IpAddr::V6(_) => libc::AF_INET6 as u8,
    }
}

/// An open rtnetlink socket of the current network namespace.
#[derive(Debug)]
pub struct Netlink {
    socket: OwnedFd,
    sequence: u32,
}

impl Netlink {
    pub fn open() -> Result<Self> {
        let socket = socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            NETLINK_ROUTE,
        )
        .for_(|| "open a netlink socket".into())?;
        Ok(Netlink { socket, sequence: 0 })
    }

    fn send(&mut self, request: Request, flags: u16) -> Result<()> {
        self.sequence += 1;
        let bytes = request.finish(self.sequence, flags);
        sendto(
            &self.socket,
            &bytes,
            SendFlags::empty(),
            &SocketAddrNetlink::new(0, 0),
        )
        .for_(|| "send a netlink request".into())?;
        Ok(())
    }

    /// Sends a request and waits for the kernel's verdict.
    pub fn request(&mut self, request: Request, what: impl FnOnce() -> String) -> Result<()> {
        self.send(request, NLM_F_ACK)?;
        self.answers(&mut |_, _| {}).map_err(|e| match e {
            Error::System { source, .. } => Error::System { what: what(), source },
            other => other,
        })
    }

    /// Sends a dump request and returns every answer of `kind`; `body` is the size of its fixed part.
    pub fn dump(&mut self, request: Request, kind: u16, body: usize) -> Result<Vec<Answer>> {
        self.send(request, NLM_F_DUMP)?;
        let mut found = Vec::new();
        self.answers(&mut |k, payload| {
            if k == kind && payload.len() >= body {
                let attributes = attributes(&payload[body..]);
                found.push(Answer {
                    body: payload[..body].to_vec(),
                    attributes,
                });
            }
        })?;
        Ok(found)
    }

    fn answers(&mut self, each: &mut dyn FnMut(u16, &[u8])) -> Result<()> {
        let mut buffer = vec![0u8; 32 * 1024];
        loop {
            let (length, _) = recv(&self.socket, &mut *buffer, RecvFlags::empty())
                .for_(|| "receive a netlink answer".into())?;
            let mut rest = &buffer[..length];
            while let Some((kind, sequence, payload, next)) = message(rest) {
                rest = next;
                if sequence != self.sequence {
                    continue;
                }
                match kind {
                    NLMSG_DONE => return Ok(()),
                    NLMSG_ERROR => {
                        let code = payload
                            .get(..4)
                            .and_then(|b| b.try_into().ok())
                            .map_or(0, i32::from_ne_bytes);
                        if code == 0 {
                            return Ok(());
                        }
                        let source = std::io::Error::from_raw_os_error(-code);
                        return Err(Error::System {
                            what: "netlink".into(),
                            source,
                        });
                    }
                    _ => each(kind, payload),
                }
            }
        }
    }
}

fn message(bytes: &[u8]) -> Option<(u16, u32, &[u8], &[u8])> {
    let length = u32::from_ne_bytes(bytes.get(0..4)?.try_into().ok()?) as usize;
    let kind = u16::from_ne_bytes(bytes.get(4..6)?.try_into().ok()?);
    let sequence = u32::from_ne_bytes(bytes.get(8..12)?.try_into().ok()?);
    let payload = bytes.get(16..length)?;
    Some((
        kind,
        sequence,
        payload,
        bytes.get(length.next_multiple_of(4)..).unwrap_or(&[]),
    ))
}

fn attributes(mut bytes: &[u8]) -> Vec<(u16, Vec<u8>)> {
    let mut found = Vec::new();
    while bytes.len() >= 4 {
        let length = usize::from(u16::from_ne_bytes([bytes[0], bytes[1]]));
        // The two top bits are flags (NLA_F_NESTED, NLA_F_NET_BYTEORDER).
        let kind = u16::from_ne_bytes([bytes[2], bytes[3]]) & 0x3fff;
        let Some(value) = bytes.get(4..length) else { break };
        found.push((kind, value.to_vec()));
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or(&[]);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_padded_and_read_back() {
        let request = Request::new(RTM_NEWLINK, 0, &[0; 16])
            .attribute(3, b"eth0\0")
            .attribute(4, &1500u32.to_ne_bytes());
        let bytes = request.finish(7, NLM_F_ACK);
        let (kind, sequence, payload, rest) = message(&bytes).unwrap();
        assert_eq!((kind, sequence, rest.len()), (RTM_NEWLINK, 7, 0));
        assert_eq!(
            attributes(&payload[16..]),
            [(3, b"eth0\0".to_vec()), (4, 1500u32.to_ne_bytes().to_vec())]
        );
    }

    proptest::proptest! {
        #[test]
        fn reading_any_bytes_ends_and_never_panics(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..128)) {
            let mut rest = bytes.as_slice();
            let mut count = 0;
            while let Some((_, _, payload, next)) = message(rest) {
                attributes(payload);
                rest = next;
                count += 1;
                assert!(count <= bytes.len());
            }
            attributes(&bytes);
        }
    }
}
