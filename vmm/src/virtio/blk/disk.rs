//! The file or block device behind a virtio-blk device: reads and writes whole sectors within its capacity.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{
    FallocateFlags, FileType, OFlags, SeekFrom, fallocate, fcntl_getfl, fdatasync, fstat, ioctl_blksszget,
    seek,
};
use rustix::io::{Errno, pwrite};
use vm_memory::VolatileSlice;

use super::SECTOR;
use super::request::Range;
use crate::virtio::device::AttachError;
use crate::virtio::guest_io;

/// Zeros to write at once to a file that has no operation for zeroing.
static ZEROES: [u8; 64 * 1024] = [0; 64 * 1024];

/// Largest block size that a guest's driver accepts: a page. If a device has larger blocks, the host's page cache assembles them.
const MOST_OF_BLOCK: u32 = 4096;

/// An open disk.
#[derive(Debug)]
pub struct Disk {
    file: File,
    read_only: bool,
    sectors: u64,
    /// Bytes of a logical block, for a block device.
    block_size: Option<u32>,
}

impl Disk {
    /// Takes a regular file or block device, which must be open for writing unless `read_only`. Its present size is the capacity.
    pub fn open(fd: OwnedFd, read_only: bool) -> Result<Disk, AttachError> {
        let stat = fstat(&fd).map_err(AttachError::system("fstat of the disk"))?;
        if !matches!(
            FileType::from_raw_mode(stat.st_mode),
            FileType::RegularFile | FileType::BlockDevice
        ) {
            return Err(AttachError::Invalid(
                "a disk is a regular file or a block device".into(),
            ));
        }
        let flags = fcntl_getfl(&fd).map_err(AttachError::system("fcntl of the disk"))?;
        let access = flags & OFlags::ACCMODE;
        if access != OFlags::RDWR && !(read_only && access == OFlags::RDONLY) {
            return Err(AttachError::Invalid(
                "the disk must be open for reading and, unless read-only, writing".into(),
            ));
        }
        let block_size = match FileType::from_raw_mode(stat.st_mode) {
            FileType::BlockDevice => {
                let size = ioctl_blksszget(&fd).map_err(AttachError::system("block size of the disk"))?;
                Some(size.clamp(SECTOR as u32, MOST_OF_BLOCK))
            }
            _ => None,
        };
        // The offset of a block device's end is its size, unlike its st_size.
        let bytes = seek(&fd, SeekFrom::End(0)).map_err(AttachError::system("size of the disk"))?;
        Ok(Disk {
            file: File::from(fd),
            read_only,
            sectors: bytes / SECTOR,
            block_size,
        })
    }

    /// Whether it is a block device of the host, not a file.
    pub fn is_block_device(&self) -> bool {
        self.block_size.is_some()
    }

    /// Bytes of a logical block.
    pub fn block_size(&self) -> u32 {
        self.block_size.unwrap_or(SECTOR as u32)
    }

    /// Capacity in sectors.
    pub fn sectors(&self) -> u64 {
        self.sectors
    }

    /// Capacity in bytes.
    pub fn bytes(&self) -> u64 {
        self.sectors * SECTOR
    }

    /// The file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Whether writes are refused.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    pub fn read(&self, sector: u64, data: &[VolatileSlice<'_>]) -> io::Result<()> {
        let at = self.check(sector, guest_io::total(data) as u64)?;
        guest_io::read_exact_at(self.file.as_fd(), data, at)
    }

    pub fn write(&self, sector: u64, data: &[VolatileSlice<'_>]) -> io::Result<()> {
        self.check_writable()?;
        let at = self.check(sector, guest_io::total(data) as u64)?;
        guest_io::write_all_at(self.file.as_fd(), data, at)
    }

    /// Reads bytes of the file into this process.
    pub fn read_bytes(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        self.file.read_exact_at(bytes, at)
    }

    /// Writes bytes of this process to the file.
    pub fn write_bytes(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.file.write_all_at(bytes, at)
    }

    /// Returns when all earlier writes are on the medium.
    pub fn flush(&self) -> io::Result<()> {
        if self.read_only {
            Ok(())
        } else {
            Ok(fdatasync(&self.file)?)
        }
    }

    /// Frees the range on the host. Only a hint: a file without support keeps its content (§5.2.6.2).
    pub fn discard(&self, range: &Range) -> io::Result<()> {
        self.free(range).map(drop)
    }

    /// The same. Returns whether the range reads as zero then: false if the file keeps its content.
    pub fn free(&self, range: &Range) -> io::Result<bool> {
        self.check_writable()?;
        let length = u64::from(range.sectors) * SECTOR;
        let at = self.check(range.sector, length)?;
        if length == 0 {
            return Ok(true);
        }
        match fallocate(
            &self.file,
            FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            at,
            length,
        ) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(false),
            done => Ok(done.map(|()| true)?),
        }
    }

    /// Makes the range read as zero.
    pub fn write_zeroes(&self, range: &Range) -> io::Result<()> {
        self.check_writable()?;
        let length = u64::from(range.sectors) * SECTOR;
        let at = self.check(range.sector, length)?;
        if length == 0 {
            return Ok(());
        }
        let how = if range.unmap {
            FallocateFlags::PUNCH_HOLE
        } else {
            FallocateFlags::ZERO_RANGE
        };
        match fallocate(&self.file, how | FallocateFlags::KEEP_SIZE, at, length) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => self.fill_with_zeroes(at, length),
            done => Ok(done?),
        }
    }

    fn fill_with_zeroes(&self, at: u64, length: u64) -> io::Result<()> {
        let mut done = 0;
        while done < length {
            let n = (length - done).min(ZEROES.len() as u64) as usize;
            match pwrite(&self.file, &ZEROES[..n], at + done) {
                Ok(n) => done += n as u64,
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    fn check_writable(&self) -> io::Result<()> {
        if self.read_only {
            Err(io::ErrorKind::ReadOnlyFilesystem.into())
        } else {
            Ok(())
        }
    }

    /// The byte offset of `sector`, if `length` bytes from there are whole sectors inside the disk.
    fn check(&self, sector: u64, length: u64) -> io::Result<u64> {
        check(self.sectors, sector, length)
    }
}

/// The byte offset of `sector`, if `length` bytes from there are whole sectors inside a disk of `sectors`.
pub fn check(sectors: u64, sector: u64, length: u64) -> io::Result<u64> {
    let inside = sector
        .checked_add(length / SECTOR)
        .is_some_and(|end| end <= sectors);
    if !length.is_multiple_of(SECTOR) || !inside {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{length} bytes at sector {sector} of {sectors}"),
        ));
    }
    Ok(sector * SECTOR)
}
