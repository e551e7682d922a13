//! What a freeze keeps of each device, and how it is read back.
//!
//! A record has three parts. The *inventory*, which is frozen: device type, features, queue sizes, windows, the bytes of
//! the configuration that no backend changes; a restore into a device that differs is refused. The *transport*: what the
//! driver wrote to the registers, its queues, what it was not yet told. And the device's own [`DeviceState`]. Threads,
//! descriptors and backends are never in it.
//!
//! Records are read from hostile bytes: decoding and [`super::Inventory::restore`] refuse, and never panic; whatever
//! passes gives a device no more than its driver could have given it by its registers.

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use thaw_protocol::control::DeviceId;
use thaw_protocol::encoding::{self, EncodingError};
use thaw_protocol::tags;
use virtio_queue::{Queue, QueueState};

use super::device::DeviceError;

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

/// What the driver has written, and what it was not yet told.
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

/// What a device keeps beside its queues.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub enum DeviceState {
    /// Nothing: balloon, rng, net.
    Plain,
    /// The disk, which its successor may exceed and not fall short of. Without a backend, capacity 0.
    Blk {
        read_only: bool,
        /// Sectors of 512 bytes.
        capacity: u64,
        /// Heads of reads that waited for their bytes. They are executed again.
        parked: Vec<u16>,
    },
    /// Bytes of the window that were mapped: 0 without a backend.
    Pmem { mapped: u64 },
    Fs {
        /// For each queue the heads of reads that waited for their bytes. They are executed again.
        parked: Vec<Vec<u16>>,
        /// What was mapped into the DAX window.
        mappings: Vec<MappingRecord>,
    },
    /// What the guest must be told before anything else.
    Vsock {
        /// Resets it was owed.
        resets: Vec<ResetRecord>,
        /// Connections it knew of: each is reset.
        connections: Vec<(HostPort, GuestPort)>,
        /// Where host ports go on: a port the guest knows is not soon another connection's.
        next_port: HostPort,
    },
    /// Memory plugged.
    Mem {
        /// Bytes the guest was asked to plug, and bytes in which it may.
        requested: u64,
        usable: u64,
        /// Blocks of 2 MiB: first and count, in order, none touching the next.
        plugged: Vec<(u32, u32)>,
    },
}

impl DeviceState {
    /// Refuses any state but that of a device that keeps nothing beside its queues.
    pub fn check_plain(&self) -> Result<(), String> {
        match self {
            DeviceState::Plain => Ok(()),
            other => Err(other.another_kind()),
        }
    }

    /// Why this is not the state of the device that was asked.
    pub fn another_kind(&self) -> String {
        format!("the state is another kind of device's: {self:?}")
    }
}

tags!(DeviceState {
    Plain = 0,
    Blk = 1,
    Pmem = 2,
    Fs = 3,
    Vsock = 4,
    Mem = 5,
});

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

/// Why records cannot be restored. Nothing was changed, except by [`RestoreError::System`].
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// There is a device too many, too few, or in another's place.
    #[error("the snapshot has {frozen} where this machine has {here}")]
    Device { frozen: String, here: String },
    /// A frozen property differs.
    #[error("{device:?}: {field} is {here} in this machine, {frozen} in the snapshot")]
    Mismatch {
        device: DeviceId,
        field: &'static str,
        frozen: String,
        here: String,
    },
    /// No driver could have brought the device into this state.
    #[error("{device:?}: {what}")]
    Invalid { device: DeviceId, what: String },
    /// Something the device needs could not be had. The machine is good for nothing any more.
    #[error("{device:?}: {error}")]
    System { device: DeviceId, error: DeviceError },
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
