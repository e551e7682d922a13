//! A child that shares our memory and our descriptors until it executes a program or ends, as vfork(2) makes one. So it costs the same
//! however large this process is.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use rustix::process::Pid;

/// Bytes of the child's stack.
const STACK: usize = 64 * 1024;

/// A child's function. Its argument is the one given to [`start`]; it returns the child's exit code.
pub type Child = extern "C" fn(*mut libc::c_void) -> libc::c_int;

/// Creates a child that runs `child`, and waits until it has executed a program or ended. Returns its pid and its pidfd. `flags`: those of
/// clone(2), besides the ones that make it share.
///
/// # Errors
/// Those of clone(2).
///
/// # Safety
/// `child` may make system calls and use `argument`. It must not allocate, lock, panic or unwind: other threads of this process run
/// meanwhile and may hold any lock, and if this process is killed, the child goes on without it.
pub unsafe fn start(
    child: Child,
    argument: *mut libc::c_void,
    flags: libc::c_int,
) -> io::Result<(Pid, OwnedFd)> {
    let mut stack = vec![0u8; STACK];
    // The stack grows down and is aligned as the ABI requires.
    let top = stack.as_mut_ptr_range().end as usize & !0xf;
    let mut pidfd: RawFd = -1;
    let shared = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_FILES;
    let flags = flags | shared | libc::CLONE_PIDFD | libc::SIGCHLD;
    let blocked = Blocked::all();
    // SAFETY: the child runs on its own stack, and this thread does not until the child has executed a program or ended; all signals are
    // blocked, so it runs none of our handlers. The rest is the caller's.
    let pid = unsafe { libc::clone(child, top as *mut libc::c_void, flags, argument, &raw mut pidfd) };
    let error = io::Error::last_os_error();
    drop(blocked);
    let pid = Pid::from_raw(pid.max(0)).ok_or(error)?;
    // SAFETY: the clone has just created it for us.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    Ok((pid, pidfd))
}

/// Blocks all signals of this thread while it lives.
struct Blocked(libc::sigset_t);

impl Blocked {
    fn all() -> Blocked {
        // SAFETY: both sets are valid and outlive the calls, which cannot fail with SIG_SETMASK.
        unsafe {
            let mut all: libc::sigset_t = std::mem::zeroed();
            let mut before: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
            Blocked(before)
        }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // SAFETY: the set is one the kernel gave us.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut()) };
    }
}

/// The lines of `/proc/self/uid_map` and `gid_map` by which a new user namespace has this process's user and group, and no other.
#[derive(Debug)]
pub struct Ids {
    uid_map: CString,
    gid_map: CString,
}

impl Ids {
    /// Those of this process.
    pub fn own() -> io::Result<Ids> {
        let map = |id: u32| CString::new(format!("{id} {id} 1")).map_err(io::Error::other);
        Ok(Ids {
            uid_map: map(rustix::process::geteuid().as_raw())?,
            gid_map: map(rustix::process::getegid().as_raw())?,
        })
    }

    /// Gives them to the user namespace of this child, which was made with it. On failure returns `false`; errno has the reason.
    ///
    /// # Safety
    /// To be called in a child of [`start`].
    pub unsafe fn map(&self) -> bool {
        // SAFETY: the caller's.
        unsafe {
            write(c"/proc/self/setgroups", c"deny")
                && write(c"/proc/self/gid_map", &self.gid_map)
                && write(c"/proc/self/uid_map", &self.uid_map)
        }
    }
}

/// Writes a file of `/proc` in one call.
///
/// # Safety
/// To be called in a child of [`start`].
unsafe fn write(path: &CStr, text: &CStr) -> bool {
    let length = text.count_bytes();
    // SAFETY: the pointers are to NUL-terminated strings, and the length is the text's.
    unsafe {
        let fd = libc::open(path.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        if fd == -1 {
            return false;
        }
        let written = libc::write(fd, text.as_ptr().cast(), length);
        let errno = *libc::__errno_location();
        libc::close(fd);
        *libc::__errno_location() = errno;
        written == length as isize
    }
}
