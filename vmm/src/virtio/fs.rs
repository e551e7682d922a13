//! virtio-fs (virtio 1.2 §5.11): a sandbox's images as one FUSE file system, served in this process.
//!
//! The file system itself is [`thaw_imagefs::fs::RootFs`]; here is what the specification calls the device. A thread of
//! its own takes FUSE messages from the queues and answers them; a read whose bytes are not in a cache file yet is parked
//! ([`parked`]) and its bytes asked for over the miss socket ([`thaw_protocol::miss`]), so that no read waits for another.
//! The thread is made with the device and sleeps until the driver is ready: starting one later would be slow, and would
//! give it the rights of a vCPU thread.

pub mod dax;
pub mod message;
mod worker;

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use thaw_imagefs::fs::RootFs;
use thaw_protocol::control::{Backend, ImageSpec};
use virtio_bindings::virtio_ids::VIRTIO_ID_FS;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use self::dax::Dax;
use self::worker::Worker;
use super::blk::image::placed_blobs;
use super::config::{Config, ConfigSpace};
use super::device::{Activation, AttachError, DeviceError, Saved, SharedMemory, VirtioDevice};
use super::gate::Gate;
use super::misses::{check_heads, packet_socket};
use super::state::{DeviceState, QueueRecord};
use super::window::HostWindow;

/// The tag the guest mounts the root device by.
pub const ROOT_TAG: &str = "thaw";

/// `hiprio`, which has FORGET and INTERRUPT, and one request queue. A read of 1 MiB takes 260 descriptors, or one that
/// points to a table of them.
pub(super) const QUEUE_SIZES: [u16; 2] = [128, 512];
/// The region files are mapped into for DAX (§5.11.4.1, `VIRTIO_FS_SHMCAP_ID_CACHE`).
const CACHE_REGION: u8 = 0;

/// `struct virtio_fs_config` (§5.11.4).
#[derive(Debug, FromBytes, Immutable, IntoBytes)]
#[repr(C)]
pub(super) struct FsConfig {
    /// What the guest mounts it by, filled up with zeros.
    tag: [u8; 36],
    num_request_queues: u32,
}

impl FsConfig {
    /// `tag` has at most 36 bytes.
    pub(super) fn new(tag: &str) -> FsConfig {
        let mut config = FsConfig {
            tag: [0; 36],
            num_request_queues: QUEUE_SIZES.len() as u32 - 1,
        };
        config.tag[..tag.len()].copy_from_slice(tag.as_bytes());
        config
    }
}

/// The device.
pub struct Fs {
    config: Config<FsConfig>,
    regions: Vec<SharedMemory>,
    images: Arc<RootFs>,
    /// An image or a miss socket has come.
    backed: bool,
    /// The thread, or why there is none: then the device cannot be activated.
    worker: io::Result<Worker>,
}

impl Fs {
    /// The root device: image slots, and a window.
    pub fn root(dax: HostWindow, gate: Arc<Gate>) -> Fs {
        let regions = vec![SharedMemory {
            id: CACHE_REGION,
            window: dax.window(),
        }];
        let images = Arc::new(RootFs::with_window());
        let worker = Worker::start(ROOT_TAG, images.clone(), Dax::new(dax), gate);
        Fs {
            config: Config::new(FsConfig::new(ROOT_TAG)),
            regions,
            images,
            backed: false,
            worker,
        }
    }

    fn worker(&self) -> Result<&Worker, DeviceError> {
        self.worker.as_ref().map_err(|error| DeviceError::System {
            what: "the thread of a virtio-fs device",
            error: io::Error::new(error.kind(), error.to_string()),
        })
    }

