//! virtio-blk (virtio 1.2 §5.2): a disk on a file or block device, or an image that a guest mounts itself.
//!
//! A read of an image's bytes that are not there yet waits ([`super::misses`]), and others are served meanwhile; one whose
//! bytes cannot be had is answered `IOERR`, and the log says why. Requests over the rate limit stay in the queue
//! ([`super::throttle`]); those behind them wait too, whatever they ask for.
//!
//! The features do not depend on the backend, so a template can be frozen with any: `F_RO` is not among them, and a
//! write to a read-only disk is answered `IOERR`. With no backend the capacity is 0 and every request is `IOERR`. A driver
//! reads the block size once, so one that is bound before a block device is attached takes it for 512 bytes, which works.

mod disk;
pub mod image;
mod request;

use std::mem::offset_of;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use thaw_log::LogLimit;
use thaw_protocol::control::{Backend, DeviceId};
use thaw_protocol::limits::DeviceLimits;
use virtio_bindings::virtio_blk as b;
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use self::disk::Disk;
use self::image::ImageDisk;
use self::request::{Kind, Request, Status};
use super::accesses::AccessLog;
use super::chain::Chain;
use super::config::{Config, ConfigSpace};
use super::device::{Activation, AttachError, DeviceError, one_descriptor};
use super::event_loop::Registrar;
use super::guest_io;
use super::looped::{Handler, Looped, another_kind};
use super::misses::{self, Misses, Resumed, Waits, check_heads, packet_socket};
use super::queue::{DeviceQueue, QueueError};
use super::state::{DeviceState, QueueRecord};
use super::throttle::Throttle;
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

/// The token of the miss socket in the event loop.
const MISSES: u32 = 0;

/// `struct virtio_blk_config` (§5.2.4), whose size is no multiple of 8.
#[derive(Default, FromBytes, Immutable, IntoBytes)]
#[repr(C, packed(4))]
struct BlkConfig {
    /// In sectors.
    capacity: u64,
    size_max: u32,
    seg_max: u32,
    cylinders: u16,
    heads: u8,
    sectors: u8,
    blk_size: u32,
    physical_block_exp: u8,
    alignment_offset: u8,
    min_io_size: u16,
    opt_io_size: u32,
    writeback: u8,
    unused0: u8,
    num_queues: u16,
    max_discard_sectors: u32,
    max_discard_seg: u32,
    discard_sector_alignment: u32,
    max_write_zeroes_sectors: u32,
    max_write_zeroes_seg: u32,
    write_zeroes_may_unmap: u8,
    unused1: [u8; 3],
}

impl BlkConfig {
    /// Of a device with no backend.
    fn empty() -> BlkConfig {
        BlkConfig {
            seg_max: SEG_MAX,
            blk_size: SECTOR as u32,
            max_discard_sectors: MAX_DISCARD,
            max_discard_seg: MAX_RANGES,
            // Discards are best in whole pages of the host's file.
            discard_sector_alignment: 8,
            max_write_zeroes_sectors: MAX_ZEROES,
            max_write_zeroes_seg: MAX_RANGES,
            write_zeroes_may_unmap: 1,
            ..BlkConfig::default()
        }
    }
}

/// The device.
pub struct Blk {
    config: Config<BlkConfig>,
    backend: Option<Backing>,
    /// The disk the guest was frozen with.
    frozen: Option<Frozen>,
    /// What `GET_ID` answers.
    serial: String,
    /// Reads of an image that wait.
    misses: Misses,
    accesses: AccessLog,
    /// Requests that waited when the guest was frozen, by head.
    to_replay: Vec<u16>,
    throttle: Throttle,
    registrar: Registrar,
    log: LogLimit,
}

/// What the disk's bytes are in.
enum Backing {
    Disk(Disk),
    Image(ImageDisk),
}

impl Backing {
    fn sectors(&self) -> u64 {
        match self {
            Backing::Disk(disk) => disk.sectors(),
            Backing::Image(image) => image.sectors(),
        }
    }

    /// Bytes of a block, as the guest is told.
    fn block_size(&self) -> u32 {
        match self {
            Backing::Disk(disk) => disk.block_size(),
            Backing::Image(_) => SECTOR as u32,
        }
    }

    fn is_read_only(&self) -> bool {
        match self {
            Backing::Disk(disk) => disk.is_read_only(),
            Backing::Image(_) => true,
        }
    }
}

/// What a restored guest counts on.
#[derive(Clone, Copy, Debug)]
struct Frozen {
    sectors: u64,
    writable: bool,
}

impl Blk {
    pub fn new(id: DeviceId, registrar: Registrar) -> Looped<Blk> {
        let capacity = 0..offset_of!(BlkConfig, size_max);
        Looped::new(Blk {
            config: Config::with_varying(BlkConfig::empty(), capacity),
            backend: None,
            frozen: None,
            serial: format!("{id:?}").to_lowercase(),
            misses: Misses::new(Waits::Loop(registrar.clone(), MISSES)),
            accesses: AccessLog::default(),
            to_replay: Vec::new(),
            throttle: Throttle::default(),
            registrar,
            log: LogLimit::default(),
        })
    }

