//! Page faults of a VMM that this process may serve.

use std::os::fd::OwnedFd;

use crate::error::Error;

/// The device through which a process without the privilege watches page faults of the kernel.
const DEVICE: &str = "/dev/userfaultfd";

/// Opens the device. A VMM makes userfaultfds with it.
pub(super) fn open() -> Result<OwnedFd, Error> {
    let file = std::fs::OpenOptions::new().read(true).write(true).open(DEVICE);
    let file = file.map_err(|e| Error::system(format!("cannot open {DEVICE}"), &e))?;
    Ok(file.into())
}
