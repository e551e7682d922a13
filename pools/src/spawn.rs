//! Starts a process as the first of a new PID namespace, at the cost of a clone.
//!
//! The child shares our memory until it executes the program, and our thread waits meanwhile (`CLONE_VM`, `CLONE_VFORK`), so nothing
//! is copied, however large this process is. Invariant: between clone and exec the child makes only system calls on what [`Prepared`]
//! holds for it. It allocates nothing, takes no lock, does not panic, and runs none of our signal handlers. It also shares our table of
//! descriptors (`CLONE_FILES`) until its first call, which gives it a copy of the table's beginning ([`inherited`]).
//!
//! A PID namespace needs CAP_SYS_ADMIN, or else a user namespace. If the host grants neither, the process starts without.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::null;

use rustix::process::Pid;
use thaw_sys::vfork::{self, Ids};

mod inherited;
use inherited::Inherited;
pub use inherited::reserve;

/// Signals are 1 to 64.
const SIGNALS: i32 = 64;

/// The program's arguments, environment and descriptors. It inherits nothing else.
pub struct Program<'a> {
    pub path: &'a CStr,
    /// `NAME=value`.
    pub environment: &'a [CString],
    /// Its descriptors, from 0 on.
    pub descriptors: &'a [BorrowedFd<'a>],
    /// Bytes of the largest file it may write.
    pub largest_file: u64,
}

/// A child that has executed its program.
#[derive(Debug)]
pub struct Started {
    /// Its pid in our namespace.
    pub pid: Pid,
    pub pidfd: OwnedFd,
}

/// The new namespaces of a child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Birth {
    /// A PID namespace, by our own privilege.
    Pid,
    /// A PID namespace, by the privilege of a new user namespace in which its user is ours.
    UserAndPid,
    /// None.
    Ours,
}

impl Birth {
    fn flags(self) -> libc::c_int {
        match self {
            Birth::Pid => libc::CLONE_NEWPID,
            Birth::UserAndPid => libc::CLONE_NEWUSER | libc::CLONE_NEWPID,
            Birth::Ours => 0,
        }
    }
}

/// Runs `program` in a session of its own, in `/`, with default signals, as the first process of a PID namespace if the host grants
/// one.
///
/// # Errors
/// If no process can be created, or the program cannot be executed.
pub fn spawn(program: &Program<'_>) -> io::Result<Started> {
    let mut refused = None;
    for birth in [Birth::Pid, Birth::UserAndPid, Birth::Ours] {
        match Prepared::new(program, birth)?.start() {
            Ok(started) => {
                if let (Birth::Ours, Some(error)) = (birth, refused) {
                    tracing::debug!(%error, "no PID namespace for a new process");
                }
                return Ok(started);
            }
            Err(Failed::Namespaces(error)) => refused = Some(error),
            Err(Failed::Start(error)) => return Err(error),
        }
    }
    Err(refused.unwrap_or_else(|| io::ErrorKind::PermissionDenied.into()))
}

/// Why there is no child.
enum Failed {
    /// The namespaces were refused.
    Namespaces(io::Error),
    Start(io::Error),
}

/// How far the child came; the child writes it to our memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    Namespaces,
    Program,
}

/// Everything that the child needs, prepared before it exists.
struct Prepared {
    path: *const libc::c_char,
    arguments: [*const libc::c_char; 2],
    environment: Vec<*const libc::c_char>,
    descriptors: Inherited,
    largest_file: libc::rlim_t,
    birth: Birth,
    ids: Ids,
    /// The child's report of its failure, written before it exits.
    failed: Option<(Step, i32)>,
}

impl Prepared {
    /// `program`'s data must outlive it: it keeps pointers.
    fn new(program: &Program<'_>, birth: Birth) -> io::Result<Prepared> {
        Ok(Prepared {
            path: program.path.as_ptr(),
            arguments: [program.path.as_ptr(), null()],
            environment: program
                .environment
                .iter()
                .map(|variable| variable.as_ptr())
                .chain([null()])
                .collect(),
            descriptors: Inherited::copy(program.descriptors)?,
            largest_file: program.largest_file,
            birth,
            ids: Ids::own()?,
            failed: None,
        })
    }

