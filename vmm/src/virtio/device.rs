//! The trait that every virtio device implements, for its transport and its event loop.
//!
//! All methods are called with the device's lock held, so a device needs no lock of its own. The order of calls is always
//! `attach* (activate (queue_ready | backend_ready | attach | detach | save)* reset)*`, and `next_call` follows each event. Only a [`Call`]
//! is made without the lock. In a restored device, `restore` comes in
//! place of the first `activate`, whether or not the driver was up.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use thaw_protocol::control::{Backend, DeviceId};
use thaw_protocol::device_limits::DeviceLimits;
use vm_memory::VolatileSlice;
use vmm_sys_util::epoll::EventSet;

use super::chain::Chain;
use super::config::ConfigSpace;
use super::queue::{DeviceQueue, QueueError};
use super::state::{DeviceState, QueueRecord};
use crate::layout::Window;
use crate::memory::GuestMemory;

/// What the driver set up. The device receives it when the driver sets `DRIVER_OK`.
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

    /// The records of its queues.
    pub fn save_queues(&self) -> Vec<QueueRecord> {
        self.queues.iter().map(DeviceQueue::save).collect()
    }

    /// Signals every queue's kick, because what its requests waited for has changed.
    pub fn kick_again(&self) {
        self.queues.iter().for_each(DeviceQueue::kick_again);
    }

    /// Interrupts the driver for the used buffers of each queue, if it wants interrupts.
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

/// A device's state at a freeze.
#[derive(Debug)]
pub struct Saved {
    pub state: DeviceState,
    /// Its queues, or `None` if it is not active.
    pub queues: Option<Vec<QueueRecord>>,
}

impl Saved {
    pub fn new(state: impl Into<DeviceState>, active: Option<&Activation>) -> Saved {
        Saved {
            state: state.into(),
            queues: active.map(Activation::save_queues),
        }
    }

    /// The state of a device that has none except its queues.
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

/// A system call for a request, which a thread that serves the device makes without the device's lock. Dropped before it was made, it is not
/// made, and its request is not answered.
pub trait Call: Send {
    /// Makes the call. The device answers the request when it is called next.
    fn make(self: Box<Self>);
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

    /// Returns to the state before `activate`, and keeps the backend. Afterwards the device no longer touches
    /// guest memory.
    fn reset(&mut self);

    /// Gives the device its backend, replacing an earlier one. The guest may be running.
    fn attach(&mut self, _backend: Backend, _fds: Vec<OwnedFd>) -> Result<(), AttachError> {
        Err(AttachError::WrongKind("it has no backend"))
    }

    /// Removes its backend. On return its descriptors are closed. The guest may be running.
    fn detach(&mut self) -> Result<(), AttachError> {
        Err(AttachError::WrongKind("only a disk can be taken away"))
    }

    /// Sets its rate limits, and checks the requests that waited for the earlier ones again. The guest may be
    /// running, and the driver may not be up. A reset keeps the limits.
    fn limit(&mut self, _limits: DeviceLimits) -> Result<(), AttachError> {
        Err(AttachError::WrongKind(
            "only a disk and the network have rate limits",
        ))
    }

    /// Whether its backend belongs to the host, so that a snapshot cannot contain it.
    fn is_of_the_host(&self) -> bool {
        false
    }

    /// Whether it has a backend. A restored device whose original had one must get one.
    fn is_backed(&self) -> bool {
        false
    }

    /// Returns its state for a freeze. No event is being served, and the device continues afterwards. It may
    /// process what the driver has sent, and return buffers that it holds.
    fn save(&mut self) -> Saved;

    /// Checks whether `state` can be restored; `queues` are those of an active device. Changes nothing. The
    /// error is a sentence. By default the device has no state except its queues.
    fn check(&self, state: &DeviceState, _queues: Option<&[QueueRecord]>) -> Result<(), String> {
        state.check_plain()
    }

    /// Restores a device that was never active to a state that [`Self::check`] accepts, without a backend. Does
    /// not touch guest memory until an event is served; the device kicks itself for work that is due then. By default
    /// the device has no state except its queues.
    fn restore(&mut self, activation: Option<Activation>, _state: &DeviceState) -> Result<(), DeviceError> {
        activation.map_or(Ok(()), |activation| self.activate(activation))
    }

