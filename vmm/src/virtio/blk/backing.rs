//! The backend of a virtio-blk device: a disk, a disk over a shared base, or a read-only image.

use std::io;

use vm_memory::VolatileSlice;

use super::SECTOR;
use super::disk::Disk;
use super::image::ImageDisk;
use super::layered::LayeredDisk;
use super::request::{Kind, Status, write_id};
use crate::virtio::guest_io;

/// Where the disk's bytes are stored.
pub enum Backing {
    Disk(Disk),
    Layered(LayeredDisk),
    Image(ImageDisk),
}

impl Backing {
    pub fn sectors(&self) -> u64 {
        match self {
            Backing::Disk(disk) => disk.sectors(),
            Backing::Layered(disk) => disk.sectors(),
            Backing::Image(image) => image.sectors(),
        }
    }

    /// Bytes of a block, for the configuration.
    pub fn block_size(&self) -> u32 {
        match self {
            Backing::Disk(disk) => disk.block_size(),
            Backing::Layered(_) | Backing::Image(_) => SECTOR as u32,
        }
    }

    pub fn is_read_only(&self) -> bool {
        match self {
            Backing::Disk(disk) => disk.is_read_only(),
            Backing::Layered(_) => false,
            Backing::Image(_) => true,
        }
    }

    /// Executes a request whose bytes are all there. Returns the status, and the number of bytes written to the guest's data buffers.
    pub fn execute(&self, kind: &Kind<'_>, serial: &str) -> (Status, u32) {
        let done = match (kind, self) {
            (Kind::GetId { data }, _) => return (Status::Ok, write_id(serial, data)),
            (Kind::In { sector, data }, Backing::Disk(disk)) => return read(data, disk.read(*sector, data)),
            (Kind::In { sector, data }, Backing::Layered(disk)) => {
                return read(data, disk.read(*sector, data));
            }
            (Kind::In { sector, data }, Backing::Image(image)) => {
                return read(data, image.read(*sector, data));
            }
            (Kind::Flush, Backing::Disk(disk)) => disk.flush(),
            (Kind::Flush, Backing::Layered(disk)) => disk.flush(),
            (Kind::Flush, Backing::Image(_)) => Ok(()),
            (_, Backing::Image(_)) => return (Status::IoErr, 0),
            (Kind::Out { sector, data }, Backing::Disk(disk)) => disk.write(*sector, data),
            (Kind::Out { sector, data }, Backing::Layered(disk)) => disk.write(*sector, data),
            (Kind::Discard(ranges), Backing::Disk(disk)) => {
                ranges.iter().try_for_each(|range| disk.discard(range))
            }
            (Kind::Discard(ranges), Backing::Layered(disk)) => {
                ranges.iter().try_for_each(|range| disk.discard(range))
            }
            (Kind::WriteZeroes(ranges), Backing::Disk(disk)) => {
                ranges.iter().try_for_each(|range| disk.write_zeroes(range))
            }
            (Kind::WriteZeroes(ranges), Backing::Layered(disk)) => {
                ranges.iter().try_for_each(|range| disk.write_zeroes(range))
            }
        };
        match done {
            Ok(()) => (Status::Ok, 0),
            Err(error) => {
                tracing::debug!(%error, ?kind, "disk request failed");
                (Status::IoErr, 0)
            }
        }
    }
}

fn read(data: &[VolatileSlice<'_>], done: io::Result<()>) -> (Status, u32) {
    match done {
        Ok(()) => (
            Status::Ok,
            u32::try_from(guest_io::total(data)).unwrap_or(u32::MAX),
        ),
        Err(error) => {
            tracing::debug!(%error, "disk read failed");
            (Status::IoErr, 0)
        }
    }
}
