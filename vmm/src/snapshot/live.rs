//! Freezes memory while the guest runs: it stops only for the moment that the snapshot is of.
//!
//! ```text
//! LiveFreeze::prepare    the guest runs: its memory is protected, and the pagemap is read
//! LiveFreeze::begin      the guest is stopped for a moment: what it has written meanwhile is protected again
//! LiveFreeze::step       the guest runs: pages are compared with zero, then written; a page that is about to change is copied first
//! ```
//!
//! The file and its map are those of [`super::freeze_memory`] at that moment. Where pages outside of the file's extents were copied, the file
//! has holes in the end.
//!
//! No page is missed or torn:
//! - A page that is there when it is protected is found: before that, also if it is swapped out, or, if it was first written in between,
//!   after it ([`WINDOW`]).
//! - From then on the userfaultfd stops every write by this process, by a system call of it and by KVM, also to pages that are not there
//!   yet. What is written before the moment is noted, and protected again while vCPUs and devices stand still.
//! - A page keeps its protection when it is swapped out, moved, or split from a huge page. Only discards would lift it, and there are none
//!   ([`crate::virtio::discards`]).

use std::collections::VecDeque;
use std::fs::File;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, fallocate};
use thaw_protocol::control::FreezeKind;

use super::freeze::{self, FreezeError, Frozen, Pages, Plan, Under};
use super::pagemap::{PageKind, Pagemap};
use super::protection::{CopiedPage, Protection, ProtectionError, Protector, SLICE, slices};
use super::{MapError, MemoryMap, PAGE, mapping, ranges};
use crate::memory::GuestMemory;

/// Bytes read, or written, in one step.
const STEP: u64 = 1 << 20;

/// Longest time in which the pagemap of a piece of memory is read, the piece is protected, and its pagemap is read again. A page that was
/// first written meanwhile is present in the end: the kernel does not swap out a page that is so new. In a longer time it may, for example
/// while this process has used up its share of a CPU and waits.
const WINDOW: Duration = Duration::from_millis(20);
/// How often a piece that took longer is tried.
const TRIES: u32 = 16;