    /// Prepares a restored device to run, once its backends are attached. May wait for them. The error is a
    /// sentence, and then nothing runs.
    fn before_running(&mut self) -> Result<(), String> {
        Ok(())
    }

    /// Queue `queue` was kicked. An error stops the device with `DEVICE_NEEDS_RESET`.
    fn queue_ready(&mut self, queue: usize) -> Result<(), DeviceError>;

    /// The next call that the device wants to be made without its lock. The caller makes it, and then asks again, until there is none.
    /// Several threads may have one each. First the device answers the requests whose calls have ended. An error stops the device with
    /// `DEVICE_NEEDS_RESET`.
    fn next_call(&mut self) -> Result<Option<Box<dyn Call>>, DeviceError> {
        Ok(None)
    }

    /// A thread has made a call, and asks for no other now. The device answers the requests whose calls have ended, and kicks itself for
    /// what else there is. An error stops the device with `DEVICE_NEEDS_RESET`.
    fn calls_ended(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// A descriptor the device registered with [`super::event_loop::Registrar`] as `token` is ready. A token that has
    /// since been removed may still come once. An error stops the device with `DEVICE_NEEDS_RESET`.
    fn backend_ready(&mut self, _token: u32, _events: EventSet) -> Result<(), DeviceError> {
        Ok(())
    }

    /// The time that it set with [`super::event_loop::Registrar::wake_at`] has come, or had come before it set
    /// another. An error stops the device with `DEVICE_NEEDS_RESET`.
    fn woken(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }
}

/// Why a device cannot continue. The guest's request cannot be answered, so the guest must reset the device.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// A ring or a chain is corrupt.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// A chain has no room for an answer.
    #[error("request of descriptor {head} has no room for an answer: {what}")]
    Unanswerable { head: u16, what: &'static str },
    /// A system call that the device depends on failed.
    #[error("{what}: {error}")]
    System {
        what: &'static str,
        error: std::io::Error,
    },
}

impl DeviceError {
    /// A chain has no room for an answer.
    pub fn unanswerable(chain: &Chain, what: &'static str) -> DeviceError {
        DeviceError::Unanswerable {
            head: chain.head(),
            what,
        }
    }
}

/// The guest's memory for the answer to a request.
pub fn room_for_answer<'m>(
    memory: &'m GuestMemory,
    chain: &Chain,
) -> Result<Vec<VolatileSlice<'m>>, DeviceError> {
    let outside = |_| DeviceError::unanswerable(chain, "response outside guest memory");
    chain.writable(memory).map_err(outside)
}

/// Why a backend was refused. The device keeps the one it had.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The device takes another kind of backend.
    #[error("device takes no such backend: {0}")]
    WrongKind(&'static str),
    /// The request has too few or too many descriptors.
    #[error("backend takes {expected} descriptors, {got} came")]
    Descriptors { expected: usize, got: usize },
    /// The backend differs from the one at the freeze.
    #[error("{0}")]
    Frozen(String),
    /// The device cannot use the descriptor or the specification.
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
    /// A device is missing, extra, or in the place of another.
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
    /// No driver could have put the device into this state.
    #[error("{device:?}: {what}")]
    Invalid { device: DeviceId, what: String },
    /// A resource of the device is not available. The machine is unusable.
    #[error("{device:?}: {error}")]
    System { device: DeviceId, error: DeviceError },
}

impl AttachError {
    /// For `map_err`: adds the call that failed.
    pub fn system<E: Into<std::io::Error>>(what: &'static str) -> impl FnOnce(E) -> AttachError {
        move |error| AttachError::System {
            what,
            error: error.into(),
        }
    }
}

/// The only descriptor of a backend.
pub fn one_descriptor(fds: Vec<OwnedFd>) -> Result<OwnedFd, AttachError> {
    let got = fds.len();
    match <[OwnedFd; 1]>::try_from(fds) {
        Ok([fd]) => Ok(fd),
        Err(_) => Err(AttachError::Descriptors { expected: 1, got }),
    }
}
