//! virtio-fs for writable host directories: a relay to another process, thaw-share ([`thaw_protocol::share`]).
//!
//! This process serves none of it, because it must not have the rights that takes. A thread of the device's own passes each
//! FUSE message on and puts its reply where the guest wants it, looking at neither ([`relay`]). Invariant: a request that the
//! device took is answered once: with its reply, or, once thaw-share is gone or where there never was one, with an error. No other device
//! or vCPU waits for this one.
//!
//! When thaw-share dies, what it was asked is answered EIO, but for names being looked up; those and all that is asked later waits for another, for
//! a bounded time. A relay that is attached again is another's, and is told the guest's INIT first.
//!
//! What the guest has open are files of that process, so a machine with a share cannot be frozen; without, all there is to
//! freeze is the queues.

pub mod relay;
mod worker;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::SocketType;
use thaw_protocol::control::Backend;
use thaw_protocol::share::{PATIENCE_MS, TAG};
use virtio_bindings::virtio_ids::VIRTIO_ID_FS;

use self::worker::Worker;
use super::config::{Config, ConfigSpace};
use super::device::{Activation, AttachError, DeviceError, Saved, VirtioDevice, one_descriptor};
use super::fs::{FsConfig, QUEUE_SIZES};
use super::gate::Gate;
use super::state::{DeviceState, QueueRecord};

/// The device.
pub struct Share {
    config: Config<FsConfig>,
    /// The thread, or why there is none: then the device cannot be activated.
    worker: io::Result<Worker>,
    /// It has, or had, somebody to ask.
    backed: bool,
}

impl Share {
    /// Without a thaw-share: its requests are answered ENOTCONN.
    pub fn new(gate: Arc<Gate>) -> Share {
        Share::patient(gate, Duration::from_millis(PATIENCE_MS))
    }

    /// The same; its guest waits so long for another thaw-share.
    pub fn patient(gate: Arc<Gate>, patience: Duration) -> Share {
        Share {
            config: Config::new(FsConfig::new(TAG)),
            worker: Worker::start(gate, patience),
            backed: false,
        }
    }

    fn worker(&self) -> Result<&Worker, DeviceError> {
        self.worker.as_ref().map_err(|error| DeviceError::System {
            what: "the thread of the shared virtio-fs device",
            error: io::Error::new(error.kind(), error.to_string()),
        })
    }
}

/// What a freeze keeps beside the queues, of each of which no request waits.
fn nothing(queues: usize) -> DeviceState {
    DeviceState::Fs {
        parked: vec![Vec::new(); queues],
        mappings: Vec::new(),
    }
}

impl VirtioDevice for Share {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_FS
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn config(&self) -> Arc<ConfigSpace> {
        self.config.space()
    }

    fn has_own_threads(&self) -> bool {
        true
    }

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        self.worker()?.activate(activation)
    }

    fn reset(&mut self) {
        if let Ok(worker) = &self.worker {
            worker.reset();
        }
    }

    fn attach(&mut self, backend: Backend, fds: Vec<OwnedFd>) -> Result<(), AttachError> {
        if backend != Backend::Share {
            return Err(AttachError::WrongKind(
                "the shared virtio-fs device takes a share's relay",
            ));
        }
        let relay = one_descriptor(fds)?;
        let kind =
            rustix::net::sockopt::socket_type(&relay).map_err(AttachError::system("the relay's type"))?;
        if kind != SocketType::STREAM {
            return Err(AttachError::Invalid("a relay must be of type STREAM".into()));
        }
        rustix::io::ioctl_fionbio(&relay, true).map_err(AttachError::system("FIONBIO of the relay"))?;
        let worker = self
            .worker()
            .map_err(|error| AttachError::Invalid(error.to_string()))?;
        worker
            .connect(relay)
            .map_err(AttachError::system("waiting for the relay"))?;
        self.backed = true;
        Ok(())
    }

    fn is_of_the_host(&self) -> bool {
        self.backed
    }

    fn is_backed(&self) -> bool {
        self.backed
    }

    fn save(&mut self) -> Saved {
        let queues = self.worker.as_ref().ok().and_then(Worker::save);
        Saved {
            state: nothing(queues.as_ref().map_or(0, Vec::len)),
            queues,
        }
    }

    fn check(&self, state: &DeviceState, _queues: Option<&[QueueRecord]>) -> Result<(), String> {
        match state {
            DeviceState::Fs { parked, mappings } => {
                match parked.iter().all(Vec::is_empty) && mappings.is_empty() {
                    true => Ok(()),
                    false => Err("requests wait, or files are mapped, in the shared device".into()),
                }
            }
            other => Err(other.another_kind()),
        }
    }

    fn restore(&mut self, activation: Option<Activation>, _state: &DeviceState) -> Result<(), DeviceError> {
        match activation {
            Some(activation) => self.worker()?.activate(activation),
            None => Ok(()),
        }
    }

    /// Never called: the device's own thread waits for kicks.
    fn queue_ready(&mut self, _queue: usize) -> Result<(), DeviceError> {
        Ok(())
    }
}

#[cfg(test)]
#[path = "share_test.rs"]
mod tests;
