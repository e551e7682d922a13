//! virtio-blk (virtio 1.2 §5.2): a disk on a file or block device, one over a base that others share, or an image that a guest mounts
//! itself.
//!
//! The threads of the disk's event loop make the system calls of requests without the device's lock ([`super::flight`]), several at once, and each
//! answer is signalled when it is there. Nothing is between a request and its call but the driver's queue.
//!
//! A read of an image waits if its bytes are not there yet ([`super::misses`]), and other requests are served meanwhile. If the node cannot
//! get the bytes, the read is answered `IOERR` and the log says why. Requests over the rate limit stay in the queue ([`super::throttle`]),
//! and so do all requests behind them.
//!
//! The features do not depend on the backend, so a template can be frozen with any. `F_RO` is therefore not offered, and a write to a
//! read-only disk is answered `IOERR`. Without a backend the capacity is 0 and every request is answered `IOERR`. A driver reads the block
//! size once. So a driver bound before a block device is attached assumes 512 bytes, which works.

mod backing;
mod call;
mod disk;
pub mod image;
mod layered;
mod request;
mod server;

use std::mem::offset_of;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use thaw_protocol::control::Backend;
use thaw_protocol::device_limits::DeviceLimits;
use virtio_bindings::virtio_blk as b;
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;
use vmm_sys_util::epoll::EventSet;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use self::backing::Backing;
use self::disk::Disk;
use self::image::ImageDisk;
use self::layered::LayeredDisk;
use self::server::Server;
use super::config::{Config, ConfigSpace};
use super::device::{
    Activation, AttachError, Call, DeviceError, DeviceSpec, Saved, VirtioDevice, active_queue, one_descriptor,
};
use super::event_loop::Registrar;
use super::flight::Completion;
use super::misses::{Misses, Waits, check_heads, packet_socket};
use super::queue::{Ended, QueueError};
use super::state::{BlkState, DeviceState, QueueRecord};