    fn start(mut self) -> Result<Started, Failed> {
        // SAFETY: `child` makes only system calls on what `self` holds, which nothing else uses until it has executed a program or ended.
        let started = unsafe { vfork::start(child, (&raw mut self).cast(), self.birth.flags()) };
        let (pid, pidfd) = started.map_err(|error| match error.raw_os_error() {
            Some(libc::EPERM | libc::EINVAL | libc::ENOSPC | libc::EUSERS) if self.birth != Birth::Ours => {
                Failed::Namespaces(error)
            }
            _ => Failed::Start(error),
        })?;
        // SAFETY: volatile, because the child has written it behind the compiler's back.
        match unsafe { (&raw const self.failed).read_volatile() } {
            None => Ok(Started { pid, pidfd }),
            Some((step, errno)) => {
                let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty());
                let error = io::Error::from_raw_os_error(errno);
                Err(match step {
                    Step::Namespaces => Failed::Namespaces(error),
                    Step::Program => Failed::Start(error),
                })
            }
        }
    }
}

/// Runs in the child. Returns only on failure; the child then ends.
extern "C" fn child(prepared: *mut libc::c_void) -> libc::c_int {
    let prepared = prepared.cast::<Prepared>();
    // SAFETY: the parent gave us its `Prepared` and is suspended, so nothing else uses it or the data it points to.
    unsafe {
        let failed = become_program(&*prepared);
        let errno = *libc::__errno_location();
        (&raw mut (*prepared).failed).write_volatile(Some((failed, errno)));
    }
    127
}

/// Executes the program, or returns the step that failed; errno has the reason.
///
/// # Safety
/// For a child that shares its parent's memory: `prepared` is complete, and nothing else uses it.
unsafe fn become_program(prepared: &Prepared) -> Step {
    // SAFETY: plain system calls on open descriptors and on memory that `prepared` keeps; the glibc wrappers used here change nothing but
    // errno. Every signal is reset (the kernel refuses that for those that cannot be), so none of the parent's handlers remains. Descriptors
    // are opened, duplicated and closed in a table of the child's own.
    unsafe {
        let end = prepared.descriptors.end() as libc::c_uint;
        if !close_from(end, libc::CLOSE_RANGE_UNSHARE) {
            return Step::Program;
        }
        if prepared.birth == Birth::UserAndPid && !prepared.ids.map() {
            return Step::Namespaces;
        }
        let mut above = 0;
        for descriptor in prepared.descriptors.numbers() {
            if libc::dup2(descriptor, above) == -1 {
                return Step::Program;
            }
            above += 1;
        }
        if !close_from(above as libc::c_uint, libc::CLOSE_RANGE_CLOEXEC) || libc::chdir(c"/".as_ptr()) == -1 {
            return Step::Program;
        }
        if !limit_files(prepared.largest_file) {
            return Step::Program;
        }
        libc::setsid();
        for signal in 1..=SIGNALS {
            libc::signal(signal, libc::SIG_DFL);
        }
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
        libc::execve(
            prepared.path,
            prepared.arguments.as_ptr(),
            prepared.environment.as_ptr(),
        );
        Step::Program
    }
}

/// Closes descriptors from this number on, as close_range(2) does with these flags.
///
/// # Safety
/// That of [`become_program`].
unsafe fn close_from(first: libc::c_uint, flags: libc::c_uint) -> bool {
    // SAFETY: the caller's.
    unsafe { libc::syscall(libc::SYS_close_range, first, libc::c_uint::MAX, flags) == 0 }
}

/// Limits the size of files the process writes, unless it is limited to less already.
///
/// # Safety
/// That of [`become_program`].
unsafe fn limit_files(most: libc::rlim_t) -> bool {
    // SAFETY: the calls write to and read from a limit of ours.
    unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        if libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) == -1 {
            return false;
        }
        limit.rlim_max = limit.rlim_max.min(most);
        limit.rlim_cur = limit.rlim_max;
        libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) == 0
    }
}
