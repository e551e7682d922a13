//! Memory that is not on this host yet: a userfaultfd over the ranges that the memory files hold.
//!
//! The VMM makes the userfaultfd for its own address space, from a descriptor of /dev/userfaultfd. The process that has the pages gets a
//! duplicate and copies the pages in (UFFDIO_COPY), whichever thread faults. Faults of the guest and of system calls happen in kernel mode,
//! so `UFFD_USER_MODE_ONLY` is not set; because of the device this needs no privilege.
//!
//! The ioctls are those of linux/userfaultfd.h; this module has their `unsafe` code.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use thaw_protocol::control::MappedRegion;

use super::restore::{check_shape, mapped_regions};
use super::{MemoryMap, RestoreError, mapping};
use crate::memory::GuestMemory;

/// `_IO(0xAA, 0)` of /dev/userfaultfd.
const USERFAULTFD_IOC_NEW: libc::Ioctl = 0xAA00;
/// `_IOWR(0xAA, 0x3F, struct uffdio_api)`.
const UFFDIO_API: libc::Ioctl = 0xC018_AA3F;
/// `_IOWR(0xAA, 0, struct uffdio_register)`.
const UFFDIO_REGISTER: libc::Ioctl = 0xC020_AA00;
/// The version of the interface.
const UFFD_API: u64 = 0xAA;
const UFFDIO_REGISTER_MODE_MISSING: u64 = 1;
/// Bit of UFFDIO_COPY in `uffdio_register.ioctls`.
const COPY: u64 = 1 << 3;

/// `struct uffdio_api`.
#[repr(C)]
struct UffdioApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_register`.
#[repr(C)]
struct UffdioRegister {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

/// Why memory cannot be watched.
#[derive(Debug, thiserror::Error)]
pub enum UffdError {
    #[error("{call}: {error}; is the descriptor /dev/userfaultfd, of Linux 6.1 or later?")]
    Ioctl { call: &'static str, error: io::Error },
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
    let uffd = create(device)?;
    for range in map.data() {
        let (guest_address, size) = (range.start, range.end - range.start);
        register(&uffd, memory, guest_address, size).map_err(|error| UffdError::Register {
            guest_address,
            size,
            error,
        })?;
    }
    Ok(Watch { uffd, regions })
}

fn create(device: BorrowedFd<'_>) -> Result<OwnedFd, UffdError> {
    // SAFETY: USERFAULTFD_IOC_NEW takes flags, not a pointer; any other device refuses the request as unknown.
    let fd = unsafe {
        libc::ioctl(
            device.as_raw_fd(),
            USERFAULTFD_IOC_NEW,
            libc::O_CLOEXEC | libc::O_NONBLOCK,
        )
    };
    if fd < 0 {
        return Err(failed("USERFAULTFD_IOC_NEW"));
    }
    // SAFETY: the call has just made this descriptor for this process.
    let uffd = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut api = UffdioApi {
        api: UFFD_API,
        features: 0,
        ioctls: 0,
    };
    // SAFETY: `api` is the structure UFFDIO_API reads and writes, and outlives the call.
    if unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_API, &raw mut api) } < 0 {
        return Err(failed("UFFDIO_API"));
    }
    Ok(uffd)
}

fn register(uffd: &OwnedFd, memory: &GuestMemory, guest_address: u64, size: u64) -> io::Result<()> {
    let start = mapping::host_address(memory, guest_address, size).ok_or(io::ErrorKind::InvalidInput)?;
    let mut range = UffdioRegister {
        start,
        len: size,
        mode: UFFDIO_REGISTER_MODE_MISSING,
        ioctls: 0,
    };
    // SAFETY: `range` is the structure UFFDIO_REGISTER reads and writes, and outlives the call. It names guest memory (checked): a thread
    // that touches a missing page there waits, and a missing page has no contents to lose.
    if unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_REGISTER, &raw mut range) } < 0 {
        return Err(io::Error::last_os_error());
    }
    if range.ioctls & COPY == 0 {
        return Err(io::Error::other("the kernel cannot copy pages into this memory"));
    }
    Ok(())
}

fn failed(call: &'static str) -> UffdError {
    UffdError::Ioctl {
        call,
        error: io::Error::last_os_error(),
    }
}

#[cfg(test)]
#[path = "uffd_test.rs"]
mod tests;
