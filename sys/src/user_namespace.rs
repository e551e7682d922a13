//! A user namespace that owns others, and in which no process stays.
//!
//! The kernel tells each network namespace of the first user namespace about each VM that begins or ends (`uevent_net_init` in
//! lib/kobject_uevent.c), so with each of them every VM costs more. Namespaces that another user namespace owns are not told. A process
//! with several threads cannot enter a user namespace: a short-lived child does.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use rustix::process::{WaitOptions, waitpid};

use crate::vfork::{self, Ids};

/// A user namespace with this process's user and group.
#[derive(Debug)]
pub struct UserNamespace(OwnedFd);

impl UserNamespace {
    /// Makes one.
    ///
    /// # Errors
    /// `EPERM`, `ENOSPC`, `EUSERS`: the host grants none.
    pub fn make() -> io::Result<UserNamespace> {
        let ids = Ids::own()?;
        open_in_child(Task::User(&ids), libc::CLONE_NEWUSER).map(UserNamespace)
    }

    /// A new network namespace that it owns.
    ///
    /// # Errors
    /// `EPERM`: this process may not enter the user namespace. `ENOSPC`: there are too many.
    pub fn new_network(&self) -> io::Result<OwnedFd> {
        open_in_child(Task::Network(self.0.as_raw_fd()), 0)
    }
}

/// What the child does.
enum Task<'a> {
    /// Gives its new user namespace ids, and opens it.
    User(&'a Ids),
    /// Makes a network namespace in this user namespace, and opens it.
    Network(RawFd),
}

/// The child writes its result to our memory: the descriptor, or an error number.
struct Order<'a> {
    task: Task<'a>,
    result: Result<RawFd, i32>,
}

/// Runs `task` in a child, and returns the descriptor that it opened.
fn open_in_child(task: Task<'_>, flags: libc::c_int) -> io::Result<OwnedFd> {
    let mut order = Order {
        task,
        result: Err(libc::ECHILD),
    };
    // SAFETY: `child` only makes system calls on what `order` holds, which has no other user until the child has ended.
    let (pid, _) = unsafe { vfork::start(child, (&raw mut order).cast(), flags) }?;
    rustix::io::retry_on_intr(|| waitpid(Some(pid), WaitOptions::empty()))?;
    // SAFETY: volatile, because the child has written it behind the compiler's back.
    match unsafe { (&raw const order.result).read_volatile() } {
        // SAFETY: the child has opened it in the table of descriptors that we share, for us.
        Ok(opened) => Ok(unsafe { OwnedFd::from_raw_fd(opened) }),
        Err(errno) => Err(io::Error::from_raw_os_error(errno)),
    }
}

/// Runs in the child.
extern "C" fn child(order: *mut libc::c_void) -> libc::c_int {
    let order = order.cast::<Order<'_>>();
    // SAFETY: the parent gave us its `Order` and is suspended, so nothing else uses it or the data it points to.
    unsafe {
        let opened = match &(*order).task {
            Task::User(ids) if ids.map() => open(c"/proc/self/ns/user"),
            Task::Network(user)
                if libc::setns(*user, libc::CLONE_NEWUSER) == 0 && libc::unshare(libc::CLONE_NEWNET) == 0 =>
            {
                open(c"/proc/self/ns/net")
            }
            _ => -1,
        };
        let result = match opened {
            -1 => Err(*libc::__errno_location()),
            opened => Ok(opened),
        };
        (&raw mut (*order).result).write_volatile(result);
    }
    0
}

/// # Safety
/// To be called in a child of [`vfork::start`].
unsafe fn open(path: &CStr) -> RawFd {
    // SAFETY: the path ends with NUL.
    unsafe { libc::open(path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) }
}

#[cfg(test)]
#[path = "user_namespace_test.rs"]
mod tests;
