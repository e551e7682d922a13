//! virtio-pmem (virtio 1.2 §5.19): a file in the guest's address space, whose page cache all guests share.
//!
//! The window's place and size never change. The backend is a file, mapped privately and read-only at the window's beginning. Past the
//! file's end, and without a backend, the window reads as zero. The guest's writes are ignored.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{FileType, fstat};
use thaw_protocol::control::Backend;
use virtio_bindings::virtio_ids::VIRTIO_ID_PMEM;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::chain::Chain;
use super::config::{Config, ConfigSpace};
use super::device::{
    Activation, AttachError, DeviceError, DeviceSpec, Saved, VirtioDevice, active_queue, one_descriptor,
    room_for_answer,
};
use super::guest_io;
use super::queue::Answer;
use super::state::{DeviceState, PmemState, QueueRecord};
use super::window::HostWindow;
use crate::layout::Window;
use crate::memory::GuestMemory;

const QUEUE_SIZES: [u16; 1] = [64];
const PAGE: u64 = 4096;
/// `VIRTIO_PMEM_REQ_TYPE_FLUSH`, the only request.
const FLUSH: u32 = 0;
/// `ret` of an unknown request.
const FAILED: u32 = u32::MAX;

/// `struct virtio_pmem_config` (§5.19.4).
#[derive(FromBytes, Immutable, IntoBytes)]
#[repr(C)]
struct PmemConfig {
    start: u64,
    size: u64,
}

/// The device.
pub struct Pmem {
    config: Config<PmemConfig>,
    active: Option<Activation>,
    window: HostWindow,
    /// Bytes of the window the backend's mapping covers.
    mapped: u64,
    /// Bytes it covered when the guest was frozen. The guest's driver may have used all of them.
    frozen: u64,
}

impl Pmem {
    pub fn new(window: HostWindow) -> Pmem {
        let Window { start, size } = window.window();
        Pmem {
            config: Config::new(PmemConfig { start, size }),
            active: None,
            window,
            mapped: 0,
            frozen: 0,
        }
    }

    fn map(&mut self, file: &File) -> Result<(), AttachError> {
        let stat = fstat(file).map_err(AttachError::system("fstat of the pmem file"))?;
        let size = u64::try_from(stat.st_size).unwrap_or(0).next_multiple_of(PAGE);
        let window = self.window.window().size;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(AttachError::Invalid("pmem is backed by a regular file".into()));
        }
        if size == 0 || size > window {
            return Err(AttachError::Invalid(format!(
                "a file of {size} bytes does not fit a window of {window}"
            )));
        }
        if size < self.frozen {
            return Err(AttachError::Frozen(format!(
                "a file of {size} bytes is smaller than the frozen guest's of {}",
                self.frozen
            )));
        }
        let invalid = |error: super::window::WindowError| AttachError::Invalid(error.to_string());
        self.window.map(0, size, file.as_fd(), 0).map_err(invalid)?;
        if self.mapped > size {
            self.window.clear(size, self.mapped - size).map_err(invalid)?;
        }
        self.mapped = size;
        Ok(())
    }
}

impl VirtioDevice for Pmem {
    fn spec(&self) -> DeviceSpec {
        DeviceSpec {
            device_type: VIRTIO_ID_PMEM,
            features: 0,
            queue_sizes: &QUEUE_SIZES,
        }
    }

    fn config(&self) -> Arc<ConfigSpace> {
        self.config.space()
    }

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        self.active = Some(activation);
        Ok(())
    }

    fn reset(&mut self) {
        self.active = None;
    }

    fn attach(&mut self, backend: Backend, fds: Vec<OwnedFd>) -> Result<(), AttachError> {
        let Backend::Pmem = backend else {
            return Err(AttachError::WrongKind("virtio-pmem takes a file to map"));
        };
        self.map(&File::from(one_descriptor(fds)?))
    }

    fn is_backed(&self) -> bool {
        self.mapped > 0
    }

    fn save(&mut self) -> Saved {
        Saved::new(PmemState { mapped: self.mapped }, self.active.as_ref())
    }

    fn check(&self, state: &DeviceState, _queues: Option<&[QueueRecord]>) -> Result<(), String> {
        match state.of::<PmemState>()? {
            PmemState { mapped } if *mapped <= self.window.window().size => Ok(()),
            PmemState { mapped } => Err(format!("{mapped} bytes were mapped into a window of fewer")),
        }
    }

    fn restore(&mut self, activation: Option<Activation>, state: &DeviceState) -> Result<(), DeviceError> {
        if let Ok(PmemState { mapped }) = state.of::<PmemState>() {
            self.frozen = *mapped;
        }
        self.active = activation;
        Ok(())
    }

    fn queue_ready(&mut self, queue: usize) -> Result<(), DeviceError> {
        if let Some(queue) = active_queue(&mut self.active, queue) {
            queue.serve(|memory, chain| answer(memory, &chain).map(Answer::Done))?;
        }
        Ok(())
    }
}

/// A flush does nothing: the mapping is private, so no write of the guest could reach the file.
fn answer(memory: &GuestMemory, chain: &Chain) -> Result<u32, DeviceError> {
    let response = room_for_answer(memory, chain)?;
    let mut kind = [0; 4];
    let read = chain
        .readable(memory)
        .map_or(0, |request| guest_io::copy_out(&request, 0, &mut kind));
    let ret = if read == kind.len() && u32::from_le_bytes(kind) == FLUSH {
        0
    } else {
        FAILED
    };
    match guest_io::copy_in(&response, 0, &ret.to_le_bytes()) {
        4 => Ok(4),
        _ => Err(DeviceError::unanswerable(chain, "response shorter than 4 bytes")),
    }
}

#[cfg(test)]
#[path = "pmem_test.rs"]
mod tests;
