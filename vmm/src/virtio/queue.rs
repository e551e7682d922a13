//! One split virtqueue of an active device: pops chains, returns them used, and interrupts the driver if it wants that.
//!
//! [`DeviceQueue::serve`] is the loop of a device that answers its driver's requests. A device that needs chains for data from the host
//! takes them with [`DeviceQueue::pop_or_enable_kicks`]. Either way kicks are enabled before the ring is checked for the last time, so no
//! chain is missed.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::GuestAddress;
use vmm_sys_util::eventfd::EventFd;

use super::chain::Chain;
use super::interrupt::Interrupt;
use super::state::QueueRecord;
use crate::memory::GuestMemory;

/// A ring or chain is broken, so it cannot be answered.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// The rings are outside memory, or the available index ran past the queue's size.
    #[error("queue {queue}: {error}")]
    Ring {
        queue: usize,
        error: virtio_queue::Error,
    },
    /// The chain loops, is cut short, or mixes readable and writable buffers.
    #[error("queue {queue}: descriptor chain {head} is malformed")]
    Chain { queue: usize, head: u16 },
}

/// A device's answer to a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The chain is used: this many bytes of its writable part are filled.
    Done(u32),
    /// The device keeps the chain and returns it later, with [`DeviceQueue::add_used`].
    Deferred,
    /// Not now: this chain and those behind it stay available until the device serves the queue again.
    Stop,
}

/// Why [`DeviceQueue::serve`] returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// No chain is left. The next one causes a kick.
    Empty,
    /// As many chains as the queue's size were served. The queue has kicked itself for the rest.
    OutOfTurns,
    /// The device wanted no more. Kicks stay disabled.
    Stopped,
}

/// A queue of an active device.
#[derive(Debug)]
pub struct DeviceQueue {
    index: usize,
    queue: Queue,
    memory: GuestMemory,
    interrupt: Arc<Interrupt>,
    kick: Arc<EventFd>,
    /// Whether a chain was returned since the driver was last interrupted. True at first, for chains returned before a freeze.
    used: bool,
}

impl DeviceQueue {
    pub fn new(
        index: usize,
        queue: Queue,
        memory: GuestMemory,
        interrupt: Arc<Interrupt>,
        kick: Arc<EventFd>,
    ) -> DeviceQueue {
        DeviceQueue {
            index,
            queue,
            memory,
            interrupt,
            kick,
            used: true,
        }
    }

    /// Its number in the device.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Its size, as the driver set it.
    pub fn size(&self) -> u16 {
        self.queue.size()
    }

    /// Most buffers of a chain. This is not the size that the driver set: Linux makes a ring smaller when memory is short, but still fills
    /// indirect tables up to the size that the device offered.
    fn longest(&self) -> usize {
        self.queue.max_size().into()
    }

    /// The eventfd that the driver's notifications signal.
    pub fn kick(&self) -> &Arc<EventFd> {
        &self.kick
    }

    /// The memory its chains are in.
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// The device's interrupt, for [`Interrupt::fail`].
    pub fn interrupt(&self) -> &Arc<Interrupt> {
        &self.interrupt
    }

    /// The state a freeze keeps: indices, addresses, and whether there is work.
    pub fn save(&self) -> QueueRecord {
        let available = self.queue.avail_idx(&self.memory, Ordering::Acquire);
        // A ring that cannot be read counts as work, so that the device finds the error.
        let has_work =
            self.queue.ready() && available.map_or(true, |index| index.0 != self.queue.next_avail());
        QueueRecord::new(self.queue.state(), has_work)
    }

    /// The next available chain, if any.
    pub fn pop(&mut self) -> Result<Option<Chain>, QueueError> {
        if !self.queue.ready() {
            return Ok(None);
        }
        let queue = self.index;
        let ring = |error| QueueError::Ring { queue, error };
        // The iterator returns nothing for an empty and for an unreadable ring; the index tells which it is.
        let available = self
            .queue
            .avail_idx(&self.memory, Ordering::Acquire)
            .map_err(ring)?;
        if available.0 == self.queue.next_avail() {
            return Ok(None);
        }
        let chain = self.queue.iter(&self.memory).map_err(ring)?.next();
        let chain = chain.ok_or(ring(virtio_queue::Error::InvalidAvailRingIndex))?;
        self.chain_at(chain.head_index()).map(Some)
    }

    /// The chain of descriptor `head`: the one popped last, or one popped before a freeze and not returned since.
    pub fn chain_at(&self, head: u16) -> Result<Chain, QueueError> {
        let malformed = QueueError::Chain {
            queue: self.index,
            head,
        };
        if !self.queue.ready() {
            return Err(malformed);
        }
        let table = GuestAddress(self.queue.desc_table());
        Chain::read(&self.memory, table, self.queue.size(), head, self.longest()).ok_or(malformed)
    }

