//! Writes guest memory to a file: all of it, the pages written since the restore, or these and the layers above a base as one layer.
//!
//! Invariant: a thaw of the resulting map gives the same guest memory. Zero pages are in no extent; if a page of an earlier layer became
//! zero, that layer's extent is cut there. To have fewer extents, the bytes between two runs of pages may be copied too. They are copied
//! from memory, so they are right whatever layer they were in.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;

use thaw_protocol::control::FreezeKind;
use vm_memory::{Address, GuestAddress, GuestMemory as _, GuestMemoryRegion, VolatileSlice};

use super::memory_map::{Extent, MAX_LAYERS, Region};
use super::pagemap::{PageKind, Pagemap};
use super::{MapError, MemoryMap, PAGE, mapping, ranges};
use crate::layout::{self, Window};
use crate::memory::GuestMemory;
use crate::virtio::{guest_io, mem};

/// A full freeze copies gaps smaller than this between its data: zeros on disk are cheaper than a mapping in every clone.
const FULL_GAP: u64 = 256 << 10;
/// The same for a delta. Smaller, because its gaps often hold another layer's data, which would be stored again.
const DELTA_GAP: u64 = 64 << 10;
/// The same for a delta over a part of the layers: it closes none, so that it stores nothing that its base has. A paused sandbox, for which it
/// is made, is thawed once.
const OVER_GAP: u64 = PAGE;
/// Most extents a freeze makes; larger gaps are closed to stay below. Each extent costs every restore a microsecond or two.
const EXTENTS: usize = 2048;

/// Why memory could not be written.
#[derive(Debug, thiserror::Error)]
pub enum FreezeError {
    #[error("this machine was booted, not restored: there is nothing to be a delta over; freeze it in full")]
    NoBase,
    #[error("this machine's memory has {0} layers already; freeze it in full")]
    TooManyLayers(u8),
    #[error("this machine's memory has {has} layers: there is no delta over {wanted} of them")]
    NoSuchBase { wanted: u8, has: u8 },
    #[error("the memory to freeze is not in order, or not this machine's: {0}")]
    NotMemory(String),
    #[error("the memory file is not empty")]
    NotEmpty,
    #[error("the descriptor handed as pagemap is not that of this process")]
    NotOurPagemap,
    #[error("reading the pagemap: {0}")]
    Pagemap(io::Error),
    #[error("writing memory {guest_address:#x} ({size:#x} bytes): {error}; is there room?")]
    Write {
        guest_address: u64,
        size: u64,
        error: io::Error,
    },
    #[error("the memory file: {0}")]
    File(io::Error),
    #[error(transparent)]
    Map(#[from] MapError),
}

/// The result of writing memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frozen {
    /// The map of all guest memory; the file written is its top layer.
    pub map: MemoryMap,
    /// Bytes written; the rest of the file is holes.
    pub bytes: u64,
}

/// Writes guest memory to `out`, which is empty and becomes a sparse file of the map's size. Nothing may touch guest memory meanwhile:
/// vCPUs are paused, devices quiet.
///
/// `memory` is boot memory and virtio-mem's region. `live` are the guest addresses that are memory now: boot memory and the blocks
/// virtio-mem has plugged; sorted, disjoint, whole pages. `base` is the map that this machine was restored from, if any. `pagemap` is this
/// process's.
///
/// [`FreezeKind::Full`]: one layer with all pages that are not zero. [`FreezeKind::Delta`]: one layer more than `base`, with the pages
/// written since the restore. [`FreezeKind::DeltaOver`]: one layer above a part of the layers of `base`, with these pages and with the data of
/// the other layers.
pub fn freeze_memory(
    kind: FreezeKind,
    memory: &GuestMemory,
    live: &[Range<u64>],
    base: Option<&MemoryMap>,
    pagemap: &File,
    out: &File,
) -> Result<Frozen, FreezeError> {
    let pagemap = check(memory, live, pagemap, out)?;
    let source = Source {
        memory,
        live,
        pagemap,
    };
    let plan = match Under::of(kind, base)? {
        None => source.full(base)?,
        Some(under) => source.delta(&under)?,
    };
    let top = plan.top;
    let map = plan.map(memory)?;
    out.set_len(map.file_size()).map_err(FreezeError::File)?;
    let mut bytes = 0;
    for extent in map.extents().iter().filter(|extent| extent.layer == top) {
        write_pages(memory, &extent.range(), &map, out)?;
        bytes += extent.size;
    }
    Ok(Frozen { map, bytes })
}

/// Checks what a freeze is given.
pub(super) fn check<'f>(
    memory: &GuestMemory,
    live: &[Range<u64>],
    pagemap: &'f File,
    out: &File,
) -> Result<Pagemap<'f>, FreezeError> {
    if out.metadata().map_err(FreezeError::File)?.len() != 0 {
        return Err(FreezeError::NotEmpty);
    }
    check_live(memory, live)?;
    Pagemap::new(pagemap)
        .map_err(FreezeError::Pagemap)?
        .ok_or(FreezeError::NotOurPagemap)
}

