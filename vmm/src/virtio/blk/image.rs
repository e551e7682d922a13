//! The image behind a virtio-blk device: a read-only disk, parts of which may still have to be fetched.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use thaw_imagefs::blob::BlobFile;
use thaw_imagefs::fs::{DiskImage, MissingRange, PlacedBlob, Source};
use thaw_protocol::control::BlobRange;
use vm_memory::VolatileSlice;

use super::SECTOR;
use crate::virtio::accesses::AccessLog;
use crate::virtio::device::AttachError;
use crate::virtio::guest_io;

/// Zeros to copy at once for the space between blobs.
static ZEROES: [u8; 4096] = [0; 4096];

/// Takes each blob's cache files, data and ready file in turn, from the descriptors. Further descriptors stay in `files`.
pub fn placed_blobs(
    ranges: &[BlobRange],
    files: &mut impl Iterator<Item = OwnedFd>,
) -> Result<Vec<PlacedBlob>, AttachError> {
    ranges
        .iter()
        .map(|range| {
            let (Some(data), Some(ready)) = (files.next(), files.next()) else {
                return Err(AttachError::Invalid("a blob's descriptors are missing".into()));
            };
            let file = BlobFile::open(File::from(data), File::from(ready))
                .map_err(|error| AttachError::Invalid(error.to_string()))?;
            Ok(PlacedBlob {
                address: range.address,
                length: range.length,
                digest: range.digest,
                file,
            })
        })
        .collect()
}

/// An image as a disk.
pub struct ImageDisk {
    image: DiskImage,
    sectors: u64,
}

impl ImageDisk {
    /// Takes the descriptors that [`thaw_protocol::control::Backend::Image`] lists. Also returns the miss socket.
    pub fn open(ranges: &[BlobRange], fds: Vec<OwnedFd>) -> Result<(ImageDisk, OwnedFd), AttachError> {
        let (expected, got) = (2 + 2 * ranges.len(), fds.len());
        let wrong = || AttachError::Descriptors { expected, got };
        if got != expected {
            return Err(wrong());
        }
        let mut fds = fds.into_iter();
        let metadata = File::from(fds.next().ok_or_else(wrong)?);
        let blobs = placed_blobs(ranges, &mut fds)?;
        let socket = fds.next().ok_or_else(wrong)?;
        let image =
            DiskImage::open(metadata, blobs).map_err(|error| AttachError::Invalid(error.to_string()))?;
        let sectors = image.length() / SECTOR;
        Ok((ImageDisk { image, sectors }, socket))
    }

    /// Capacity in sectors.
    pub fn sectors(&self) -> u64 {
        self.sectors
    }

    /// The byte offset of `sector`, if `length` bytes from there are whole sectors inside the disk.
    fn check(&self, sector: u64, length: u64) -> io::Result<u64> {
        super::disk::check(self.sectors, sector, length)
    }

    /// The ranges that a read must wait for. If there are none, the read can be answered now, with data or an error.
    pub fn missing(&self, sector: u64, length: u64) -> Vec<MissingRange> {
        match self.check(sector, length) {
            Ok(address) => self.image.missing(address, length),
            Err(_) => Vec::new(),
        }
    }

    /// Reports the bytes of blobs that a read covers.
    pub fn record_access(&self, accesses: &mut AccessLog, sector: u64, length: u64) {
        if accesses.is_on()
            && let Ok(address) = self.check(sector, length)
        {
            let record = |blob, offset, length| accesses.record(blob, offset, length);
            self.image.touched(address, length, record);
        }
    }

    /// Reads bytes that are there, straight into guest memory.
    pub fn read(&self, sector: u64, data: &[VolatileSlice<'_>]) -> io::Result<()> {
        let length = guest_io::total(data) as u64;
        let address = self.check(sector, length)?;
        let mut done = 0;
        self.image.read(address, length, |source, length| {
            let part = guest_io::part(data, done, length as usize);
            done += length as usize;
            match source {
                Source::File(file, offset) => guest_io::read_exact_at(file.as_fd(), &part, offset),
                Source::Zeros => {
                    let mut at = 0;
                    while at < length as usize {
                        let now = (length as usize - at).min(ZEROES.len());
                        guest_io::copy_in(&part, at, &ZEROES[..now]);
                        at += now;
                    }
                    Ok(())
                }
            }
        })
    }
}