const QUEUE_SIZES: [u16; 1] = [256];
/// Most data segments of a request: the queue's size without header and status.
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
    /// The configuration of a device without a backend.
    fn empty() -> BlkConfig {
        BlkConfig {
            seg_max: SEG_MAX,
            blk_size: SECTOR as u32,
            max_discard_sectors: MAX_DISCARD,
            max_discard_seg: MAX_RANGES,
            // Discards work best on whole pages of the host's file.
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
    active: Option<Activation>,
    server: Server,
    /// The disk that the guest was frozen with.
    frozen: Option<Frozen>,
    /// Requests that waited at the freeze, by head.
    to_replay: Vec<u16>,
    /// A thread was woken for requests that another left in the queue, and none has come since. Until one comes, no other is woken.
    is_awaited: bool,
    registrar: Registrar,
}

/// The properties of the disk that a restored guest relies on.
#[derive(Clone, Copy, Debug)]
struct Frozen {
    sectors: u64,
    writable: bool,
}

impl Blk {
    /// `serial` is the answer to `GET_ID`: at most 20 bytes.
    pub fn new(serial: &str, registrar: Registrar) -> Blk {
        let capacity = 0..offset_of!(BlkConfig, size_max);
        let misses = Misses::new(Waits::Loop(registrar.clone(), MISSES));
        Blk {
            config: Config::with_varying(BlkConfig::empty(), capacity),
            active: None,
            server: Server::new(serial.to_owned(), misses, registrar.shared_threads()),
            frozen: None,
            to_replay: Vec::new(),
            is_awaited: false,
            registrar,
        }
    }

    /// Writes the backend's properties to the configuration, for the driver.
    fn publish(&self) {
        let disk = self.server.backend.as_deref();
        let capacity = disk.map_or(0, Backing::sectors);
        let block_size = disk.map_or(SECTOR as u32, Backing::block_size);
        let changed = self.config.change(|config| {
            config.capacity = capacity;
            config.blk_size = block_size;
        });
        if changed && let Some(active) = &self.active {
            active.config_changed();
        }
    }

    /// Makes the queue serve again the requests that waited for something that has changed.
    fn kick_again(&self) {
        if let Some(active) = &self.active {
            active.kick_again();
        }
    }

    /// Answers the requests whose calls have ended, and interrupts the driver.
    fn answer_ended(&mut self) -> Result<(), QueueError> {
        let completions = self.server.flight.completions();
        match active_queue(&mut self.active, 0) {
            Some(queue) if !completions.is_empty() => {
                for Completion { head, written } in completions {
                    queue.add_used(head, written)?;
                }
                queue.signal()
            }
            _ => Ok(()),
        }
    }

    /// Answers the requests that waited at a freeze.
    fn replay(&mut self) -> Result<(), DeviceError> {
        let Some(Activation { memory, queues, .. }) = &mut self.active else {
            return Ok(());
        };
        let Some(queue) = queues.first_mut() else {
            return Ok(());
        };
        for head in std::mem::take(&mut self.to_replay) {
            let chain = queue.chain_at(head)?;
            let answer = self.server.execute(memory, Server::request(chain))?;
            queue.settle(head, answer)?;
            queue.signal()?;
        }
        Ok(())
    }

    /// Serves the queue until a request needs a call.
    fn serve(&mut self) -> Result<Option<Box<dyn Call>>, DeviceError> {
        let Some(queue) = active_queue(&mut self.active, 0) else {
            return Ok(None);
        };
        let ended = match self.server.throttle.waits() {
            true => {
                queue.signal()?;
                Ended::Stopped
            }
            false => queue.serve_while(&mut self.server, Server::wants, Server::take)?,
        };
        let call = self.server.call.take();
        let is_left = match ended {
            _ if call.is_some() => !self.is_awaited,
            Ended::Stopped => {
                self.registrar.wake_at(self.server.throttle.until());
                !self.server.throttle.waits()
            }
            Ended::Empty | Ended::OutOfTurns => false,
        };
        if is_left {
            self.leave_to_others()?;
        }
        self.server.misses.ask()?;
        Ok(call)
    }

    /// Has another thread take the requests that this one leaves in the queue, if there are any and a thread is free, now or later.
    fn leave_to_others(&mut self) -> Result<(), QueueError> {
        let Some(queue) = active_queue(&mut self.active, 0) else {
            return Ok(());
        };
        if self.server.flight.is_full() {
            self.server.flight.kick_when_free(queue.kick());
        } else if queue.enable_kicks()? {
            self.is_awaited = true;
            queue.kick_again();
        }
        Ok(())
    }

    /// Waits until no call touches guest memory or the backend. They need nothing of this device to end.
    fn drain(&mut self) {
        // Left here only by an error after the request was taken.
        self.server.call = None;
        self.server.flight.drain();
    }

    /// Checks that a disk for a restored guest offers everything that the frozen one did.
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

impl VirtioDevice for Blk {
    fn spec(&self) -> DeviceSpec {
        DeviceSpec {
            device_type: VIRTIO_ID_BLOCK,
            features: 1 << b::VIRTIO_BLK_F_SEG_MAX
                | 1 << b::VIRTIO_BLK_F_BLK_SIZE
                | 1 << b::VIRTIO_BLK_F_FLUSH
                | 1 << b::VIRTIO_BLK_F_DISCARD
                | 1 << b::VIRTIO_BLK_F_WRITE_ZEROES,
            queue_sizes: &QUEUE_SIZES,
        }
    }

    fn config(&self) -> Arc<ConfigSpace> {
        self.config.space()
    }

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        self.active = Some(activation);
        Ok(())
    }

    fn reset(&mut self) {
        self.drain();
        // The driver has taken its requests back.
        self.server.flight.completions();
        self.active = None;
        self.server.misses.clear();
        self.server.throttle.forget();
        self.to_replay.clear();
        self.is_awaited = false;
        self.registrar.wake_at(None);
    }

    fn attach(&mut self, backend: Backend, fds: Vec<OwnedFd>) -> Result<(), AttachError> {
        let (backing, socket) = match backend {
            Backend::Disk { read_only } => {
                (Backing::Disk(Disk::open(one_descriptor(fds)?, read_only)?), None)
            }
            Backend::LayeredDisk => (Backing::Layered(LayeredDisk::open(fds)?), None),
            Backend::Image { blobs } => {
                let (image, socket) = ImageDisk::open(&blobs, fds)?;
                (Backing::Image(image), Some(packet_socket(vec![socket])?))
            }
            Backend::Misses => {
                self.server.misses.connect(packet_socket(fds)?);
                return Ok(());
            }
            Backend::Accesses => {
                self.server.accesses.connect(packet_socket(fds)?);
                return Ok(());
            }
            _ => {
                return Err(AttachError::WrongKind(
                    "virtio-blk takes a disk, or an image and its sockets",
                ));
            }
        };
        self.check_frozen(&backing)?;
        self.server.backend = Some(Arc::new(backing));
        if let Some(socket) = socket {
            self.server.misses.connect(socket);
        }
        self.publish();
        Ok(())
    }

    fn detach(&mut self) -> Result<(), AttachError> {
        if let Some(Backing::Image(_)) = self.server.backend.as_deref() {
            return Err(AttachError::WrongKind("a disk that is an image stays"));
        }
        // The threads that made the last calls answer their requests after this.
        self.drain();
        self.server.backend = None;
        self.publish();
        // Requests that wait for the rate limit are answered with errors now.
        self.server.throttle.forget();
        self.kick_again();
        Ok(())
    }

    fn limit(&mut self, limits: DeviceLimits) -> Result<(), AttachError> {
        let DeviceLimits::Disk(limit) = limits else {
            return Err(AttachError::WrongKind("a disk has the limits of a disk"));
        };
        self.server.throttle.set(limit);
        self.kick_again();
        Ok(())
    }

    fn is_of_the_host(&self) -> bool {
        matches!(self.server.backend.as_deref(), Some(Backing::Disk(disk)) if disk.is_block_device())
    }

    fn is_backed(&self) -> bool {
        self.server.backend.is_some()
    }

    fn save(&mut self) -> Saved {
        // Nothing is in flight while the gate is closed; otherwise this waits, so that no request is lost. A ring that cannot be written is
        // found when the device goes on.
        self.drain();
        let _ = self.answer_ended();
        // A thread that leaves for the gate kicks the queue, and the driver is not asked for kicks then. A restored device knows of no such
        // kick, so the driver is asked now.
        if let Some(queue) = active_queue(&mut self.active, 0) {
            let _ = queue.enable_kicks();
        }
        let disk = self.server.backend.as_deref();
        let waiting = self.server.misses.heads().into_iter().map(|(_, head)| head);
        let state = BlkState {
            read_only: disk.is_some_and(Backing::is_read_only),
            capacity: disk.map_or(0, Backing::sectors),
            parked: waiting.chain(self.to_replay.iter().copied()).collect(),
        };
        Saved::new(state, self.active.as_ref())
    }

    fn check(&self, state: &DeviceState, queues: Option<&[QueueRecord]>) -> Result<(), String> {
        let BlkState { parked, .. } = state.of::<BlkState>()?;
        check_heads(0, parked, queues.and_then(|queues| queues.first()))
    }

    fn restore(&mut self, activation: Option<Activation>, state: &DeviceState) -> Result<(), DeviceError> {
        if let Ok(state) = state.of::<BlkState>() {
            self.frozen = Some(Frozen {
                sectors: state.capacity,
                writable: state.capacity > 0 && !state.read_only,
            });
            self.to_replay = state.parked.clone();
        }
        self.active = activation;
        if !self.to_replay.is_empty() {
            self.kick_again();
        }
        Ok(())
    }

    /// Serves nothing: [`Self::next_call`] follows every event.
    fn queue_ready(&mut self, _queue: usize) -> Result<(), DeviceError> {
        self.is_awaited = false;
        Ok(())
    }

    fn woken(&mut self) -> Result<(), DeviceError> {
        self.is_awaited = false;
        Ok(())
    }

    fn next_call(&mut self) -> Result<Option<Box<dyn Call>>, DeviceError> {
        self.answer_ended()?;
        self.replay()?;
        self.serve()
    }

    fn calls_ended(&mut self) -> Result<(), DeviceError> {
        self.answer_ended()?;
        self.kick_again();
        Ok(())
    }

    /// The miss socket has answers.
    fn backend_ready(&mut self, _token: u32, _events: EventSet) -> Result<(), DeviceError> {
        self.is_awaited = false;
        let resumed = self.server.misses.answers();
        if let Some(Activation { memory, queues, .. }) = &mut self.active
            && let Some(queue) = queues.first_mut()
        {
            for resumed in resumed {
                let head = resumed.request.chain.head();
                let answer = self.server.resume(memory, resumed)?;
                queue.settle(head, answer)?;
                queue.signal()?;
            }
        }
        self.server.misses.ask()
    }
}

#[cfg(test)]
#[path = "blk/blk_test.rs"]
mod tests;
