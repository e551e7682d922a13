//! What this process gives up before it serves anybody.
//!
//! Invariant: when [`enter`] returns, the process sees an empty read-only root, no network, no other process's IPC, has
//! no descriptor but 0 to 3, can gain no privilege, dumps no core, and holds no capability; but where it was started
//! with CAP_SYS_BOOT in the initial user namespace it keeps that one until the VM is made, because
//! KVM_CAP_VM_DISABLE_NX_HUGE_PAGES asks for it, and [`give_up_last_capability`] ends that before any guest code exists.
//!
//! Paths are opened here and nowhere else: `/proc/self/{uid_map,gid_map,setgroups}` where a user namespace is needed.

use std::io;

use rustix::io::Errno;
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use rustix::process::{DumpableBehavior, Resource, Rlimit};
use rustix::thread::{CapabilitySet, CapabilitySets, UnshareFlags};
use rustix::{mount, process, thread};
use thaw_protocol::control::CONTROL_FD;

use crate::seccomp;

/// The user and group a privileged VMM becomes: `nobody`, who owns nothing.
const NOBODY: u32 = 65534;
/// Most descriptors: two a blob of an image, and a handful a device.
const MAX_DESCRIPTORS: u64 = 16384;

/// A step of the jail that failed. There is no running without it.
#[derive(Debug, thiserror::Error)]
pub enum JailError {
    #[error("{step}: {source}")]
    Step { step: &'static str, source: io::Error },
    #[error(
        "no user namespace can be made ({0}): run as root, or allow them (sysctl kernel.unprivileged_userns_clone=1, \
         kernel.apparmor_restrict_unprivileged_userns=0)"
    )]
    UserNamespace(io::Error),
    #[error("the seccomp filter: {0}")]
    Seccomp(#[from] seccompiler::Error),
}

fn step<T, E: Into<io::Error>>(step: &'static str, result: Result<T, E>) -> Result<T, JailError> {
    result.map_err(|e| JailError::Step {
        step,
        source: e.into(),
    })
}

/// Closes the jail. While the process has one thread.
pub fn enter() -> Result<(), JailError> {
    // Signals of the terminal go to whoever started us. Fails only when this is a session of our own already.
    let _ = process::setsid();
    keep_allocator_from_paths();
    close_other_descriptors()?;
    limit_resources()?;
    let capabilities = step("reading our capabilities", thread::capabilities(None))?;
    let privileged = capabilities.effective.contains(CapabilitySet::SYS_ADMIN);
    if !privileged {
        enter_user_namespace()?;
    }
    unshare_others()?;
    empty_root()?;
    give_up_privileges(privileged)?;
    step(
        "forbidding core dumps",
        process::set_dumpable_behavior(DumpableBehavior::NotDumpable),
    )?;
    step("no_new_privs", thread::set_no_new_privs(true))?;
    seccomp::install()?;
    Ok(())
}

/// Gives up CAP_SYS_BOOT, if it is still there.
pub fn give_up_last_capability() -> io::Result<()> {
    Ok(thread::set_capabilities(None, no_capabilities())?)
}

/// glibc's allocator counts the processors in /sys when a thread first allocates, to know how many arenas to make; told
/// how many, it opens nothing. Two suffice: no hot path allocates.
fn keep_allocator_from_paths() {
    // SAFETY: mallopt has no preconditions, and nobody allocates beside us yet.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 2) };
}

fn no_capabilities() -> CapabilitySets {
    CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    }
}

fn close_other_descriptors() -> Result<(), JailError> {
    // SAFETY: nothing of this process is open yet but what it inherited, which nobody in it refers to by number.
    let result = unsafe { libc::close_range(CONTROL_FD as u32 + 1, u32::MAX, 0) };
    step(
        "closing inherited descriptors",
        (result == 0).then_some(()).ok_or_else(io::Error::last_os_error),
    )
}

fn limit_resources() -> Result<(), JailError> {
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    step("RLIMIT_CORE", process::setrlimit(Resource::Core, none))?;
    let most = process::getrlimit(Resource::Nofile)
        .maximum
        .unwrap_or(u64::MAX)
        .min(MAX_DESCRIPTORS);
    let descriptors = Rlimit {
        current: Some(most),
        maximum: Some(most),
    };
    step("RLIMIT_NOFILE", process::setrlimit(Resource::Nofile, descriptors))
}

/// Where we may not make the other namespaces, a user namespace in which we may; we stay who we are in it.
fn enter_user_namespace() -> Result<(), JailError> {
    let (user, group) = (process::geteuid().as_raw(), process::getegid().as_raw());
    unshare(UnshareFlags::NEWUSER).map_err(|e| JailError::UserNamespace(e.into()))?;
    step(
        "writing uid_map",
        std::fs::write("/proc/self/uid_map", format!("{user} {user} 1")),
    )?;
    step(
        "writing setgroups",
        std::fs::write("/proc/self/setgroups", "deny"),
    )?;
    step(
        "writing gid_map",
        std::fs::write("/proc/self/gid_map", format!("{group} {group} 1")),
    )
}

fn unshare_others() -> Result<(), JailError> {
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

fn unshare(flags: UnshareFlags) -> Result<(), Errno> {
    debug_assert!(!flags.contains(UnshareFlags::FILES));
    // SAFETY: only UnshareFlags::FILES may take descriptors from other threads; it is never asked for.
    unsafe { thread::unshare_unsafe(flags) }
}

/// Changes to a root that is empty and stays so: a read-only tmpfs that has no other name.
fn empty_root() -> Result<(), JailError> {
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    step("making mounts private", mount::mount_change("/", private))?;
    let flags = MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    // Any directory will do, and none but the root itself is sure to exist; the mount over it is what "/.." leads to.
    step(
        "mounting the empty root",
        mount::mount("none", "/", "tmpfs", flags, c"size=4k,nr_inodes=1,mode=555"),
    )?;
    step("entering the empty root", process::chdir("/.."))?;
    step("pivot_root", process::pivot_root(".", "."))?;
    step(
        "detaching the old root",
        mount::unmount(".", UnmountFlags::DETACH),
    )?;
    step("entering the new root", process::chdir("/"))
}

fn give_up_privileges(privileged: bool) -> Result<(), JailError> {
    for capability in CapabilitySet::all().iter() {
        match thread::remove_capability_from_bounding_set(capability) {
            // Not one of this kernel's.
            Err(Errno::INVAL) => {}
            result => step("emptying the capability bounding set", result)?,
        }
    }
    step(
        "clearing ambient capabilities",
        thread::clear_ambient_capability_set(),
    )?;
    let mut kept = no_capabilities();
    if privileged {
        step("PR_SET_KEEPCAPS", thread::set_keep_capabilities(true))?;
        let (user, group) = (process::Uid::from_raw(NOBODY), process::Gid::from_raw(NOBODY));
        step("leaving all groups", thread::set_thread_groups(&[]))?;
        step(
            "becoming group nobody",
            thread::set_thread_res_gid(group, group, group),
        )?;
        step(
            "becoming user nobody",
            thread::set_thread_res_uid(user, user, user),
        )?;
        let permitted = step("reading our capabilities", thread::capabilities(None))?.permitted;
        kept.permitted = permitted & CapabilitySet::SYS_BOOT;
        kept.effective = kept.permitted;
    }
    step("dropping capabilities", thread::set_capabilities(None, kept))?;
    step("PR_SET_KEEPCAPS", thread::set_keep_capabilities(false))
}
