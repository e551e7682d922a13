//! The state a freeze keeps of each device, and its decoding.
//!
//! A record has three parts. The *inventory* never changes: device type, features, queue sizes, windows, and the bytes of the configuration
//! that no backend changes. A restore into a device with another inventory is refused. The *transport* is what the driver wrote to the
//! registers, its queues, and the interrupts it has not seen. The third part is the device's own [`DeviceState`]. Threads, descriptors and
//! backends are never in a record.
//!
//! Records are decoded from hostile bytes: decoding and [`super::Inventory::restore`] refuse invalid ones and never panic. A device never
//! gets a state from an accepted record that its driver could not have set through its registers.

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use thaw_protocol::control::DeviceId;
use thaw_protocol::encoding::{self, EncodingError};
use thaw_protocol::tags;
use virtio_queue::{Queue, QueueState};

/// Version of the encoding. Other versions are refused.
pub const VERSION: u32 = 2;

/// Everything a freeze keeps of one virtio device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceRecord {
    pub id: DeviceId,
    pub inventory: InventoryRecord,
    pub transport: TransportRecord,
    /// The configuration space, and its generation.
    pub config: Vec<u8>,
    pub generation: u32,
    pub state: DeviceState,
    /// Whether it had a backend. If so, it must get one again.
    pub backed: bool,
}

/// Properties that the restoring device must have too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InventoryRecord {
    /// Virtio device type (virtio 1.2 §5).
    pub device_type: u32,
    /// Features offered, the transport's included.
    pub features: u64,
    /// Largest size of each queue.
    pub queue_sizes: Vec<u16>,
    /// Shared memory regions: id, first guest address, bytes.
    pub shared_memory: Vec<(u8, u64, u64)>,
}

/// The driver's writes to the registers, and the interrupts that it has not seen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransportRecord {
    pub status: u32,
    pub device_features_select: u32,
    pub driver_features_select: u32,
    pub driver_features: u64,
    pub queue_select: u32,
    pub shared_memory_select: u32,
    pub queues: Vec<QueueRecord>,
    /// Interrupt reasons not acknowledged.
    pub reasons: u32,
    /// The device had failed (`DEVICE_NEEDS_RESET`).
    pub needs_reset: bool,
}

/// One split queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueRecord {
    pub size: u16,
    pub ready: bool,
    pub descriptors: u64,
    pub available: u64,
    pub used: u64,
    /// Index of the next entry that the device reads in the available ring, and writes in the used ring.
    pub next_available: u16,
    pub next_used: u16,
    /// Whether chains were available that the device had not popped.
    pub has_work: bool,
}

/// The state a device keeps besides its queues, as stored in a record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub enum DeviceState {
    /// Nothing: balloon, rng, net.
    Plain,
    Blk(BlkState),
    Pmem(PmemState),
    Fs(FsState),
    Vsock(VsockState),
    Mem(MemState),
}

tags!(DeviceState {
    Plain = 0,
    Blk = 1,
    Pmem = 2,
    Fs = 3,
    Vsock = 4,
    Mem = 5,
});

/// The state of one kind of device.
pub trait State {
    /// The state, or `None` if it is of another kind of device.
    fn of(state: &DeviceState) -> Option<&Self>;
}

impl DeviceState {
    /// The state, as that of the kind of device that calls this.
    ///
    /// # Errors
    /// A sentence, if it is of another kind of device.
    pub fn of<S: State>(&self) -> Result<&S, String> {
        S::of(self).ok_or_else(|| self.another_kind())
    }

    /// Refuses any state except that of a device that keeps nothing besides its queues.
    pub fn check_plain(&self) -> Result<(), String> {
        match self {
            DeviceState::Plain => Ok(()),
            other => Err(other.another_kind()),
        }
    }

    fn another_kind(&self) -> String {
        format!("the state is another kind of device's: {self:?}")
    }
}

macro_rules! states {
    ($($variant:ident($state:ty)),+ $(,)?) => {
        $(
            impl From<$state> for DeviceState {
                fn from(state: $state) -> DeviceState {
                    DeviceState::$variant(state)
                }
            }

            impl State for $state {
                fn of(state: &DeviceState) -> Option<&$state> {
                    match state {
                        DeviceState::$variant(state) => Some(state),
                        _ => None,
                    }
                }
            }
        )+
    };
}

states!(
    Blk(BlkState),
    Pmem(PmemState),
    Fs(FsState),
    Vsock(VsockState),
    Mem(MemState),
);

/// The disk. Its replacement may be larger but not smaller. Without a backend, capacity 0.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlkState {
    pub read_only: bool,
    /// Sectors of 512 bytes.
    pub capacity: u64,
    /// Heads of reads that waited for their bytes. They are executed again.
    pub parked: Vec<u16>,
}