/// Writes this guest memory to its place in the file.
pub(super) fn write_pages(
    memory: &GuestMemory,
    range: &Range<u64>,
    map: &MemoryMap,
    out: &File,
) -> Result<(), FreezeError> {
    let offset = map.file_offset(range.start).unwrap_or_default();
    guest_io::write_all_at(out.as_fd(), &[slice(memory, range)?], offset).map_err(|error| {
        FreezeError::Write {
            guest_address: range.start,
            size: range.end - range.start,
            error,
        }
    })
}

/// What a delta lies on.
pub(super) struct Under {
    /// The layers that stay.
    base: MemoryMap,
    /// The data of the layers that the delta replaces: it has to write them too.
    pub replaced: Vec<Range<u64>>,
    /// Gaps smaller than this are copied.
    gap: u64,
}

impl Under {
    /// What a freeze of this kind lies on, in a machine that was restored from `base`. `None` for a full freeze.
    pub fn of(kind: FreezeKind, base: Option<&MemoryMap>) -> Result<Option<Under>, FreezeError> {
        let base = match kind {
            FreezeKind::Full => return Ok(None),
            FreezeKind::Delta | FreezeKind::DeltaOver { .. } => base.ok_or(FreezeError::NoBase)?,
        };
        let has = base.layers();
        let (layers, gap) = match kind {
            FreezeKind::DeltaOver { layers } => (layers, OVER_GAP),
            _ => (has, DELTA_GAP),
        };
        if !(1..=has).contains(&layers) {
            return Err(FreezeError::NoSuchBase { wanted: layers, has });
        }
        if layers >= MAX_LAYERS {
            return Err(FreezeError::TooManyLayers(layers));
        }
        Ok(Some(Under {
            base: base.lowest(layers),
            replaced: base.data_above(layers),
            gap,
        }))
    }

    /// The pages whose contents decide, if this process has written `written`: those that are to be written unless they are zero, and those that
    /// the base has, but that may be zero. virtio-mem may have unplugged and plugged pages again since the restore: the base has data for
    /// them, but they are zero. The pagemap shows them as untouched; if only read, as pages of a file, because the kernel's huge page of zeros
    /// looks like one.
    pub fn to_look_at(&self, written: &[Range<u64>]) -> Vec<Range<u64>> {
        let Window { start, size } = layout::VIRTIO_MEM;
        let window = start..start + size;
        let hotplugged = ranges::intersection(&self.base.data(), std::slice::from_ref(&window));
        ranges::union(written, &hotplugged)
    }

    /// A layer above the base, with the pages that were written. `zero` pages are in no layer.
    pub fn plan(&self, written: &[Range<u64>], zero: &[Range<u64>], live: &[Range<u64>]) -> Plan {
        let top = self.base.layers();
        let kept = ranges::difference(live, zero);
        let extents = fewest(self.gap, |gap| {
            let copied = ranges::close_gaps(written, gap, live);
            let mut extents = self.base.extents_within(&ranges::difference(&kept, &copied));
            extents.extend(copied.into_iter().map(|range| Extent::new(range, top)));
            extents.sort_unstable_by_key(|extent| extent.guest_address);
            extents
        });
        Plan { top, extents }
    }
}

/// The extents to write, and those that stay in earlier layers.
pub(super) struct Plan {
    /// The layer to write.
    pub top: u8,
    extents: Vec<Extent>,
}

impl Plan {
    /// One layer, with the pages that have `data`.
    pub fn full(data: &[Range<u64>], live: &[Range<u64>]) -> Plan {
        let extents = fewest(FULL_GAP, |gap| {
            ranges::close_gaps(data, gap, live)
                .into_iter()
                .map(|range| Extent::new(range, 0))
                .collect()
        });
        Plan { top: 0, extents }
    }

    /// The map of the memory file that this makes.
    pub fn map(self, memory: &GuestMemory) -> Result<MemoryMap, MapError> {
        let end = self.extents.last().map_or(0, |extent| extent.range().end);
        MemoryMap::new(regions(memory, end), self.top + 1, self.extents)
    }
}

struct Source<'a> {
    memory: &'a GuestMemory,
    live: &'a [Range<u64>],
    pagemap: Pagemap<'a>,
}

/// Pages that were checked for zeros.
#[derive(Default)]
pub(super) struct Pages {
    pub data: Vec<Range<u64>>,
    pub zero: Vec<Range<u64>>,
}

impl Pages {
    /// Adds the pages of `range`, each of which is zero or not.
    pub fn add(&mut self, range: &Range<u64>, zeros: &[bool]) {
        for (at, is_zero) in (range.start..range.end).step_by(PAGE as usize).zip(zeros) {
            let list = match is_zero {
                true => &mut self.zero,
                false => &mut self.data,
            };
            ranges::push(list, at..at + PAGE);
        }
    }
}

