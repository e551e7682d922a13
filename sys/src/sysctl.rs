//! Settings of a network namespace: files below `/proc/sys/net` (sysctl(8)).
//!
//! A procfs instance keeps the directories of all network namespaces under one name in one hash chain, and each path through one searches
//! it (`proc_sys_compare` in fs/proc/proc_sysctl.c): beside 2,000 namespaces the first path in a new one takes 0.8 ms. So files are opened
//! in an instance that is mounted nowhere. Invariant: an instance opens at most [`USES`] files, and is then replaced.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex};

use rustix::fs::{Mode, OFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};

use crate::lock::Lock;

/// Files that one instance opens.
const USES: u32 = 128;

/// In place of an interface's name: those that the namespace will have.
pub const LATER: &str = "default";

static CURRENT: Mutex<Option<Current>> = Mutex::new(None);

/// The instance that opens the next file.
#[derive(Debug)]
struct Current {
    instance: Arc<Instance>,
    used: u32,
}

/// A procfs instance. It ends with its last user.
#[derive(Debug)]
struct Instance {
    /// Its directory `sys/net`.
    net: OwnedFd,
    /// Keeps it mounted: to unmount it takes half a millisecond, mostly of waiting.
    _mount: OwnedFd,
}

impl Instance {
    /// Without CAP_SYS_ADMIN: `EPERM`; before Linux 5.2: `ENOSYS`. Before 5.8 it is the instance at `/proc`, and spares nothing.
    fn new() -> io::Result<Instance> {
        let context = fsopen("proc", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_create(&context)?;
        let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
            | MountAttrFlags::MOUNT_ATTR_NODEV
            | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        let mount = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let net = rustix::fs::openat(&mount, "sys/net", flags, Mode::empty())?;
        Ok(Instance { net, _mount: mount })
    }

    /// One that may open another file.
    fn current() -> io::Result<Arc<Instance>> {
        // Declared before the lock is taken, so it ends after the lock is released.
        let _replaced;
        let mut current = CURRENT.locked();
        if let Some(current) = current.as_mut().filter(|current| current.used < USES) {
            current.used += 1;
            return Ok(current.instance.clone());
        }
        let instance = Arc::new(Instance::new()?);
        _replaced = current.replace(Current {
            instance: instance.clone(),
            used: 1,
        });
        Ok(instance)
    }
}

/// Writes a setting of the calling thread's network namespace. `name` is its path below `/proc/sys/net`.
///
/// # Errors
/// `NotFound`: the kernel has no such setting. `EACCES` or `EROFS`: the namespace is another user's, or `/proc/sys` is not writable.
pub fn set(name: impl AsRef<Path>, value: &str) -> io::Result<()> {
    let name = name.as_ref();
    let mut file = match Instance::current() {
        Ok(instance) => {
            let flags = OFlags::WRONLY | OFlags::CLOEXEC;
            File::from(rustix::fs::openat(&instance.net, name, flags, Mode::empty())?)
        }
        Err(_) => OpenOptions::new()
            .write(true)
            .open(Path::new("/proc/sys/net").join(name))?,
    };
    file.write_all(value.as_bytes())
}

/// Turns IPv6 off for an interface of the calling thread's network namespace; [`LATER`]: for those that it will have. Does nothing if the
/// kernel has no IPv6. For an interface that exists this takes RTNL, a lock of the whole host, and while another has it the kernel tries
/// again and again (`addrconf_disable_ipv6` in net/ipv6/addrconf.c).
///
/// # Errors
/// As [`set`].
pub fn disable_ipv6(interface: &str) -> io::Result<()> {
    match set(format!("ipv6/conf/{interface}/disable_ipv6"), "1") {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        set => set,
    }
}

#[cfg(test)]
#[path = "sysctl_test.rs"]
mod tests;