/// The mapping in the window.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PmemState {
    /// Bytes of the mapping; 0 without a backend.
    pub mapped: u64,
}

/// Reads in progress, and the DAX window.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FsState {
    /// For each queue, the heads of reads that waited for their bytes. They are executed again.
    pub parked: Vec<Vec<u16>>,
    /// The mappings in the DAX window.
    pub mappings: Vec<MappingRecord>,
}

/// The packets that the guest must get before any others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VsockState {
    /// Resets that it was owed.
    pub resets: Vec<ResetRecord>,
    /// Connections that it knew. Each is reset.
    pub connections: Vec<(HostPort, GuestPort)>,
    /// The next host port to use, so that a port the guest knows is not reused soon.
    pub next_port: HostPort,
}

/// The plugged memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemState {
    /// Bytes that the guest was asked to plug, and bytes in which it may plug.
    pub requested: u64,
    pub usable: u64,
    /// Blocks of 2 MiB: first and count, in order, none touching the next.
    pub plugged: Vec<(u32, u32)>,
}

/// A range of a file in the DAX window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MappingRecord {
    /// Offset in the window: a multiple of 2 MiB.
    pub window_offset: u64,
    /// The file's FUSE node ID.
    pub node: u64,
    /// First byte and length: multiples of 4096, at most 2 MiB.
    pub file_offset: u64,
    pub length: u64,
}

/// A vsock port of the host, and one of the guest.
pub type HostPort = u32;
pub type GuestPort = u32;

/// A reset that the guest has not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResetRecord {
    pub host_port: HostPort,
    pub guest_port: GuestPort,
    /// Socket type of the packet that it answers.
    pub kind: u16,
}

/// The state a freeze keeps of the console, a 16550. The freeze writes out an unfinished line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConsoleRecord {
    pub baud_divisor_low: u8,
    pub baud_divisor_high: u8,
    pub interrupt_enable: u8,
    pub interrupt_identification: u8,
    pub line_control: u8,
    pub line_status: u8,
    pub modem_control: u8,
    pub modem_status: u8,
    pub scratch: u8,
    /// Bytes received and not yet read: at most 64.
    pub in_buffer: Vec<u8>,
    /// Whether it had a backend.
    pub backed: bool,
}

/// The state a freeze keeps of everything on the [`crate::bus::Bus`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BusRecords {
    pub console: ConsoleRecord,
    /// The virtio devices, in slot order.
    pub devices: Vec<DeviceRecord>,
}

/// Why bytes are not a valid record.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    #[error("device record of version {0}; this thaw-vmm reads version {VERSION}")]
    Version(u32),
    #[error("damaged device record: {0}")]
    Malformed(#[from] EncodingError),
}

macro_rules! encoded {
    ($record:ty) => {
        impl $record {
            /// Encodes the version, then the record, in postcard.
            pub fn encode(&self) -> Vec<u8> {
                encode(self)
            }

            /// Decodes the result of [`Self::encode`]. All bytes must be used.
            pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
                decode(bytes)
            }
        }
    };
}

encoded!(DeviceRecord);
encoded!(ConsoleRecord);

fn encode<T: Serialize>(record: &T) -> Vec<u8> {
    encoding::encode(&(VERSION, record)).expect("records have lengths, and memory is all it takes")
}

fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, DecodeError> {
    let (version, rest) = encoding::take::<u32>(bytes)?;
    match version {
        VERSION => Ok(encoding::decode(rest)?),
        other => Err(DecodeError::Version(other)),
    }
}

impl QueueRecord {
    /// `has_work`: the device has chains to pop.
    pub(super) fn new(state: QueueState, has_work: bool) -> QueueRecord {
        QueueRecord {
            size: state.size,
            ready: state.ready,
            descriptors: state.desc_table,
            available: state.avail_ring,
            used: state.used_ring,
            next_available: state.next_avail,
            next_used: state.next_used,
            has_work,
        }
    }

    /// The queue, for a driver that negotiated `event_idx` or did not. `None` if no queue can have its size or addresses. Does not check
    /// that it is in memory.
    pub(super) fn queue(&self, max_size: u16, event_idx: bool) -> Option<Queue> {
        Queue::try_from(QueueState {
            max_size,
            next_avail: self.next_available,
            next_used: self.next_used,
            event_idx_enabled: event_idx,
            size: self.size,
            ready: self.ready,
            desc_table: self.descriptors,
            avail_ring: self.available,
            used_ring: self.used,
        })
        .ok()
    }
}

#[cfg(test)]
#[path = "state_test.rs"]
mod tests;

#[cfg(test)]
#[path = "state_golden_test.rs"]
mod golden;
