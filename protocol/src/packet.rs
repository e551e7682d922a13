//! Messages with file descriptors over a SEQPACKET unix socket.
//!
//! Invariant: a message and its descriptors travel in the same packet, so neither arrives without the other.
//! A packet over [`MAX_PACKET`] or with more than [`MAX_FDS`] descriptors is an error; it is never truncated.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use serde::{Serialize, de::DeserializeOwned};

use crate::encoding::{EncodingError, decode, encode};
use crate::versions::VersionError;

/// Largest encoded message, in bytes.
pub const MAX_PACKET: usize = 64 * 1024;
/// Largest number of descriptors in a packet (the kernel's `SCM_MAX_FD`, include/net/scm.h).
pub const MAX_FDS: usize = 253;

/// Why a packet could not be sent or received.
#[derive(Debug, thiserror::Error)]
pub enum PacketError {
    #[error("the peer closed the connection")]
    Closed,
    #[error("packet I/O: {0}")]
    Io(#[from] io::Error),
    #[error("malformed packet: {0}")]
    Malformed(#[from] EncodingError),
    #[error(transparent)]
    Version(#[from] VersionError),
    #[error("packet too large: {bytes} bytes and {fds} descriptors (limits: {MAX_PACKET} and {MAX_FDS})")]
    TooLarge { bytes: usize, fds: usize },
    #[error(
        "the kernel truncated the packet: it exceeds {MAX_PACKET} bytes or the descriptor limit of this process"
    )]
    Truncated,
}

impl From<rustix::io::Errno> for PacketError {
    fn from(e: rustix::io::Errno) -> Self {
        PacketError::Io(e.into())
    }
}

/// Sends one message and its descriptors `fds`, in order.
pub fn send<T: Serialize>(socket: impl AsFd, message: &T, fds: &[BorrowedFd<'_>]) -> Result<(), PacketError> {
    let bytes = encode(message)?;
    if bytes.len() > MAX_PACKET || fds.len() > MAX_FDS {
        return Err(PacketError::TooLarge {
            bytes: bytes.len(),
            fds: fds.len(),
        });
    }
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(PacketError::TooLarge {
            bytes: bytes.len(),
            fds: fds.len(),
        });
    }
    let iov = [IoSlice::new(&bytes)];
    rustix::io::retry_on_intr(|| rustix::net::sendmsg(&socket, &iov, &mut ancillary, SendFlags::NOSIGNAL))?;
    Ok(())
}

/// Receives one message and its descriptors. A caller that receives many uses a [`Receiver`].
pub fn receive<T: DeserializeOwned>(socket: impl AsFd) -> Result<(T, Vec<OwnedFd>), PacketError> {
    Receiver::default().receive(socket)
}

/// A receive buffer for one packet. It is reused, because allocating it takes longer than receiving.
#[derive(Debug)]
pub struct Receiver {
    bytes: Box<[u8]>,
    space: Box<[MaybeUninit<u8>]>,
}

impl Default for Receiver {
    fn default() -> Receiver {
        Receiver::for_descriptors(MAX_FDS)
    }
}

impl Receiver {
    /// A receiver for a peer that sends at most `most` descriptors with a message. With more than that (the
    /// kernel may leave room for one more), the kernel closes the excess and `receive` fails with
    /// [`PacketError::Truncated`].
    pub fn for_descriptors(most: usize) -> Receiver {
        Receiver {
            bytes: vec![0; MAX_PACKET].into(),
            space: vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(most))].into(),
        }
    }

    /// Receives one message and its descriptors (close-on-exec). Blocks unless the socket is non-blocking.
    pub fn receive<T: DeserializeOwned>(
        &mut self,
        socket: impl AsFd,
    ) -> Result<(T, Vec<OwnedFd>), PacketError> {
        let (bytes, fds) = self.receive_bytes(socket)?;
        Ok((decode(bytes)?, fds))
    }

    /// As [`Receiver::receive`], but returns the encoded message.
    pub fn receive_bytes(&mut self, socket: impl AsFd) -> Result<(&[u8], Vec<OwnedFd>), PacketError> {
        let mut ancillary = RecvAncillaryBuffer::new(&mut self.space);
        let received = rustix::io::retry_on_intr(|| {
            let mut iov = [IoSliceMut::new(&mut self.bytes)];
            rustix::net::recvmsg(&socket, &mut iov, &mut ancillary, RecvFlags::CMSG_CLOEXEC)
        })?;
        let mut fds = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                fds.extend(received);
            }
        }
        if received
            .flags
            .intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC)
        {
            return Err(PacketError::Truncated);
        }
        if received.bytes == 0 {
            return Err(PacketError::Closed);
        }
        Ok((&self.bytes[..received.bytes], fds))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use std::io::{Read, Seek, Write};

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap()
    }

    #[test]
    fn a_message_arrives_with_its_descriptors_in_order() {
        let (a, b) = pair();
        let mut files: Vec<std::fs::File> = (0..3)
            .map(|_| {
                std::fs::File::from(rustix::fs::memfd_create("t", rustix::fs::MemfdFlags::CLOEXEC).unwrap())
            })
            .collect();
        for (i, f) in files.iter_mut().enumerate() {
            write!(f, "{i}").unwrap();
        }
        let borrowed: Vec<_> = files.iter().map(|f| f.as_fd()).collect();
        send(&a, &("hello".to_string(), 7u32), &borrowed).unwrap();
        let ((text, number), fds) = receive::<(String, u32)>(&b).unwrap();
        assert_eq!((text.as_str(), number, fds.len()), ("hello", 7, 3));
        for (i, fd) in fds.into_iter().enumerate() {
            let mut f = std::fs::File::from(fd);
            f.rewind().unwrap();
            let mut s = String::new();
            f.read_to_string(&mut s).unwrap();
            assert_eq!(s, i.to_string());
        }
    }

    #[test]
    fn nothing_of_a_packet_is_in_the_next() {
        let (a, b) = pair();
        let mut receiver = Receiver::default();
        send(&a, &vec![7u8; 100], &[a.as_fd()]).unwrap();
        send(&a, &vec![1u8], &[]).unwrap();
        let (long, fds) = receiver.receive::<Vec<u8>>(&b).unwrap();
        assert_eq!((long.len(), fds.len()), (100, 1));
        let (short, fds) = receiver.receive::<Vec<u8>>(&b).unwrap();
        assert_eq!((short, fds.len()), (vec![1], 0));
    }

    #[test]
    fn a_closed_peer_and_an_oversize_message_are_told_apart() {
        let (a, b) = pair();
        assert!(matches!(
            send(&a, &vec![0u8; MAX_PACKET + 1], &[]),
            Err(PacketError::TooLarge { .. })
        ));
        drop(a);
        assert!(matches!(receive::<u32>(&b), Err(PacketError::Closed)));
    }

    proptest::proptest! {
        #[test]
        fn decoding_any_bytes_never_panics(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..512)) {
            let _ = decode::<crate::control::Request>(&bytes);
            let _ = decode::<crate::control::FromVmm>(&bytes);
            let _ = decode::<crate::miss::Miss>(&bytes);
            let _ = decode::<crate::miss::Filled>(&bytes);
        }
    }
}
