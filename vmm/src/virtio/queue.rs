//! One split virtqueue of an active device: pop a chain, give it back used, interrupt if the driver wants it.
//!
//! A [`Chain`] is checked whole before a device sees it: it does not loop, it ends, its readable buffers come before its
//! writable ones (virtio 1.2 §2.7.4.2), it is not over 2^32 bytes, and it has no more buffers than the queue can have
//! descriptors (§2.7.5.3.1), whether they lie in an indirect table or not. Where its buffers are is checked when they are used
//! ([`Chain::readable`], [`Chain::writable`]), so a device can answer a request whose data lies outside memory.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueOwnedT, QueueState, QueueT};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemory as _, GuestRegionMmap, MmapRegion, VolatileSlice};
use vmm_sys_util::eventfd::EventFd;

use super::interrupt::Interrupt;
use super::state::QueueRecord;
use crate::memory::GuestMemory;

/// Where [`DeviceQueue::chain_at`] has its ring: beyond any guest address.
const OWN_RING: u64 = 1 << 61;
const RING_BYTES: usize = 4096;

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

/// A buffer of a chain that is not in guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("buffer at {address:#x}, {length} bytes, is outside guest memory")]
pub struct OutsideMemory {
    pub address: u64,
    pub length: u32,
}

/// A guest buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    pub address: GuestAddress,
    pub length: u32,
}

/// A request: what the driver wrote for the device, then where the device may write.
#[derive(Clone, Debug)]
pub struct Chain {
    head: u16,
    buffers: Vec<Buffer>,
    /// Buffers before this are readable, the rest writable.
    split: usize,
}

impl Chain {
    /// The head descriptor's index, which names the chain in the used ring.
    pub fn head(&self) -> u16 {
        self.head
    }

    /// The buffers the device may only read.
    pub fn readable_buffers(&self) -> &[Buffer] {
        &self.buffers[..self.split]
    }

    /// The buffers the device may only write.
    pub fn writable_buffers(&self) -> &[Buffer] {
        &self.buffers[self.split..]
    }

    /// Bytes the device may read.
    pub fn readable_len(&self) -> u64 {
        self.readable_buffers().iter().map(|b| u64::from(b.length)).sum()
    }

    /// Bytes the device may write.
    pub fn writable_len(&self) -> u64 {
        self.writable_buffers().iter().map(|b| u64::from(b.length)).sum()
    }

    /// The readable bytes as slices of guest memory.
    pub fn readable<'m>(&self, memory: &'m GuestMemory) -> Result<Vec<VolatileSlice<'m>>, OutsideMemory> {
        slices(memory, self.readable_buffers())
    }

    /// The writable bytes as slices of guest memory.
    pub fn writable<'m>(&self, memory: &'m GuestMemory) -> Result<Vec<VolatileSlice<'m>>, OutsideMemory> {
        slices(memory, self.writable_buffers())
    }

    /// The last byte the device may write, where some device types want a status; none if that is nowhere.
    pub fn last_writable_byte<'m>(&self, memory: &'m GuestMemory) -> Option<VolatileSlice<'m>> {
        let last = self.writable_buffers().iter().rev().find(|b| b.length > 0)?;
        memory
            .get_slice(last.address.checked_add(u64::from(last.length) - 1)?, 1)
            .ok()
    }
}

fn slices<'m>(memory: &'m GuestMemory, buffers: &[Buffer]) -> Result<Vec<VolatileSlice<'m>>, OutsideMemory> {
    buffers
        .iter()
        .filter(|b| b.length > 0)
        .map(|b| {
            memory
                .get_slice(b.address, b.length as usize)
                .map_err(|_| OutsideMemory {
                    address: b.address.raw_value(),
                    length: b.length,
                })
        })
        .collect()
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
        let head = chain.head_index();
        collect(head, chain, self.longest())
            .map(Some)
            .ok_or(QueueError::Chain { queue, head })
    }

    /// The chain whose head is `head`, popped before the freeze and not given back since.
    pub fn chain_at(&self, head: u16) -> Result<Chain, QueueError> {
        let queue = self.index;
        let malformed = || QueueError::Chain { queue, head };
        let ring = |error| QueueError::Ring { queue, error };
        // A chain is read by way of an available ring. This one has a single entry, where only this process sees it.
        let region = MmapRegion::new(RING_BYTES)
            .ok()
            .and_then(|mapping| GuestRegionMmap::new(mapping, GuestAddress(OWN_RING)))
            .ok_or_else(malformed)?;
        let memory = self
            .memory
            .insert_region(Arc::new(region))
            .map_err(|_| malformed())?;
        let entry = [0u16, 1, head].map(u16::to_le_bytes).concat();
        memory
            .write_slice(&entry, GuestAddress(OWN_RING))
            .map_err(|_| malformed())?;
        let state = QueueState {
            avail_ring: OWN_RING,
            next_avail: 0,
            ..self.queue.state()
        };
        let chain = Queue::try_from(state)
            .map_err(ring)?
            .pop_descriptor_chain(&memory)
            .ok_or_else(malformed)?;
        collect(head, chain, self.longest()).ok_or_else(malformed)
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

/// Reads a chain whole; none if it is malformed or has more than `longest` buffers.
fn collect(head: u16, chain: impl Iterator<Item = Descriptor>, longest: usize) -> Option<Chain> {
    let mut buffers = Vec::new();
    let mut split = None;
    let mut ended = false;
    for descriptor in chain {
        if buffers.len() == longest {
            return None;
        }
        match (descriptor.is_write_only(), split) {
            (true, None) => split = Some(buffers.len()),
            (false, Some(_)) => return None,
            _ => {}
        }
        buffers.push(Buffer {
            address: descriptor.addr(),
            length: descriptor.len(),
        });
        // The iterator stops silently at a loop, a bad index or an unreadable table: then the last one has a next.
        ended = !descriptor.has_next();
    }
    let split = split.unwrap_or(buffers.len());
    ended.then_some(Chain { head, buffers, split })
}

#[cfg(test)]
#[path = "queue_test.rs"]
mod tests;
