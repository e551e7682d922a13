//! The system calls a jailed VMM makes, by kind of thread.
//!
//! A machine that ends is taken apart by whichever thread lets go of it last.
//!
//! This one list is what the filters are compiled from and what docs/jail.md shows (a test keeps it so). It comes from
//! reading what each thread can reach, the C library and its allocator included, not from watching it: a call that is
//! missing here ends a sandbox. Where the list is to grow, say why in the row.

use super::names;

/// A kind of thread, by what it may ask of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thread {
    /// The only thread there is, while it makes the machine and its threads. It may do what any other may.
    Start,
    /// The same thread, once the machine is made: serves the control socket.
    Control,
    /// Serves every device but those of virtio-fs.
    Devices,
    /// Runs a vCPU, and a device's registers when the guest touches them.
    Vcpu,
    /// Serves a virtio-fs device.
    Files,
}

impl Thread {
    pub const ALL: [Thread; 5] = [
        Thread::Start,
        Thread::Control,
        Thread::Devices,
        Thread::Vcpu,
        Thread::Files,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Thread::Start => "start",
            Thread::Control => "control",
            Thread::Devices => "devices",
            Thread::Vcpu => "vcpu",
            Thread::Files => "fs",
        }
    }
}

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
    /// Who may, besides [`Thread::Start`].
    pub threads: &'static [Thread],
    pub why: &'static str,
}

impl Call {
    /// Whether threads of this kind may make it.
    pub fn is_for(&self, thread: Thread) -> bool {
        thread == Thread::Start || self.threads.contains(&thread)
    }

