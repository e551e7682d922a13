//! The trait that every virtio device implements, for its transport and its event loop.
//!
//! All methods are called with the device's lock held, so a device needs no lock of its own. The order of calls is always
//! `attach* (activate (queue_ready | backend_ready | attach | detach | save)* reset)*`. In a restored device, `restore` comes in
//! place of the first `activate`, whether or not the driver was up.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use thaw_protocol::control::{Backend, DeviceId};
use thaw_protocol::limits::DeviceLimits;
use vmm_sys_util::epoll::EventSet;

use super::config::ConfigSpace;
use super::queue::{DeviceQueue, QueueError};
use super::state::{DeviceState, QueueRecord};
use crate::layout::Window;
use crate::memory::GuestMemory;

/// What the driver set up, handed to the device when it sets `DRIVER_OK`.
pub struct Activation {
    /// Guest memory, for addresses in requests.
    pub memory: GuestMemory,
    /// Negotiated feature bits.
    pub features: u64,
    /// One for each of [`DeviceSpec::queue_sizes`]. One the driver left disabled never yields a chain.
    pub queues: Vec<DeviceQueue>,
}

impl Activation {
    /// Whether feature `bit` was negotiated.
    pub fn negotiated(&self, bit: u32) -> bool {
        self.features & 1 << bit != 0
    }

    /// Its queues as they are.
    pub fn save_queues(&self) -> Vec<QueueRecord> {
        self.queues.iter().map(DeviceQueue::save).collect()
    }

    /// Has every queue looked at again: what requests waited for has changed.
    pub fn kick_again(&self) {
        self.queues.iter().for_each(DeviceQueue::kick_again);
    }

    /// Interrupts the driver for what was used in each queue, if it wants to know.
    pub fn signal(&mut self) -> Result<(), QueueError> {
        self.queues.iter_mut().try_for_each(DeviceQueue::signal)
    }

    /// Tells the driver that the configuration changed.
    pub fn config_changed(&self) {
        if let Some(queue) = self.queues.first() {
            queue.interrupt().config_changed();
        }
    }
}

/// Queue `index` of a device, while its driver is up.
pub fn active_queue(active: &mut Option<Activation>, index: usize) -> Option<&mut DeviceQueue> {
    active.as_mut()?.queues.get_mut(index)
}

/// A shared memory region (virtio 1.2 §2.10): memory of the device in the guest's address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedMemory {
    /// `shmid`: what the device type's section of the specification calls the region.
    pub id: u8,
    /// Where the guest finds it.
    pub window: Window,
}

/// What a device hands over at a freeze.
#[derive(Debug)]
pub struct Saved {
    pub state: DeviceState,
    /// Its queues; none if it is not active.
    pub queues: Option<Vec<QueueRecord>>,
}

impl Saved {
    pub fn new(state: impl Into<DeviceState>, active: Option<&Activation>) -> Saved {
        Saved {
            state: state.into(),
            queues: active.map(Activation::save_queues),
        }
    }

    /// Of a device that keeps nothing beside its queues.
    pub fn plain(active: Option<&Activation>) -> Saved {
        Saved::new(DeviceState::Plain, active)
    }
}

/// The constants of a device type, which a driver sees and snapshots depend on. The backend has no influence on them.
#[derive(Clone, Copy, Debug)]
pub struct DeviceSpec {
    /// Device type (virtio 1.2 §5), `virtio_bindings::virtio_ids`.
    pub device_type: u32,
    /// Feature bits of the device type. The transport adds `VERSION_1`, `RING_INDIRECT_DESC` and `RING_EVENT_IDX`.
    pub features: u64,
    /// Largest size of each queue; powers of two.
    pub queue_sizes: &'static [u16],
}

/// A virtio device. See the module's documentation for the order of calls.
pub trait VirtioDevice: Send {
    /// Its constants.
    fn spec(&self) -> DeviceSpec;

    /// The configuration space. The transport serves the guest's reads from it without the device's lock.
    fn config(&self) -> Arc<ConfigSpace>;

    /// Shared memory regions, if the device type has any.
    fn shared_memory(&self) -> &[SharedMemory] {
        &[]
    }

    /// True if the device waits for its queues' kicks in threads of its own, started by `activate` and gone (or
    /// parked, not touching guest memory) when `reset` returns. Otherwise the event loop calls `queue_ready`.
    fn has_own_threads(&self) -> bool {
        false
    }

    /// The driver is ready. Every queue's kick has been signalled once, so buffers made available earlier are found.
    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError>;

