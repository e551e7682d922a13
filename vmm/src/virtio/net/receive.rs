//! Receives frames: from the tap to the guest.
//!
//! A frame's length is known only after it has been read, so buffers for the largest frame are popped in advance and kept. They count as
//! the guest's unused buffers and are always the last ones popped. So rewinding the queue by their number returns them, which a freeze
//! does.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;

use super::tap::Tap;
use super::{FrameSlices, HEADER};
use crate::memory::GuestMemory;
use crate::virtio::chain::Chain;
use crate::virtio::device::DeviceError;
use crate::virtio::guest_io::{self, MAX_SLICES};
use crate::virtio::queue::DeviceQueue;
use crate::virtio::throttle::Throttle;

/// Header and the largest frame that a tap returns: 64 KiB of segments, Ethernet header, VLAN tag.
const LARGEST: usize = HEADER + 65_535 + 18;
/// Most frames taken before other devices get their turn.
const BURST: usize = 64;
/// Most slices of popped buffers in one read; the spill needs one more.
const SLICES: usize = MAX_SLICES - 1;

/// Popped buffers, and room for bytes that do not fit them.
#[derive(Default)]
pub struct Receiver {
    spare: VecDeque<Chain>,
    spill: Vec<u8>,
}

/// The result of one attempt to read a frame.
enum Outcome {
    /// A frame of this many bytes, header included, was delivered.
    Delivered(usize),
    /// A frame of this many bytes was dropped: it did not fit the available buffers, or was shorter than a header.
    Dropped(usize),
    /// The tap has no frame.
    Empty,
    /// There is no buffer.
    Starved,
}

impl Receiver {
    /// Delivers the tap's frames, up to a burst and to the rate limit. A frame's length is known only after it has been read. So a frame is
    /// read if the limit admits one byte, and is charged afterwards. Returns true if it stopped for lack of buffers; a kick will come then.
    pub fn receive(
        &mut self,
        queue: &mut DeviceQueue,
        tap: &Tap,
        mergeable: bool,
        throttle: &mut Throttle,
    ) -> Result<bool, DeviceError> {
        let mut starved = false;
        queue.disable_kicks()?;
        for _ in 0..BURST {
            if !throttle.admits(1, 1) {
                break;
            }
            match self.frame(queue, tap, mergeable)? {
                Outcome::Delivered(length) | Outcome::Dropped(length) => {
                    throttle.charge(length.saturating_sub(HEADER) as u64, 1);
                }
                Outcome::Empty => break,
                Outcome::Starved => {
                    starved = true;
                    break;
                }
            }
        }
        queue.signal()?;
        Ok(starved)
    }

    fn frame(&mut self, queue: &mut DeviceQueue, tap: &Tap, mergeable: bool) -> Result<Outcome, DeviceError> {
        if !self.refill(queue, mergeable)? {
            return Ok(Outcome::Starved);
        }
        match self.read(queue.memory(), tap, mergeable) {
            Ok((length, 0)) => Ok(Outcome::Dropped(length)),
            Ok((length, filled)) => {
                self.deliver(queue, length, filled)?;
                Ok(Outcome::Delivered(length))
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(Outcome::Empty),
            Err(error) => {
                tracing::debug!(%error, "tap read failed");
                Ok(Outcome::Empty)
            }
        }
    }

    /// Reads a frame into the spare buffers. Returns its length, and how many buffers it fills: 0 if it is no frame, or does not fit them.
    fn read(&mut self, memory: &GuestMemory, tap: &Tap, mergeable: bool) -> io::Result<(usize, usize)> {
        let usable = if mergeable { self.spare.len() } else { 1 };
        let mut slices = FrameSlices::new();
        for chain in self.spare.iter().take(usable) {
            // Checked when it was popped.
            slices.extend(chain.writable_slices(memory).flatten());
        }
        slices.truncate(SLICES);
        self.spill.resize(LARGEST, 0);
        let length = guest_io::read_some(tap.as_fd(), &slices, &mut self.spill)?;
        if length > guest_io::total(&slices) || length < HEADER {
            return Ok((length, 0));
        }
        let filled = self.filled_by(length);
        // num_buffers, which the tap does not write (§5.1.6.4).
        guest_io::copy_in(&slices, HEADER - 2, &(filled as u16).to_le_bytes());
        Ok((length, filled))
    }

    /// Makes all popped buffers available again.
    pub fn give_back(&mut self, queue: &mut DeviceQueue) {
        for _ in self.spare.drain(..) {
            queue.unpop();
        }
    }

    /// Returns the buffers that a frame of `length` bytes fills to the driver.
    fn deliver(&mut self, queue: &mut DeviceQueue, length: usize, filled: usize) -> Result<(), DeviceError> {
        let mut rest = length;
        for chain in self.spare.drain(..filled) {
            let written = rest.min(chain.writable_len() as usize);
            rest -= written;
            queue.add_used(chain.head(), written as u32)?;
        }
        Ok(())
    }

    /// How many of the spare buffers a frame of `length` bytes fills.
    fn filled_by(&self, length: usize) -> usize {
        let mut room = 0;
        for (index, chain) in self.spare.iter().enumerate() {
            room += chain.writable_len() as usize;
            if room >= length {
                return index + 1;
            }
        }
        self.spare.len()
    }

    /// Pops buffers until the largest frame fits, or none are left. False if there is no buffer at all.
    fn refill(&mut self, queue: &mut DeviceQueue, mergeable: bool) -> Result<bool, DeviceError> {
        let mut room: usize = self.spare.iter().map(|chain| chain.writable_len() as usize).sum();
        let mut slices: usize = self
            .spare
            .iter()
            .map(|chain| chain.writable_buffers().len())
            .sum();
        while self.spare.is_empty() || mergeable && room < LARGEST && slices < SLICES {
            let next = match self.spare.is_empty() {
                true => queue.pop_or_enable_kicks()?,
                false => queue.pop()?,
            };
            let Some(chain) = next else {
                return Ok(!self.spare.is_empty());
            };
            // A buffer that cannot hold the header, or lies outside memory, is returned empty.
            let usable = chain.writable_buffers().len() <= SLICES
                && chain.writable_len() >= HEADER as u64
                && chain.writable_slices(queue.memory()).all(|slice| slice.is_ok());
            if usable {
                room = room.saturating_add(chain.writable_len() as usize);
                slices += chain.writable_buffers().len();
                self.spare.push_back(chain);
            } else if !self.spare.is_empty() {
                // It is used after the buffers before it, because the held buffers must stay the last ones popped.
                queue.unpop();
                return Ok(true);
            } else {
                queue.add_used(chain.head(), 0)?;
            }
        }
        Ok(true)
    }
}
