//! Takes rights away from this process before it serves a request.
//!
//! Invariant: when [`enter`] returns, the process sees an empty read-only root, no network and no other process's IPC, has no
//! descriptor but 0 to 3, can gain no privilege, dumps no core, and holds no capability. There is one exception: a process that
//! was started with CAP_SYS_BOOT in the initial user namespace keeps it until the VM is made, because
//! KVM_CAP_VM_DISABLE_NX_HUGE_PAGES needs it; [`give_up_last_capability`] drops it before any guest code exists. Once the machine
//! is made, and before anything hostile reaches the process, [`seal`] leaves its threads only the system calls of [`syscalls`].
//!
//! Namespaces need CAP_SYS_ADMIN or a user namespace. On a host that grants neither, the process ends, or, if it was started with
//! that allowed, goes on with Landlock and the filter alone and logs one line. The PID namespace is made by whoever starts the
//! process, because a process cannot enter one itself; here it is only checked. docs/jail.md describes the whole jail.
//!
//! Paths are opened here and nowhere else: `/proc/self` and `/proc/self/{uid_map,gid_map,setgroups}`. One file of /sys is read
//! earlier ([`crate::multihit`]).

mod filter;
mod landlock;
mod names;
mod signals;
pub mod syscalls;
pub mod threads;

use std::fs;
use std::io;

use rustix::mount::MountFlags;
use rustix::process::{DumpableBehavior, Resource};
use rustix::thread::{CapabilitySet, CapabilitySets, UnshareFlags};
use rustix::{process, thread};
use thaw_protocol::control::CONTROL_FD;
use thaw_sys::jail::{self, StepError, step};

pub use filter::seal;
pub use signals::set_hotplug_region;

/// Users and groups of privileged VMMs: this and the process's number, so that each has one of its own while it lives and
/// nobody has to hand them out. systemd leaves 0x70000000 to 0x7fffffff unused (its UIDS-GIDS); a process has at most
/// 22 bits of number.
const FIRST_USER: u32 = 0x7400_0000;
/// Where that one is not mapped: `nobody`.
const NOBODY: u32 = 65534;
/// Most descriptors: two a blob of an image, and a handful a device.
const MAX_DESCRIPTORS: u64 = 16384;
/// Most threads of a user of its own: 16 vCPUs, the servers, and what KVM starts in this process's name.
const MAX_THREADS: u64 = 64;

/// A step of the jail that failed. There is no running without it.
#[derive(Debug, thiserror::Error)]
pub enum JailError {
    #[error(transparent)]
    Step(#[from] StepError),
    #[error("the jail would lack {0}")]
    Lacks(String),
}

/// Closes the jail. While the process has one thread.
///
/// # Errors
/// A step that failed; where the jail is to be `whole`, [`JailError::Lacks`] what this host cannot give.
pub fn enter(whole: bool) -> Result<(), JailError> {
    // Signals of the terminal go to whoever started us. Fails only when this is a session of our own already.
    let _ = process::setsid();
    step("taking signals", signals::install())?;
    keep_allocator_from_paths();
    close_other_descriptors()?;
    let capabilities = step("reading our capabilities", thread::capabilities(None))?.effective;
    let privileged = capabilities.contains(CapabilitySet::SYS_ADMIN);
    let mut missing = Vec::new();
    let namespaces = match privileged {
        true => Ok(()),
        false => enter_user_namespace(),
    };
    // Paths are read while there are some.
    let user = own_user();
    match namespaces.and_then(|()| leave_host()) {
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

/// Gives up CAP_SYS_BOOT, if it is still there.
pub fn give_up_last_capability() -> io::Result<()> {
    Ok(thread::set_capabilities(None, no_capabilities())?)
}

/// glibc's allocator reads files: /sys to count processors, before it makes an arena beyond the first few, and
/// /proc/sys/vm/overcommit_memory, before it shrinks one that is not the first. With the first alone it reads none. No hot
/// path allocates.
fn keep_allocator_from_paths() {
    // SAFETY: mallopt has no preconditions, and nobody allocates beside us yet.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

fn no_capabilities() -> CapabilitySets {
    CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    }
}

fn close_other_descriptors() -> Result<(), StepError> {
    // SAFETY: nothing of this process is open yet but what it inherited, which nobody in it refers to by number.
    let result = unsafe { libc::close_range(CONTROL_FD as u32 + 1, u32::MAX, 0) };
    step(
        "closing inherited descriptors",
        (result == 0).then_some(()).ok_or_else(io::Error::last_os_error),
    )
}

/// Whoever starts us limits the size of files, as the size of the disk is not known yet. Threads are counted by user: one that is shared has others' too.
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

/// Where we may not make the other namespaces, a user namespace in which we may; we stay who we are in it.
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

/// Leaves the host's namespaces and its files, for a root that is empty and stays so: a read-only tmpfs that has no other name.
fn leave_host() -> Result<(), StepError> {
    jail::leave_namespaces()?;
    jail::make_mounts_private()?;
    let flags = MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    jail::mount_root(flags, c"size=4k,nr_inodes=1,mode=555")?;
    jail::pivot_to_working_directory()
}

/// Whose process this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum User {
    /// Its own: nobody else's process or file is that user's.
    Own,
    Nobody,
    /// Who started it.
    Caller,
}

/// Who this process can become, and the number.
fn own_user() -> (User, u32) {
    let maps =
        ["/proc/self/uid_map", "/proc/self/gid_map"].map(|map| fs::read_to_string(map).unwrap_or_default());
    let mapped = |id| maps.iter().all(|map| is_mapped(map, id));
    // The number that this mount of /proc gives us: the host's, where it is the host's.
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

/// Whether a user namespace whose map this is has `id` (user_namespaces(7): first inside, first outside, how many).
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

/// Becomes that user, if we may; who this process then is.
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
