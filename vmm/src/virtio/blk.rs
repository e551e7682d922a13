//! virtio-blk (virtio 1.2 §5.2): a disk on a file or block device.
//!
//! The features do not depend on the backend, so a template can be frozen with any: `F_RO` is not among them, and a
//! write to a read-only disk is answered `IOERR`. With no backend the capacity is 0 and every request is `IOERR`.

mod disk;
mod request;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use thaw_protocol::control::{Backend, DeviceId};
use virtio_bindings::virtio_blk as b;
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;

use self::disk::Disk;
use self::request::{Kind, Request, Status};
use super::config::ConfigSpace;
use super::device::{Activation, AttachError, DeviceError, one_descriptor};
use super::looped::{Handler, Looped, another_kind};
use super::queue::Chain;
use super::state::DeviceState;
use crate::memory::GuestMemory;

const QUEUE_SIZES: [u16; 1] = [256];
/// Data segments of a request: what is left of a queue by header and status.
const SEG_MAX: u32 = QUEUE_SIZES[0] as u32 - 2;
/// Bytes of a sector, the unit of all addresses (§5.2.4), whatever the block size.
const SECTOR: u64 = 512;
/// Ranges in one discard or write-zeroes request.
const MAX_RANGES: u32 = 32;
/// Sectors in one range: 1 GiB to discard, which is one call; 16 MiB to zero, which may have to be written.
const MAX_DISCARD: u32 = 1 << 21;
const MAX_ZEROES: u32 = 1 << 15;

/// The device.
pub struct Blk {
    config: Arc<ConfigSpace>,
    backend: Option<Disk>,
    /// The disk the guest was frozen with.
    frozen: Option<Frozen>,
    /// What `GET_ID` answers.
    serial: String,
}

/// What a restored guest counts on.
#[derive(Clone, Copy, Debug)]
struct Frozen {
    sectors: u64,
    writable: bool,
}

impl Blk {
    pub fn new(id: DeviceId) -> Looped<Blk> {
        let config = Arc::new(ConfigSpace::new(config(0)).varying(0..8));
        Looped::new(Blk {
            config,
            backend: None,
            frozen: None,
            serial: format!("{id:?}").to_lowercase(),
        })
    }

    /// A disk for a restored guest holds all that the guest may have on the frozen one.
    fn check_frozen(&self, disk: &Disk) -> Result<(), AttachError> {
        let Some(frozen) = self.frozen else { return Ok(()) };
        if disk.sectors() < frozen.sectors {
            return Err(AttachError::Frozen(format!(
                "a disk of {} sectors is smaller than the frozen guest's of {}",
                disk.sectors(),
                frozen.sectors
            )));
        }
        if disk.is_read_only() && frozen.writable {
            return Err(AttachError::Frozen(
                "a read-only disk cannot replace the frozen guest's writable one".into(),
            ));
        }
        Ok(())
    }
}

/// `struct virtio_blk_config` (§5.2.4).
fn config(capacity: u64) -> Vec<u8> {
    let mut c = vec![0; 60];
    c[0..8].copy_from_slice(&capacity.to_le_bytes());
    c[12..16].copy_from_slice(&SEG_MAX.to_le_bytes());
    c[20..24].copy_from_slice(&(SECTOR as u32).to_le_bytes());
    c[36..40].copy_from_slice(&MAX_DISCARD.to_le_bytes());
    c[40..44].copy_from_slice(&MAX_RANGES.to_le_bytes());
    // Discards are best in whole pages of the host's file.
    c[44..48].copy_from_slice(&8u32.to_le_bytes());
    c[48..52].copy_from_slice(&MAX_ZEROES.to_le_bytes());
    c[52..56].copy_from_slice(&MAX_RANGES.to_le_bytes());
    c[56] = 1;
    c
}

