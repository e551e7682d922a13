//! virtio-fs (virtio 1.2 §5.11): a FUSE file system for the guest.
//!
//! One device with two backends. [`Images`] is the root device: a sandbox's images, served in this process. [`Share`] is the device for
//! writable host directories: it forwards messages to another process, which has the rights that serving them needs. Each device has a
//! thread ([`worker`]), which takes FUSE messages from the queues and lets its backend answer them.

pub mod dax;
pub mod images;
pub mod message;
pub mod share;
mod worker;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use thaw_protocol::control::Backend;
use virtio_bindings::virtio_ids::VIRTIO_ID_FS;
use zerocopy::{FromBytes, Immutable, IntoBytes};

pub use self::images::Images;
pub use self::share::Share;
use self::worker::{Event, Worker};
use super::config::{Config, ConfigSpace};
use super::device::{
    Activation, AttachError, Call, DeviceError, DeviceSpec, Saved, SharedMemory, VirtioDevice,
};
use super::state::{DeviceState, FsState, QueueRecord};
use crate::memory::GuestMemory;

/// `hiprio`, which carries FORGET and INTERRUPT, and one request queue. A read of 1 MiB takes 260 descriptors, or one that points to a
/// table of them.
const QUEUE_SIZES: [u16; 2] = [128, 512];

/// `struct virtio_fs_config` (§5.11.4).
#[derive(FromBytes, Immutable, IntoBytes)]
#[repr(C)]
struct FsConfig {
    /// The tag that the guest mounts the device by, padded with zeros.
    tag: [u8; 36],
    num_request_queues: u32,
}

impl FsConfig {
    /// `tag` has at most 36 bytes.
    fn new(tag: &str) -> FsConfig {
        let mut config = FsConfig {
            tag: [0; 36],
            num_request_queues: QUEUE_SIZES.len() as u32 - 1,
        };
        config.tag[..tag.len()].copy_from_slice(tag.as_bytes());
        config
    }
}

/// Answers the messages of a device. Called on the device's thread, or while the worker's lock keeps that thread out.
pub trait FsBackend: Send + 'static {
    /// Whether the backend belongs to the host, so that a snapshot cannot contain it.
    const IS_OF_THE_HOST: bool;

    /// The driver is up; `memory` is its guest memory.
    fn activate(&mut self, memory: &GuestMemory) -> Result<(), DeviceError>;

    /// The driver is gone with its requests. Guest memory must not be touched any more.
    fn reset(&mut self);

    /// Serves an event. `active` is the driver's setup while it is up. The device's thread makes the call that this returns, without the lock,
    /// and then calls it with [`Event::Called`]. An error stops the device.
    fn serve(
        &mut self,
        active: &mut Option<Activation>,
        event: Event,
    ) -> Result<Option<Box<dyn Call>>, DeviceError>;

    /// Takes a backend, or a socket that the device needs. Returns whether the device has a backend now.
    fn attach(&mut self, backend: Backend, fds: Vec<OwnedFd>) -> Result<bool, AttachError>;

    /// The state a freeze keeps of a device with this number of queues whose driver is up.
    fn save(&self, queues: usize) -> FsState;

    /// Whether `state` can be restored into a device whose DAX window has `window` bytes. `queues` are those of an active device. The error
    /// is a sentence.
    fn check(state: &FsState, queues: Option<&[QueueRecord]>, window: u64) -> Result<(), String>;

    /// Restores a state that was checked and whose driver is up. Returns whether the thread has work to do without an event.
    fn restore(&mut self, state: &FsState) -> bool;

    /// See [`VirtioDevice::before_running`].
    fn before_running(&mut self) -> Result<(), String> {
        Ok(())
    }
}

/// The device.
pub struct Fs<B> {
    config: Config<FsConfig>,
    /// The DAX window, if there is one.
    regions: Vec<SharedMemory>,
    /// Whether a backend was attached.
    backed: bool,
    /// The thread, or why it could not be started. Without it, attaching and activating fail.
    worker: io::Result<Worker<B>>,
}

impl<B: FsBackend> Fs<B> {
    fn new(tag: &str, regions: Vec<SharedMemory>, worker: io::Result<Worker<B>>) -> Fs<B> {
        Fs {
            config: Config::new(FsConfig::new(tag)),
            regions,
            backed: false,
            worker,
        }
    }

    fn worker(&self) -> Result<&Worker<B>, DeviceError> {
        self.worker.as_ref().map_err(|error| DeviceError::System {
            what: "the thread of a virtio-fs device",
            error: io::Error::new(error.kind(), error.to_string()),
        })
    }

    /// As [`Self::worker`], with the error of an attach.
    fn attachable(&self) -> Result<&Worker<B>, AttachError> {
        self.worker()
            .map_err(|error| AttachError::Invalid(error.to_string()))
    }
}

impl<B: FsBackend> VirtioDevice for Fs<B> {
    fn spec(&self) -> DeviceSpec {
        DeviceSpec {
            device_type: VIRTIO_ID_FS,
            features: 0,
            queue_sizes: &QUEUE_SIZES,
        }
    }

    fn config(&self) -> Arc<ConfigSpace> {
        self.config.space()
    }

    fn shared_memory(&self) -> &[SharedMemory] {
        &self.regions
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
        let is_backed = self.attachable()?.with(|served| served.attach(backend, fds))?;
        self.backed |= is_backed;
        Ok(())
    }

    fn is_of_the_host(&self) -> bool {
        B::IS_OF_THE_HOST && self.backed
    }

    fn is_backed(&self) -> bool {
        self.backed
    }

    fn save(&mut self) -> Saved {
        let saved = self.worker.as_ref().ok().and_then(Worker::save);
        saved.unwrap_or_else(|| Saved::new(FsState::default(), None))
    }

    fn check(&self, state: &DeviceState, queues: Option<&[QueueRecord]>) -> Result<(), String> {
        let window = self.regions.first().map_or(0, |region| region.window.size);
        B::check(state.of::<FsState>()?, queues, window)
    }

    fn restore(&mut self, activation: Option<Activation>, state: &DeviceState) -> Result<(), DeviceError> {
        // Without a driver there is no file system to restore.
        match (activation, state.of::<FsState>()) {
            (Some(activation), Ok(state)) => self.worker()?.restore(activation, state),
            _ => Ok(()),
        }
    }

    fn before_running(&mut self) -> Result<(), String> {
        match &self.worker {
            Ok(worker) => worker.with(B::before_running),
            Err(_) => Ok(()),
        }
    }

    /// Never called: the device's own thread waits for kicks.
    fn queue_ready(&mut self, _queue: usize) -> Result<(), DeviceError> {
        Ok(())
    }
}
