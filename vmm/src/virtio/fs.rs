//! virtio-fs (virtio 1.2 §5.11): a sandbox's images as one FUSE file system, served in this process.
//!
//! The file system itself is [`thaw_rootfs::fs::RootFs`]; here is what the specification calls the device. A thread of
//! its own takes FUSE messages from the queues and answers them; a read whose bytes are not in a cache file yet is parked
//! ([`parked`]) and its bytes asked for over the miss socket ([`thaw_protocol::miss`]), so that no read waits for another.
//! The thread is made with the device and sleeps until the driver is ready: starting one later would be slow, and would
//! give it the rights of a vCPU thread.

pub mod message;
mod parked;
mod worker;

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use thaw_protocol::control::{Backend, ImageSpec};
use thaw_rootfs::blob::BlobFile;
use thaw_rootfs::fs::{PlacedBlob, RootFs};
use virtio_bindings::virtio_ids::VIRTIO_ID_FS;

use self::worker::Worker;
use super::config::ConfigSpace;
use super::device::{
    Activation, AttachError, DeviceError, Saved, SharedMemory, VirtioDevice, one_descriptor,
};
use super::gate::Gate;
use super::looped::another_kind;
use super::state::{DeviceState, QueueRecord};
use super::window::HostWindow;

/// The tag the guest mounts the root device by.
pub const ROOT_TAG: &str = "thaw";
/// The tag of the shared volumes.
pub const SHARED_TAG: &str = "shared";

/// `hiprio`, which has FORGET and INTERRUPT, and one request queue. A read of 1 MiB takes 260 descriptors, or one that
/// points to a table of them.
const QUEUE_SIZES: [u16; 2] = [128, 512];
/// The region files are mapped into for DAX (§5.11.4.1, `VIRTIO_FS_SHMCAP_ID_CACHE`).
const CACHE_REGION: u8 = 0;
/// Bytes of a tag in the configuration.
const TAG_LENGTH: usize = 36;

/// The device.
pub struct Fs {
    config: Arc<ConfigSpace>,
    regions: Vec<SharedMemory>,
    /// The window's mapping: reserved, and registered as a memslot; nothing is mapped into it yet.
    _dax: Option<HostWindow>,
    images: Arc<RootFs>,
    /// Whether it takes images and a miss socket; the shared device does not.
    is_root: bool,
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
        Fs::new(ROOT_TAG, true, regions, Some(dax), gate)
    }

    /// The shared device: a file system with nothing in it, until there are volumes.
    pub fn shared(gate: Arc<Gate>) -> Fs {
        Fs::new(SHARED_TAG, false, Vec::new(), None, gate)
    }

    fn new(
        tag: &str,
        is_root: bool,
        regions: Vec<SharedMemory>,
        dax: Option<HostWindow>,
        gate: Arc<Gate>,
    ) -> Fs {
        let images = Arc::new(RootFs::new());
        let worker = Worker::start(tag, images.clone(), gate);
        Fs {
            config: Arc::new(ConfigSpace::new(config(tag))),
            regions,
            _dax: dax,
            images,
            is_root,
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
        if !self.is_root {
            return Err(AttachError::WrongKind("only the root device has image slots"));
        }
        let expected = 1 + 2 * image.blobs.len();
        if fds.len() != expected {
            return Err(AttachError::Descriptors {
                expected,
                got: fds.len(),
            });
        }
        let invalid =
            |error: &dyn std::fmt::Display| AttachError::Invalid(format!("image {:?}: {error}", image.name));
        let mut files = fds.into_iter().map(File::from);
        let metadata = files
            .next()
            .ok_or(AttachError::Descriptors { expected, got: 0 })?;
        let mut blobs = Vec::with_capacity(image.blobs.len());
        for range in &image.blobs {
            let (Some(data), Some(ready)) = (files.next(), files.next()) else {
                return Err(AttachError::Descriptors {
                    expected,
                    got: expected - 1,
                });
            };
            let file = BlobFile::open(data, ready).map_err(|error| invalid(&error))?;
            blobs.push(PlacedBlob {
                address: range.address,
                length: range.length,
                digest: range.digest,
                file,
            });
        }
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
            .map_err(|error| AttachError::Invalid(error.to_string()))
    }
}

/// `struct virtio_fs_config` (§5.11.4): tag, number of request queues.
fn config(tag: &str) -> Vec<u8> {
    let mut bytes = tag.as_bytes().to_vec();
    bytes.resize(TAG_LENGTH, 0);
    bytes.extend((QUEUE_SIZES.len() as u32 - 1).to_le_bytes());
    bytes
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
        self.config.clone()
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
        if !self.is_root || !matches!(backend, Backend::Misses) {
            return Err(AttachError::WrongKind(
                "the root virtio-fs device takes a miss socket, the shared one nothing",
            ));
        }
        let socket = one_descriptor(fds)?;
        let kind = rustix::net::sockopt::socket_type(&socket)
            .map_err(AttachError::system("the miss socket's type"))?;
        if kind != rustix::net::SocketType::SEQPACKET {
            return Err(AttachError::Invalid(
                "the miss socket must be of type SEQPACKET".into(),
            ));
        }
        rustix::io::ioctl_fionbio(&socket, true)
            .map_err(AttachError::system("FIONBIO of the miss socket"))?;
        let worker = self
            .worker()
            .map_err(|error| AttachError::Invalid(error.to_string()))?;
        worker.connect(socket);
        self.backed = true;
        Ok(())
    }

    fn is_backed(&self) -> bool {
        self.backed
    }

    /// Reads that wait for bytes are kept by their heads; here they go on waiting.
    fn save(&mut self) -> Saved {
        match self.worker.as_ref().ok().and_then(Worker::save) {
            Some((parked, queues)) => Saved {
                state: DeviceState::Fs { parked },
                queues: Some(queues),
            },
            None => Saved {
                state: DeviceState::Fs { parked: Vec::new() },
                queues: None,
            },
        }
    }

    fn check(&self, state: &DeviceState, queues: Option<&[QueueRecord]>) -> Result<(), String> {
        let DeviceState::Fs { parked } = state else {
            return Err(another_kind(state));
        };
        let queues = queues.unwrap_or_default();
        if parked.len() > queues.len() {
            return Err(format!(
                "reads wait in {} queues of {}",
                parked.len(),
                queues.len()
            ));
        }
        for (index, (heads, queue)) in parked.iter().zip(queues).enumerate() {
            let mut seen = HashSet::new();
            if let Some(head) = heads
                .iter()
                .find(|head| !queue.ready || **head >= queue.size || !seen.insert(**head))
            {
                return Err(format!(
                    "head {head} cannot wait in queue {index}, or waits twice"
                ));
            }
        }
        Ok(())
    }

    fn restore(&mut self, activation: Option<Activation>, state: &DeviceState) -> Result<(), DeviceError> {
        let (Some(activation), DeviceState::Fs { parked }) = (activation, state) else {
            return Ok(());
        };
        let replay = parked
            .iter()
            .enumerate()
            .flat_map(|(queue, heads)| heads.iter().map(move |head| (queue, *head)));
        self.worker()?.activate(activation, replay.collect())
    }

    /// Never called: the device's own thread waits for kicks.
    fn queue_ready(&mut self, _queue: usize) -> Result<(), DeviceError> {
        Ok(())
    }
}

#[cfg(test)]
#[path = "fs_test.rs"]
mod tests;
