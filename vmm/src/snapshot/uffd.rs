//! Memory that is not here yet: a userfaultfd over what the memory files hold.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use thaw_protocol::control::MappedRegion;

use super::{MemoryMap, RestoreError};
use crate::memory::GuestMemory;

/// Why memory cannot be watched.
#[derive(Debug, thiserror::Error)]
pub enum UffdError {
    #[error("{call}: {error}")]
    Ioctl { call: &'static str, error: io::Error },
    #[error(transparent)]
    Shape(#[from] RestoreError),
}

/// A userfaultfd over guest memory.
#[derive(Debug)]
pub struct Watch {
    /// A duplicate of it goes to the server of pages; this one stays as long as the machine: when the last is closed, the
    /// kernel fills missing pages with zeros, which would be a silent corruption were the server to die.
    pub uffd: OwnedFd,
    /// Where it watches.
    pub regions: Vec<MappedRegion>,
}

/// Makes a userfaultfd from `device` (/dev/userfaultfd) and registers the map's extents: from now on whoever touches a
/// page of theirs that is not there waits for the server.
pub fn watch(device: BorrowedFd<'_>, memory: &GuestMemory, map: &MemoryMap) -> Result<Watch, UffdError> {
    let _ = (device, memory, map);
    unimplemented!()
}
