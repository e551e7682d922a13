//! Registers descriptors with tokio. The safety argument for tokio's requirements is made only here.

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Registers a descriptor, so that its readiness can be awaited. Must be called within a tokio runtime.
pub fn register(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd refers to one open descriptor for as long as it lives, and AsyncFd owns it from here until it is deregistered.
    unsafe { AsyncFd::register_with_interest(fd, interest) }.map_err(io::Error::from)
}

/// Both directions.
pub const BOTH: Interest = Interest::READABLE.add(Interest::WRITABLE);
