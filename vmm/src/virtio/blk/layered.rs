//! A disk over a base that is only read, and that other machines may share: blocks that the guest has written are in a file of its own, its
//! layer, whose format is that of [`thaw_protocol::disk_layer`].
//!
//! Invariants: the base is never written. A block gets its mark, in memory and in the file, after all of its data is in the file and before
//! the guest gets its answer, so whoever reads the layer of a paused machine finds each marked block complete. The layer has no name and
//! ends with its machine, so no crash of the host leaves a layer with marks on the medium but without their data. A flush therefore syncs both at once.
//!
//! Requests are executed by several threads. A mark is never taken away, so blocks that have theirs are written at once. Others are written
//! one request at a time: two requests that write parts of one block must not both copy it from the base.

use std::os::fd::OwnedFd;
use std::sync::{Mutex, RwLock};
use std::{io, ops};

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use thaw_protocol::disk_layer::{BLOCK, Marks, file_bytes, marks_bytes, marks_offset};
use thaw_sys::lock::{Lock, Share};
use vm_memory::VolatileSlice;

use super::SECTOR;
use super::disk::{Disk, check};
use super::request::Range;
use crate::virtio::device::AttachError;
use crate::virtio::guest_io;

/// An open base, and the layer over it.
#[derive(Debug)]
pub struct LayeredDisk {
    base: Disk,
    layer: Disk,
    marks: RwLock<Marks>,
    /// Held while blocks without marks get data and marks.
    marking: Mutex<()>,
}

impl LayeredDisk {
    /// Takes the descriptors that [`thaw_protocol::control::Backend::LayeredDisk`] lists.
    pub fn open(fds: Vec<OwnedFd>) -> Result<LayeredDisk, AttachError> {
        let got = fds.len();
        let Ok([base, layer]) = <[OwnedFd; 2]>::try_from(fds) else {
            return Err(AttachError::Descriptors { expected: 2, got });
        };
        let (base, layer) = (Disk::open(base, true)?, Disk::open(layer, false)?);
        if base.is_block_device() || layer.is_block_device() {
            return Err(AttachError::Invalid(
                "the base of a disk and the layer over it are regular files".into(),
            ));
        }
        let (bytes, expected) = (layer.bytes(), file_bytes(base.bytes()));
        if bytes != expected {
            return Err(AttachError::Invalid(format!(
                "a layer over a base of {} bytes has {expected} bytes, not {bytes}",
                base.bytes()
            )));
        }
        let marks = read_marks(&layer, base.bytes())?;
        Ok(LayeredDisk {
            base,
            layer,
            marks: RwLock::new(marks),
            marking: Mutex::new(()),
        })
    }

    /// Capacity in sectors.
    pub fn sectors(&self) -> u64 {
        self.base.sectors()
    }

