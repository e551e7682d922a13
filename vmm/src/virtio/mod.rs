//! The virtio devices (virtio 1.2) of a machine: always the same thirteen, on virtio-mmio.
//!
//! ```text
//!  vCPU thread ── register access ──> mmio::MmioDevice ── activate, reset ──> device::VirtioDevice
//!  KVM ── ioeventfd ──> event loop (each disk: its own, with several threads; fs: a thread of its own) ── queue_ready ──> the same
//!  device ── Interrupt ── irqfd ──> KVM
//! ```
//!
//! | module | contents |
//! |---|---|
//! | [`inventory`] | the devices of a machine: a table with the parameters of each, and the operations on them |
//! | [`device`] | the trait that every device implements |
//! | [`queue`], [`chain`] | a virtqueue and its loop; a request's buffers, read once and checked |
//! | [`config`] | the configuration space: a structure for the device, bytes for the guest |
//! | [`mmio`], [`interrupt`] | the registers a driver sees, and the interrupt line |
//! | [`event_loop`], [`device_thread`], [`alarms`] | the threads that call devices, and when |
//! | [`gate`] | keeps those threads from guest memory |
//! | [`state`], [`backend_check`] | the state a freeze keeps of a device; which restored devices still need a backend |
//! | [`blk`], [`net`], [`vsock`], [`fs`], [`pmem`], [`mem`], [`balloon`], [`rng`] | the device types |
//! | [`misses`], [`accesses`] | asking the node for bytes of images; reporting which bytes are read |
//! | [`throttle`], [`token_bucket`] | rate limits |
//! | [`window`], [`guest_io`] | files mapped into guest addresses; system calls on guest memory |
//!
//! A device has a configuration that the guest sees, a handler for its queues and a backend. Only the backend comes from outside
//! ([`Inventory::attach`]), and only the backend may be absent. All state that a guest can observe is in the device, not in a thread, so a
//! freeze can save it.
//!
//! Device threads work while the [`gate::Gate`] is open: not while the machine is parked, and not while a freeze reads
//! memory. A freeze writes a [`DeviceRecord`] of each device. A restore puts new devices into that state, and the thaw is
//! refused until each has its backend again or is declared to have none.
//!
//! Guests are hostile: every address, length and index they give is checked where it is used. A device answers a request
//! with an error if it can. If it cannot (a corrupt ring, a chain that loops), it stops with `DEVICE_NEEDS_RESET`. It does
//! not panic in either case.

pub mod accesses;
pub mod alarms;
pub mod backend_check;
pub mod balloon;
pub mod blk;
pub mod chain;
pub mod config;
pub mod device;
pub mod device_thread;
pub mod discards;
pub mod event_loop;
pub mod flight;
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
pub mod shared_threads;
pub mod state;
pub mod throttle;
pub mod token_bucket;
pub mod vsock;
pub mod window;

#[cfg(test)]
pub(crate) mod testing;

pub use backend_check::NotSettled;
pub use chain::Chain;
pub use config::ConfigSpace;
pub use device::{
    Activation, AttachError, DeviceError, DeviceSpec, RestoreError, SharedMemory, VirtioDevice,
};
pub use interrupt::Interrupt;
pub use inventory::{Inventory, InventoryError, Loops, Windows};
pub use queue::{DeviceQueue, QueueError};
pub use state::{BusRecords, ConsoleRecord, DeviceRecord, DeviceState};
pub use window::HostWindow;
