//! Reports which bytes of its images a guest reads ([`thaw_protocol::access`]). A report never blocks: one that the socket does not take is
//! dropped, and the next one it takes states how many were dropped.

use std::os::fd::OwnedFd;

use thaw_protocol::access::Access;
use thaw_protocol::packet::{self, PacketError};

/// The socket that reports go to, if there is one.
#[derive(Debug, Default)]
pub struct AccessLog {
    socket: Option<OwnedFd>,
    dropped: u32,
}

impl AccessLog {
    /// Sends reports to this socket from now on. It must be non-blocking.
    pub fn connect(&mut self, socket: OwnedFd) {
        *self = AccessLog {
            socket: Some(socket),
            dropped: 0,
        };
    }

    /// Whether there is a socket.
    pub fn is_on(&self) -> bool {
        self.socket.is_some()
    }

    /// Reports that the guest reads these bytes of a blob.
    pub fn record(&mut self, blob: [u8; 32], offset: u64, length: u64) {
        let Some(socket) = &self.socket else { return };
        let access = Access {
            blob,
            offset,
            // Never too large: a request covers at most the bytes of a message or a mapping.
            length: u32::try_from(length).unwrap_or(u32::MAX),
            dropped: self.dropped,
        };
        match packet::send(socket, &access, &[]) {
            Ok(()) => self.dropped = 0,
            Err(PacketError::Io(error)) if error.kind() == std::io::ErrorKind::WouldBlock => {
                self.dropped = self.dropped.saturating_add(1);
            }
            Err(error) => {
                tracing::info!(%error, "the socket for accesses is closed; they are reported no more");
                self.socket = None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    #[test]
    fn lost_reports_are_counted_and_a_closed_socket_is_dropped() {
        let (ours, theirs) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::NONBLOCK,
            None,
        )
        .unwrap();
        rustix::net::sockopt::set_socket_send_buffer_size(&theirs, 1).unwrap();
        let mut log = AccessLog::default();
        log.record([1; 32], 0, 1);
        assert!(!log.is_on());
        log.connect(theirs);
        for offset in 0..100 {
            log.record([1; 32], offset, 7);
        }
        let mut seen = 0;
        while let Ok((access, _)) = packet::receive::<Access>(&ours) {
            assert_eq!((access.offset, access.length, access.dropped), (seen, 7, 0));
            seen += 1;
        }
        assert!(seen > 0 && seen < 100);
        log.record([2; 32], 1000, 9);
        let (access, _) = packet::receive::<Access>(&ours).unwrap();
        assert_eq!((access.offset, u64::from(access.dropped)), (1000, 100 - seen));
        drop(ours);
        log.record([2; 32], 0, 1);
        assert!(!log.is_on());
    }
}
