//! The system calls a jailed VMM may make once its machine is made.
//!
//! The filter is compiled from this list, and docs/jail.md shows it (a test keeps the two equal). The list comes from reading
//! what each thread can reach, including the C library and its allocator, not from tracing: a call that is missing here ends a
//! sandbox. A new row needs a reason.
//!
//! The thread that drops the machine last destroys it. That can be any thread, so every thread needs the calls for it.

use super::names;

/// What a call's arguments must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Only {
    /// Anything.
    Any,
    /// The argument of this index lacks PROT_EXEC.
    NoExec(u8),
    /// The argument of this index has this value, which has a name.
    Is(u8, u32, &'static str),
    /// The argument of this index has all these bits, which have a name.
    Has(u8, u32, &'static str),
    /// Goes to a thread of this process, and is this signal, which has a name.
    OwnThread(i32, &'static str),
}

/// A row of the list.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    pub number: i64,
    pub only: Only,
    pub why: &'static str,
}

impl Call {
    /// The call's name, with the condition on its argument.
    pub fn name(&self) -> String {
        let name = names::of(self.number).unwrap_or("?");
        match self.only {
            Only::Any => name.to_string(),
            Only::NoExec(_) => format!("{name}, not PROT_EXEC"),
            Only::Is(_, _, value) => format!("{name} {value}"),
            Only::Has(_, _, bits) => format!("{name} with {bits}"),
            Only::OwnThread(_, signal) => format!("{name} {signal}, own process"),
        }
    }
}

const fn call(number: i64, why: &'static str) -> Call {
    Call {
        number,
        only: Only::Any,
        why,
    }
}

const fn ioctl(request: u32, name: &'static str, why: &'static str) -> Call {
    Call {
        number: libc::SYS_ioctl,
        only: Only::Is(1, request, name),
        why,
    }
}

const fn fcntl(command: i32, name: &'static str, why: &'static str) -> Call {
    Call {
        number: libc::SYS_fcntl,
        only: Only::Is(1, command as u32, name),
        why,
    }
}

const fn only(number: i64, only: Only, why: &'static str) -> Call {
    Call { number, only, why }
}

/// The list.
#[rustfmt::skip]
pub const CALLS: &[Call] = &[
    // Descriptors that were handed over.
    call(libc::SYS_read, "eventfds; the kernel's file; writes to memory that a freeze protects"),
    call(libc::SYS_write, "eventfds (interrupts, kicks, wake-ups); the log; a console that is no socket"),
    call(libc::SYS_writev, "the log; frames to the tap"),
    call(libc::SYS_readv, "frames from the tap, bytes from vsock clients, replies of a share"),
    call(libc::SYS_pread64, "snapshot files, the pagemap; ready bits' digests; blocks of a disk's base; old lines of a full log"),
    call(libc::SYS_preadv, "disks, image data"),
    call(libc::SYS_preadv2, "files of a share that the guest opened, without waiting"),
    call(libc::SYS_pwrite64, "snapshot files, pages copied for one; marks of a disk's layer; zeros to a disk that cannot make holes"),
    call(libc::SYS_pwritev, "memory files; disks"),
    call(libc::SYS_pwritev2, "files of a share that the guest opened"),
    call(libc::SYS_lseek, "the size of a disk; the marks of a layer; the kernel's file; a full log"),
    call(libc::SYS_fstat, "kinds and sizes of files; how full the log is"),
    call(libc::SYS_newfstatat, "the same, as the C library asks"),
    call(libc::SYS_statx, "the same, as Rust asks"),
    call(libc::SYS_ftruncate, "the size of a memory file; a full log"),
    call(libc::SYS_fallocate, "discards and zeroes of a disk; holes of a memory file"),
    call(libc::SYS_fdatasync, "flushes of a disk"),
    call(libc::SYS_close, "backends that are replaced, clients that left"),
    fcntl(libc::F_GETFL, "F_GETFL", "how a disk or tap was opened"),
    fcntl(libc::F_SETFL, "F_SETFL", "a tap that does not wait"),
    fcntl(libc::F_GETFD, "F_GETFD", "whether a descriptor is open, before a build with assertions closes it"),
    fcntl(libc::F_DUPFD_CLOEXEC, "F_DUPFD_CLOEXEC", "a second userfaultfd descriptor, for its server"),
    // Sockets that were handed over.
    call(libc::SYS_accept4, "control connections; vsock clients"),
    call(libc::SYS_recvmsg, "requests and descriptors; answers to misses; files of a share that the guest opened"),
    call(libc::SYS_sendmsg, "replies; misses, accesses; bytes to vsock clients; requests to a share"),
    call(libc::SYS_recvfrom, "a vsock client's first line"),
    call(libc::SYS_sendto, "a console that is a socket; vsock clients"),
    call(libc::SYS_shutdown, "vsock streams that end one way"),
    call(libc::SYS_getsockopt, "what kind a socket is"),
    ioctl(0x5421, "FIONBIO", "sockets that do not wait"),
    // Waiting.
    call(libc::SYS_poll, "the control socket; whether the console takes a line; answers a thaw waits for; writes to protected memory"),
    call(libc::SYS_ppoll, "the same with a limit"),
    call(libc::SYS_epoll_wait, "kicks and backends"),
    call(libc::SYS_epoll_pwait, "the same, as other C libraries ask"),
    call(libc::SYS_epoll_ctl, "what is waited for: a driver that comes or goes changes it from a vCPU"),
    call(libc::SYS_timerfd_settime, "when a queue over its rate limit is looked at again"),
    call(libc::SYS_futex, "locks, conditions, threads that end"),
    call(libc::SYS_restart_syscall, "the kernel's own, after a stop"),
    call(libc::SYS_sched_yield, "locks of the C library"),
    call(libc::SYS_clock_gettime, "where the vDSO cannot tell the time"),
    // Memory: the guest's, windows, the heap.
    only(libc::SYS_mmap, Only::NoExec(2), "windows, snapshots, unplugged memory, a lost page of an image; the heap"),
    only(libc::SYS_mprotect, Only::NoExec(2), "memory that virtio-mem plugs; the heap and stacks"),
    call(libc::SYS_munmap, "images, the heap, stacks"),
    call(libc::SYS_mremap, "the heap"),
    call(libc::SYS_madvise, "balloon, page sizes, populating; the heap; stacks of threads that end"),
    call(libc::SYS_brk, "the heap"),
    // Signals, ends.
    only(libc::SYS_tgkill, Only::OwnThread(34, "SIGRTMIN"), "kicks of vCPUs"),
    only(libc::SYS_tgkill, Only::OwnThread(libc::SIGABRT, "SIGABRT"), "a panic's end"),
    call(libc::SYS_getpid, "for tgkill"),
    call(libc::SYS_gettid, "for tgkill; who a vCPU's thread is"),
    call(libc::SYS_rt_sigaction, "the kick's handler; a fault that is to end the process"),
    call(libc::SYS_rt_sigprocmask, "threads that start or end, a panic's end"),
    call(libc::SYS_rt_sigreturn, "the end of a handler"),
    call(libc::SYS_sigaltstack, "threads that start or end"),
    call(libc::SYS_exit, "a thread's end"),
    call(libc::SYS_exit_group, "the process's end"),
    call(libc::SYS_getrandom, "virtio-rng, generation IDs, seeds of hash tables"),
    call(libc::SYS_getrusage, "page faults of a vCPU, for Status"),
    // A running machine's KVM.
    ioctl(0xae80, "KVM_RUN", "the guest"),
    ioctl(0xaead, "KVM_KVMCLOCK_CTRL", "a pause the guest's watchdog shall forgive"),
    ioctl(0x4020_ae46, "KVM_SET_USER_MEMORY_REGION", "memory that virtio-mem plugs, or a machine that ended lets go"),
    ioctl(0x8090_ae81, "KVM_GET_REGS", "a freeze; where a vCPU ended"),
    ioctl(0x4090_ae82, "KVM_SET_REGS", "boot, restore"),
    ioctl(0x8138_ae83, "KVM_GET_SREGS", "a freeze; where a vCPU ended"),
    ioctl(0x4138_ae84, "KVM_SET_SREGS", "boot, restore"),
    ioctl(0xc008_ae88, "KVM_GET_MSRS", "a freeze; an MSR a restore could not set"),
    ioctl(0x4008_ae89, "KVM_SET_MSRS", "restore; a thawed guest's time"),
    ioctl(0x4008_ae90, "KVM_SET_CPUID2", "restore"),
    ioctl(0xaea2, "KVM_SET_TSC_KHZ", "restore"),
    ioctl(0xaea3, "KVM_GET_TSC_KHZ", "freeze, restore"),
    ioctl(0x5000_aea5, "KVM_SET_XSAVE", "restore"),
    ioctl(0x4188_aea7, "KVM_SET_XCRS", "restore"),
    ioctl(0x4080_aea2, "KVM_SET_DEBUGREGS", "restore"),
    ioctl(0x4400_ae8f, "KVM_SET_LAPIC", "restore"),
    ioctl(0x4004_ae99, "KVM_SET_MP_STATE", "restore"),
    ioctl(0x4040_aea0, "KVM_SET_VCPU_EVENTS", "restore"),
    ioctl(0x9000_aea4, "KVM_GET_XSAVE", "freeze"),
    ioctl(0x9000_aecf, "KVM_GET_XSAVE2", "freeze, where vector state is large"),
    ioctl(0x8188_aea6, "KVM_GET_XCRS", "freeze"),
    ioctl(0x8080_aea1, "KVM_GET_DEBUGREGS", "freeze"),
    ioctl(0x8400_ae8e, "KVM_GET_LAPIC", "freeze"),
    ioctl(0x8004_ae98, "KVM_GET_MP_STATE", "freeze"),
    ioctl(0x8040_ae9f, "KVM_GET_VCPU_EVENTS", "freeze"),
    ioctl(0xc208_ae62, "KVM_GET_IRQCHIP", "freeze"),
    ioctl(0x8208_ae63, "KVM_SET_IRQCHIP", "restore"),
    ioctl(0x8030_ae7c, "KVM_GET_CLOCK", "freeze"),
    ioctl(0x4030_ae7b, "KVM_SET_CLOCK", "thaw"),
    // Other devices.
    ioctl(0x1268, "BLKSSZGET", "the block size of a disk that is a device of the host"),
    ioctl(0x8004_54d2, "TUNGETIFF", "whether a descriptor is a tap"),
    ioctl(0x4004_54d8, "TUNSETVNETHDRSZ", "a tap's headers"),
    ioctl(0x4004_54d0, "TUNSETOFFLOAD", "what the guest's driver takes"),
    ioctl(0xaa00, "USERFAULTFD_IOC_NEW", "restore with a page server; a freeze that the guest runs through"),
    ioctl(0xc018_aa3f, "UFFDIO_API", "the same"),
    ioctl(0xc020_aa00, "UFFDIO_REGISTER", "the same"),
    ioctl(0xc018_aa06, "UFFDIO_WRITEPROTECT", "pages that such a freeze has not written yet"),
    ioctl(0x8010_aa01, "UFFDIO_UNREGISTER", "the end of such a freeze"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_a_name_a_reason_and_an_effect() {
        for (index, row) in CALLS.iter().enumerate() {
            assert!(names::of(row.number).is_some() && !row.why.is_empty(), "{row:?}");
            for other in &CALLS[index + 1..] {
                let same = row.number == other.number;
                assert!(
                    !same || row.only != Only::Any && other.only != Only::Any,
                    "{row:?} {other:?}"
                );
                assert!(!same || row.only != other.only, "twice: {row:?}");
            }
        }
    }

    #[test]
    fn list_has_no_call_that_opens_connects_or_executes() {
        let never = [
            libc::SYS_open,
            libc::SYS_openat,
            libc::SYS_openat2,
            libc::SYS_creat,
            libc::SYS_open_by_handle_at,
            libc::SYS_socket,
            libc::SYS_socketpair,
            libc::SYS_connect,
            libc::SYS_bind,
            libc::SYS_listen,
            libc::SYS_execve,
            libc::SYS_execveat,
            libc::SYS_fork,
            libc::SYS_vfork,
            libc::SYS_clone3,
            libc::SYS_ptrace,
            libc::SYS_process_vm_readv,
            libc::SYS_process_vm_writev,
            libc::SYS_pidfd_getfd,
            libc::SYS_kill,
            libc::SYS_mount,
            libc::SYS_setns,
            libc::SYS_unshare,
            libc::SYS_bpf,
            libc::SYS_io_uring_setup,
            libc::SYS_userfaultfd,
            libc::SYS_perf_event_open,
            libc::SYS_memfd_create,
            libc::SYS_pkey_mprotect,
            libc::SYS_remap_file_pages,
            libc::SYS_modify_ldt,
            libc::SYS_keyctl,
            libc::SYS_clone,
            libc::SYS_seccomp,
            libc::SYS_prctl,
            libc::SYS_capset,
        ];
        assert!(!CALLS.iter().any(|row| never.contains(&row.number)));
    }

    #[test]
    fn list_has_no_call_on_what_namespaces_hold() {
        let never = [
            libc::SYS_shmget,
            libc::SYS_shmat,
            libc::SYS_shmctl,
            libc::SYS_semget,
            libc::SYS_semop,
            libc::SYS_semtimedop,
            libc::SYS_semctl,
            libc::SYS_msgget,
            libc::SYS_msgsnd,
            libc::SYS_msgrcv,
            libc::SYS_msgctl,
            libc::SYS_mq_open,
            libc::SYS_mq_unlink,
            libc::SYS_mq_timedsend,
            libc::SYS_mq_timedreceive,
            libc::SYS_sethostname,
            libc::SYS_setdomainname,
            libc::SYS_flock,
            libc::SYS_inotify_init,
            libc::SYS_inotify_init1,
            libc::SYS_fanotify_init,
        ];
        assert!(!CALLS.iter().any(|row| never.contains(&row.number)));
    }

    /// The table of docs/jail.md.
    fn table() -> String {
        let mut table = String::from("| call | for |\n|---|---|\n");
        for row in CALLS {
            table += &format!("| `{}` | {} |\n", row.name(), row.why);
        }
        table
    }

    #[test]
    fn the_document_has_the_list() {
        const BEGIN: &str = "<!-- made from vmm/src/jail/syscalls.rs -->\n";
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/jail.md");
        let written = std::fs::read_to_string(path).unwrap();
        let (before, _) = written.split_once(BEGIN).expect("the mark where the list begins");
        let document = format!("{before}{BEGIN}{}", table());
        if std::env::var_os("THAW_WRITE_DOCS").is_some() {
            std::fs::write(path, &document).unwrap();
        } else {
            assert!(
                written == document,
                "docs/jail.md is stale: run the tests with THAW_WRITE_DOCS=1"
            );
        }
    }
}
