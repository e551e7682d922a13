//! Memory that is not on this host yet: a userfaultfd over the ranges that the memory files hold.
//!
//! The VMM makes the userfaultfd ([`super::userfault`]). The process that has the pages gets a duplicate and copies the pages in
//! (UFFDIO_COPY), whichever thread faults.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use thaw_protocol::control::MappedRegion;

use super::restore::{check_shape, mapped_regions};
use super::userfault::{Mode, OpenError, Userfault};
use super::{MemoryMap, RestoreError};
use crate::memory::GuestMemory;

/// Why memory cannot be watched.
#[derive(Debug, thiserror::Error)]
pub enum UffdError {
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error("watching memory {guest_address:#x} ({size:#x} bytes): {error}")]
    Register {
        guest_address: u64,
        size: u64,
        error: io::Error,
    },
    #[error(transparent)]
    Shape(#[from] RestoreError),
}

/// A userfaultfd over guest memory.
#[derive(Debug)]
pub struct Watch {
    /// Non-blocking. The page server gets a duplicate; this one stays open as long as the machine. When the last one is closed, the kernel
    /// fills missing pages with zeros: if the server died, that would corrupt memory silently.
    pub uffd: OwnedFd,
    /// The map's regions in this address space.
    pub regions: Vec<MappedRegion>,
}

/// Makes a userfaultfd from `device` (/dev/userfaultfd) and registers the map's extents: from now on a thread that touches a missing page
/// of an extent waits for the server. Guest memory must be untouched and anonymous.
pub fn watch(device: BorrowedFd<'_>, memory: &GuestMemory, map: &MemoryMap) -> Result<Watch, UffdError> {
    check_shape(memory, map)?;
    let regions = mapped_regions(memory, map)?;
    let userfault = Userfault::new(device, 0)?;
    for range in map.data() {
        let (guest_address, size) = (range.start, range.end - range.start);
        userfault
            .register(memory, guest_address, size, Mode::Missing)
            .map_err(|error| UffdError::Register {
                guest_address,
                size,
                error,
            })?;
    }
    Ok(Watch {
        uffd: userfault.into(),
        regions,
    })
}

#[cfg(test)]
#[path = "uffd_test.rs"]
mod tests;
