//! The privileges that this process drops before it reads a guest's first byte.
//!
//! Invariant: when [`close`] returns, the process has no network, no IPC with other processes, only
//! [`capabilities`] and no way to gain more, the limits of a file server, and makes only the system calls in
//! [`CALLS`]. [`jail::leave_namespaces`] is called before, and the tree is entered in between.
//!
//! Unlike the VMM (docs/jail.md), this process has a user who may write any user's files, and it has file
//! names: those of the shares, which are its whole root ([`crate::tree`]). Landlock would therefore add
//! nothing. All threads are alike and have the same filter.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::process::{DumpableBehavior, Resource};
use rustix::thread::{CapabilitySet, CapabilitySets, LinkNameSpaceType};
use rustix::{process, thread};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch,
};
use thaw_sys::jail::{self, StepError, limit, step};

/// Most descriptors that are requested: one for each file that the guest remembers.
const DESCRIPTORS: u64 = 1 << 20;

/// The text in the log, before the call's number, when the process ends because of a system call that is not in
/// [`CALLS`].
pub const FORBIDDEN_CALL: &str = "thaw-share: forbidden system call ";
/// The exit code in that case: a shell's for SIGSYS.
pub const FORBIDDEN_CODE: i32 = 128 + 31;

/// A step failed. The process must not run without it.
#[derive(Debug, thiserror::Error)]
pub enum JailError {
    #[error(transparent)]
    Step(#[from] StepError),
    #[error("the seccomp filter: {0}")]
    Seccomp(#[from] seccompiler::Error),
}

/// Enters the mount namespace of a process that ended, and its root. The process must have one thread.
pub fn join_mounts(namespace: &OwnedFd) -> Result<(), StepError> {
    let mounts = Some(LinkNameSpaceType::Mount);
    step(
        "entering the mounts of the earlier process",
        thread::move_into_link_name_space(namespace.as_fd(), mounts),
    )
}

/// Raises the limit of descriptors as far as this host allows, and lowers other limits. Returns the number of
/// descriptors. Must be called while the process has the right to.
pub fn limit_resources() -> Result<u64, StepError> {
    step("RLIMIT_CORE", limit(Resource::Core, 0))?;
    step("RLIMIT_MEMLOCK", limit(Resource::Memlock, 0))?;
    step("RLIMIT_MSGQUEUE", limit(Resource::Msgqueue, 0))?;
    if limit(Resource::Nofile, DESCRIPTORS).is_ok() {
        return Ok(DESCRIPTORS);
    }
    let most = process::getrlimit(Resource::Nofile)
        .maximum
        .unwrap_or(DESCRIPTORS)
        .min(DESCRIPTORS);
    step("RLIMIT_NOFILE", limit(Resource::Nofile, most))?;
    Ok(most)
}

/// Rights over files, and the right to become the user who creates one.
fn capabilities(devices: bool) -> CapabilitySet {
    let kept = CapabilitySet::CHOWN
        | CapabilitySet::DAC_OVERRIDE
        | CapabilitySet::FOWNER
        | CapabilitySet::FSETID
        | CapabilitySet::SETUID
        | CapabilitySet::SETGID;
    match devices {
        true => kept | CapabilitySet::MKNOD,
        false => kept,
    }
}

/// Closes the jail. The process must have one thread.
pub fn close(devices: bool) -> Result<(), JailError> {
    step(
        "handling SIGSYS",
        handle(libc::SIGSYS, forbidden as *const () as usize),
    )?;
    // A write beyond the file size limit then fails, and the guest receives the error.
    step("ignoring SIGXFSZ", handle(libc::SIGXFSZ, libc::SIG_IGN))?;
    let had = step("reading our capabilities", thread::capabilities(None))?;
    jail::empty_bounding_set()?;
    if had.effective.contains(CapabilitySet::SETGID) {
        // Fails in a user namespace with one user, whose groups grant nothing outside.
        let _ = thread::set_thread_groups(&[]);
    }
    step(
        "clearing ambient capabilities",
        thread::clear_ambient_capability_set(),
    )?;
    let kept = had.permitted & capabilities(devices);
    let sets = CapabilitySets {
        effective: kept,
        permitted: kept,
        inheritable: CapabilitySet::empty(),
    };
    step("dropping capabilities", thread::set_capabilities(None, sets))?;
    step(
        "forbidding core dumps",
        process::set_dumpable_behavior(DumpableBehavior::NotDumpable),
    )?;
    step("no_new_privs", thread::set_no_new_privs(true))?;
    seccompiler::apply_filter(&without_clone3()?)?;
    Ok(seccompiler::apply_filter(&filter()?)?)
}

/// clone3 has its flags in memory, where no filter sees them, so the C library must use clone.
fn without_clone3() -> Result<BpfProgram, seccompiler::Error> {
    let refuse = SeccompAction::Errno(libc::ENOSYS as u32);
    let rules = BTreeMap::from([(libc::SYS_clone3, vec![])]);
    Ok(SeccompFilter::new(rules, SeccompAction::Allow, refuse, TargetArch::x86_64)?.try_into()?)
}

/// A condition on a call's argument.
#[derive(Clone, Copy, Debug)]
enum Only {
    Any,
    /// The argument of this index lacks these bits.
    Lacks(u8, u32),
    /// The argument of this index has these bits.
    Has(u8, u32),
    /// The argument of this index is this.
    Is(u8, u32),
}

const EXEC: u32 = libc::PROT_EXEC as u32;

/// The system calls of a jailed thaw-share: those of virtiofsd's file system for files it has opened, of its
/// threads, and of the C library. The list comes from reading the sources, as the VMM's does.
#[rustfmt::skip]
const CALLS: &[(i64, Only)] = &[
    // The relay, and the log.
    (libc::SYS_read, Only::Any), (libc::SYS_write, Only::Any), (libc::SYS_writev, Only::Any),
    (libc::SYS_epoll_pwait, Only::Any),
    (libc::SYS_recvfrom, Only::Any), (libc::SYS_sendto, Only::Any), (libc::SYS_sendmsg, Only::Any), (libc::SYS_shutdown, Only::Any),
    // Names.
    (libc::SYS_openat, Only::Any), (libc::SYS_openat2, Only::Any), (libc::SYS_mkdirat, Only::Any),
    (libc::SYS_mknodat, Only::Any), (libc::SYS_symlinkat, Only::Any), (libc::SYS_linkat, Only::Any),
    (libc::SYS_unlinkat, Only::Any), (libc::SYS_renameat, Only::Any), (libc::SYS_renameat2, Only::Any),
    (libc::SYS_readlinkat, Only::Any), (libc::SYS_getdents64, Only::Any), (libc::SYS_fchdir, Only::Any),
    // Attributes.
    (libc::SYS_fstat, Only::Any), (libc::SYS_newfstatat, Only::Any), (libc::SYS_statx, Only::Any),
    (libc::SYS_fstatfs, Only::Any), (libc::SYS_fchmod, Only::Any), (libc::SYS_fchmodat, Only::Any),
    (libc::SYS_fchown, Only::Any), (libc::SYS_fchownat, Only::Any), (libc::SYS_utimensat, Only::Any),
    (libc::SYS_ftruncate, Only::Any), (libc::SYS_umask, Only::Any),
    (libc::SYS_getxattr, Only::Any), (libc::SYS_setxattr, Only::Any), (libc::SYS_listxattr, Only::Any),
    (libc::SYS_removexattr, Only::Any), (libc::SYS_fgetxattr, Only::Any), (libc::SYS_fsetxattr, Only::Any),
    (libc::SYS_flistxattr, Only::Any), (libc::SYS_fremovexattr, Only::Any),
    // Data.
    (libc::SYS_pread64, Only::Any), (libc::SYS_preadv, Only::Any), (libc::SYS_preadv2, Only::Any),
    (libc::SYS_pwrite64, Only::Any), (libc::SYS_pwritev, Only::Any), (libc::SYS_pwritev2, Only::Any),
    (libc::SYS_lseek, Only::Any), (libc::SYS_fallocate, Only::Any), (libc::SYS_copy_file_range, Only::Any),
    (libc::SYS_fsync, Only::Any), (libc::SYS_fdatasync, Only::Any), (libc::SYS_syncfs, Only::Any),
    (libc::SYS_dup, Only::Any), (libc::SYS_close, Only::Any), (libc::SYS_flock, Only::Any),
    (libc::SYS_fcntl, Only::Is(1, libc::F_GETFD as u32)), (libc::SYS_fcntl, Only::Is(1, libc::F_GETFL as u32)),
    (libc::SYS_fcntl, Only::Is(1, libc::F_SETFL as u32)), (libc::SYS_fcntl, Only::Is(1, libc::F_DUPFD_CLOEXEC as u32)),
    // The creator of a file.
    (libc::SYS_setresuid, Only::Any), (libc::SYS_setresgid, Only::Any), (libc::SYS_setgroups, Only::Any),
    (libc::SYS_geteuid, Only::Any), (libc::SYS_getegid, Only::Any), (libc::SYS_capget, Only::Any),
    (libc::SYS_capset, Only::Any),
    // Threads, memory, the rest of the C library.
    (libc::SYS_clone, Only::Has(0, libc::CLONE_THREAD as u32)), (libc::SYS_unshare, Only::Is(0, libc::CLONE_FS as u32)),
    (libc::SYS_set_robust_list, Only::Any), (libc::SYS_rseq, Only::Any), (libc::SYS_sched_getaffinity, Only::Any),
    (libc::SYS_sched_yield, Only::Any), (libc::SYS_prctl, Only::Is(0, libc::PR_SET_NAME as u32)),
    (libc::SYS_futex, Only::Any), (libc::SYS_restart_syscall, Only::Any), (libc::SYS_clock_gettime, Only::Any),
    (libc::SYS_mmap, Only::Lacks(2, EXEC)), (libc::SYS_mprotect, Only::Lacks(2, EXEC)),
    (libc::SYS_munmap, Only::Any), (libc::SYS_mremap, Only::Any), (libc::SYS_madvise, Only::Any), (libc::SYS_brk, Only::Any),
    (libc::SYS_rt_sigaction, Only::Any), (libc::SYS_rt_sigprocmask, Only::Any), (libc::SYS_rt_sigreturn, Only::Any),
    (libc::SYS_sigaltstack, Only::Any), (libc::SYS_getrandom, Only::Any), (libc::SYS_gettid, Only::Any),
    (libc::SYS_getpid, Only::Any), (libc::SYS_tgkill, Only::Is(2, libc::SIGABRT as u32)),
    (libc::SYS_exit, Only::Any), (libc::SYS_exit_group, Only::Any),
];

fn filter() -> Result<BpfProgram, seccompiler::Error> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for (number, only) in CALLS {
        let condition = |argument, comparison, value: u32| {
            SeccompCondition::new(argument, SeccompCmpArgLen::Dword, comparison, value.into())
        };
        let masked = |bits: u32| SeccompCmpOp::MaskedEq(bits.into());
        let condition = match *only {
            Only::Any => None,
            Only::Lacks(argument, bits) => Some(condition(argument, masked(bits), 0)?),
            Only::Has(argument, bits) => Some(condition(argument, masked(bits), bits)?),
            Only::Is(argument, value) => Some(condition(argument, SeccompCmpOp::Eq, value)?),
        };
        let rules = rules.entry(*number).or_default();
        if let Some(condition) = condition {
            rules.push(SeccompRule::new(vec![condition])?);
        }
    }
    // The other filter answers it first.
    rules.insert(libc::SYS_clone3, vec![]);
    Ok(SeccompFilter::new(
        rules,
        SeccompAction::Trap,
        SeccompAction::Allow,
        TargetArch::x86_64,
    )?
    .try_into()?)
}

fn handle(signal: i32, handler: usize) -> io::Result<()> {
    // SAFETY: an all-zero sigaction is valid, and its fields are set below; the handler only does what a signal handler may.
    let done = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaction(signal, &action, std::ptr::null_mut())
    };
    match done {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Handles SIGSYS, which a forbidden system call raises: logs the call's number and ends the process. Uses only
/// system calls and its own stack.
extern "C" fn forbidden(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    const NUMBER_AT: usize = 24;
    // SAFETY: the kernel passes a valid siginfo; for SIGSYS it has the call's number there (asm-generic/siginfo.h, `_sigsys`).
    let number = unsafe { info.cast::<u8>().add(NUMBER_AT).cast::<u32>().read_unaligned() };
    let mut digits = [b'0'; 11];
    digits[10] = b'\n';
    let mut rest = number;
    for digit in digits[..10].iter_mut().rev() {
        *digit = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    // SAFETY: writes constants and bytes on the stack, and ends the process without running any destructor or exit handler.
    unsafe {
        libc::write(2, FORBIDDEN_CALL.as_ptr().cast(), FORBIDDEN_CALL.len());
        libc::write(2, digits.as_ptr().cast(), digits.len());
        libc::_exit(FORBIDDEN_CODE)
    }
}
