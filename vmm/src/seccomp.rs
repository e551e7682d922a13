//! The system calls a running VMM makes. Anything else is logged by the kernel (audit, `dmesg`), not refused: the list
//! is complete when a full run of the end-to-end tests logs nothing.

use std::collections::BTreeMap;

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};

/// By what needs them.
const ALLOWED: &[&[i64]] = &[
    // KVM, taps, eventfds.
    &[libc::SYS_ioctl, libc::SYS_eventfd2],
    // Reading and writing what was handed over.
    &[
        libc::SYS_read,
        libc::SYS_readv,
        libc::SYS_pread64,
        libc::SYS_preadv,
        libc::SYS_preadv2,
        libc::SYS_write,
        libc::SYS_writev,
        libc::SYS_pwrite64,
        libc::SYS_pwritev,
        libc::SYS_pwritev2,
        libc::SYS_lseek,
        libc::SYS_fstat,
        libc::SYS_newfstatat,
        libc::SYS_statx,
        libc::SYS_fdatasync,
        libc::SYS_fsync,
        libc::SYS_fallocate,
        libc::SYS_ftruncate,
        libc::SYS_fcntl,
        libc::SYS_dup,
        libc::SYS_close,
    ],
    // Sockets: control, vsock, misses, console.
    &[
        libc::SYS_accept4,
        libc::SYS_recvmsg,
        libc::SYS_recvfrom,
        libc::SYS_sendmsg,
        libc::SYS_sendto,
        libc::SYS_shutdown,
        libc::SYS_getsockopt,
        libc::SYS_setsockopt,
        libc::SYS_getsockname,
        libc::SYS_getpeername,
    ],
    // Waiting.
    &[
        libc::SYS_poll,
        libc::SYS_ppoll,
        libc::SYS_epoll_create1,
        libc::SYS_epoll_ctl,
        libc::SYS_epoll_wait,
        libc::SYS_epoll_pwait,
        libc::SYS_timerfd_create,
        libc::SYS_timerfd_settime,
        libc::SYS_futex,
        libc::SYS_restart_syscall,
        libc::SYS_clock_gettime,
        libc::SYS_clock_nanosleep,
        libc::SYS_nanosleep,
    ],
    // Memory: guest memory, DAX and pmem windows, the heap.
    &[
        libc::SYS_mmap,
        libc::SYS_munmap,
        libc::SYS_mremap,
        libc::SYS_mprotect,
        libc::SYS_madvise,
        libc::SYS_brk,
    ],
    // Page faults of vCPU threads, for Status.
    &[libc::SYS_getrusage],
    // Threads.
    &[
        libc::SYS_clone3,
        libc::SYS_clone,
        libc::SYS_set_robust_list,
        libc::SYS_rseq,
        libc::SYS_prctl,
        libc::SYS_sched_getaffinity,
        libc::SYS_sched_yield,
        libc::SYS_gettid,
        libc::SYS_getpid,
        libc::SYS_tgkill,
        libc::SYS_exit,
        libc::SYS_exit_group,
    ],
    // Signals: the vCPU kick, and Rust's stack-overflow handlers.
    &[
        libc::SYS_rt_sigaction,
        libc::SYS_rt_sigprocmask,
        libc::SYS_rt_sigreturn,
        libc::SYS_sigaltstack,
    ],
    // CAP_SYS_BOOT is given up once the machine is made.
    &[libc::SYS_capset],
    &[libc::SYS_getrandom],
];

/// Puts the filter on every thread of this process, those to come included.
pub fn install() -> Result<(), seccompiler::Error> {
    let rules: BTreeMap<i64, Vec<_>> = ALLOWED
        .iter()
        .copied()
        .flatten()
        .map(|call| (*call, vec![]))
        .collect();
    let filter = SeccompFilter::new(
        rules,
        SeccompAction::Log,
        SeccompAction::Allow,
        TargetArch::x86_64,
    )?;
    let program: BpfProgram = filter.try_into()?;
    seccompiler::apply_filter_all_threads(&program)
}
