//! The memory behind a virtio-mem region: shown to the guest in pieces of 1 GiB, writable in blocks of 2 MiB.
//!
//! Invariant: the guest and the devices can write to pages of plugged blocks and to no others. Unplugged blocks are pages of
//! zeros that cost the host nothing ([`guest_io::withdraw`]). A guest that writes to one ends its machine. It may read one:
//! Linux does so by accident, for a word that reaches over the end of a plugged page (`load_unaligned_zeropad`).
//!
//! Page protection decides what is reachable, not memslots, because a memslot is slow: 0.4-0.8 ms (sometimes 4-6 ms) against
//! some microseconds. One memslot for the whole 64 GiB would cost KVM tables for all of it (with shadow paging 8 bytes a
//! page: 128 MiB) in every machine, and most machines never plug a block. So a piece gets its memslot when its first block is
//! plugged, and keeps it: a piece whose blocks are all unplugged again costs only its tables.
//!
//! Memslots for the first pieces could be made with the machine. That was measured and is not done: where KVM keeps shadow
//! tables it costs every parked machine 2.5 MiB of kernel memory a piece, and saves a start only time that passes while the
//! agent is busy with the handshake. The address space is one mapping from the start, so a device's buffers may cross pieces.

use std::io;
use std::sync::Arc;

use thaw_hypervisor::{Access, Vm};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{
    Address, GuestAddress, GuestMemoryRegion, GuestRegionMmap, MemoryRegionAddress, MmapRegion, VolatileSlice,
};

use super::BLOCK;
use super::blocks::Span;
use crate::layout::{Window, memslot};
use crate::virtio::guest_io;

/// Bytes of a piece: one memslot's worth.
const PIECE: u64 = 1 << 30;

/// Shows memory to the guest. KVM, or in tests nothing.
pub trait Slots: Send {
    fn show(&self, slot: u32, piece: Arc<GuestRegionMmap<()>>) -> Result<(), thaw_hypervisor::Error>;
    fn hide(&self, slot: u32) -> Result<(), thaw_hypervisor::Error>;
}

impl Slots for Arc<Vm> {
    fn show(&self, slot: u32, piece: Arc<GuestRegionMmap<()>>) -> Result<(), thaw_hypervisor::Error> {
        self.set_memory(slot, piece, Access::ReadWrite)
    }

    fn hide(&self, slot: u32) -> Result<(), thaw_hypervisor::Error> {
        self.remove_memory(slot)
    }
}

/// A region's memory and memslots.
pub struct MemorySlots {
    region: Arc<GuestRegionMmap<()>>,
    slots: Box<dyn Slots>,
    /// Which pieces the guest sees.
    shown: Vec<bool>,
}

/// Why memory cannot be shown to the guest.
#[derive(Debug, thiserror::Error)]
pub enum ShowError {
    #[error("memory slot {slot}: {error}")]
    Slot {
        slot: u32,
        error: thaw_hypervisor::Error,
    },
    #[error("piece {piece}: {error}")]
    Piece {
        piece: usize,
        error: vm_memory::mmap::MmapRegionError,
    },
    #[error("piece {0} ends past the last address")]
    Address(usize),
    #[error("letting the guest write blocks {first} to {last}: {error}; is vm.max_map_count below 65530?")]
    Protection {
        first: usize,
        last: usize,
        error: io::Error,
    },
}

/// Address space for the region: nothing is plugged, and nothing can be written.
pub fn reserve(window: Window) -> io::Result<GuestRegionMmap<()>> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let mapping =
        MmapRegion::build(None, window.size as usize, libc::PROT_READ, flags).map_err(io::Error::other)?;
    let region = GuestRegionMmap::new(mapping, GuestAddress(window.start))
        .ok_or_else(|| io::Error::other("it ends past the last address"))?;
    let whole = region.get_slice(MemoryRegionAddress(0), window.size as usize);
    guest_io::withdraw(&whole.map_err(io::Error::other)?)?;
    Ok(region)
}

impl MemorySlots {
    /// `region` is [`reserve`]d.
    pub fn new(region: Arc<GuestRegionMmap<()>>, slots: impl Slots + 'static) -> MemorySlots {
        let pieces = region.len().div_ceil(PIECE) as usize;
        MemorySlots {
            region,
            slots: Box::new(slots),
            shown: vec![false; pieces],
        }
    }