/// Why memory could not be written while the guest runs.
#[derive(Debug, thiserror::Error)]
pub enum LiveError {
    #[error(transparent)]
    Freeze(#[from] FreezeError),
    #[error(transparent)]
    Protection(#[from] ProtectionError),
}

impl From<MapError> for LiveError {
    fn from(error: MapError) -> LiveError {
        LiveError::Freeze(error.into())
    }
}

/// The memory to freeze, as for [`super::freeze_memory`].
pub struct Source {
    pub kind: FreezeKind,
    pub memory: GuestMemory,
    pub live: Vec<Range<u64>>,
    pub base: Option<MemoryMap>,
    /// The memory file.
    pub out: File,
}

/// A freeze in progress. Dropping it lifts the protection of guest memory.
pub struct LiveFreeze {
    source: Source,
    /// What it lies on; `None` for a full freeze.
    under: Option<Under>,
    protection: Arc<Protection>,
    /// Pages that are this process's own or were read.
    there: Vec<Range<u64>>,
    /// Pages that are its own; from the moment on, all that a delta writes if they are not zero.
    written: Vec<Range<u64>>,
    /// Where each guest address is in the file.
    offsets: MemoryMap,
    work: Work,
}

/// What is left to do. The ranges are at most [`STEP`] long.
enum Work {
    /// Pages to compare with zero, and those that were.
    Look {
        left: VecDeque<Range<u64>>,
        seen: Pages,
        /// Pages that were copied and written to the file, data only.
        copied: Vec<Range<u64>>,
    },
    /// Memory to write, which is part of the file's extents.
    Write {
        left: VecDeque<Range<u64>>,
        extents: Vec<Range<u64>>,
        map: MemoryMap,
    },
}

impl LiveFreeze {
    /// Protects the memory of a machine, which may run. Its devices must discard no memory until this is dropped. `pagemap` is this process's,
    /// `device` is /dev/userfaultfd.
    ///
    /// # Errors
    /// [`ProtectionError::Open`], [`ProtectionError::Register`], [`ProtectionError::Slow`]: this kernel, this memory, or so busy a host
    /// does not allow it.
    pub fn prepare(
        source: Source,
        pagemap: &File,
        device: BorrowedFd<'_>,
        protector: &Protector,
    ) -> Result<LiveFreeze, LiveError> {
        let Source {
            kind,
            memory,
            live,
            base,
            out,
        } = &source;
        let pagemap = freeze::check(memory, live, pagemap, out)?;
        let under = Under::of(*kind, base.as_ref())?;
        let end = live.last().map_or(0, |range| range.end);
        let offsets = MemoryMap::new(freeze::regions(memory, end), 1, Vec::new())?;
        let protection = protector.protection(device, memory, live)?;
        let mut freeze = LiveFreeze {
            under,
            offsets,
            protection,
            there: Vec::new(),
            written: Vec::new(),
            work: Work::Look {
                left: VecDeque::new(),
                seen: Pages::default(),
                copied: Vec::new(),
            },
            source,
        };
        freeze.protect(&pagemap)?;
        Ok(freeze)
    }

    /// Protects all memory and reads which pages are there, piece by piece.
    fn protect(&mut self, pagemap: &Pagemap<'_>) -> Result<(), LiveError> {
        let live = self.source.live.clone();
        for slice in live.iter().flat_map(|range| slices(range, SLICE)) {
            let seen = in_time(
                || self.protect_slice(&slice, pagemap),
                || Ok(self.protection.unprotect(&slice)?),
            )?;
            let Seen { there, written } = seen.ok_or(ProtectionError::Slow {
                guest_address: slice.start,
                size: slice.end - slice.start,
            })?;
            there
                .into_iter()
                .for_each(|range| ranges::push(&mut self.there, range));
            written
                .into_iter()
                .for_each(|range| ranges::push(&mut self.written, range));
        }
        Ok(())
    }

    /// Protects a piece of memory that is not protected. Returns its pages that are there.
    fn protect_slice(&self, slice: &Range<u64>, pagemap: &Pagemap<'_>) -> Result<Seen, LiveError> {
        let size = slice.end - slice.start;
        let host = mapping::host_address(&self.source.memory, slice.start, size)
            .ok_or_else(|| FreezeError::NotMemory(format!("{slice:#x?}")))?;
        // Before, because a mark of the protection looks like a page that is swapped out; and after, for what was written in between.
        let (mut before, mut after) = (Seen::default(), Seen::default());
        pagemap
            .runs(host, size, |run, kind| before.add(slice.start, &run, kind))
            .map_err(FreezeError::Pagemap)?;
        self.protection.protect(slice)?;
        pagemap
            .protected_runs(host, size, |run, kind| after.add(slice.start, &run, kind))
            .map_err(FreezeError::Pagemap)?;
        Ok(Seen {
            there: ranges::union(&before.there, &after.there),
            written: ranges::union(&before.written, &after.written),
        })
    }

    /// The moment of the snapshot. vCPUs are paused, devices quiet.
    pub fn begin(&mut self) -> Result<(), LiveError> {
        let since = self.protection.begin()?;
        self.there = ranges::union(&self.there, &since);
        self.written = ranges::union(&self.written, &since);
        let Source { live, base, .. } = &self.source;
        let pages = match (&self.under, base) {
            (Some(under), _) => {
                self.written = ranges::union(&self.written, &under.replaced);
                under.to_look_at(&self.written)
            }
            // Pages never touched in this process are in the files it was restored from.
            (None, Some(base)) => ranges::union(&self.there, &base.data()),
            (None, None) => self.there.clone(),
        };
        let pages = ranges::intersection(&pages, live);
        if let Work::Look { left, .. } = &mut self.work {
            left.extend(pages.iter().flat_map(|range| slices(range, STEP)));
        }
        Ok(())
    }

    /// Whether threads that write memory may have to wait for the next [`Self::step`].
    pub fn hurry(&self, is_hurried: bool) {
        self.protection.hurry(is_hurried);
    }

    /// Does a part of the work. Returns the result if that was the last one.
    pub fn step(&mut self) -> Result<Option<Frozen>, LiveError> {
        self.write_copies()?;
        match &mut self.work {
            Work::Look { left, seen, .. } => {
                let Some(range) = left.pop_front() else {
                    self.plan()?;
                    return Ok(None);
                };
                let mut zeros = freeze::zeros(&self.source.memory, &range)?;
                self.protection.correct(&range, &mut zeros);
                seen.add(&range, &zeros);
                Ok(None)
            }
            Work::Write { left, map, .. } => {
                let Some(range) = left.pop_front() else {
                    return self.finish().map(Some);
                };
                for pages in self.protection.unsettled(&range) {
                    freeze::write_pages(&self.source.memory, &pages, map, &self.source.out)?;
                }
                self.protection.settle(&range)?;
                Ok(None)
            }
        }
    }

    /// All pages were compared with zero.
    fn plan(&mut self) -> Result<(), LiveError> {
        let Work::Look { seen, copied, .. } = &mut self.work else {
            return Ok(());
        };
        let (seen, copied) = (std::mem::take(seen), std::mem::take(copied));
        let live = &self.source.live;
        let plan = match &self.under {
            Some(under) => {
                let written = ranges::intersection(&seen.data, &self.written);
                under.plan(&written, &seen.zero, live)
            }
            None => Plan::full(&seen.data, live),
        };
        let top = plan.top;
        let map = plan.map(&self.source.memory)?;
        self.source
            .out
            .set_len(map.file_size())
            .map_err(FreezeError::File)?;
        let mut extents = Vec::new();
        for extent in map.extents().iter().filter(|extent| extent.layer == top) {
            ranges::push(&mut extents, extent.range());
        }
        for range in ranges::difference(&sorted(copied), &extents) {
            self.make_hole(&range, &map);
        }
        self.work = Work::Write {
            left: extents.iter().flat_map(|range| slices(range, STEP)).collect(),
            extents,
            map,
        };
        Ok(())
    }

    /// Everything is in the file but the last copies.
    fn finish(&mut self) -> Result<Frozen, LiveError> {
        self.protection.end();
        self.write_copies()?;
        self.protection.release();
        let Work::Write { extents, map, .. } = &self.work else {
            unreachable!("memory is planned before it is written");
        };
        Ok(Frozen {
            map: map.clone(),
            bytes: extents.iter().map(|range| range.end - range.start).sum(),
        })
    }

    /// Writes the pages that were copied to the file. After memory that was read while they were copied, which they replace.
    fn write_copies(&mut self) -> Result<(), LiveError> {
        while let Some(CopiedPage { guest_address, data }) = self.protection.take()? {
            let page = guest_address..guest_address + PAGE;
            let (bytes, offset) = match (&mut self.work, data) {
                (Work::Look { copied, .. }, Some(bytes)) => {
                    copied.push(page);
                    (bytes, self.offsets.file_offset(guest_address))
                }
                // A hole.
                (Work::Look { .. }, None) => continue,
                (Work::Write { extents, map, .. }, data) => {
                    if !contains(extents, guest_address) {
                        continue;
                    }
                    let zero = || Box::new([0; PAGE as usize]);
                    (data.unwrap_or_else(zero), map.file_offset(guest_address))
                }
            };
            self.source
                .out
                .write_all_at(&bytes[..], offset.unwrap_or_default())
                .map_err(|error| FreezeError::Write {
                    guest_address,
                    size: PAGE,
                    error,
                })?;
        }
        Ok(())
    }

    /// Best effort: a filesystem without holes keeps bytes that no map refers to.
    fn make_hole(&self, range: &Range<u64>, map: &MemoryMap) {
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let Some(offset) = map.file_offset(range.start) else {
            return;
        };
        if let Err(error) = fallocate(&self.source.out, how, offset, range.end - range.start) {
            tracing::debug!(%error, ?range, "a memory file has pages outside of its extents");
        }
    }
}

impl Drop for LiveFreeze {
    fn drop(&mut self) {
        self.protection.end();
        self.protection.release();
    }
}

/// The result of `look`, if it came within [`WINDOW`]. If not, `undo` is called, and `look` again. `None` if it is late [`TRIES`] times.
fn in_time<T>(
    mut look: impl FnMut() -> Result<T, LiveError>,
    undo: impl Fn() -> Result<(), LiveError>,
) -> Result<Option<T>, LiveError> {
    for _ in 0..TRIES {
        let began = Instant::now();
        let found = look()?;
        if began.elapsed() <= WINDOW {
            return Ok(Some(found));
        }
        undo()?;
    }
    Ok(None)
}

/// The pages of a piece of memory that are there, and those that were written.
#[derive(Default)]
struct Seen {
    there: Vec<Range<u64>>,
    written: Vec<Range<u64>>,
}

impl Seen {
    /// Adds a run of pages, whose offset is from `start`.
    fn add(&mut self, start: u64, run: &Range<u64>, kind: PageKind) {
        let range = start + run.start..start + run.end;
        if kind == PageKind::Written {
            ranges::push(&mut self.written, range.clone());
        }
        if kind != PageKind::Absent {
            ranges::push(&mut self.there, range);
        }
    }
}

/// These ranges, which are disjoint, as a list.
fn sorted(mut pages: Vec<Range<u64>>) -> Vec<Range<u64>> {
    pages.sort_unstable_by_key(|range| range.start);
    let mut list = Vec::new();
    pages.into_iter().for_each(|range| ranges::push(&mut list, range));
    list
}

fn contains(list: &[Range<u64>], address: u64) -> bool {
    let at = list.partition_point(|range| range.end <= address);
    list.get(at).is_some_and(|range| range.start <= address)
}

#[cfg(test)]
#[path = "live_test.rs"]
mod tests;