impl Handler for Blk {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_BLOCK
    }

    fn features(&self) -> u64 {
        1 << b::VIRTIO_BLK_F_SEG_MAX
            | 1 << b::VIRTIO_BLK_F_BLK_SIZE
            | 1 << b::VIRTIO_BLK_F_FLUSH
            | 1 << b::VIRTIO_BLK_F_DISCARD
            | 1 << b::VIRTIO_BLK_F_WRITE_ZEROES
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn config(&self) -> Arc<ConfigSpace> {
        self.config.clone()
    }

    fn attach(&mut self, backend: Backend, fds: Vec<OwnedFd>) -> Result<bool, AttachError> {
        let Backend::Disk { read_only } = backend else {
            return Err(AttachError::WrongKind("virtio-blk takes a disk"));
        };
        let disk = Disk::open(one_descriptor(fds)?, read_only)?;
        self.check_frozen(&disk)?;
        let capacity = disk.sectors();
        self.backend = Some(disk);
        Ok(self.config.set(0, &capacity.to_le_bytes()))
    }

    fn is_backed(&self) -> bool {
        self.backend.is_some()
    }

    fn save(&self) -> DeviceState {
        let disk = self.backend.as_ref();
        DeviceState::Blk {
            read_only: disk.is_some_and(Disk::is_read_only),
            capacity: disk.map_or(0, Disk::sectors),
        }
    }

    fn check(&self, state: &DeviceState) -> Result<(), String> {
        match state {
            DeviceState::Blk { .. } => Ok(()),
            other => Err(another_kind(other)),
        }
    }

    fn restore(&mut self, state: &DeviceState) -> Result<(), DeviceError> {
        if let DeviceState::Blk { read_only, capacity } = state {
            self.frozen = Some(Frozen {
                sectors: *capacity,
                writable: *capacity > 0 && !*read_only,
            });
        }
        Ok(())
    }

    fn serve(&mut self, active: &mut Activation, queue: usize) -> Result<(), DeviceError> {
        let (disk, serial) = (self.backend.as_ref(), &self.serial);
        active.queues[queue].serve(|memory, chain| answer(memory, chain, disk, serial))
    }
}

/// Answers one request; the bytes written include the status.
fn answer(
    memory: &GuestMemory,
    chain: &Chain,
    disk: Option<&Disk>,
    serial: &str,
) -> Result<u32, DeviceError> {
    let request = Request::parse(memory, chain).map_err(|what| DeviceError::Unanswerable {
        head: chain.head(),
        what,
    })?;
    let (status, data) = match (&request.kind, disk) {
        (Err(status), _) => (*status, 0),
        (Ok(_), None) => (Status::IoErr, 0),
        (Ok(kind), Some(disk)) => execute(kind, disk, serial),
    };
    request.status.copy_from(&[status as u8]);
    Ok(data.saturating_add(1))
}

/// Does what was asked, and says how many bytes it wrote to the guest's data buffers.
fn execute(kind: &Kind<'_>, disk: &Disk, serial: &str) -> (Status, u32) {
    let done = match kind {
        Kind::In { sector, data } => return read(disk, *sector, data),
        Kind::Out { sector, data } => disk.write(*sector, data),
        Kind::Flush => disk.flush(),
        Kind::GetId { data } => return (Status::Ok, request::write_id(serial, data)),
        Kind::Discard(ranges) => ranges.iter().try_for_each(|range| disk.discard(range)),
        Kind::WriteZeroes(ranges) => ranges.iter().try_for_each(|range| disk.write_zeroes(range)),
    };
    match done {
        Ok(()) => (Status::Ok, 0),
        Err(error) => {
            tracing::debug!(%error, ?kind, "disk request failed");
            (Status::IoErr, 0)
        }
    }
}

fn read(disk: &Disk, sector: u64, data: &[vm_memory::VolatileSlice<'_>]) -> (Status, u32) {
    match disk.read(sector, data) {
        Ok(()) => (
            Status::Ok,
            u32::try_from(super::guest_io::total(data)).unwrap_or(u32::MAX),
        ),
        Err(error) => {
            tracing::debug!(%error, sector, "disk read failed");
            (Status::IoErr, 0)
        }
    }
}

#[cfg(test)]
#[path = "blk/blk_test.rs"]
mod tests;
