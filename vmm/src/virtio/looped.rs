//! The shell of devices whose queues the event loop serves: blk, pmem, mem, balloon and rng; each is a [`Handler`]. What
//! they are asked is answered before the next event, but for reads of an image that wait for their bytes.

use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use thaw_protocol::control::Backend;
use thaw_protocol::limits::DeviceLimits;
use vmm_sys_util::epoll::EventSet;

use super::config::ConfigSpace;
use super::device::{Activation, AttachError, DeviceError, Saved, VirtioDevice};
use super::queue::DeviceQueue;
use super::state::{DeviceState, QueueRecord};

/// What is particular to a device; see [`VirtioDevice`] for what the methods promise.
pub trait Handler: Send {
    fn device_type(&self) -> u32;

    fn features(&self) -> u64;

    fn queue_sizes(&self) -> &[u16];

    fn config(&self) -> Arc<ConfigSpace>;

    /// Answers what is available in queue `queue`, one of `active`'s.
    fn serve(&mut self, active: &mut Activation, queue: usize) -> Result<(), DeviceError>;

    /// True if the configuration changed by it.
    fn attach(&mut self, backend: Backend, fds: Vec<OwnedFd>) -> Result<bool, AttachError>;

    /// True if the configuration changed by it.
    fn detach(&mut self) -> Result<bool, AttachError> {
        Err(AttachError::WrongKind("only a disk can be taken away"))
    }

    /// See [`VirtioDevice::limit`]; the queues are looked at afterwards.
    fn limit(&mut self, _limits: DeviceLimits) -> Result<(), AttachError> {
        Err(AttachError::WrongKind(
            "only a disk and the network have rate limits",
        ))
    }

    fn is_of_the_host(&self) -> bool {
        false
    }

    fn is_backed(&self) -> bool {
        false
    }

    fn save(&self) -> DeviceState {
        DeviceState::Plain
    }

    fn check(&self, state: &DeviceState) -> Result<(), String> {
        plain(state)
    }

    /// As [`Self::check`], of what the state says of the queues: those of an active device.
    fn check_queues(&self, _state: &DeviceState, _queues: Option<&[QueueRecord]>) -> Result<(), String> {
        Ok(())
    }

    fn restore(&mut self, _state: &DeviceState) -> Result<(), DeviceError> {
        Ok(())
    }

    /// It was restored, with its driver up: what it has to do by itself, it kicks itself for.
    fn restored(&mut self, _active: &Activation) {}

    /// Forgets what it keeps of a queue.
    fn reset(&mut self) {}

    /// A descriptor it registered with the event loop is ready.
    fn backend_ready(&mut self, _active: Option<&mut Activation>) -> Result<(), DeviceError> {
        Ok(())
    }

    /// See [`VirtioDevice::woken`].
    fn woken(&mut self, _active: Option<&mut Activation>) -> Result<(), DeviceError> {
        Ok(())
    }
}

/// Accepts the state of a device that has none.
pub fn plain(state: &DeviceState) -> Result<(), String> {
    match state {
        DeviceState::Plain => Ok(()),
        other => Err(another_kind(other)),
    }
}

/// Why a state is not this device's.
pub fn another_kind(state: &DeviceState) -> String {
    format!("the state is another kind of device's: {state:?}")
}

/// A device: its handler, and what the driver set up.
pub struct Looped<H> {
    handler: H,
    active: Option<Activation>,
}

impl<H: Handler> Looped<H> {
    /// `handler`, its driver not up.
    pub fn new(handler: H) -> Looped<H> {
        Looped {
            handler,
            active: None,
        }
    }

    /// Has requests looked at that waited for what has changed.
    fn look_again(&self) {
        if let Some(active) = &self.active {
            active.queues.iter().for_each(DeviceQueue::kick_again);
        }
    }

    /// What the driver set up, while it is up.
    pub fn active(&self) -> Option<&Activation> {
        self.active.as_ref()
    }
}

impl<H> Deref for Looped<H> {
    type Target = H;

    fn deref(&self) -> &H {
        &self.handler
    }
}

impl<H> DerefMut for Looped<H> {
    fn deref_mut(&mut self) -> &mut H {
        &mut self.handler
    }
}

impl<H: Handler> VirtioDevice for Looped<H> {
    fn device_type(&self) -> u32 {
        self.handler.device_type()
    }

    fn features(&self) -> u64 {
        self.handler.features()
    }

    fn queue_sizes(&self) -> &[u16] {
        self.handler.queue_sizes()
    }

    fn config(&self) -> Arc<ConfigSpace> {
        self.handler.config()
    }

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        self.active = Some(activation);
        Ok(())
    }

    fn reset(&mut self) {
        self.active = None;
        self.handler.reset();
    }

    fn attach(&mut self, backend: Backend, fds: Vec<OwnedFd>) -> Result<(), AttachError> {
        if self.handler.attach(backend, fds)?
            && let Some(active) = &self.active
        {
            active.config_changed();
        }
        Ok(())
    }

    fn detach(&mut self) -> Result<(), AttachError> {
        if self.handler.detach()?
            && let Some(active) = &self.active
        {
            active.config_changed();
        }
        self.look_again();
        Ok(())
    }

    fn limit(&mut self, limits: DeviceLimits) -> Result<(), AttachError> {
        self.handler.limit(limits)?;
        self.look_again();
        Ok(())
    }

    fn is_of_the_host(&self) -> bool {
        self.handler.is_of_the_host()
    }

    fn is_backed(&self) -> bool {
        self.handler.is_backed()
    }

    fn save(&mut self) -> Saved {
        Saved {
            state: self.handler.save(),
            queues: self.active.as_ref().map(Activation::save_queues),
        }
    }

    fn check(&self, state: &DeviceState, queues: Option<&[QueueRecord]>) -> Result<(), String> {
        self.handler.check(state)?;
        self.handler.check_queues(state, queues)
    }

    fn restore(&mut self, activation: Option<Activation>, state: &DeviceState) -> Result<(), DeviceError> {
        self.handler.restore(state)?;
        self.active = activation;
        if let Some(active) = &self.active {
            self.handler.restored(active);
        }
        Ok(())
    }

    fn backend_ready(&mut self, _token: u32, _events: EventSet) -> Result<(), DeviceError> {
        self.handler.backend_ready(self.active.as_mut())
    }

    fn woken(&mut self) -> Result<(), DeviceError> {
        self.handler.woken(self.active.as_mut())
    }

    fn queue_ready(&mut self, queue: usize) -> Result<(), DeviceError> {
        match &mut self.active {
            Some(active) if queue < active.queues.len() => self.handler.serve(active, queue),
            _ => Ok(()),
        }
    }
}