impl Source<'_> {
    fn full(&self, base: Option<&MemoryMap>) -> Result<Plan, FreezeError> {
        // Pages never touched in this process are in the files it was restored from.
        let untouched = base.map(MemoryMap::data).unwrap_or_default();
        let there = ranges::union(&self.pages_that(|kind| kind != PageKind::Absent)?, &untouched);
        let data = look_at(self.memory, &ranges::intersection(&there, self.live))?.data;
        Ok(Plan::full(&data, self.live))
    }

    fn delta(&self, under: &Under) -> Result<Plan, FreezeError> {
        let own = self.pages_that(|kind| kind == PageKind::Written)?;
        let written = ranges::union(&own, &under.replaced);
        let pages = ranges::intersection(&under.to_look_at(&written), self.live);
        let seen = look_at(self.memory, &pages)?;
        let data = ranges::intersection(&seen.data, &written);
        Ok(under.plan(&data, &seen.zero, self.live))
    }

    /// The live pages whose kind is `wanted`.
    fn pages_that(&self, wanted: impl Fn(PageKind) -> bool) -> Result<Vec<Range<u64>>, FreezeError> {
        let mut pages = Vec::new();
        for range in self.live {
            let size = range.end - range.start;
            let host = mapping::host_address(self.memory, range.start, size)
                .ok_or_else(|| FreezeError::NotMemory(format!("{range:#x?}")))?;
            self.pagemap
                .runs(host, size, |run, kind| {
                    if wanted(kind) {
                        ranges::push(&mut pages, range.start + run.start..range.start + run.end);
                    }
                })
                .map_err(FreezeError::Pagemap)?;
        }
        Ok(pages)
    }
}

/// Sorts pages into zero and not zero.
pub(super) fn look_at(memory: &GuestMemory, pages: &[Range<u64>]) -> Result<Pages, FreezeError> {
    let mut found = Pages::default();
    for range in pages {
        found.add(range, &zeros(memory, range)?);
    }
    Ok(found)
}

/// Tells for each page of `range` whether it is zero.
pub(super) fn zeros(memory: &GuestMemory, range: &Range<u64>) -> Result<Vec<bool>, FreezeError> {
    let slice = slice(memory, range)?;
    let pages = (0..range.end - range.start).step_by(PAGE as usize);
    let is_zero = |page| {
        let bytes = slice
            .subslice(page as usize, PAGE as usize)
            .map_err(|e| FreezeError::NotMemory(e.to_string()))?;
        Ok(is_zero(&bytes))
    };
    pages.map(is_zero).collect()
}

pub(super) fn slice<'m>(
    memory: &'m GuestMemory,
    range: &Range<u64>,
) -> Result<VolatileSlice<'m>, FreezeError> {
    memory
        .get_slice(GuestAddress(range.start), (range.end - range.start) as usize)
        .map_err(|e| FreezeError::NotMemory(e.to_string()))
}

/// Calls `make` with growing gaps, until it makes few enough extents.
fn fewest(mut gap: u64, make: impl Fn(u64) -> Vec<Extent>) -> Vec<Extent> {
    loop {
        let extents = make(gap);
        // A gap as large as the largest region closes every gap that can be closed.
        if extents.len() <= EXTENTS || gap > layout::VIRTIO_MEM.size {
            return extents;
        }
        gap *= 2;
    }
}

pub(super) fn is_zero(page: &VolatileSlice<'_>) -> bool {
    let mut bytes = [0; PAGE as usize];
    page.copy_to(&mut bytes);
    // Whole cache lines: a line's bytes are or-ed with vector instructions.
    bytes
        .as_chunks::<64>()
        .0
        .iter()
        .all(|line| line.iter().fold(0, |all, byte| all | byte) == 0)
}

fn check_live(memory: &GuestMemory, live: &[Range<u64>]) -> Result<(), FreezeError> {
    let outside = live.iter().find(|range| {
        mapping::host_address(memory, range.start, range.end.saturating_sub(range.start)).is_none()
    });
    if !ranges::is_list(live, PAGE) || outside.is_some() {
        return Err(FreezeError::NotMemory(format!("{live:#x?}")));
    }
    Ok(())
}

/// The regions of a memory file. Virtio-mem's region, which is last and mostly empty, ends with the data, at `end`; what follows needs no
/// space.
pub(super) fn regions(memory: &GuestMemory, end: u64) -> Vec<Region> {
    let mut regions = Vec::new();
    for region in memory.iter() {
        let (guest_address, mut size) = (region.start_addr().raw_value(), region.len());
        if guest_address == layout::VIRTIO_MEM.start {
            size = end.saturating_sub(guest_address).next_multiple_of(mem::BLOCK);
        }
        if size > 0 {
            regions.push(Region { guest_address, size });
        }
    }
    regions
}

#[cfg(test)]
#[path = "freeze_test.rs"]
mod tests;
