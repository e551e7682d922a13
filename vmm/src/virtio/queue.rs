//! One split virtqueue of an active device: pop a chain, give it back used, interrupt if the driver wants it.
//!
//! [`DeviceQueue::serve`] is the loop of a device that answers what its driver asks. A device that needs chains for what
//! comes from the host takes them with [`DeviceQueue::pop_or_enable_kicks`]. Either way kicks are enabled before the last
//! look at the ring, so no chain is missed.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::GuestAddress;
use vmm_sys_util::eventfd::EventFd;

use super::chain::Chain;
use super::interrupt::Interrupt;
use super::state::QueueRecord;
use crate::memory::GuestMemory;

/// A ring or chain no answer can be given to.
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

/// What a device answers for a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It is used: so many bytes of its writable part are filled.
    Done(u32),
    /// The device keeps it and gives it back later, with [`DeviceQueue::add_used`].
    Deferred,
    /// Not now: it stays available, as do those behind it, until the device looks at the queue again.
    Stop,
}

/// Why [`DeviceQueue::serve`] returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// No chain is left; a kick comes for the next.
    Empty,
    /// A queue's worth was served; the queue has kicked itself for the rest.
    OutOfTurns,
    /// The device wanted no more. No kick is asked for.
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
    /// Whether a chain was given back since the driver was last interrupted; true at first, for those of before a freeze.
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

    /// Most buffers of a chain. Not the size the driver set: Linux makes a ring smaller when memory is short, and goes on
    /// to fill indirect tables up to what the device offered.
    fn longest(&self) -> usize {
        self.queue.max_size().into()
    }

    /// The eventfd the driver's notifications arrive at.
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

    /// Indices and addresses, and whether there is work: all that a freeze must keep.
    pub fn save(&self) -> QueueRecord {
        let available = self.queue.avail_idx(&self.memory, Ordering::Acquire);
        // A ring that cannot be read is for the device to find.
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
        // The iterator's silence means "empty" or "unreadable"; the index tells which.
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

    /// The chain whose head is `head`: the one popped last, or one popped before a freeze and not given back since.
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

    /// Takes the last popped chain back: it is available again.
    pub fn unpop(&mut self) {
        self.queue.go_to_previous_position();
    }

    /// Gives a chain back, `written` bytes of its writable part filled.
    pub fn add_used(&mut self, head: u16, written: u32) -> Result<(), QueueError> {
        let queue = self.index;
        self.used = true;
        self.queue
            .add_used(&self.memory, head, written)
            .map_err(|error| QueueError::Ring { queue, error })
    }

    /// Gives a chain that was deferred back, if it is answered now.
    pub fn settle(&mut self, head: u16, answer: Answer) -> Result<(), QueueError> {
        match answer {
            Answer::Done(written) => self.add_used(head, written),
            Answer::Deferred | Answer::Stop => Ok(()),
        }
    }

    /// Interrupts the driver if chains were given back since the last call, and it wants to know. A driver that answers each
    /// interrupt with a kick would otherwise be interrupted for ever.
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

    /// The next available chain. None: there is none, and a kick comes for the next.
    pub fn pop_or_enable_kicks(&mut self) -> Result<Option<Chain>, QueueError> {
        // Bounded, whatever a driver does that takes back what it made available.
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

    /// Has the device answer what is available, at most a queue's worth so that other devices get their turn.
    pub fn serve<E: From<QueueError>>(
        &mut self,
        mut handle: impl FnMut(&GuestMemory, Chain) -> Result<Answer, E>,
    ) -> Result<Ended, E> {
        self.serve_while(&mut (), |()| true, |(), memory, chain| handle(memory, chain))
    }

    /// As [`Self::serve`]; a chain is popped only while `device` wants one.
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

    /// Has this queue looked at again, after other events had their turn.
    pub fn kick_again(&self) {
        // Fails only when a kick is pending.
        let _ = self.kick.write(1);
    }

    /// Asks for kicks. True if chains became available meanwhile, for which none may come.
    pub fn enable_kicks(&mut self) -> Result<bool, QueueError> {
        if !self.queue.ready() {
            return Ok(false);
        }
        let queue = self.index;
        self.queue
            .enable_notification(&self.memory)
            .map_err(|error| QueueError::Ring { queue, error })
    }

    /// Asks for no kicks while the device is looking anyway.
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
