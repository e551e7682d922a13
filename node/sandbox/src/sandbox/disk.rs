//! Disks of snapshots: a disk like one, and a copy of a disk for one. By reflink if the filesystem supports it. Otherwise the disk of a
//! thawed sandbox is a layer over the snapshot's ([`thaw_protocol::disk_layer`]), so nothing is copied at a thaw, and while a sandbox is stopped
//! for a freeze only its layer is copied. A copy is of the data without the holes.
//!
//! Invariant: a snapshot's disk does not change, so it is the base of any number of layers. A base that is removed stays for those that have it
//! open.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{FallocateFlags, Mode, OFlags, SeekFrom};
use rustix::io::Errno;
use thaw_pools::disk::Disk;
use thaw_protocol::disk_layer::{BLOCK, Marks, marks_bytes, marks_offset};

/// Maximum number of bytes that one call copies.
const STEP: u64 = 1 << 30;

/// Makes the empty file `to` a copy of `from`.
fn copy(from: &OwnedFd, to: &OwnedFd) -> io::Result<()> {
    match rustix::fs::ioctl_ficlone(to, from) {
        Ok(()) => Ok(()),
        Err(_) => copy_data(from, to),
    }
}

/// The same, without a reflink.
fn copy_data(from: &OwnedFd, to: &OwnedFd) -> io::Result<()> {
    // Each call passes its offset, because the VMM shares the descriptors' own offset.
    let size = rustix::fs::fstat(from)?.st_size as u64;
    rustix::fs::ftruncate(to, size)?;
    let from = reopened(from)?;
    let mut at = 0;
    while at < size {
        at = match rustix::fs::seek(&from, SeekFrom::Data(at)) {
            Ok(data) => data,
            Err(Errno::NXIO) => return Ok(()),
            Err(e) => return Err(e.into()),
        };
        let end = rustix::fs::seek(&from, SeekFrom::Hole(at))?;
        while at < end {
            at += copy_some(&from, to, at, end - at)?;
        }
    }
    Ok(())
}

/// Copies up to `length` bytes at `offset`. Returns the number of bytes copied.
fn copy_some(from: &File, to: &OwnedFd, offset: u64, length: u64) -> io::Result<u64> {
    let (mut source, mut target) = (offset, offset);
    let length = length.min(STEP) as usize;
    match rustix::fs::copy_file_range(from, Some(&mut source), to.as_fd(), Some(&mut target), length) {
        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok(copied) => Ok(copied as u64),
        Err(Errno::XDEV | Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
            let mut buffer = vec![0; length.min(1 << 20)];
            from.read_exact_at(&mut buffer, offset)?;
            let mut done = 0;
            while done < buffer.len() {
                done += rustix::io::pwrite(to, &buffer[done..], offset + done as u64)?;
            }
            Ok(buffer.len() as u64)
        }
        Err(e) => Err(e.into()),
    }
}

/// A disk with the content of a snapshot's, whose file is in `directory`: by reflink; or else a layer over it, if `may_layer` and if it can be
/// a base; or else a copy.
pub(super) fn thawed(frozen: &OwnedFd, directory: &Path, may_layer: bool) -> io::Result<Disk> {
    let file = nameless_file(directory)?;
    if rustix::fs::ioctl_ficlone(&file, frozen).is_err() {
        if may_layer && can_be_base(frozen, &file)? {
            return Disk::layered(reopened(frozen)?.into(), file);
        }
        copy_data(frozen, &file)?;
    }
    Disk::of(file)
}

/// The same of a snapshot's disk that is a layer over `base`: a copy of the layer over the same base, so that layers do not add up; or else a
/// copy of both.
pub(super) fn thawed_layer(
    base: &OwnedFd,
    layer: &OwnedFd,
    directory: &Path,
    may_layer: bool,
) -> io::Result<Disk> {
    let file = nameless_file(directory)?;
    if may_layer && can_be_base(base, &file)? {
        copy(layer, &file)?;
        return Disk::layered(reopened(base)?.into(), file);
    }
    whole(&Disk::layered(base.try_clone()?, layer.try_clone()?)?, directory)
}

/// A copy without a base, whose file is in `directory`.
pub(super) fn whole(disk: &Disk, directory: &Path) -> io::Result<Disk> {
    let file = nameless_file(directory)?;
    copy_base(disk, &file)?;
    copy_rest(disk, &file)?;
    Disk::of(file)
}

