//! The memory behind a virtio-mem region: added to the guest in pieces of 1 GiB, writable in blocks of 2 MiB.
//!
//! Invariant: the guest and the devices can write only to pages of plugged blocks. Unplugged blocks are pages of zeros that cost the host
//! nothing ([`guest_io::withdraw`]). If a guest writes to one, its machine ends. Reading one is allowed: Linux does so by accident, for a
//! word that extends past the end of a plugged page (`load_unaligned_zeropad`).
//!
//! Page protection decides which blocks are reachable, not memslots, because a memslot is slow: 0.4-0.8 ms (sometimes 4-6 ms) against some
//! microseconds. One memslot for the whole 64 GiB would need KVM tables for all of it in every machine (with shadow paging 8 bytes a page:
//! 128 MiB), and most machines never plug a block. So a piece gets its memslot when its first block is plugged, and keeps it. When all its
//! blocks are unplugged again, it costs only its tables.
//!
//! Memslots for the first pieces could be made with the machine. Measurements spoke against it: where KVM keeps shadow tables, every parked
//! machine would need 2.5 MiB more kernel memory for each piece, and a start would save only time in which the agent is busy with the
//! handshake anyway. The address space is one mapping from the start, so a device's buffers may cross pieces.

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

/// Adds memory to the guest: KVM, or nothing in tests.
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
    /// By piece: whether it has a memslot.
    shown: Vec<bool>,
}

/// Why memory cannot be added to the guest.
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

/// Reserves address space for the region. Nothing is plugged or writable.
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
    /// `region` must come from [`reserve`].
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

    /// Lets the guest access the blocks of `span`, which are withdrawn and become new zero pages. If this fails, they stay withdrawn.
    pub fn plug(&mut self, span: Span) -> Result<(), ShowError> {
        self.show(span)?;
        let pages = self.pages(span).map_err(|error| protection(span, error))?;
        guest_io::provide(&pages).map_err(|error| {
            // Some of the pages may be writable by now, because the kernel changes one mapping after the other.
            let undone = guest_io::withdraw(&pages);
            if let Err(error) = undone {
                tracing::error!(%error, ?span, "blocks that are not plugged may stay writable");
            }
            protection(span, error)
        })
    }

    /// Lets the guest access the blocks of `span` as the restore has mapped them.
    pub fn restore(&mut self, span: Span) -> Result<(), ShowError> {
        self.show(span)?;
        self.pages(span)
            .and_then(|pages| guest_io::allow_writes(&pages))
            .map_err(|error| protection(span, error))
    }

    /// Replaces the blocks of `span` by read-only zero pages and frees their memory. They may be mapped from a snapshot, so this needs a
    /// new mapping.
    pub fn unplug(&self, span: Span) -> io::Result<()> {
        guest_io::withdraw(&self.pages(span)?)
    }

    /// Adds memslots for the pieces of `span` that have none.
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
        // SAFETY: the range is inside `region`'s mapping. It lives at least until `drop` has removed every view from KVM; if a removal
        // fails, `drop` keeps the mapping for ever.
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

/// The offsets of a span's first byte and of the byte after it, from the region's start.
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