    pub fn read(&self, sector: u64, data: &[VolatileSlice<'_>]) -> io::Result<()> {
        let ops::Range { start, end } = self.check(sector, guest_io::total(data) as u64)?;
        let mut at = start;
        while at < end {
            let (is_layers, run) = self.marks.reading().run(at / BLOCK, end.div_ceil(BLOCK));
            let to = end.min(run * BLOCK);
            let file = match is_layers {
                true => &self.layer,
                false => &self.base,
            };
            if at == start && to == end {
                return file.read(sector, data);
            }
            let part = guest_io::part(data, (at - start) as usize, (to - at) as usize);
            file.read(at / SECTOR, &part)?;
            at = to;
        }
        Ok(())
    }

    pub fn write(&self, sector: u64, data: &[VolatileSlice<'_>]) -> io::Result<()> {
        let bytes = self.check(sector, guest_io::total(data) as u64)?;
        self.change(&bytes, || self.layer.write(sector, data))
    }

    /// Returns when all earlier writes are on the medium.
    pub fn flush(&self) -> io::Result<()> {
        self.layer.flush()
    }

    /// Frees the whole blocks of the range on the host, which then read as zero. The others keep their content, because a discard is only a
    /// hint (§5.2.6.2).
    pub fn discard(&self, range: &Range) -> io::Result<()> {
        let ops::Range { start, end } = self.check_range(range)?;
        let start = start.next_multiple_of(BLOCK);
        let end = match end == self.base.bytes() {
            true => end,
            false => end / BLOCK * BLOCK,
        };
        if start >= end {
            return Ok(());
        }
        let whole = Range {
            sector: start / SECTOR,
            // No more than those of `range`.
            sectors: ((end - start) / SECTOR) as u32,
            unmap: true,
        };
        let _marking = self.marking.locked();
        match self.layer.free(&whole)? {
            true => self.mark(&(start..end)),
            false => Ok(()),
        }
    }

    /// Makes the range read as zero.
    pub fn write_zeroes(&self, range: &Range) -> io::Result<()> {
        let bytes = self.check_range(range)?;
        self.change(&bytes, || self.layer.write_zeroes(range))
    }

    /// Writes these bytes to the layer with `write`, and marks their blocks.
    fn change(&self, bytes: &ops::Range<u64>, write: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        if self.has_marks(bytes) {
            return write();
        }
        let _marking = self.marking.locked();
        self.complete(bytes)?;
        write()?;
        self.mark(bytes)
    }

    /// Whether all blocks of these bytes are in the layer.
    fn has_marks(&self, bytes: &ops::Range<u64>) -> bool {
        let blocks = bytes.start / BLOCK..bytes.end.div_ceil(BLOCK);
        blocks.is_empty() || self.marks.reading().run(blocks.start, blocks.end) == (true, blocks.end)
    }

    /// Copies the blocks that these bytes cover in part to the layer, unless they are there, so that they can become the layer's.
    fn complete(&self, bytes: &ops::Range<u64>) -> io::Result<()> {
        let is_within = |at: u64| !at.is_multiple_of(BLOCK) && at < self.base.bytes();
        let (first, last) = (bytes.start / BLOCK, bytes.end / BLOCK);
        if is_within(bytes.start) {
            self.copy_to_layer(first)?;
        }
        if is_within(bytes.end) && !(is_within(bytes.start) && first == last) {
            self.copy_to_layer(last)?;
        }
        Ok(())
    }

    fn copy_to_layer(&self, block: u64) -> io::Result<()> {
        if self.marks.reading().has(block) {
            return Ok(());
        }
        let at = block * BLOCK;
        let mut content = [0; BLOCK as usize];
        let length = BLOCK.min(self.base.bytes() - at) as usize;
        self.base.read_bytes(&mut content[..length], at)?;
        self.layer.write_bytes(&content[..length], at)
    }

    /// Marks the blocks of these bytes, whose data is in the layer. If that fails, they stay as they were.
    /// Only with `marking` held.
    fn mark(&self, bytes: &ops::Range<u64>) -> io::Result<()> {
        let blocks = bytes.start / BLOCK..bytes.end.div_ceil(BLOCK);
        if self.has_marks(bytes) {
            return Ok(());
        }
        let (place, marked) = self.marks.reading().marked(blocks.clone());
        let marks_at = marks_offset(self.base.bytes());
        self.layer.write_bytes(&marked, marks_at + place)?;
        self.marks.writing().mark(blocks);
        Ok(())
    }

    fn check_range(&self, range: &Range) -> io::Result<ops::Range<u64>> {
        self.check(range.sector, u64::from(range.sectors) * SECTOR)
    }

    /// The bytes from `sector` on, if `length` bytes are whole sectors inside the disk.
    fn check(&self, sector: u64, length: u64) -> io::Result<ops::Range<u64>> {
        let start = check(self.sectors(), sector, length)?;
        Ok(start..start + length)
    }
}

/// The marks in a layer over a base of this size. Those of a new layer are a hole.
fn read_marks(layer: &Disk, base_bytes: u64) -> Result<Marks, AttachError> {
    let failed = AttachError::system::<io::Error>;
    let marks_at = marks_offset(base_bytes);
    match seek(layer.file(), SeekFrom::Data(marks_at)) {
        Err(Errno::NXIO) => return Ok(Marks::none(base_bytes)),
        Err(e) => return Err(failed("data of the layer")(e.into())),
        Ok(_) => {}
    }
    let mut bits = vec![0; usize::try_from(marks_bytes(base_bytes)).unwrap_or(usize::MAX)];
    layer
        .read_bytes(&mut bits, marks_at)
        .map_err(failed("marks of the layer"))?;
    Marks::from_bytes(base_bytes, bits)
        .ok_or_else(|| AttachError::Invalid("a layer has a mark for each block".into()))
}

#[cfg(test)]
#[path = "layered_test.rs"]
mod tests;
