//! mount_setattr(2), which rustix lacks.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::io::Errno;
use rustix::mount::MountAttrFlags;

/// Changes to a mount's attributes.
#[derive(Clone, Copy, Debug)]
pub struct Attributes {
    pub set: MountAttrFlags,
    pub clear: MountAttrFlags,
    /// `MS_PRIVATE` or similar, as for mount(2); 0 keeps the propagation.
    pub propagation: u64,
}

/// Changes the attributes of a mount, and of those below it if `recursive`.
pub fn set_attributes(mount: &OwnedFd, attributes: Attributes, recursive: bool) -> Result<(), Errno> {
    let below = if recursive { libc::AT_RECURSIVE } else { 0 };
    let attributes = libc::mount_attr {
        attr_set: attributes.set.bits().into(),
        attr_clr: attributes.clear.bits().into(),
        propagation: attributes.propagation,
        userns_fd: 0,
    };
    // SAFETY: the kernel reads a structure of the stated size, and an empty path.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH | below,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    match done {
        0 => Ok(()),
        _ => Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)),
    }
}
