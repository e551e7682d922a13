//! fork(2), and functions that only a forked child may call.

use std::ffi::CString;
use std::io;
use std::os::fd::RawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs `child` in a new process and returns its PID. The child never returns: it exits with 125 if `child`
/// does.
///
/// The agent may have other threads, which do not exist in the child and may have held locks. Of those locks the child uses only the
/// allocator's, which glibc's fork handles. The child must not touch the agent's own locks.
pub fn fork(child: impl FnOnce()) -> io::Result<i32> {
    // SAFETY: see above; the closure captures no lock of another thread.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            let _ = catch_unwind(AssertUnwindSafe(child));
            exit(125)
        }
        pid => Ok(pid),
    }
}

/// Ends this process without running the agent's destructors and exit handlers.
pub fn exit(code: i32) -> ! {
    // SAFETY: _exit takes no resources with it but the process.
    unsafe { libc::_exit(code) }
}

/// Restores the default dispositions and unblocks all signals, so that a program does not inherit the agent's
/// (Rust ignores SIGPIPE).
pub fn reset_signals() {
    for signal in 1..=64 {
        // SAFETY: SIG_DFL is no handler; numbers that cannot be set (SIGKILL, glibc's own) fail harmlessly.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    // SAFETY: the set is initialised by sigemptyset before it is read.
    unsafe {
        let mut none = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
    }
}

/// A set of signals.
pub struct Signals(libc::sigset_t);

/// Blocks all signals for this process, which has one thread. Returns their set, to wait for them.
pub fn block_signals() -> Signals {
    // SAFETY: the set is initialised by sigfillset before it is read.
    unsafe {
        let mut all = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut());
        Signals(all)
    }
}

/// Waits for one of these signals, which are blocked, and returns its number.
pub fn wait_signal(signals: &Signals) -> i32 {
    loop {
        // SAFETY: the set is initialised; without an info, the kernel writes nothing.
        let signal = unsafe { libc::sigwaitinfo(&raw const signals.0, std::ptr::null_mut()) };
        // It fails if the process was stopped and continued meanwhile.
        if signal > 0 {
            return signal;
        }
    }
}

/// kill(2) of one process. A process that has ended gets nothing.
pub fn send_signal(pid: i32, signal: i32) {
    // SAFETY: touches nothing of this process.
    unsafe { libc::kill(pid, signal) };
}

/// Lets the kernel reap this process's children, including those it inherits, and does nothing else.
pub fn reap_forever() -> ! {
    // SAFETY: SIG_IGN is no handler.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
    loop {
        // SAFETY: touches nothing of this process.
        unsafe { libc::pause() };
    }
}

/// Closes every descriptor above stderr except `keep`, so that a child that waits does not hold other
/// processes' pipes open.
pub fn close_all_but(mut keep: Vec<RawFd>) {
    keep.sort_unstable();
    let mut from = 3;
    for fd in keep.into_iter().filter(|fd| *fd >= 3).chain([i32::MAX]) {
        if fd > from {
            // SAFETY: the agent's process still owns its copies of these descriptors; nothing in the child uses or drops them.
            unsafe { libc::syscall(libc::SYS_close_range, from as u32, (fd - 1) as u32, 0u32) };
        }
        from = fd.saturating_add(1);
    }
}

/// Marks every descriptor above stderr to be closed when the program is executed.
pub fn close_on_exec() {
    // SAFETY: marks descriptors close-on-exec; closes none now.
    unsafe { libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
}

/// execve(2). Returns only on failure.
pub fn exec(path: &CString, args: &[CString], env: &[CString]) -> io::Error {
    let array = |strings: &[CString]| -> Vec<*const libc::c_char> {
        strings
            .iter()
            .map(|s| s.as_ptr())
            .chain([std::ptr::null()])
            .collect()
    };
    let (args, env) = (array(args), array(env));
    // SAFETY: both arrays end in null and their strings outlive the call.
    unsafe { libc::execve(path.as_ptr(), args.as_ptr(), env.as_ptr()) };
    io::Error::last_os_error()
}

/// Changes the user and group of this process permanently.
pub fn change_user(uid: u32, gid: u32, groups: &[u32]) -> io::Result<()> {
    // SAFETY: plain system calls on this process; the child has one thread, so libc's fan-out to threads is trivial.
    let failed = unsafe {
        libc::setgroups(groups.len(), groups.as_ptr()) != 0
            || libc::setresgid(gid, gid, gid) != 0
            || libc::setresuid(uid, uid, uid) != 0
    };
    if failed {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Makes `fd` standard stream `number`.
pub fn become_stdio(fd: std::os::fd::BorrowedFd<'_>, number: i32) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    // SAFETY: no OwnedFd in the child owns 0, 1 or 2.
    if unsafe { libc::dup2(fd.as_raw_fd(), number) } < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
