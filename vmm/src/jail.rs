//! Drops this process's rights before it serves a request.
//!
//! Invariant: when [`enter`] returns, the process sees an empty read-only root, no network and no other process's IPC. It has only the
//! descriptors 0 to 3, cannot gain privileges, dumps no core, and holds no capability. There is one exception: a process that was started
//! with CAP_SYS_BOOT in the initial user namespace keeps it until the VM is made, because KVM_CAP_VM_DISABLE_NX_HUGE_PAGES needs it;
//! [`give_up_last_capability`] drops it before any guest code exists. After the machine is made, and before hostile input reaches the
//! process, [`seal`] restricts its threads to the system calls of [`syscalls`].
//!
//! A process that will have a user of its own enters the empty namespaces that its starter made for all its VMMs; any other makes its own.
//! Both need CAP_SYS_ADMIN or a user namespace. If the host grants neither, the process ends, unless it was started with permission
//! to run without them: then it goes on with Landlock and the filter alone and logs one line. The parent makes the PID namespace, because a
//! process cannot enter one itself; this module only checks for it. docs/jail.md describes the whole jail.
//!
//! This module opens the paths `/proc/self`, `/proc/self/{uid_map,gid_map,setgroups}` and, for the namespaces, `/proc/self/fd/N`; no other
//! module opens any, except that [`crate::multihit`] reads one file of /sys earlier.

mod filter;
mod landlock;
mod names;
mod signals;
pub mod syscalls;
pub mod threads;

use std::fs;
use std::io;
use std::os::fd::RawFd;

use rustix::process::{DumpableBehavior, Resource};
use rustix::thread::{CapabilitySet, CapabilitySets, UnshareFlags};
use rustix::{process, thread};
use thaw_protocol::control::CONTROL_FD;
use thaw_sys::jail::{self, StepError, step};
use thaw_sys::namespaces::{self, Namespaces};
use thaw_sys::{allocator, descriptors};

pub use filter::seal;
pub use signals::set_hotplug_region;

/// Base of the user and group IDs of privileged VMMs. The ID is this plus the process ID, so each VMM has an ID of its own while it lives,
/// and no allocator of IDs is needed. systemd leaves 0x70000000 to 0x7fffffff unused (its UIDS-GIDS); a process ID has at most 22 bits.
const FIRST_USER: u32 = 0x7400_0000;
/// The user `nobody`, used if the namespace does not map the process's own ID.
const NOBODY: u32 = 65534;
/// Most descriptors: two for each blob of an image, and a handful for each device.
const MAX_DESCRIPTORS: u64 = 16384;
/// More descriptors than a machine usually has.
const USUAL_DESCRIPTORS: u32 = 256;
/// Most threads of a user that only this process has: 16 vCPUs, 16 of disks, 6 others, and the threads that KVM starts for this process.
const MAX_THREADS: u64 = 64;

