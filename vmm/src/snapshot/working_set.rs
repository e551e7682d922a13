//! The pages a clone touches first: recorded once, then mapped in advance in every later clone.
//!
//! A first touch costs a page fault of some microseconds, and a start consists mostly of those. So one clone records which pages it touched
//! between thaw and ready. Later clones map these pages before the guest runs: pages that were only read are mapped from the file, pages
//! that were written are copied.
//!
//! Invariant: a working set is only a hint. An old, wrong or hostile one costs time and a bounded amount of memory, but never changes
//! contents. A page that cannot be mapped in advance is mapped when it is touched.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Once;

use rustix::io::Errno;

use super::freeze::{FreezeError, look_at};
use super::mapping::{self, Hint};
use super::memory_map::Region;
use super::pagemap::{PageKind, Pagemap};
use super::records::{Fields, Format, HEADER};
use super::{FileError, MemoryMap, PAGE, ranges};
use crate::clock::monotonic_ns;
use crate::layout;
use crate::memory::GuestMemory;

/// The `working-set` file.
pub const FORMAT: Format = Format {
    name: "working-set",
    magic: *b"THAWWSET",
    version: 1,
    max_bytes: HEADER as u64 + MAX_RUNS as u64 * RUN_BYTES as u64,
};
/// Most runs in a file.
pub const MAX_RUNS: usize = 65536;
/// Bytes of a run in the file.
const RUN_BYTES: usize = 16;
/// Most pages copied in advance: 128 MiB. A working set cannot help a start that writes more.
pub const MAX_WRITTEN_PAGES: u64 = 32768;
/// The flag of a run whose pages were written.
const WRITTEN: u32 = 1;

/// Gaps smaller than this between runs that were read are mapped too: the pages are in the page cache, and another call costs more.
const READ_GAP: u64 = 8 * PAGE;
/// Bytes populated by one call. The kernel holds the address space's lock meanwhile, and other threads' faults wait for it.
const BATCH: u64 = 2 << 20;

/// Pages, as a list of runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkingSet {
    runs: Vec<Run>,
}

/// Neighbouring pages, all read or all written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Offset in the memory file, in pages.
    pub first: u64,
    pub pages: u32,
    /// Whether the guest or a device wrote them.
    pub written: bool,
}

/// The result of mapping pages in advance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Populated {
    pub pages: u64,
    /// Nanoseconds it took.
    pub ns: u64,
}

/// The pages touched since `map` was mapped into memory. `pagemap` is this process's. Runs beyond [`MAX_RUNS`] are left out.
pub fn record(memory: &GuestMemory, map: &MemoryMap, pagemap: &File) -> Result<WorkingSet, FreezeError> {
    let pagemap = Pagemap::new(pagemap)
        .map_err(FreezeError::Pagemap)?
        .ok_or(FreezeError::NotOurPagemap)?;
    let (mut read, mut written) = (Vec::new(), Vec::new());
    for &Region { guest_address, size } in map.regions() {
        let host = mapping::host_address(memory, guest_address, size)
            .ok_or_else(|| FreezeError::NotMemory(format!("{guest_address:#x}")))?;
        pagemap
            .runs(host, size, |run, kind| {
                let range = guest_address + run.start..guest_address + run.end;
                match kind {
                    PageKind::Absent => {}
                    PageKind::Read => ranges::push(&mut read, range),
                    PageKind::Written => ranges::push(&mut written, range),
                }
            })
            .map_err(FreezeError::Pagemap)?;
    }
    // Where the snapshot has no data, a page that was only read looks written; such a page is zero.
    let fresh = ranges::difference(&written, &map.data());
    let zero = look_at(memory, &fresh)?.zero;
    let mut runs = runs_of(map, &ranges::difference(&written, &zero), true);
    runs.extend(runs_of(map, &ranges::union(&read, &zero), false));
    runs.sort_unstable_by_key(|run| run.first);
    runs.truncate(MAX_RUNS);
    Ok(WorkingSet { runs })
}

/// Ranges inside the map's regions, as runs.
fn runs_of(map: &MemoryMap, list: &[Range<u64>], written: bool) -> Vec<Run> {
    let run = |range: &Range<u64>| {
        Some(Run {
            first: map.file_offset(range.start)? / PAGE,
            pages: u32::try_from((range.end - range.start) / PAGE).ok()?,
            written,
        })
    };
    list.iter().filter_map(run).collect()
}

/// Maps the pages of `set` that lie in the map. Best effort: a failure is logged and costs only time.
pub fn populate(memory: &GuestMemory, map: &MemoryMap, set: &WorkingSet) -> Populated {
    let there = populatable(map);
    let pages = |written| {
        let runs = set.runs.iter().filter(|run| run.written == written);
        ranges::intersection(&map_ranges(map, runs), &there)
    };
    let (written, read) = (pages(true), pages(false));
    let read = ranges::difference(&ranges::close_gaps(&read, READ_GAP, &there), &written);
    let first = populate_ranges(memory, &read, Hint::PopulateRead);
    let second = populate_ranges(memory, &at_most(written, MAX_WRITTEN_PAGES), Hint::PopulateWrite);
    Populated {
        pages: first.pages + second.pages,
        ns: first.ns + second.ns,
    }
}