    /// Makes the last popped chain available again.
    pub fn unpop(&mut self) {
        self.queue.go_to_previous_position();
    }

    /// Returns a chain. `written` bytes of its writable part are filled.
    pub fn add_used(&mut self, head: u16, written: u32) -> Result<(), QueueError> {
        let queue = self.index;
        self.used = true;
        self.queue
            .add_used(&self.memory, head, written)
            .map_err(|error| QueueError::Ring { queue, error })
    }

    /// Returns a chain that was deferred, if it is answered now.
    pub fn settle(&mut self, head: u16, answer: Answer) -> Result<(), QueueError> {
        match answer {
            Answer::Done(written) => self.add_used(head, written),
            Answer::Deferred | Answer::Stop => Ok(()),
        }
    }

    /// Interrupts the driver if chains were returned since the last call and it wants interrupts. Without the first condition, a driver
    /// that answers each interrupt with a kick would be interrupted for ever.
    pub fn signal(&mut self) -> Result<(), QueueError> {
        if !self.queue.ready() || !std::mem::take(&mut self.used) {
            return Ok(());
        }
        let queue = self.index;
        if self
            .queue
            .needs_notification(&self.memory)
            .map_err(|error| QueueError::Ring { queue, error })?
        {
            self.interrupt.used_buffer();
        }
        Ok(())
    }

    /// The next available chain. If `None`, there is none, and the next one causes a kick.
    pub fn pop_or_enable_kicks(&mut self) -> Result<Option<Chain>, QueueError> {
        // Bounded, because a driver could make chains available and take them back without end.
        for _ in 0..self.queue.size() {
            match self.pop()? {
                Some(chain) => return Ok(Some(chain)),
                None if self.enable_kicks()? => {}
                None => return Ok(None),
            }
        }
        self.kick_again();
        Ok(None)
    }

    /// Lets the device answer the available chains, at most as many as the queue's size, so that other devices get their turn.
    pub fn serve<E: From<QueueError>>(
        &mut self,
        mut handle: impl FnMut(&GuestMemory, Chain) -> Result<Answer, E>,
    ) -> Result<Ended, E> {
        self.serve_while(&mut (), |()| true, |(), memory, chain| handle(memory, chain))
    }

    /// As [`Self::serve`], but pops a chain only while `device` wants one.
    pub fn serve_while<D, E: From<QueueError>>(
        &mut self,
        device: &mut D,
        wants: impl Fn(&D) -> bool,
        mut handle: impl FnMut(&mut D, &GuestMemory, Chain) -> Result<Answer, E>,
    ) -> Result<Ended, E> {
        self.disable_kicks()?;
        let mut turns = self.queue.size();
        let ended = loop {
            if !wants(device) {
                break Ended::Stopped;
            }
            if turns == 0 {
                // A snapshot does not have the queue's own kick. If this was the last chain, a restored device waits for the driver's.
                self.enable_kicks()?;
                self.kick_again();
                break Ended::OutOfTurns;
            }
            turns -= 1;
            let Some(chain) = self.pop_or_enable_kicks()? else {
                break Ended::Empty;
            };
            let head = chain.head();
            match handle(device, &self.memory, chain)? {
                Answer::Done(written) => self.add_used(head, written)?,
                Answer::Deferred => {}
                Answer::Stop => {
                    self.unpop();
                    break Ended::Stopped;
                }
            }
        };
        self.signal()?;
        Ok(ended)
    }

    /// Makes the event loop serve this queue again, after other events had their turn.
    pub fn kick_again(&self) {
        // Fails only if a kick is pending.
        let _ = self.kick.write(1);
    }

    /// Enables kicks. Returns true if chains became available meanwhile: there may be no kick for those.
    pub fn enable_kicks(&mut self) -> Result<bool, QueueError> {
        if !self.queue.ready() {
            return Ok(false);
        }
        let queue = self.index;
        self.queue
            .enable_notification(&self.memory)
            .map_err(|error| QueueError::Ring { queue, error })
    }

    /// Disables kicks while the device serves the queue anyway.
    pub fn disable_kicks(&mut self) -> Result<(), QueueError> {
        if !self.queue.ready() {
            return Ok(());
        }
        let queue = self.index;
        self.queue
            .disable_notification(&self.memory)
            .map_err(|error| QueueError::Ring { queue, error })
    }
}

#[cfg(test)]
#[path = "queue_test.rs"]
mod tests;
