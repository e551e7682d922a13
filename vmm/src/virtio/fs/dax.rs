//! The DAX window (virtio 1.2 §5.11.6.5): ranges of files mapped into the guest's address space.
//!
//! The window is divided into *frames* of 2 MiB, the size that a guest's kernel maps at once. A frame shows a range of one file, or zeros.
//! A range is mapped from the blobs' cache files, so every guest that maps it shares the host's page cache. It is mapped only when all its
//! bytes are ready. In holes and in the rest of a file's last page a guest sees zeros. It never sees bytes that follow the file in its
//! blob.
//!
//! A frozen guest goes on using its mappings. So a freeze saves them, and they are made again, from the images attached at that time,
//! before the guest runs.
//!
//! Store files are never truncated while they are in use. If one is truncated all the same, a missing page faults only in the guest:
//! KVM_RUN ends with EFAULT and the machine ends. This process never reads the window, so it survives and can report that.

use std::collections::HashSet;
use std::io;
use std::os::fd::AsFd;

use fuse_backend_rs::abi::virtio_fs::{RemovemappingIn, RemovemappingOne, SetupmappingFlags, SetupmappingIn};
use thaw_imagefs::fs::{DAX_RANGE, MissingRange, RootFs};
use vm_memory::ByteValued;

use crate::virtio::state::MappingRecord;
use crate::virtio::window::HostWindow;

const PAGE: u64 = 4096;

/// A range of a file in a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shown {
    node: u64,
    offset: u64,
    length: u64,
}

/// The window and the ranges mapped in it.
pub struct Dax {
    window: HostWindow,
    frames: Vec<Option<Shown>>,
    /// The mappings at the freeze, until they are made again.
    frozen: Vec<MappingRecord>,
}

fn errno(number: i32) -> io::Error {
    io::Error::from_raw_os_error(number)
}

impl Dax {
    pub fn new(window: HostWindow) -> Dax {
        let frames = (window.window().size / DAX_RANGE) as usize;
        Dax {
            window,
            frames: vec![None; frames],
            frozen: Vec::new(),
        }
    }

    /// The frame that begins at an offset of the window.
    fn frame(&self, offset: u64) -> io::Result<usize> {
        let frame = (offset / DAX_RANGE) as usize;
        match offset.is_multiple_of(DAX_RANGE) && frame < self.frames.len() {
            true => Ok(frame),
            false => Err(errno(libc::EINVAL)),
        }
    }

    fn clear_frame(&mut self, frame: usize) -> io::Result<()> {
        if self.frames[frame].is_none() {
            return Ok(());
        }
        self.window
            .clear(frame as u64 * DAX_RANGE, DAX_RANGE)
            .map_err(io::Error::other)?;
        self.frames[frame] = None;
        Ok(())
    }

    /// Fills the whole window with zeros: the file system is mounted anew, or gone.
    pub fn clear(&mut self) {
        self.frozen.clear();
        self.clear_if(|_| true);
    }

    /// Replaces the mappings of an image with zeros.
    pub fn forget(&mut self, images: &RootFs, slot: u16) {
        self.clear_if(|shown| images.slot(shown.node).is_none_or(|other| other == slot));
    }

    fn clear_if(&mut self, which: impl Fn(&Shown) -> bool) {
        for frame in 0..self.frames.len() {
            if self.frames[frame].is_some_and(|shown| which(&shown))
                && let Err(error) = self.clear_frame(frame)
            {
                tracing::error!(%error, frame, "a mapped range of an image could not be unmapped");
            }
        }
    }

    /// Maps a range of a file into a frame, as SETUPMAPPING requests. Returns the ranges that must be fetched first, if any. A range ends
    /// at the latest where the file does.
    pub fn setup(
        &mut self,
        images: &RootFs,
        node: u64,
        body: &[u8],
    ) -> io::Result<Result<(), Vec<MissingRange>>> {
        let request: SetupmappingIn = take(body)?;
        let frame = self.frame(request.moffset)?;
        if request.flags & SetupmappingFlags::WRITE.bits() != 0 {
            return Err(errno(libc::EROFS));
        }
        if request.len == 0
            || request.len > DAX_RANGE
            || !(request.len | request.foffset).is_multiple_of(PAGE)
        {
            return Err(errno(libc::EINVAL));
        }
        let missing = images.missing(node, request.foffset, request.len as u32);
        if !missing.is_empty() {
            return Ok(Err(missing));
        }
        let shown = Shown {
            node,
            offset: request.foffset,
            length: request.len,
        };
        self.show(images, frame, shown).map(Ok)
    }

