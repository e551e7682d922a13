//! A set of empty namespaces, for processes that leave the host's: a root without a file, a network whose only interface is a loopback that
//! is down, no IPC object.
//!
//! Linux makes and removes a set under locks of the whole host, and waits for RCU grace periods. So a process that starts many others makes
//! one set and hands it to each. docs/jail.md says why such processes can share it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};

use rustix::mount::MountFlags;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::jail::{self, StepError, step};

/// The name in `/proc/PID/ns` and the kind of each namespace, in the order of the descriptors. Mounts are the last: a process that has
/// entered them finds no file.
const KINDS: [(&str, LinkNameSpaceType); 5] = [
    ("net", LinkNameSpaceType::Network),
    ("ipc", LinkNameSpaceType::InterProcessCommunication),
    ("uts", LinkNameSpaceType::HostNameAndNISDomainName),
    ("cgroup", LinkNameSpaceType::ControlGroup),
    ("mnt", LinkNameSpaceType::Mount),
];

/// A set of empty namespaces, one of each kind. It exists while a process is in it or a descriptor of it is open.
#[derive(Debug)]
pub struct Namespaces(Vec<OwnedFd>);

impl Namespaces {
    /// Makes a set, on a thread of its own, because the thread that makes it is then in it.
    ///
    /// # Errors
    /// The step that failed: `EPERM` without CAP_SYS_ADMIN.
    pub fn make() -> Result<Namespaces, StepError> {
        let make = || -> Result<Namespaces, StepError> {
            jail::leave_namespaces()?;
            // The empty root has no /proc.
            let made = open(KINDS.map(|(name, _)| format!("/proc/thread-self/ns/{name}")))?;
            enter_empty_root()?;
            Ok(made)
        };
        let thread = std::thread::Builder::new().name("namespaces".into());
        step("starting a thread for namespaces", thread.spawn(make))?
            .join()
            .unwrap_or_else(|_| step("making namespaces", Err(io::Error::other("the thread panicked"))))
    }

    /// The set that a process inherited as consecutive descriptors, of which `first` is the first. Opens them anew, so the caller can close
    /// the inherited ones.
    ///
    /// # Errors
    /// If one of the descriptors is not open, or /proc is missing.
    pub fn inherited(first: RawFd) -> Result<Namespaces, StepError> {
        let mut number = first;
        open(KINDS.map(|_| {
            let path = format!("/proc/self/fd/{number}");
            number = number.saturating_add(1);
            path
        }))
    }

    /// The descriptors, in the order in which a process that enters the set must inherit them.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.iter().map(AsFd::as_fd)
    }

    /// Moves this process, which must have one thread, into the set. Its root and its working directory are then the empty root.
    ///
    /// # Errors
    /// The step that failed; the process may be in some of the namespaces then. `EPERM` without CAP_SYS_ADMIN and CAP_SYS_CHROOT.
    pub fn enter(&self) -> Result<(), StepError> {
        for (namespace, (_, kind)) in self.descriptors().zip(KINDS) {
            step(
                "entering a namespace",
                move_into_link_name_space(namespace, Some(kind)),
            )?;
        }
        Ok(())
    }
}

/// Moves this process, which must have one thread, into a set of its own.
pub fn unshare_all() -> Result<(), StepError> {
    jail::leave_namespaces()?;
    enter_empty_root()
}

fn open<const N: usize>(paths: [String; N]) -> Result<Namespaces, StepError> {
    let opened: io::Result<Vec<OwnedFd>> = paths
        .into_iter()
        .map(|path| File::open(path).map(OwnedFd::from))
        .collect();
    step("opening namespaces", opened).map(Namespaces)
}

/// Replaces all mounts of this mount namespace by an empty, read-only tmpfs, which is mounted nowhere else.
fn enter_empty_root() -> Result<(), StepError> {
    jail::make_mounts_private()?;
    let flags = MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    jail::mount_root(flags, c"size=4k,nr_inodes=1,mode=555")?;
    jail::pivot_to_working_directory()
}

#[cfg(test)]
#[path = "namespaces_test.rs"]
mod tests;