    /// Has the configuration say what is behind it now. True if that changed.
    fn tell(&self) -> bool {
        let disk = self.backend.as_ref();
        let capacity = disk.map_or(0, Backing::sectors);
        let block_size = disk.map_or(SECTOR as u32, Backing::block_size);
        self.config.change(|config| {
            config.capacity = capacity;
            config.blk_size = block_size;
        })
    }

    /// A disk for a restored guest holds all that the guest may have on the frozen one.
    fn check_frozen(&self, disk: &Backing) -> Result<(), AttachError> {
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
        self.config.space()
    }

    fn attach(&mut self, backend: Backend, fds: Vec<OwnedFd>) -> Result<bool, AttachError> {
        let (backing, socket) = match backend {
            Backend::Disk { read_only } => {
                (Backing::Disk(Disk::open(one_descriptor(fds)?, read_only)?), None)
            }
            Backend::Image { blobs } => {
                let (image, socket) = ImageDisk::open(&blobs, fds)?;
                (Backing::Image(image), Some(packet_socket(vec![socket])?))
            }
            Backend::Misses => {
                self.misses.connect(packet_socket(fds)?);
                return Ok(false);
            }
            Backend::Accesses => {
                self.accesses.connect(packet_socket(fds)?);
                return Ok(false);
            }
            _ => {
                return Err(AttachError::WrongKind(
                    "virtio-blk takes a disk, or an image and its sockets",
                ));
            }
        };
        self.check_frozen(&backing)?;
        self.backend = Some(backing);
        if let Some(socket) = socket {
            self.misses.connect(socket);
        }
        Ok(self.tell())
    }

    fn detach(&mut self) -> Result<bool, AttachError> {
        if let Some(Backing::Image(_)) = self.backend {
            return Err(AttachError::WrongKind("a disk that is an image stays"));
        }
        // No request is in flight: those of a disk are answered before the lock is let go.
        self.backend = None;
        // Requests that wait for the limit have errors at once.
        self.throttle.forget();
        Ok(self.tell())
    }

    fn limit(&mut self, limits: DeviceLimits) -> Result<(), AttachError> {
        let DeviceLimits::Disk(limit) = limits else {
            return Err(AttachError::WrongKind("a disk has the limits of a disk"));
        };
        self.throttle.set(limit);
        Ok(())
    }

    fn is_of_the_host(&self) -> bool {
        matches!(&self.backend, Some(Backing::Disk(disk)) if disk.is_block_device())
    }

    fn is_backed(&self) -> bool {
        self.backend.is_some()
    }

    fn save(&self) -> DeviceState {
        let disk = self.backend.as_ref();
        let waiting = self.misses.heads().into_iter().map(|(_, head)| head);
        DeviceState::Blk {
            read_only: disk.is_some_and(Backing::is_read_only),
            capacity: disk.map_or(0, Backing::sectors),
            parked: waiting.chain(self.to_replay.iter().copied()).collect(),
        }
    }

    fn check(&self, state: &DeviceState) -> Result<(), String> {
        match state {
            DeviceState::Blk { .. } => Ok(()),
            other => Err(another_kind(other)),
        }
    }

    fn check_queues(&self, state: &DeviceState, queues: Option<&[QueueRecord]>) -> Result<(), String> {
        match state {
            DeviceState::Blk { parked, .. } => {
                check_heads(0, parked, queues.and_then(|queues| queues.first()))
            }
            _ => Ok(()),
        }
    }

    fn restore(&mut self, state: &DeviceState) -> Result<(), DeviceError> {
        if let DeviceState::Blk {
            read_only,
            capacity,
            parked,
        } = state
        {
            self.frozen = Some(Frozen {
                sectors: *capacity,
                writable: *capacity > 0 && !*read_only,
            });
            self.to_replay = parked.clone();
        }
        Ok(())
    }

    fn restored(&mut self, active: &Activation) {
        if !self.to_replay.is_empty()
            && let Some(queue) = active.queues.first()
        {
            queue.kick_again();
        }
    }

    fn reset(&mut self) {
        self.misses.clear();
        self.to_replay.clear();
        self.throttle.forget();
        self.registrar.wake_at(None);
    }

    fn serve(&mut self, active: &mut Activation, queue: usize) -> Result<(), DeviceError> {
        let queue = &mut active.queues[queue];
        for head in std::mem::take(&mut self.to_replay) {
            let chain = queue.chain_at(head)?;
            self.execute(queue, request_of(queue, chain))?;
        }
        if self.throttle.waits() {
            self.registrar.wake_at(self.throttle.until());
            queue.signal()?;
            return self.misses.ask();
        }
        queue.disable_kicks()?;
        for _ in 0..queue.size() {
            match queue.pop()? {
                Some(chain) if self.misses.has(queue.index(), chain.head()) => {
                    return Err(QueueError::Chain {
                        queue: queue.index(),
                        head: chain.head(),
                    }
                    .into());
                }
                Some(chain) => {
                    let request = request_of(queue, chain);
                    if !self.admits(queue, &request)? {
                        queue.unpop();
                        self.registrar.wake_at(self.throttle.until());
                        queue.signal()?;
                        return self.misses.ask();
                    }
                    self.execute(queue, request)?;
                }
                None if queue.enable_kicks()? => {}
                None => {
                    queue.signal()?;
                    return self.misses.ask();
                }
            }
        }
        queue.kick_again();
        queue.signal()?;
        self.misses.ask()
    }