    /// Replaces frames with zeros, as REMOVEMAPPING requests.
    pub fn remove(&mut self, body: &[u8]) -> io::Result<()> {
        let RemovemappingIn { count } = take(body)?;
        let entries = body.get(size_of::<RemovemappingIn>()..).unwrap_or_default();
        // Only entries that are there are collected: the message's count alone reserves no memory.
        let all: Vec<RemovemappingOne> = entries
            .chunks_exact(size_of::<RemovemappingOne>())
            .take(count as usize)
            .map(take)
            .collect::<io::Result<_>>()?;
        if all.len() != count as usize {
            return Err(errno(libc::EINVAL));
        }
        for RemovemappingOne { moffset, len } in all {
            let first = self.frame(moffset)?;
            let frames = len.div_ceil(DAX_RANGE).min(self.frames.len() as u64) as usize;
            for frame in first..(first + frames).min(self.frames.len()) {
                self.clear_frame(frame)?;
            }
        }
        Ok(())
    }

    /// The first byte and the length of the file range that SETUPMAPPING names.
    pub fn range(body: &[u8]) -> Option<(u64, u64)> {
        let request: SetupmappingIn = take(body).ok()?;
        Some((request.foffset, request.len.min(DAX_RANGE)))
    }

    /// The mappings, for a freeze. If those of the last freeze have not been made again, returns those.
    pub fn save(&self) -> Vec<MappingRecord> {
        let frames = self.frames.iter().zip((0u64..).step_by(DAX_RANGE as usize));
        let shown = frames.filter_map(|(shown, window_offset)| {
            shown.map(|Shown { node, offset, length }| MappingRecord {
                window_offset,
                node,
                file_offset: offset,
                length,
            })
        });
        shown.chain(self.frozen.iter().copied()).collect()
    }

    /// Whether a window of `size` bytes could have had these mappings.
    pub fn check(size: u64, records: &[MappingRecord]) -> Result<(), String> {
        let mut frames = HashSet::new();
        for record in records {
            let aligned = record.window_offset.is_multiple_of(DAX_RANGE)
                && (record.file_offset | record.length).is_multiple_of(PAGE);
            let fits = record.window_offset < size / DAX_RANGE * DAX_RANGE
                && (1..=DAX_RANGE).contains(&record.length)
                && record.file_offset.checked_add(record.length).is_some();
            if !aligned || !fits || !frames.insert(record.window_offset) {
                return Err(format!("a file cannot be mapped so: {record:?}"));
            }
        }
        Ok(())
    }

    /// Takes the mappings of a frozen guest. [`Self::check`] must have accepted them.
    pub fn restore(&mut self, records: &[MappingRecord]) {
        self.frozen = records.to_vec();
    }

    /// The ranges that the frozen guest's mappings need and that are missing.
    pub fn frozen_missing(&self, images: &RootFs) -> Vec<MissingRange> {
        let mut missing: Vec<_> = self
            .frozen
            .iter()
            .flat_map(|record| images.missing(record.node, record.file_offset, record.length as u32))
            .collect();
        missing.sort_by_key(|range| (range.blob, range.offset, range.length));
        missing.dedup();
        missing
    }

    /// Makes the frozen guest's mappings again.
    pub fn map_frozen(&mut self, images: &RootFs) -> Result<(), String> {
        for record in self.frozen.clone() {
            let shown = Shown {
                node: record.node,
                offset: record.file_offset,
                length: record.length,
            };
            let mapped = self
                .frame(record.window_offset)
                .and_then(|frame| self.show(images, frame, shown));
            mapped.map_err(|error| {
                format!(
                    "bytes {}.. of node {:#x}, which the frozen guest had mapped: {error}",
                    record.file_offset, record.node
                )
            })?;
        }
        self.frozen.clear();
        Ok(())
    }

    fn show(&mut self, images: &RootFs, frame: usize, shown: Shown) -> io::Result<()> {
        self.clear_frame(frame)?;
        let start = frame as u64 * DAX_RANGE;
        // Recorded first, so that a partly mapped range is cleared like a whole one.
        self.frames[frame] = Some(shown);
        let window = &self.window;
        let mapped = images.map(shown.node, shown.offset, shown.length, |part| {
            window
                .map(start + part.at, part.length, part.file.as_fd(), part.offset)
                .map_err(io::Error::other)
        });
        if mapped.is_err() {
            self.clear_frame(frame)?;
        }
        mapped
    }
}

/// Reads a structure from the beginning of `bytes`, whatever its alignment.
fn take<T: ByteValued + Default>(bytes: &[u8]) -> io::Result<T> {
    let mut value = T::default();
    let from = bytes.get(..size_of::<T>());
    value
        .as_mut_slice()
        .copy_from_slice(from.ok_or(errno(libc::EINVAL))?);
    Ok(value)
}