    /// First guest address.
    pub fn start(&self) -> u64 {
        self.region.start_addr().raw_value()
    }

    /// Bytes.
    pub fn size(&self) -> u64 {
        self.region.len()
    }

    /// Has the guest reach the blocks of `span`, which are withdrawn and become zero pages of its own. When that fails,
    /// they are withdrawn.
    pub fn plug(&mut self, span: Span) -> Result<(), ShowError> {
        self.show(span)?;
        let pages = self.pages(span).map_err(|error| protection(span, error))?;
        guest_io::provide(&pages).map_err(|error| {
            // A part may be writable: the kernel changes one mapping after the other.
            let undone = guest_io::withdraw(&pages);
            if let Err(error) = undone {
                tracing::error!(%error, ?span, "blocks that are not plugged may stay writable");
            }
            protection(span, error)
        })
    }

    /// Has the guest reach the blocks of `span` as the restore has mapped them.
    pub fn restore(&mut self, span: Span) -> Result<(), ShowError> {
        self.show(span)?;
        self.pages(span)
            .and_then(|pages| guest_io::allow_writes(&pages))
            .map_err(|error| protection(span, error))
    }

    /// Makes the blocks of `span` pages of zeros that cannot be written, and gives theirs back to the host. They may be a
    /// snapshot's, so it takes a new mapping.
    pub fn unplug(&self, span: Span) -> io::Result<()> {
        guest_io::withdraw(&self.pages(span)?)
    }

    /// Sees to it that the pieces of `span` have memslots.
    fn show(&mut self, span: Span) -> Result<(), ShowError> {
        let (start, end) = bytes(span);
        for piece in start / PIECE..end.div_ceil(PIECE) {
            self.show_piece(piece as usize)?;
        }
        Ok(())
    }

    fn pages(&self, span: Span) -> io::Result<VolatileSlice<'_>> {
        let (start, end) = bytes(span);
        self.region
            .get_slice(MemoryRegionAddress(start), (end - start) as usize)
            .map_err(io::Error::other)
    }

    fn show_piece(&mut self, piece: usize) -> Result<(), ShowError> {
        if self.shown[piece] {
            return Ok(());
        }
        let slot = memslot::VIRTIO_MEM + piece as u32;
        self.slots
            .show(slot, Arc::new(self.piece(piece)?))
            .map_err(|error| ShowError::Slot { slot, error })?;
        self.shown[piece] = true;
        Ok(())
    }

    /// A view of one piece of the region.
    fn piece(&self, piece: usize) -> Result<GuestRegionMmap<()>, ShowError> {
        let offset = piece as u64 * PIECE;
        let size = PIECE.min(self.region.len() - offset);
        let host = self.region.as_ptr().wrapping_add(offset as usize);
        let builder = MmapRegionBuilder::new(size as usize)
            .with_mmap_prot(self.region.prot())
            .with_mmap_flags(self.region.flags());
        // SAFETY: the range is inside `region`'s mapping, which lives until `drop` has taken every view from KVM,
        // or for ever.
        let view = unsafe { builder.with_raw_mmap_pointer(host) }
            .build()
            .map_err(|error| ShowError::Piece { piece, error })?;
        GuestRegionMmap::new(view, GuestAddress(self.start() + offset)).ok_or(ShowError::Address(piece))
    }
}

impl Drop for MemorySlots {
    fn drop(&mut self) {
        for (piece, _) in self.shown.iter().enumerate().filter(|(_, shown)| **shown) {
            if let Err(error) = self.slots.hide(memslot::VIRTIO_MEM + piece as u32) {
                tracing::warn!(%error, piece, "memslot kept, and its memory with it");
                std::mem::forget(self.region.clone());
            }
        }
    }
}

/// First byte of a span and the byte after it, from the region's start.
fn bytes(span: Span) -> (u64, u64) {
    let start = span.first as u64 * BLOCK;
    (start, start + span.count as u64 * BLOCK)
}

fn protection(span: Span, error: io::Error) -> ShowError {
    ShowError::Protection {
        first: span.first,
        last: span.first + span.count - 1,
        error,
    }
}