/// Whether a disk of a snapshot can stay the base of a layer in `file`: it is on the same file system, no other user can change it, and its
/// size is whole blocks.
fn can_be_base(frozen: &OwnedFd, file: &OwnedFd) -> io::Result<bool> {
    let (frozen, file) = (rustix::fs::fstat(frozen)?, rustix::fs::fstat(file)?);
    let by_others = Mode::WGRP | Mode::WOTH;
    let is_ours = frozen.st_uid == rustix::process::geteuid().as_raw()
        && !Mode::from_raw_mode(frozen.st_mode).intersects(by_others);
    Ok(is_ours && frozen.st_dev == file.st_dev && (frozen.st_size as u64).is_multiple_of(BLOCK))
}

/// Whether `file` is the base of a disk.
pub(super) fn is_base(disk: &Disk, file: &File) -> io::Result<bool> {
    let Some(base) = &disk.base else { return Ok(false) };
    let (base, file) = (rustix::fs::fstat(base)?, rustix::fs::fstat(file)?);
    Ok((base.st_dev, base.st_ino) == (file.st_dev, file.st_ino))
}

/// Copies the layer of a disk to the empty file `to`. The disk must not be in use.
pub(super) fn copy_layer(disk: &Disk, to: &OwnedFd) -> io::Result<()> {
    copy(&disk.file, to)
}

/// Copies the base of a disk, if it has one, to the empty file `to`. The disk may be in use.
pub(super) fn copy_base(disk: &Disk, to: &OwnedFd) -> io::Result<()> {
    disk.base.as_ref().map_or(Ok(()), |base| copy(base, to))
}

/// Copies a disk to `to`, which has the copy of its base. The disk must not be in use.
pub(super) fn copy_rest(disk: &Disk, to: &OwnedFd) -> io::Result<()> {
    if disk.base.is_none() {
        return copy(&disk.file, to);
    }
    let layer = reopened(&disk.file)?;
    let marks = read_marks(&layer, disk.size)?;
    let mut block = 0;
    while block < marks.blocks() {
        let (is_layers, end) = marks.run(block, marks.blocks());
        if is_layers {
            copy_with_holes(&layer, to, block * BLOCK, disk.size.min(end * BLOCK))?;
        }
        block = end;
    }
    Ok(())
}

fn read_marks(layer: &File, size: u64) -> io::Result<Marks> {
    let mut bits = vec![0; usize::try_from(marks_bytes(size)).map_err(io::Error::other)?];
    layer.read_exact_at(&mut bits, marks_offset(size))?;
    Marks::from_bytes(size, bits).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Makes the bytes `at..end` of `to` those of `from`, of which holes are zero.
fn copy_with_holes(from: &File, to: &OwnedFd, mut at: u64, end: u64) -> io::Result<()> {
    while at < end {
        let data = match rustix::fs::seek(from, SeekFrom::Data(at)) {
            Ok(data) => data.min(end),
            Err(Errno::NXIO) => end,
            Err(e) => return Err(e.into()),
        };
        clear(to, at, data)?;
        at = data;
        let hole = match at < end {
            true => rustix::fs::seek(from, SeekFrom::Hole(at))?.min(end),
            false => end,
        };
        while at < hole {
            at += copy_some(from, to, at, hole - at)?;
        }
    }
    Ok(())
}

/// Makes the bytes `at..end` zero.
fn clear(file: &OwnedFd, mut at: u64, end: u64) -> io::Result<()> {
    if at >= end {
        return Ok(());
    }
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    match rustix::fs::fallocate(file, hole, at, end - at) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
        done => return Ok(done?),
    }
    let zeros = [0; BLOCK as usize];
    while at < end {
        at += rustix::io::pwrite(file, &zeros[..BLOCK.min(end - at) as usize], at)? as u64;
    }
    Ok(())
}

/// Opens the same file again for reading, with an offset of its own.
fn reopened(file: &OwnedFd) -> io::Result<File> {
    use std::os::fd::AsRawFd;
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

fn nameless_file(directory: &Path) -> io::Result<OwnedFd> {
    std::fs::create_dir_all(directory)?;
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    Ok(rustix::fs::open(directory, flags, Mode::RUSR | Mode::WUSR)?)
}

#[cfg(test)]
#[path = "disk_test.rs"]
mod tests;
