//! Registers descriptors with tokio. The safety argument about what tokio requires of a descriptor is here alone.

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A descriptor that can be waited for. Within a tokio runtime.
pub fn register(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd names one open descriptor for as long as it lives, and AsyncFd owns it from here to its
    // deregistration.
    unsafe { AsyncFd::register_with_interest(fd, interest) }.map_err(io::Error::from)
}

/// Both directions.
pub const BOTH: Interest = Interest::READABLE.add(Interest::WRITABLE);