    /// Back to the state before `activate`, backend kept. When this returns the device touches guest memory no more.
    fn reset(&mut self);

    /// Gives the device its backend, replacing an earlier one. The guest may be running.
    fn attach(&mut self, _backend: Backend, _fds: Vec<OwnedFd>) -> Result<(), AttachError> {
        Err(AttachError::WrongKind("it has no backend"))
    }

    /// Takes its backend away: when this returns its descriptors are closed. The guest may be running.
    fn detach(&mut self) -> Result<(), AttachError> {
        Err(AttachError::WrongKind("only a disk can be taken away"))
    }

    /// Sets how much it may do from now on; what waited for the limit before is looked at again. The guest may be running, and
    /// the driver may not be up. A reset keeps it.
    fn limit(&mut self, _limits: DeviceLimits) -> Result<(), AttachError> {
        Err(AttachError::WrongKind(
            "only a disk and the network have rate limits",
        ))
    }

    /// Whether what is behind it belongs to the host, so that no snapshot can hold it.
    fn is_of_the_host(&self) -> bool {
        false
    }

    /// Whether it has a backend: then a device restored from its state must get one.
    fn is_backed(&self) -> bool {
        false
    }

    /// What a freeze keeps. No event is being served, and the device goes on as it is afterwards; it may take what the
    /// driver has sent, and give back what it holds.
    fn save(&mut self) -> Saved;

    /// Whether `state` can be restored; `queues` are those of an active device. Changes nothing. The error is a
    /// sentence.
    fn check(&self, state: &DeviceState, queues: Option<&[QueueRecord]>) -> Result<(), String>;

    /// Puts a device that was never active into a state [`Self::check`] accepts, without a backend. Guest memory is not
    /// touched before an event is served; what has to be done then, the device kicks itself for.
    fn restore(&mut self, activation: Option<Activation>, state: &DeviceState) -> Result<(), DeviceError>;

    /// Does what has to be done before a restored guest runs, its backends attached. May wait for them. The error is a
    /// sentence, and nothing runs.
    fn before_running(&mut self) -> Result<(), String> {
        Ok(())
    }

    /// Queue `queue` was kicked. An error stops the device with `DEVICE_NEEDS_RESET`.
    fn queue_ready(&mut self, queue: usize) -> Result<(), DeviceError>;

    /// A descriptor the device registered with [`super::event_loop::Registrar`] as `token` is ready. A token that has
    /// since been removed may still come once. An error stops the device with `DEVICE_NEEDS_RESET`.
    fn backend_ready(&mut self, _token: u32, _events: EventSet) -> Result<(), DeviceError> {
        Ok(())
    }

    /// The moment has come for which it had set its [`super::event_loop::Registrar::wake_at`], or came before the device set
    /// another. An error stops the device with `DEVICE_NEEDS_RESET`.
    fn woken(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }
}

/// Why a device cannot go on. What the guest asked for cannot be answered; it must reset the device.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// A ring or a chain is corrupt.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// A chain has no place for an answer.
    #[error("request of descriptor {head} has no room for an answer: {what}")]
    Unanswerable { head: u16, what: &'static str },
    /// A system call the device cannot do without failed.
    #[error("{what}: {error}")]
    System {
        what: &'static str,
        error: std::io::Error,
    },
}

/// Why a backend was refused. The device keeps the one it had.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The device takes another kind of backend.
    #[error("device takes no such backend: {0}")]
    WrongKind(&'static str),
    /// Too few or too many descriptors came beside the request.
    #[error("backend takes {expected} descriptors, {got} came")]
    Descriptors { expected: usize, got: usize },
    /// The guest was frozen with what this backend is not.
    #[error("{0}")]
    Frozen(String),
    /// The descriptor or the specification is not what the device can use.
    #[error("{0}")]
    Invalid(String),
    /// A system call on the backend failed.
    #[error("{what}: {error}")]
    System {
        what: &'static str,
        error: std::io::Error,
    },
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

impl AttachError {
    /// For `map_err`: names the call that failed.
    pub fn system<E: Into<std::io::Error>>(what: &'static str) -> impl FnOnce(E) -> AttachError {
        move |error| AttachError::System {
            what,
            error: error.into(),
        }
    }
}

/// The one descriptor a backend came with.
pub fn one_descriptor(fds: Vec<OwnedFd>) -> Result<OwnedFd, AttachError> {
    let got = fds.len();
    match <[OwnedFd; 1]>::try_from(fds) {
        Ok([fd]) => Ok(fd),
        Err(_) => Err(AttachError::Descriptors { expected: 1, got }),
    }
}
