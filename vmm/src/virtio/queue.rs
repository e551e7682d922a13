//! One split virtqueue of an active device: pop a chain, give it back used, interrupt if the driver wants it.

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

    /// Serves what is available, at most a queue's worth so that other devices get their turn, then kicks itself for
    /// the rest. `serve` answers a chain and says how many bytes it wrote.
    pub fn serve<E: From<QueueError>>(
        &mut self,
        mut serve: impl FnMut(&GuestMemory, &Chain) -> Result<u32, E>,
    ) -> Result<(), E> {
        self.disable_kicks()?;
        for _ in 0..self.queue.size() {
            match self.pop()? {
                Some(chain) => {
                    let written = serve(&self.memory, &chain)?;
                    self.add_used(chain.head(), written)?;
                }
                None if self.enable_kicks()? => {}
                None => return Ok(self.signal()?),
            }
        }
        self.kick_again();
        Ok(self.signal()?)
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
