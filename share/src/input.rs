//! The receiving end of the stream from the VMM.
//!
//! Invariant: it gives whole messages, in order. What has come behind a message stays here for the next thread.

use std::io;
use std::ops::Range;
use std::os::unix::net::UnixStream;

use rustix::io::retry_on_intr;
use rustix::net::{RecvFlags, recv};
use thaw_protocol::share::RequestHeader;
use vm_memory::bitmap::BitmapSlice;
use vm_memory::{ReadVolatile, VolatileMemoryError, VolatileSlice};

use crate::end::End;
use crate::message::MessageBuffer;

/// Bytes received at once: the whole message of most requests, which write a page at most.
const AHEAD: usize = 8 << 10;

/// The receiving end.
pub struct Input {
    stream: UnixStream,
    ahead: Box<[u8; AHEAD]>,
    /// The bytes of `ahead` that have come and were not taken.
    left: Range<usize>,
    /// Whether there may be more than was received: the stream had all the bytes that were asked for, or was not asked since.
    may_have_more: bool,
    /// Whether the other end was closed.
    has_ended: bool,
}

impl Input {
    pub fn new(stream: UnixStream) -> Input {
        Input {
            stream,
            ahead: Box::new([0; AHEAD]),
            left: 0..0,
            may_have_more: false,
            has_ended: false,
        }
    }

    /// Takes the next message into `buffer`, and waits for all of it if some of it is there. `None` if nothing is.
    ///
    /// # Errors
    /// The stream has ended, or what came is no message.
    pub fn take(&mut self, buffer: &mut MessageBuffer) -> Result<Option<RequestHeader>, End> {
        if self.left.is_empty() {
            match self.receive(RecvFlags::DONTWAIT) {
                Err(End::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                received => received?,
            }
        } else {
            self.may_have_more = true;
        }
        while self.left.len() < RequestHeader::BYTES {
            self.receive(RecvFlags::empty())?;
        }
        let mut header = [0; RequestHeader::BYTES];
        self.give(&mut header);
        let header = RequestHeader::decode(&header)?;
        buffer.read(self, header.length)?;
        Ok(Some(header))
    }

    /// Whether more may be there than was taken.
    pub fn may_have_more(&self) -> bool {
        self.may_have_more || self.has_ended || !self.left.is_empty()
    }

    /// The other end was closed. What it sent before is still taken, then its end.
    pub fn ends(&mut self) {
        self.has_ended = true;
    }

    /// Receives at least a byte behind those that are left.
    fn receive(&mut self, flags: RecvFlags) -> Result<(), End> {
        self.ahead.copy_within(self.left.clone(), 0);
        self.left = 0..self.left.len();
        let room = &mut self.ahead[self.left.end..];
        let most = room.len();
        let (_, received) =
            retry_on_intr(|| recv(&self.stream, &mut *room, flags)).map_err(io::Error::from)?;
        if received == 0 {
            return Err(End::Closed);
        }
        self.left.end += received;
        self.may_have_more = received == most;
        Ok(())
    }

    /// Moves the first of the bytes that are left to `place`, which is not longer than they are.
    fn give(&mut self, place: &mut [u8]) {
        let from = self.left.start;
        self.left.start += place.len();
        place.copy_from_slice(&self.ahead[from..self.left.start]);
    }
}

/// The bytes that are left, then those of the stream.
impl ReadVolatile for Input {
    fn read_volatile<B: BitmapSlice>(
        &mut self,
        place: &mut VolatileSlice<'_, B>,
    ) -> Result<usize, VolatileMemoryError> {
        if self.left.is_empty() {
            // How much more there is, is not seen by this.
            self.may_have_more = true;
            return self.stream.read_volatile(place);
        }
        let length = place.len().min(self.left.len());
        let from = self.left.start;
        self.left.start += length;
        place.copy_from(&self.ahead[from..self.left.start]);
        Ok(length)
    }
}

#[cfg(test)]
#[path = "input_test.rs"]
mod tests;