/// A step of the jail failed, so the process cannot run.
#[derive(Debug, thiserror::Error)]
pub enum JailError {
    #[error(transparent)]
    Step(#[from] StepError),
    #[error("the jail would lack {0}")]
    Lacks(String),
}

/// Enters the jail. Must be called while the process has one thread. `shared`: the first of the descriptors with the namespaces that this
/// process may share with other VMMs.
///
/// # Errors
/// [`JailError`] with the step that failed. If the jail must be `whole`, [`JailError::Lacks`] with what this host cannot provide.
pub fn enter(whole: bool, shared: Option<RawFd>) -> Result<(), JailError> {
    // Detaches from the parent's terminal and its signals. Fails only if this process leads a session already.
    let _ = process::setsid();
    step("taking signals", signals::install())?;
    // Another heap would open files, which it has none of here. One is enough, because no hot path allocates.
    allocator::limit_heaps(1);
    let capabilities = step("reading our capabilities", thread::capabilities(None))?.effective;
    let privileged = capabilities.contains(CapabilitySet::SYS_ADMIN);
    let mut missing = Vec::new();
    let namespaces = match privileged {
        true => Ok(()),
        false => enter_user_namespace(),
    };
    // Before leave_host: afterwards /proc is gone.
    let user = own_user();
    // Users that others have too are kept apart by namespaces.
    let shared = shared.filter(|_| privileged && user.0 == User::Own);
    let left = namespaces.and_then(|()| leave_host(shared));
    close_other_descriptors()?;
    step(
        "making room for descriptors",
        descriptors::make_room(USUAL_DESCRIPTORS),
    )?;
    match left {
        Ok(()) => {}
        Err(e) if privileged => return Err(e.into()),
        Err(e) => missing.push(format!(
            "namespaces and an empty root ({e}; run as root, or allow user namespaces: sysctl \
             kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0)"
        )),
    }
    if process::getpid() != process::Pid::INIT {
        missing.push("a PID namespace (whoever started it could make none)".into());
    }
    jail::empty_bounding_set()?;
    let user = become_user(user)?;
    limit_resources(user == User::Own)?;
    give_up_capabilities(privileged)?;
    step(
        "forbidding core dumps",
        process::set_dumpable_behavior(DumpableBehavior::NotDumpable),
    )?;
    step("no_new_privs", thread::set_no_new_privs(true))?;
    match landlock::deny_all() {
        Ok(version) => tracing::info!(landlock = version, ?user, "jailed"),
        Err(e) => {
            tracing::info!(?user, "jailed");
            missing.push(format!("Landlock ({e})"));
        }
    }
    if !missing.is_empty() {
        let missing = missing.join(", ");
        if whole {
            return Err(JailError::Lacks(missing));
        }
        tracing::warn!("the jail lacks {missing}");
    }
    filter::will_seal();
    Ok(())
}

/// Drops CAP_SYS_BOOT, if the process still has it.
pub fn give_up_last_capability() -> io::Result<()> {
    Ok(thread::set_capabilities(None, no_capabilities())?)
}

fn no_capabilities() -> CapabilitySets {
    CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    }
}

fn close_other_descriptors() -> Result<(), StepError> {
    // SAFETY: this process has only inherited descriptors so far, and no value in it owns one of those closed.
    let result = unsafe { libc::close_range(CONTROL_FD as u32 + 1, u32::MAX, 0) };
    step(
        "closing inherited descriptors",
        (result == 0).then_some(()).ok_or_else(io::Error::last_os_error),
    )
}

/// Sets resource limits. The parent limits file sizes, because the disk's size is not known here yet. The number of threads is limited only
/// for a user that no other process has, because the kernel counts threads by user.
fn limit_resources(own_user: bool) -> Result<(), StepError> {
    let limit = |what, resource, most: u64| {
        let most = process::getrlimit(resource).maximum.unwrap_or(u64::MAX).min(most);
        step(what, jail::limit(resource, most))
    };
    limit("RLIMIT_CORE", Resource::Core, 0)?;
    limit("RLIMIT_MEMLOCK", Resource::Memlock, 0)?;
    limit("RLIMIT_MSGQUEUE", Resource::Msgqueue, 0)?;
    limit("RLIMIT_NOFILE", Resource::Nofile, MAX_DESCRIPTORS)?;
    match own_user {
        true => limit("RLIMIT_NPROC", Resource::Nproc, MAX_THREADS),
        false => Ok(()),
    }
}

/// Enters a user namespace in which this process may make the other namespaces. Its user and group IDs stay the same.
fn enter_user_namespace() -> Result<(), StepError> {
    let (user, group) = (process::geteuid().as_raw(), process::getegid().as_raw());
    step("making a user namespace", jail::unshare(UnshareFlags::NEWUSER))?;
    step(
        "writing uid_map",
        fs::write("/proc/self/uid_map", format!("{user} {user} 1")),
    )?;
    step("writing setgroups", fs::write("/proc/self/setgroups", "deny"))?;
    step(
        "writing gid_map",
        fs::write("/proc/self/gid_map", format!("{group} {group} 1")),
    )
}