    /// Its name, with the argument that is asked for.
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

const fn call(number: i64, threads: &'static [Thread], why: &'static str) -> Call {
    Call {
        number,
        only: Only::Any,
        threads,
        why,
    }
}

const fn ioctl(request: u32, name: &'static str, threads: &'static [Thread], why: &'static str) -> Call {
    Call {
        number: libc::SYS_ioctl,
        only: Only::Is(1, request, name),
        threads,
        why,
    }
}

const fn fcntl(command: i32, name: &'static str, threads: &'static [Thread], why: &'static str) -> Call {
    Call {
        number: libc::SYS_fcntl,
        only: Only::Is(1, command as u32, name),
        threads,
        why,
    }
}

const fn only(number: i64, only: Only, threads: &'static [Thread], why: &'static str) -> Call {
    Call {
        number,
        only,
        threads,
        why,
    }
}

use Thread::{Control, Devices, Files, Vcpu};

const ALL: &[Thread] = &[Control, Devices, Vcpu, Files];
const START: &[Thread] = &[];
const SERVERS: &[Thread] = &[Control, Devices, Files];
const CONTROL: &[Thread] = &[Control];
const VCPU: &[Thread] = &[Vcpu];
const LOOPS: &[Thread] = &[Devices, Files];
const BACKENDS: &[Thread] = &[Control, Devices];
const STATE: &[Thread] = &[Control, Vcpu];

/// The list.
#[rustfmt::skip]
pub const CALLS: &[Call] = &[
    // Descriptors that were handed over.
    call(libc::SYS_read, ALL, "eventfds; the kernel's file"),
    call(libc::SYS_write, ALL, "eventfds (interrupts, kicks, wake-ups); the log; a console that is no socket"),
    call(libc::SYS_writev, ALL, "the log; frames to the tap"),
    call(libc::SYS_readv, SERVERS, "frames from the tap, bytes from vsock clients, replies of a share"),
    call(libc::SYS_pread64, SERVERS, "snapshot files, the pagemap; ready bits' digests"),
    call(libc::SYS_preadv, SERVERS, "disks, image data"),
    call(libc::SYS_pwrite64, BACKENDS, "snapshot files; zeros to a disk that cannot make holes"),
    call(libc::SYS_pwritev, BACKENDS, "memory files; disks"),
    call(libc::SYS_lseek, BACKENDS, "the size of a disk; the kernel's file"),
    call(libc::SYS_fstat, SERVERS, "kinds and sizes of files"),
    call(libc::SYS_newfstatat, SERVERS, "the same, as the C library asks"),
    call(libc::SYS_statx, SERVERS, "the same, as Rust asks"),
    call(libc::SYS_ftruncate, CONTROL, "the size of a memory file"),
    call(libc::SYS_fallocate, BACKENDS, "discards and zeroes of a disk"),
    call(libc::SYS_fdatasync, BACKENDS, "flushes of a disk"),
    call(libc::SYS_close, ALL, "backends that are replaced, clients that left"),
    fcntl(libc::F_GETFL, "F_GETFL", BACKENDS, "how a disk or tap was opened"),
    fcntl(libc::F_SETFL, "F_SETFL", BACKENDS, "a tap that does not wait"),
    fcntl(libc::F_GETFD, "F_GETFD", ALL, "whether a descriptor is open, before a build with assertions closes it"),
    fcntl(libc::F_DUPFD_CLOEXEC, "F_DUPFD_CLOEXEC", CONTROL, "a second userfaultfd descriptor, for its server"),
    // Sockets that were handed over.
    call(libc::SYS_accept4, BACKENDS, "control connections; vsock clients"),
    call(libc::SYS_recvmsg, SERVERS, "requests and descriptors; answers to misses"),
    call(libc::SYS_sendmsg, SERVERS, "replies; misses, accesses; bytes to vsock clients; requests to a share"),
    call(libc::SYS_recvfrom, BACKENDS, "a vsock client's first line"),
    call(libc::SYS_sendto, &[Control, Devices, Vcpu], "a console that is a socket; vsock clients"),
    call(libc::SYS_shutdown, BACKENDS, "vsock streams that end one way"),
    call(libc::SYS_getsockopt, BACKENDS, "what kind a socket is"),
    ioctl(0x5421, "FIONBIO", BACKENDS, "sockets that do not wait"),
    // Waiting.
    call(libc::SYS_poll, ALL, "the control socket; whether the console takes a line; answers a thaw waits for"),
    call(libc::SYS_ppoll, ALL, "the same with a limit"),
    call(libc::SYS_epoll_wait, LOOPS, "kicks and backends"),
    call(libc::SYS_epoll_pwait, LOOPS, "the same, as other C libraries ask"),
    call(libc::SYS_epoll_ctl, ALL, "what is waited for: a driver that comes or goes changes it from a vCPU"),
    call(libc::SYS_futex, ALL, "locks, conditions, threads that end"),
    call(libc::SYS_restart_syscall, ALL, "the kernel's own, after a stop"),
    call(libc::SYS_sched_yield, ALL, "locks of the C library"),
    call(libc::SYS_clock_gettime, ALL, "where the vDSO cannot tell the time"),
    // Memory: the guest's, windows, the heap.
    only(libc::SYS_mmap, Only::NoExec(2), ALL, "windows, snapshots, unplugged memory, a lost page of an image; the heap"),
    only(libc::SYS_mprotect, Only::NoExec(2), ALL, "the heap and stacks"),
    call(libc::SYS_munmap, ALL, "images, the heap, stacks"),
    call(libc::SYS_mremap, ALL, "the heap"),
    call(libc::SYS_madvise, ALL, "balloon, page sizes, populating; stacks of threads that end"),
    call(libc::SYS_brk, ALL, "the heap"),
    // Signals, ends.
    only(libc::SYS_tgkill, Only::OwnThread(34, "SIGRTMIN"), ALL, "kicks of vCPUs"),
    only(libc::SYS_tgkill, Only::OwnThread(libc::SIGABRT, "SIGABRT"), ALL, "a panic's end"),
    call(libc::SYS_getpid, ALL, "for tgkill"),
    call(libc::SYS_gettid, ALL, "for tgkill; who a vCPU's thread is"),
    call(libc::SYS_rt_sigaction, ALL, "the kick's handler; a fault that is to end the process"),
    call(libc::SYS_rt_sigprocmask, ALL, "threads that start or end, a panic's end"),
    call(libc::SYS_rt_sigreturn, ALL, "the end of a handler"),
    call(libc::SYS_sigaltstack, ALL, "threads that start or end"),
    call(libc::SYS_exit, ALL, "a thread's end"),
    call(libc::SYS_exit_group, ALL, "the process's end"),
    call(libc::SYS_getrandom, ALL, "virtio-rng, generation IDs, seeds of hash tables"),
    call(libc::SYS_getrusage, VCPU, "page faults of a vCPU, for Status"),
    // A running machine's KVM.
    ioctl(0xae80, "KVM_RUN", VCPU, "the guest"),
    ioctl(0xaead, "KVM_KVMCLOCK_CTRL", VCPU, "a pause the guest's watchdog shall forgive"),
    ioctl(0x4020_ae46, "KVM_SET_USER_MEMORY_REGION", &[Control, Devices, Vcpu], "memory that virtio-mem plugs, or a machine that ended lets go"),
    ioctl(0x8090_ae81, "KVM_GET_REGS", STATE, "a freeze; where a vCPU ended"),
    ioctl(0x4090_ae82, "KVM_SET_REGS", STATE, "boot, restore"),
    ioctl(0x8138_ae83, "KVM_GET_SREGS", STATE, "a freeze; where a vCPU ended"),
    ioctl(0x4138_ae84, "KVM_SET_SREGS", STATE, "boot, restore"),
    ioctl(0xc008_ae88, "KVM_GET_MSRS", STATE, "a freeze; an MSR a restore could not set"),
    ioctl(0x4008_ae89, "KVM_SET_MSRS", STATE, "restore; a thawed guest's time"),
    ioctl(0x4008_ae90, "KVM_SET_CPUID2", VCPU, "restore"),
    ioctl(0xaea2, "KVM_SET_TSC_KHZ", VCPU, "restore"),
    ioctl(0xaea3, "KVM_GET_TSC_KHZ", STATE, "freeze, restore"),
    ioctl(0x5000_aea5, "KVM_SET_XSAVE", VCPU, "restore"),
    ioctl(0x4188_aea7, "KVM_SET_XCRS", VCPU, "restore"),
    ioctl(0x4080_aea2, "KVM_SET_DEBUGREGS", VCPU, "restore"),
    ioctl(0x4400_ae8f, "KVM_SET_LAPIC", VCPU, "restore"),
    ioctl(0x4004_ae99, "KVM_SET_MP_STATE", VCPU, "restore"),
    ioctl(0x4040_aea0, "KVM_SET_VCPU_EVENTS", VCPU, "restore"),
    ioctl(0x9000_aea4, "KVM_GET_XSAVE", CONTROL, "freeze"),
    ioctl(0x9000_aecf, "KVM_GET_XSAVE2", CONTROL, "freeze, where vector state is large"),
    ioctl(0x8188_aea6, "KVM_GET_XCRS", CONTROL, "freeze"),
    ioctl(0x8080_aea1, "KVM_GET_DEBUGREGS", CONTROL, "freeze"),
    ioctl(0x8400_ae8e, "KVM_GET_LAPIC", CONTROL, "freeze"),
    ioctl(0x8004_ae98, "KVM_GET_MP_STATE", CONTROL, "freeze"),
    ioctl(0x8040_ae9f, "KVM_GET_VCPU_EVENTS", CONTROL, "freeze"),
    ioctl(0xc208_ae62, "KVM_GET_IRQCHIP", CONTROL, "freeze"),
    ioctl(0x8208_ae63, "KVM_SET_IRQCHIP", CONTROL, "restore"),
    ioctl(0x8030_ae7c, "KVM_GET_CLOCK", CONTROL, "freeze"),
    ioctl(0x4030_ae7b, "KVM_SET_CLOCK", CONTROL, "thaw"),
    // Other devices.
    ioctl(0x1268, "BLKSSZGET", CONTROL, "the block size of a disk that is a device of the host"),
    ioctl(0x8004_54d2, "TUNGETIFF", CONTROL, "whether a descriptor is a tap"),
    ioctl(0x4004_54d8, "TUNSETVNETHDRSZ", CONTROL, "a tap's headers"),
    ioctl(0x4004_54d0, "TUNSETOFFLOAD", &[Control, Devices, Vcpu], "what the guest's driver takes"),
    ioctl(0xaa00, "USERFAULTFD_IOC_NEW", CONTROL, "restore with a page server"),
    ioctl(0xc018_aa3f, "UFFDIO_API", CONTROL, "the same"),
    ioctl(0xc020_aa00, "UFFDIO_REGISTER", CONTROL, "the same"),
    // Making the machine.
    ioctl(0xae00, "KVM_GET_API_VERSION", START, "whether a descriptor is KVM"),
    ioctl(0xae03, "KVM_CHECK_EXTENSION", START, "what KVM can"),
    ioctl(0xc008_ae05, "KVM_GET_SUPPORTED_CPUID", START, "what a vCPU can be"),
    ioctl(0xc004_ae02, "KVM_GET_MSR_INDEX_LIST", START, "what a freeze will save"),
    ioctl(0xae04, "KVM_GET_VCPU_MMAP_SIZE", START, "vCPUs"),
    ioctl(0xae01, "KVM_CREATE_VM", START, "the VM"),
    ioctl(0x4068_aea3, "KVM_ENABLE_CAP", START, "no recovery of huge pages"),
    ioctl(0xae47, "KVM_SET_TSS_ADDR", START, "real mode on Intel"),
    ioctl(0x4008_ae48, "KVM_SET_IDENTITY_MAP_ADDR", START, "the same"),
    ioctl(0xae60, "KVM_CREATE_IRQCHIP", START, "interrupt controllers"),
    ioctl(0xae41, "KVM_CREATE_VCPU", START, "vCPUs"),
    ioctl(0x4020_ae76, "KVM_IRQFD", START, "devices"),
    ioctl(0x4040_ae79, "KVM_IOEVENTFD", START, "devices"),
    call(libc::SYS_eventfd2, START, "devices"),
    call(libc::SYS_epoll_create1, START, "threads that serve devices"),
    call(libc::SYS_capset, START, "the last capability is given up"),
    only(libc::SYS_clone, Only::Has(0, (libc::CLONE_THREAD | libc::CLONE_VM) as u32, "CLONE_THREAD"), START, "threads"),
    call(libc::SYS_set_robust_list, START, "threads that start"),
    call(libc::SYS_rseq, START, "threads that start"),
    call(libc::SYS_sched_getaffinity, START, "threads that start: the C library, of their stacks"),
    only(libc::SYS_prctl, Only::Is(0, libc::PR_SET_NAME as u32, "PR_SET_NAME"), START, "threads that start"),
    only(libc::SYS_prctl, Only::Is(0, libc::PR_SET_NO_NEW_PRIVS as u32, "PR_SET_NO_NEW_PRIVS"), START, "tighter filters"),
    only(libc::SYS_seccomp, Only::Is(0, libc::SECCOMP_SET_MODE_FILTER, "SECCOMP_SET_MODE_FILTER"), START, "tighter filters"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_a_name_and_a_reason_and_none_makes_another_pointless() {
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
    fn nothing_that_opens_connects_or_executes_is_on_it() {
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
        ];
        assert!(!CALLS.iter().any(|row| never.contains(&row.number)));
    }

    #[test]
    fn a_made_machine_makes_no_thread_and_no_vm() {
        let making = [
            libc::SYS_clone,
            libc::SYS_seccomp,
            libc::SYS_prctl,
            libc::SYS_capset,
        ];
        for thread in &Thread::ALL[1..] {
            assert!(
                !CALLS
                    .iter()
                    .any(|row| making.contains(&row.number) && row.is_for(*thread))
            );
        }
    }

    /// The table of docs/jail.md.
    fn table() -> String {
        let mut table = String::from(
            "| call | start | control | devices | vcpu | fs | for |\n|---|---|---|---|---|---|---|\n",
        );
        for row in CALLS {
            let marks = Thread::ALL.map(|thread| if row.is_for(thread) { "x" } else { "" });
            table += &format!("| `{}` | {} | {} |\n", row.name(), marks.join(" | "), row.why);
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
