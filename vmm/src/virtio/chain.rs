//! A request of a driver: a chain of buffers, first those the device reads, then those it may write.
//!
//! A [`Chain`] is checked completely before a device sees it, and each descriptor is read once. The chain has an end and no loop. Its
//! readable buffers come before its writable ones (virtio 1.2 §2.7.4.2). It has at most 2^32 bytes, and no more buffers than the queue can
//! have descriptors (§2.7.5.3.1), also with an indirect table. The buffers' addresses are checked when they are used ([`Chain::readable`],
//! [`Chain::writable`]), so a device can answer a request whose data lies outside memory.

use smallvec::SmallVec;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Address, Bytes, GuestAddress, GuestMemory as _, VolatileSlice};

use crate::memory::GuestMemory;

/// A buffer of a chain is outside guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("buffer at {address:#x}, {length} bytes, is outside guest memory")]
pub struct OutsideMemory {
    pub address: u64,
    pub length: u32,
}

/// A buffer as a slice of guest memory.
pub type InMemory<'m> = Result<VolatileSlice<'m>, OutsideMemory>;

/// A guest buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    pub address: GuestAddress,
    pub length: u32,
}

/// A chain's buffers: without an allocation if there are as few as a small frame or a message without data has.
type Buffers = SmallVec<[Buffer; 4]>;

/// A request: the bytes that the driver wrote for the device, then the buffers that the device may write to.
#[derive(Clone, Debug)]
pub struct Chain {
    head: u16,
    buffers: Buffers,
    /// Buffers before this are readable, the rest writable.
    split: usize,
}

impl Chain {
    /// Reads the chain of descriptor `head` from a table of `size` descriptors. `None` if it is malformed or has more than `longest`
    /// buffers.
    pub(super) fn read(
        memory: &GuestMemory,
        table: GuestAddress,
        size: u16,
        head: u16,
        longest: usize,
    ) -> Option<Chain> {
        let mut buffers = Buffers::new();
        let mut split = None;
        let mut bytes: u32 = 0;
        let mut table = Table {
            start: table,
            size,
            is_indirect: false,
        };
        let mut index = head;
        let mut left = size;
        loop {
            // More descriptors than the table has mean a loop.
            left = left.checked_sub(1)?;
            let descriptor = table.descriptor(memory, index)?;
            if descriptor.refers_to_indirect_table() {
                table = table.indirect(&descriptor)?;
                (index, left) = (0, table.size);
                continue;
            }
            if buffers.len() == longest {
                return None;
            }
            match (descriptor.is_write_only(), split) {
                (true, None) => split = Some(buffers.len()),
                (false, Some(_)) => return None,
                _ => {}
            }
            bytes = bytes.checked_add(descriptor.len())?;
            buffers.push(Buffer {
                address: descriptor.addr(),
                length: descriptor.len(),
            });
            if !descriptor.has_next() {
                let split = split.unwrap_or(buffers.len());
                return Some(Chain { head, buffers, split });
            }
            index = descriptor.next();
        }
    }

    /// The index of the head descriptor, which identifies the chain in the used ring.
    pub fn head(&self) -> u16 {
        self.head
    }

    /// The buffers that the device may only read.
    pub fn readable_buffers(&self) -> &[Buffer] {
        &self.buffers[..self.split]
    }

    /// The buffers that the device may only write.
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
        self.readable_slices(memory).collect()
    }

    /// The writable bytes as slices of guest memory.
    pub fn writable<'m>(&self, memory: &'m GuestMemory) -> Result<Vec<VolatileSlice<'m>>, OutsideMemory> {
        self.writable_slices(memory).collect()
    }

    /// As [`Self::readable`], without an allocation.
    pub fn readable_slices<'m>(&self, memory: &'m GuestMemory) -> impl Iterator<Item = InMemory<'m>> {
        slices(memory, self.readable_buffers())
    }

    /// As [`Self::writable`], without an allocation.
    pub fn writable_slices<'m>(&self, memory: &'m GuestMemory) -> impl Iterator<Item = InMemory<'m>> {
        slices(memory, self.writable_buffers())
    }

    /// The last byte that the device may write, where some device types put a status. `None` if it is outside memory or there is none.
    pub fn last_writable_byte<'m>(&self, memory: &'m GuestMemory) -> Option<VolatileSlice<'m>> {
        let last = self.writable_buffers().iter().rev().find(|b| b.length > 0)?;
        memory
            .get_slice(last.address.checked_add(u64::from(last.length) - 1)?, 1)
            .ok()
    }
}

/// The descriptor table of a chain: the queue's, then at most one indirect table (§2.7.5.3).
struct Table {
    start: GuestAddress,
    size: u16,
    is_indirect: bool,
}

impl Table {
    fn descriptor(&self, memory: &GuestMemory, index: u16) -> Option<Descriptor> {
        if index >= self.size {
            return None;
        }
        let offset = u64::from(index) * size_of::<Descriptor>() as u64;
        memory.read_obj(self.start.checked_add(offset)?).ok()
    }

    /// The table that `descriptor`, one of this table's, refers to.
    fn indirect(&self, descriptor: &Descriptor) -> Option<Table> {
        let size = size_of::<Descriptor>() as u32;
        if self.is_indirect || !descriptor.len().is_multiple_of(size) {
            return None;
        }
        Some(Table {
            start: descriptor.addr(),
            size: u16::try_from(descriptor.len() / size).ok()?,
            is_indirect: true,
        })
    }
}

fn slices<'m>(memory: &'m GuestMemory, buffers: &[Buffer]) -> impl Iterator<Item = InMemory<'m>> {
    buffers.iter().filter(|b| b.length > 0).map(move |b| {
        memory
            .get_slice(b.address, b.length as usize)
            .map_err(|_| OutsideMemory {
                address: b.address.raw_value(),
                length: b.length,
            })
    })
}