    /// Shows an image in a slot; `fds` as [`ImageSpec::blobs`] says. The guest sees it at its next look.
    pub fn add_image(&mut self, slot: u16, image: ImageSpec, fds: Vec<OwnedFd>) -> Result<(), AttachError> {
        let expected = 1 + 2 * image.blobs.len();
        if fds.len() != expected {
            return Err(AttachError::Descriptors {
                expected,
                got: fds.len(),
            });
        }
        let invalid =
            |error: &dyn std::fmt::Display| AttachError::Invalid(format!("image {:?}: {error}", image.name));
        let mut fds = fds.into_iter();
        let metadata = fds
            .next()
            .map(File::from)
            .ok_or(AttachError::Descriptors { expected, got: 0 })?;
        let blobs = placed_blobs(&image.blobs, &mut fds).map_err(|error| invalid(&error))?;
        self.images
            .add_image(slot, &image.name, &metadata, blobs)
            .map_err(|error| invalid(&error))?;
        self.backed = true;
        Ok(())
    }

    /// Takes an image away; the guest must have unmounted it.
    pub fn remove_image(&mut self, slot: u16) -> Result<(), AttachError> {
        self.images
            .remove_image(slot)
            .map_err(|error| AttachError::Invalid(error.to_string()))?;
        if let Ok(worker) = &self.worker {
            worker.forget_image(slot);
        }
        Ok(())
    }
}

impl VirtioDevice for Fs {
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

    fn shared_memory(&self) -> &[SharedMemory] {
        &self.regions
    }

    fn has_own_threads(&self) -> bool {
        true
    }

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        self.worker()?.activate(activation, Vec::new())
    }

    fn reset(&mut self) {
        if let Ok(worker) = &self.worker {
            worker.reset();
        }
    }

    fn attach(&mut self, backend: Backend, fds: Vec<OwnedFd>) -> Result<(), AttachError> {
        if !matches!(backend, Backend::Misses | Backend::Accesses) {
            return Err(AttachError::WrongKind(
                "the root virtio-fs device takes sockets for misses and accesses",
            ));
        }
        let socket = packet_socket(fds)?;
        let worker = self
            .worker()
            .map_err(|error| AttachError::Invalid(error.to_string()))?;
        match backend {
            Backend::Accesses => worker.tell(socket),
            _ => {
                worker.connect(socket);
                self.backed = true;
            }
        }
        Ok(())
    }

    fn is_backed(&self) -> bool {
        self.backed
    }

    /// Reads that wait for bytes are kept by their heads; here they go on waiting.
    fn save(&mut self) -> Saved {
        let saved = self.worker.as_ref().ok().and_then(Worker::save);
        saved.unwrap_or(Saved {
            state: DeviceState::Fs {
                parked: Vec::new(),
                mappings: Vec::new(),
            },
            queues: None,
        })
    }

    fn check(&self, state: &DeviceState, queues: Option<&[QueueRecord]>) -> Result<(), String> {
        let DeviceState::Fs { parked, mappings } = state else {
            return Err(state.another_kind());
        };
        // A driver that is not up has no file system, and nothing mapped.
        let window = match (queues, self.regions.first()) {
            (Some(_), Some(region)) => region.window.size,
            _ => 0,
        };
        Dax::check(window, mappings)?;
        let queues = queues.unwrap_or_default();
        if parked.len() > queues.len() {
            return Err(format!(
                "reads wait in {} queues of {}",
                parked.len(),
                queues.len()
            ));
        }
        for (index, (heads, queue)) in parked.iter().zip(queues).enumerate() {
            check_heads(index, heads, Some(queue))?;
        }
        Ok(())
    }

    fn restore(&mut self, activation: Option<Activation>, state: &DeviceState) -> Result<(), DeviceError> {
        let (Some(activation), DeviceState::Fs { parked, mappings }) = (activation, state) else {
            return Ok(());
        };
        let replay = parked
            .iter()
            .enumerate()
            .flat_map(|(queue, heads)| heads.iter().map(move |head| (queue, *head)));
        let worker = self.worker()?;
        worker.activate(activation, replay.collect())?;
        worker.restore(mappings);
        Ok(())
    }

    fn before_running(&mut self) -> Result<(), String> {
        match &self.worker {
            Ok(worker) => worker.map_frozen(),
            Err(_) => Ok(()),
        }
    }

    /// Never called: the device's own thread waits for kicks.
    fn queue_ready(&mut self, _queue: usize) -> Result<(), DeviceError> {
        Ok(())
    }
}

#[cfg(test)]
#[path = "fs_test.rs"]
mod tests;