/// Leaves the host's namespaces and files, for the namespaces that it inherited as descriptors from `shared` on, or for new ones.
fn leave_host(shared: Option<RawFd>) -> Result<(), StepError> {
    let Some(first) = shared else {
        return namespaces::unshare_all();
    };
    let entered = Namespaces::inherited(first).and_then(|shared| shared.enter());
    entered.or_else(|error| {
        tracing::info!(%error, "cannot enter the shared namespaces; making its own");
        namespaces::unshare_all()
    })
}

/// The user this process runs as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum User {
    /// A user that no other process or file has.
    Own,
    Nobody,
    /// The user that started this process.
    Caller,
}

/// The user that this process can switch to, and its ID (0 for [`User::Caller`]).
fn own_user() -> (User, u32) {
    let maps =
        ["/proc/self/uid_map", "/proc/self/gid_map"].map(|map| fs::read_to_string(map).unwrap_or_default());
    let mapped = |id| maps.iter().all(|map| is_mapped(map, id));
    // The process ID in the PID namespace of this /proc mount: the host's, if it is the host's mount.
    let number = fs::read_link("/proc/self")
        .ok()
        .and_then(|link| link.to_str()?.parse::<u32>().ok());
    let own = number.and_then(|number| FIRST_USER.checked_add(number));
    match own.filter(|id| mapped(*id)) {
        Some(id) => (User::Own, id),
        None if mapped(NOBODY) => (User::Nobody, NOBODY),
        None => (User::Caller, 0),
    }
}

/// Whether `map`, the ID map of a user namespace, maps `id` (user_namespaces(7): first inside, first outside, how many).
fn is_mapped(map: &str, id: u32) -> bool {
    map.lines().any(|line| {
        let mut numbers = line.split_ascii_whitespace().map(str::parse::<u64>);
        match (numbers.next(), numbers.nth(1)) {
            (Some(Ok(first)), Some(Ok(count))) => {
                u64::from(id).checked_sub(first).is_some_and(|at| at < count)
            }
            _ => false,
        }
    })
}

/// Switches to that user if this process may. Returns the user it then runs as.
fn become_user((user, id): (User, u32)) -> Result<User, StepError> {
    let capabilities = step("reading our capabilities", thread::capabilities(None))?.effective;
    if user == User::Caller || !capabilities.contains(CapabilitySet::SETUID | CapabilitySet::SETGID) {
        return Ok(User::Caller);
    }
    let (uid, gid) = (process::Uid::from_raw(id), process::Gid::from_raw(id));
    step("PR_SET_KEEPCAPS", thread::set_keep_capabilities(true))?;
    step("leaving all groups", thread::set_thread_groups(&[]))?;
    step("becoming a group", thread::set_thread_res_gid(gid, gid, gid))?;
    step("becoming a user", thread::set_thread_res_uid(uid, uid, uid))?;
    Ok(user)
}

fn give_up_capabilities(privileged: bool) -> Result<(), StepError> {
    step(
        "clearing ambient capabilities",
        thread::clear_ambient_capability_set(),
    )?;
    let mut kept = no_capabilities();
    if privileged {
        let permitted = step("reading our capabilities", thread::capabilities(None))?.permitted;
        kept.permitted = permitted & CapabilitySet::SYS_BOOT;
        kept.effective = kept.permitted;
    }
    step("dropping capabilities", thread::set_capabilities(None, kept))?;
    step("PR_SET_KEEPCAPS", thread::set_keep_capabilities(false))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_mapped_where_a_line_of_the_map_has_it() {
        let whole = "         0          0 4294967295\n";
        assert!(is_mapped(whole, 0) && is_mapped(whole, FIRST_USER + 4_194_304));
        assert!(!is_mapped(whole, u32::MAX));
        let container = "0 100000 65536\n70000 1000 1\n";
        assert!(is_mapped(container, NOBODY) && is_mapped(container, 70_000));
        assert!(!is_mapped(container, 65_536) && !is_mapped(container, FIRST_USER));
        for odd in ["", "\n", "0\n", "a b c\n", "1 2\n", "5 0 18446744073709551616\n"] {
            assert!(!is_mapped(odd, 5), "{odd:?}");
        }
    }
}