    fn woken(&mut self, active: Option<&mut Activation>) -> Result<(), DeviceError> {
        match active {
            Some(active) => self.serve(active, 0),
            None => Ok(()),
        }
    }

    fn backend_ready(&mut self, active: Option<&mut Activation>) -> Result<(), DeviceError> {
        let resumed = self.misses.answers();
        if let Some(queue) = active.and_then(|active| active.queues.first_mut()) {
            for Resumed { request, failure } in resumed {
                match failure {
                    None => self.execute(queue, request)?,
                    Some(reason) => {
                        if let Some(dropped) = self.log.pass() {
                            tracing::error!(
                                reason,
                                disk = self.serial,
                                dropped,
                                "a read of an image failed: its bytes cannot be had"
                            );
                        }
                        refuse(queue, &request)?;
                    }
                }
            }
            queue.signal()?;
        }
        self.misses.ask()
    }
}

fn request_of(queue: &DeviceQueue, chain: Chain) -> misses::Request {
    misses::Request {
        queue: queue.index(),
        chain,
        rounds: 0,
    }
}

fn parse<'m>(memory: &'m GuestMemory, request: &misses::Request) -> Result<Request<'m>, DeviceError> {
    Request::parse(memory, &request.chain).map_err(|what| DeviceError::Unanswerable {
        head: request.chain.head(),
        what,
    })
}

/// Answers a request whose bytes cannot be had.
fn refuse(queue: &mut DeviceQueue, request: &misses::Request) -> Result<(), DeviceError> {
    let memory = queue.memory().clone();
    let parsed = parse(&memory, request)?;
    parsed.status.copy_from(&[Status::IoErr as u8]);
    Ok(queue.add_used(request.chain.head(), 1)?)
}

impl Blk {
    /// Whether a request may be served now; if so, it is charged for. With no backend there is nothing to limit.
    fn admits(&mut self, queue: &DeviceQueue, request: &misses::Request) -> Result<bool, DeviceError> {
        if self.backend.is_none() || !self.throttle.limits() {
            return Ok(true);
        }
        let (bytes, operations) = match parse(queue.memory(), request)?.kind {
            Ok(kind) => kind.cost(),
            Err(_) => (0, 1),
        };
        let admitted = self.throttle.admits(bytes, operations);
        if admitted {
            self.throttle.charge(bytes, operations);
        }
        Ok(admitted)
    }

    /// Answers one request, or parks it until its bytes are there; the bytes written include the status.
    fn execute(&mut self, queue: &mut DeviceQueue, request: misses::Request) -> Result<(), DeviceError> {
        let memory = queue.memory().clone();
        let parsed = parse(&memory, &request)?;
        if let (Ok(Kind::In { sector, data }), Some(Backing::Image(image))) = (&parsed.kind, &self.backend) {
            let length = guest_io::total(data) as u64;
            if request.rounds == 0 {
                image.tell(&mut self.accesses, *sector, length);
            }
            let missing = image.missing(*sector, length);
            if !missing.is_empty() {
                return match self.misses.park(request, &missing) {
                    Ok(()) => Ok(()),
                    Err(refused) => refuse(queue, &refused),
                };
            }
        }
        let (status, data) = match (&parsed.kind, &self.backend) {
            (Err(status), _) => (*status, 0),
            (Ok(_), None) => (Status::IoErr, 0),
            (Ok(kind), Some(Backing::Disk(disk))) => execute(kind, disk, &self.serial),
            (Ok(kind), Some(Backing::Image(image))) => execute_on_image(kind, image, &self.serial),
        };
        parsed.status.copy_from(&[status as u8]);
        Ok(queue.add_used(request.chain.head(), data.saturating_add(1))?)
    }
}

/// As [`execute`], on what can only be read, and is there.
fn execute_on_image(kind: &Kind<'_>, image: &ImageDisk, serial: &str) -> (Status, u32) {
    match kind {
        Kind::In { sector, data } => read(data, image.read(*sector, data)),
        Kind::Flush => (Status::Ok, 0),
        Kind::GetId { data } => (Status::Ok, request::write_id(serial, data)),
        Kind::Out { .. } | Kind::Discard(_) | Kind::WriteZeroes(_) => (Status::IoErr, 0),
    }
}

/// Does what was asked, and says how many bytes it wrote to the guest's data buffers.
fn execute(kind: &Kind<'_>, disk: &Disk, serial: &str) -> (Status, u32) {
    let done = match kind {
        Kind::In { sector, data } => return read(data, disk.read(*sector, data)),
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

fn read(data: &[vm_memory::VolatileSlice<'_>], done: std::io::Result<()>) -> (Status, u32) {
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

#[cfg(test)]
#[path = "blk/blk_test.rs"]
mod tests;