/// The memory that may be mapped in advance: boot memory, and the part of virtio-mem's region that the snapshot has data for. The rest of
/// that region may not be plugged.
fn populatable(map: &MemoryMap) -> Vec<Range<u64>> {
    let boot = map.regions().iter().map(Region::range);
    let boot: Vec<_> = boot
        .filter(|range| range.start != layout::VIRTIO_MEM.start)
        .collect();
    ranges::union(&boot, &map.data())
}

/// The guest addresses of runs.
fn map_ranges<'r>(map: &MemoryMap, runs: impl Iterator<Item = &'r Run>) -> Vec<Range<u64>> {
    let mut list = Vec::new();
    for run in runs {
        for range in map.guest_ranges(run.first * PAGE..(run.first + u64::from(run.pages)) * PAGE) {
            ranges::push(&mut list, range);
        }
    }
    list
}

fn at_most(mut list: Vec<Range<u64>>, mut pages: u64) -> Vec<Range<u64>> {
    for range in &mut list {
        range.end = range.end.min(range.start + pages * PAGE);
        pages -= (range.end - range.start) / PAGE;
    }
    list.retain(|range| !range.is_empty());
    list
}

/// Maps the pages of guest addresses, batch by batch.
pub(super) fn populate_ranges(memory: &GuestMemory, list: &[Range<u64>], hint: Hint) -> Populated {
    let begin = monotonic_ns();
    let mut pages = 0;
    for (at, size) in list.iter().flat_map(batches) {
        match mapping::advise(memory, at, size, hint) {
            Ok(()) => pages += size / PAGE,
            Err(error) => {
                complain(&error, at, size);
                break;
            }
        }
    }
    Populated {
        pages,
        ns: monotonic_ns().saturating_sub(begin),
    }
}

/// Start and size of each batch of a range.
fn batches(range: &Range<u64>) -> impl Iterator<Item = (u64, u64)> + use<> {
    let end = range.end;
    range
        .clone()
        .step_by(BATCH as usize)
        .map(move |at| (at, BATCH.min(end - at)))
}

fn complain(error: &io::Error, at: u64, size: u64) {
    static OLD_KERNEL: Once = Once::new();
    if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) {
        OLD_KERNEL.call_once(|| {
            tracing::warn!(
                "Linux before 5.14 cannot map pages in advance: first touches will fault one by one"
            );
        });
    } else {
        tracing::warn!(%error, "memory {at:#x} ({size:#x} bytes) and what follows is not mapped in advance");
    }
}

impl WorkingSet {
    /// A working set with these runs, which must ascend and not overlap.
    ///
    /// # Errors
    /// [`FileError::Damaged`], as for a damaged file.
    pub fn new(runs: Vec<Run>) -> Result<WorkingSet, FileError> {
        let mut end = 0;
        for (index, run) in runs.iter().enumerate() {
            let at = (HEADER + index * RUN_BYTES) as u64;
            let next = run.first.checked_add(u64::from(run.pages));
            // Far beyond any memory file, so no sum in this module overflows.
            let next = next.filter(|next| *next < 1 << 50 && run.pages > 0 && run.first >= end);
            end = next.ok_or_else(|| {
                FORMAT.damaged(
                    at,
                    format!("run {index} is empty, out of order, or past any memory"),
                )
            })?;
        }
        Ok(WorkingSet { runs })
    }

    /// Sorted by page.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Writes the file, which is empty.
    pub fn write(&self, file: &File) -> Result<(), FileError> {
        FORMAT.write_file(file, &self.encode())
    }

    /// Reads and checks a file.
    pub fn read(file: &File) -> Result<WorkingSet, FileError> {
        WorkingSet::decode(&FORMAT.read_file(file)?)
    }

    fn encode(&self) -> Vec<u8> {
        let mut body = Vec::with_capacity(self.runs.len() * RUN_BYTES);
        for run in &self.runs {
            body.extend_from_slice(&run.first.to_le_bytes());
            body.extend_from_slice(&run.pages.to_le_bytes());
            body.extend_from_slice(&(u32::from(run.written) * WRITTEN).to_le_bytes());
        }
        body
    }

    /// Reads and checks a file's bytes.
    pub fn decode(bytes: &[u8]) -> Result<WorkingSet, FileError> {
        WorkingSet::decode_body(FORMAT.open(bytes)?)
    }

    /// Reads what follows the header.
    pub fn decode_body(body: &[u8]) -> Result<WorkingSet, FileError> {
        let mut fields = Fields::new(&FORMAT, body, HEADER as u64);
        let mut runs = Vec::with_capacity(body.len() / RUN_BYTES);
        while fields.left() > 0 {
            let (first, pages, flags) = (fields.u64()?, fields.u32()?, fields.u32()?);
            if flags & !WRITTEN != 0 {
                return Err(fields.damaged(format!("the run before has unknown flags {flags:#x}")));
            }
            runs.push(Run {
                first,
                pages,
                written: flags & WRITTEN != 0,
            });
        }
        WorkingSet::new(runs)
    }
}

#[cfg(test)]
#[path = "working_set_test.rs"]
mod tests;
