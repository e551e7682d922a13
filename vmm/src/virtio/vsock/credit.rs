//! Credit: each side sends only as many bytes as the other has announced room for (virtio 1.2 §5.10.6.3).
//!
//! Counters count all bytes since the connection began, modulo 2^32, as on the wire.

use std::collections::VecDeque;
use std::num::Wrapping;

/// Bytes that this side holds for a client that does not read. This bounds the memory of a connection.
pub const BUFFER: u32 = 256 * 1024;
/// How much freed space, since the last header to the guest, justifies a packet of its own.
const WORTH_TELLING: u32 = BUFFER / 4;

/// The bytes that may be sent to the guest.
#[derive(Clone, Copy, Debug, Default)]
pub struct SendCredit {
    /// The buffer size that the guest last announced.
    buffer: u32,
    forwarded: Wrapping<u32>,
    sent: Wrapping<u32>,
}

impl SendCredit {
    /// Records the guest's announcement: the size of its buffer, and the count of bytes that have left it.
    pub fn update(&mut self, buffer: u32, forwarded: u32) {
        self.buffer = buffer;
        self.forwarded = Wrapping(forwarded);
    }

    /// Bytes that may be sent now. 0 if the guest claims that more bytes have left its buffer than were sent.
    pub fn available(&self) -> u32 {
        self.buffer.saturating_sub((self.sent - self.forwarded).0)
    }

    /// Records that `bytes` were sent.
    pub fn spend(&mut self, bytes: u32) {
        self.sent += Wrapping(bytes);
    }
}

/// Bytes that the guest sent and the client has not taken.
#[derive(Clone, Debug, Default)]
pub struct ReceiveBuffer {
    held: VecDeque<u8>,
    forwarded: Wrapping<u32>,
    told: Wrapping<u32>,
}

impl ReceiveBuffer {
    /// Bytes the guest may send beyond those held.
    pub fn room(&self) -> u32 {
        BUFFER.saturating_sub(self.held.len() as u32)
    }

    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Holds bytes. The caller must have checked [`Self::room`].
    pub fn hold(&mut self, bytes: &[u8]) {
        self.held.extend(bytes);
    }

    /// The oldest bytes held, in one piece.
    pub fn front(&self) -> &[u8] {
        self.held.as_slices().0
    }

    /// The client took the oldest `bytes`.
    pub fn release(&mut self, bytes: usize) {
        self.held.drain(..bytes.min(self.held.len()));
        self.pass(bytes as u32);
        if self.held.is_empty() {
            // A connection that was slow once does not keep its large buffer.
            self.held = VecDeque::new();
        }
    }

    /// `bytes` bypassed the buffer: the client took them at once, or they were dropped because it left.
    pub fn pass(&mut self, bytes: u32) {
        self.forwarded += Wrapping(bytes);
    }

    /// Returns the count for the next header to the guest, which the guest knows from then on.
    pub fn announce(&mut self) -> u32 {
        self.told = self.forwarded;
        self.forwarded.0
    }

    /// Whether the guest should get a packet that only announces room. The guest cannot stall: when it believes the buffer full, [`BUFFER`]
    /// bytes are still to be forwarded, and after a quarter of them it is told.
    pub fn worth_telling(&self) -> bool {
        (self.forwarded - self.told).0 >= WORTH_TELLING
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// However the counters wrap and whatever the guest claims, the bytes in flight never exceed the guest's buffer.
        #[test]
        fn no_more_is_sent_than_the_guest_can_hold(
            start in any::<u32>(),
            steps in prop::collection::vec((1u32..100_000, 0u32..100_000), 1..50),
        ) {
            let (mut sent, mut left) = (Wrapping(start), Wrapping(start));
            let mut credit = SendCredit { buffer: 65_536, forwarded: left, sent };
            for (want, read) in steps {
                let n = want.min(credit.available());
                credit.spend(n);
                sent += n;
                prop_assert!((sent - left).0 <= 65_536);
                left += read.min((sent - left).0);
                credit.update(65_536, left.0);
                prop_assert_eq!(credit.available(), 65_536 - (sent - left).0);
            }
        }

        /// A guest that lies gets at most as many bytes as the buffer size it claims.
        #[test]
        fn lies_do_not_overflow(buffer in any::<u32>(), forwarded in any::<u32>(), sent in any::<u32>()) {
            let mut credit = SendCredit { sent: Wrapping(sent), ..SendCredit::default() };
            credit.update(buffer, forwarded);
            prop_assert!(credit.available() <= buffer);
        }

        /// A guest that always sends all bytes it may send never stalls while the client reads, and never exceeds the buffer.
        #[test]
        fn a_greedy_guest_neither_stalls_nor_overruns(reads in prop::collection::vec(1usize..200_000, 1..60)) {
            let mut buffer = ReceiveBuffer::default();
            let (mut sent, mut known) = (Wrapping(0u32), Wrapping(0u32));
            for read in reads {
                let believes = BUFFER - (sent - known).0;
                prop_assert!(believes <= buffer.room());
                buffer.hold(&vec![0; believes as usize]);
                sent += believes;
                let n = read.min(buffer.front().len());
                buffer.release(n);
                if buffer.worth_telling() {
                    known = Wrapping(buffer.announce());
                }
                prop_assert!(believes > 0 || !buffer.is_empty() || buffer.room() == BUFFER);
            }
            while !buffer.is_empty() {
                buffer.release(buffer.front().len());
            }
            prop_assert!(buffer.worth_telling() || (sent - known).0 < BUFFER);
        }
    }
}
