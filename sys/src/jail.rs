//! Steps by which a process gives up its access to the host. thaw-vmm and thaw-share choose their own and the order
//! (docs/jail.md); the guest's agent uses some for containers.
//!
//! Hand-written on rustix: crates for sandboxes come with a policy of their own and hide the order of the steps, on which a jail depends.

use std::ffi::CStr;
use std::io;

use rustix::io::Errno;
use rustix::mount::{self, MountFlags, MountPropagationFlags, UnmountFlags};
use rustix::process::{self, Resource, Rlimit};
use rustix::thread::{self, CapabilitySet, UnshareFlags};

/// A step that failed.
#[derive(Debug, thiserror::Error)]
#[error("{step}: {source}")]
pub struct StepError {
    pub step: &'static str,
    pub source: io::Error,
}

/// Names the step that a result is of.
pub fn step<T, E: Into<io::Error>>(step: &'static str, result: Result<T, E>) -> Result<T, StepError> {
    result.map_err(|e| StepError {
        step,
        source: e.into(),
    })
}

/// unshare(2).
///
/// # Errors
/// `EINVAL`: `flags` has `FILES`, which would take descriptors away from the process's other threads.
pub fn unshare(flags: UnshareFlags) -> Result<(), Errno> {
    if flags.contains(UnshareFlags::FILES) {
        return Err(Errno::INVAL);
    }
    // SAFETY: only FILES affects descriptors that others rely on, and it was refused above.
    unsafe { thread::unshare_unsafe(flags) }
}

/// Leaves the host's mount, network, IPC, UTS and cgroup namespaces. The calling thread, and no other, gets a copy of the mounts and new,
/// empty namespaces for the rest.
pub fn leave_namespaces() -> Result<(), StepError> {
    let namespaces = UnshareFlags::NEWNS
        | UnshareFlags::NEWNET
        | UnshareFlags::NEWIPC
        | UnshareFlags::NEWUTS
        | UnshareFlags::NEWCGROUP;
    step(
        "making mount, network, IPC, UTS and cgroup namespaces",
        unshare(namespaces),
    )
}

/// Makes mounts of this process's namespace invisible to others, and theirs to it.
pub fn make_mounts_private() -> Result<(), StepError> {
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    step("making mounts private", mount::mount_change("/", private))
}

/// Mounts a tmpfs over the root directory and enters it: the working directory is then the future root.
pub fn mount_root(flags: MountFlags, options: &CStr) -> Result<(), StepError> {
    // Any directory works, and only the root itself certainly exists; "/.." leads to the mount over it.
    step(
        "mounting the new root",
        mount::mount("none", "/", "tmpfs", flags, options),
    )?;
    step("entering the new root's mount", process::chdir("/.."))
}

/// Makes the working directory, a mount, the root, and detaches the old one. While the process has one thread.
pub fn pivot_to_working_directory() -> Result<(), StepError> {
    // The old root ends up on top of the new one at "." (pivot_root(2), NOTES).
    step("pivot_root", process::pivot_root(".", "."))?;
    step(
        "detaching the old root",
        mount::unmount(".", UnmountFlags::DETACH),
    )?;
    step("entering the new root", process::chdir("/"))
}

/// Sets a resource limit, soft and hard.
pub fn limit(resource: Resource, most: u64) -> Result<(), Errno> {
    let limit = Rlimit {
        current: Some(most),
        maximum: Some(most),
    };
    process::setrlimit(resource, limit)
}

/// Empties the capability bounding set, if the process may. Otherwise the capabilities in it are useless, because of `no_new_privs`.
pub fn empty_bounding_set() -> Result<(), StepError> {
    let capabilities = step("reading our capabilities", thread::capabilities(None))?.effective;
    if !capabilities.contains(CapabilitySet::SETPCAP) {
        return Ok(());
    }
    for capability in CapabilitySet::all().iter() {
        match thread::remove_capability_from_bounding_set(capability) {
            // This kernel does not know it.
            Err(Errno::INVAL) => {}
            result => step("emptying the capability bounding set", result)?,
        }
    }
    Ok(())
}
