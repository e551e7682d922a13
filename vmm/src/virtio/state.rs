//! What a freeze keeps of each device, and how it is read back.
//!
//! A record has three parts. The *inventory* is frozen: device type, features, queue sizes, windows, and the bytes of the
//! configuration that no backend changes; a restore into a device that differs is refused. The *transport* is what the driver
//! wrote to the registers, its queues, and the interrupts it has not seen. The third is the device's own [`DeviceState`].
//! Threads, descriptors and backends are never in it.
//!
//! Records are read from hostile bytes: decoding and [`super::Inventory::restore`] refuse and never panic, and an accepted record
//! gives a device nothing that its driver could not have given it by its registers.

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use thaw_protocol::control::DeviceId;
use thaw_protocol::encoding::{self, EncodingError};
use thaw_protocol::tags;
use virtio_queue::{Queue, QueueState};

/// Version of the encoding; another is refused.
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
    /// Whether it had a backend: then it must get one again.
    pub backed: bool,
}

/// What the restoring device must be too.
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

/// What the driver has written, and the interrupts it has not seen.
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
    /// Where the device looks next in the available ring, and writes next in the used ring.
    pub next_available: u16,
    pub next_used: u16,
    /// Chains were available that the device had not popped.
    pub has_work: bool,
}

/// What a device keeps beside its queues, as a record has it.
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
    /// `None` if it is another kind's.
    fn of(state: &DeviceState) -> Option<&Self>;
}

impl DeviceState {
    /// The state of the kind of device that asks.
    ///
    /// # Errors
    /// A sentence, if it is another kind's.
    pub fn of<S: State>(&self) -> Result<&S, String> {
        S::of(self).ok_or_else(|| self.another_kind())
    }

    /// Refuses any state but that of a device that keeps nothing beside its queues.
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

/// The disk, which its successor may exceed and not fall short of. Without a backend, capacity 0.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlkState {
    pub read_only: bool,
    /// Sectors of 512 bytes.
    pub capacity: u64,
    /// Heads of reads that waited for their bytes. They are executed again.
    pub parked: Vec<u16>,
}

/// What was mapped into the window.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PmemState {
    /// Bytes: 0 without a backend.
    pub mapped: u64,
}

/// Reads under way, and the DAX window.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FsState {
    /// For each queue the heads of reads that waited for their bytes. They are executed again.
    pub parked: Vec<Vec<u16>>,
    /// What was mapped into the DAX window.
    pub mappings: Vec<MappingRecord>,
}

/// What the guest must be sent before anything else.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VsockState {
    /// Resets it was owed.
    pub resets: Vec<ResetRecord>,
    /// Connections it knew of: each is reset.
    pub connections: Vec<(HostPort, GuestPort)>,
    /// Where host ports go on: a port the guest knows is not soon another connection's.
    pub next_port: HostPort,
}

/// Memory plugged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemState {
    /// Bytes the guest was asked to plug, and bytes in which it may.
    pub requested: u64,
    pub usable: u64,
    /// Blocks of 2 MiB: first and count, in order, none touching the next.
    pub plugged: Vec<(u32, u32)>,
}

/// A range of a file in the DAX window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MappingRecord {
    /// Where in the window: a multiple of 2 MiB.
    pub window_offset: u64,
    /// The file, as FUSE names it.
    pub node: u64,
    /// First byte, and how many: multiples of 4096, at most 2 MiB.
    pub file_offset: u64,
    pub length: u64,
}

/// A vsock port of the host, and one of the guest.
pub type HostPort = u32;
pub type GuestPort = u32;

/// A reset the guest has not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResetRecord {
    pub host_port: HostPort,
    pub guest_port: GuestPort,
    /// Socket type of the packet it answers.
    pub kind: u16,
}

/// What a freeze keeps of the console, a 16550. What was written but not ended by a newline is written out by the freeze.
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
    /// Received and not yet read: at most 64 bytes.
    pub in_buffer: Vec<u8>,
    /// Whether it had somewhere to write to.
    pub backed: bool,
}

/// Everything a freeze keeps of what is on the [`crate::bus::Bus`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BusRecords {
    pub console: ConsoleRecord,
    /// The virtio devices, in slot order.
    pub devices: Vec<DeviceRecord>,
}

/// Why bytes are no record.
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
            /// The version, then the record, in postcard.
            pub fn encode(&self) -> Vec<u8> {
                encode(self)
            }

            /// Reads what [`Self::encode`] wrote, all of it.
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
    /// `has_work` as the device says.
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

    /// The queue, for a driver that negotiated `event_idx` or did not; none if its size or
    /// addresses are such as no queue has. Whether it is in memory is not looked at.
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
