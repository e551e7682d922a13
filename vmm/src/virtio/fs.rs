//! virtio-fs (virtio 1.2 §5.11): the images of a sandbox as one FUSE file system.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use thaw_protocol::control::{Backend, ImageSpec};
use virtio_bindings::virtio_ids::VIRTIO_ID_FS;

use super::config::ConfigSpace;
use super::device::{Activation, AttachError, DeviceError, SharedMemory, VirtioDevice};
use super::window::HostWindow;

/// The tag the guest mounts the root device by.
pub const ROOT_TAG: &str = "thaw";
/// The tag of the shared volumes.
pub const SHARED_TAG: &str = "shared";

/// Queues: one for FORGET and INTERRUPT (hiprio), one for requests.
const QUEUE_SIZES: [u16; 2] = [16, 256];

/// The device.
pub struct Fs {
    config: Arc<ConfigSpace>,
    active: Option<Activation>,
    /// Where files may be mapped for DAX; the root device has one.
    _dax: Option<HostWindow>,
    regions: Vec<SharedMemory>,
}

impl Fs {
    /// The root device: image slots, and a window.
    pub fn root(dax: HostWindow) -> Fs {
        let regions = vec![SharedMemory { id: 0, window: dax.window() }];
        Fs { config: config(ROOT_TAG), active: None, _dax: Some(dax), regions }
    }

    /// The shared device: an empty directory.
    pub fn shared() -> Fs {
        Fs { config: config(SHARED_TAG), active: None, _dax: None, regions: Vec::new() }
    }

    /// Shows an image in a slot; `fds` as [`ImageSpec::blobs`] says.
    pub fn add_image(&mut self, _slot: u16, _image: ImageSpec, _fds: Vec<OwnedFd>) -> Result<(), AttachError> {
        Err(AttachError::WrongKind("images come later"))
    }

    /// Takes an image away.
    pub fn remove_image(&mut self, _slot: u16) -> Result<(), AttachError> {
        Err(AttachError::WrongKind("images come later"))
    }
}

/// struct virtio_fs_config: tag, num_request_queues.
fn config(tag: &str) -> Arc<ConfigSpace> {
    let mut bytes = vec![0; 36];
    bytes[..tag.len()].copy_from_slice(tag.as_bytes());
    bytes.extend((QUEUE_SIZES.len() as u32 - 1).to_le_bytes()); // after 36 bytes of tag
    Arc::new(ConfigSpace::new(bytes))
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
        self.active = Some(activation);
        Ok(())
    }

    fn reset(&mut self) {
        self.active = None;
    }

    fn attach(&mut self, _backend: Backend, _fds: Vec<OwnedFd>) -> Result<(), AttachError> {
        Err(AttachError::WrongKind("a virtio-fs device takes a miss socket"))
    }

    fn queue_ready(&mut self, _queue: usize) -> Result<(), DeviceError> {
        Ok(())
    }
}
