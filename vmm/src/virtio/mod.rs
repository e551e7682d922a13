//! The virtio devices: a frozen inventory of thirteen, on virtio-mmio (DESIGN §5; virtio 1.2).
//!
//! A device is *config the guest sees*, *queue handler* and *backend*, and its struct shows the three. Only the backend
//! comes from outside ([`Inventory::attach`]) and only it may be absent. Nothing a guest can read lives in a thread.
//!
//! ```text
//!  vCPU thread ── mmio_read/write ──> mmio::MmioDevice ── activate/reset ──> device::VirtioDevice
//!  KVM ── ioeventfd ──> event_loop (one thread; fs has its own) ── queue_ready ──> the same
//!  device ── Interrupt ── irqfd ──> KVM
//! ```
//!
//! Device threads work while the [`gate::Gate`] is open: not while the machine is parked, and not while a freeze reads
//! memory. A freeze keeps a [`DeviceRecord`] of each device ([`state`]); a restore puts fresh devices into that state, and
//! each then owes an answer to what stands behind it ([`swap`]).
//!
//! Guests are hostile: every address, length and index they give is checked where it is used. A request that can be
//! answered with an error is; what cannot be answered (a corrupt ring, a looping chain) stops the device with
//! `DEVICE_NEEDS_RESET`. Neither panics.

pub mod accesses;
pub mod alarms;
pub mod balloon;
pub mod blk;
pub mod chain;
pub mod config;
pub mod device;
pub mod device_thread;
pub mod event_loop;
pub mod fs;
pub mod gate;
pub mod guest_io;
pub mod interrupt;
pub mod inventory;
pub mod mem;
pub mod misses;
pub mod mmio;
pub mod net;
pub mod pmem;
pub mod queue;
pub mod rng;
pub mod state;
pub mod swap;
pub mod throttle;
pub mod token_bucket;
pub mod vsock;
pub mod window;

#[cfg(test)]
pub(crate) mod testing;

pub use chain::Chain;
pub use config::ConfigSpace;
pub use device::{Activation, AttachError, DeviceError, RestoreError, SharedMemory, VirtioDevice};
pub use interrupt::Interrupt;
pub use inventory::{Inventory, InventoryError, Windows};
pub use queue::{DeviceQueue, QueueError};
pub use state::{BusRecords, ConsoleRecord, DeviceRecord, DeviceState};
pub use swap::Unsettled;
pub use window::HostWindow;
