//! The default seccomp profile: the system calls that `docker run` allows a container with docker's default capabilities.
//!
//! The microVM isolates a container from the host. The profile protects the guest's kernel from the container: most calls it forbids are
//! for administrators, and those had most kernel bugs. Forbidden calls fail with EPERM, as under docker. Calls newer than any in the list,
//! and `clone3`, whose flags no filter can read, fail with ENOSYS, so that programs fall back. The list has only x86-64 calls, because
//! guest kernels run no other programs.

use std::path::PathBuf;

use thaw_protocol::agent::oci;
use thaw_protocol::api::SeccompProfile;

use super::seccomp_profile::Profile;
use crate::closest::closest;

const ALLOW: &str = "SCMP_ACT_ALLOW";
const ERRNO: &str = "SCMP_ACT_ERRNO";

/// The calls that docker allows a container with a capability in addition.
#[rustfmt::skip]
const WITH_CAPABILITY: &[(&str, &[&str])] = &[
    ("CAP_BPF", &["bpf"]),
    ("CAP_DAC_READ_SEARCH", &["open_by_handle_at"]),
    ("CAP_PERFMON", &["perf_event_open"]),
    ("CAP_SYS_ADMIN", &[
        "bpf", "clone", "clone3", "fanotify_init", "fsconfig", "fsmount", "fsopen", "fspick", "lookup_dcookie", "mount",
        "mount_setattr", "move_mount", "open_tree", "perf_event_open", "pivot_root", "quotactl", "quotactl_fd",
        "setdomainname", "sethostname", "setns", "syslog", "umount", "umount2", "unshare",
    ]),
    ("CAP_SYS_BOOT", &["reboot"]),
    ("CAP_SYS_MODULE", &["delete_module", "finit_module", "init_module"]),
    ("CAP_SYS_NICE", &["get_mempolicy", "mbind", "set_mempolicy", "set_mempolicy_home_node"]),
    ("CAP_SYS_PACCT", &["acct"]),
    ("CAP_SYS_PTRACE", &["kcmp", "pidfd_getfd", "process_madvise"]),
    ("CAP_SYS_RAWIO", &["ioperm", "iopl"]),
    ("CAP_SYS_TIME", &["clock_settime", "settimeofday"]),
    ("CAP_SYS_TTY_CONFIG", &["vhangup"]),
    ("CAP_SYSLOG", &["syslog"]),
];

/// Calls allowed with any arguments.
#[rustfmt::skip]
const ALLOWED: &[&str] = &[
    "accept", "accept4", "access", "adjtimex", "alarm", "arch_prctl", "bind", "brk", "cachestat", "capget", "capset",
    "chdir", "chmod", "chown", "chroot", "clock_adjtime", "clock_getres", "clock_gettime", "clock_nanosleep", "close",
    "close_range", "connect", "copy_file_range", "creat", "dup", "dup2", "dup3", "epoll_create", "epoll_create1",
    "epoll_ctl", "epoll_ctl_old", "epoll_pwait", "epoll_pwait2", "epoll_wait", "epoll_wait_old", "eventfd", "eventfd2",
    "execve", "execveat", "exit", "exit_group", "faccessat", "faccessat2", "fadvise64", "fallocate", "fanotify_mark",
    "fchdir", "fchmod", "fchmodat", "fchmodat2", "fchown", "fchownat", "fcntl", "fdatasync", "fgetxattr", "flistxattr",
    "flock", "fork", "fremovexattr", "fsetxattr", "fstat", "fstatfs", "fsync", "ftruncate", "futex", "futex_requeue",
    "futex_wait", "futex_waitv", "futex_wake", "futimesat", "get_robust_list", "get_thread_area", "getcpu", "getcwd",
    "getdents", "getdents64", "getegid", "geteuid", "getgid", "getgroups", "getitimer", "getpeername", "getpgid",
    "getpgrp", "getpid", "getppid", "getpriority", "getrandom", "getresgid", "getresuid", "getrlimit", "getrusage",
    "getsid", "getsockname", "getsockopt", "gettid", "gettimeofday", "getuid", "getxattr", "getxattrat",
    "inotify_add_watch", "inotify_init", "inotify_init1", "inotify_rm_watch", "io_cancel", "io_destroy",
    "io_getevents", "io_pgetevents", "io_setup", "io_submit", "ioctl", "ioprio_get", "ioprio_set", "kill",
    "landlock_add_rule", "landlock_create_ruleset", "landlock_restrict_self", "lchown", "lgetxattr", "link", "linkat",
    "listen", "listmount", "listxattr", "listxattrat", "llistxattr", "lremovexattr", "lseek", "lsetxattr", "lstat",
    "madvise", "map_shadow_stack", "membarrier", "memfd_create", "memfd_secret", "mincore", "mkdir", "mkdirat",
    "mknod", "mknodat", "mlock", "mlock2", "mlockall", "mmap", "modify_ldt", "mprotect", "mq_getsetattr", "mq_notify",
    "mq_open", "mq_timedreceive", "mq_timedsend", "mq_unlink", "mremap", "mseal", "msgctl", "msgget", "msgrcv",
    "msgsnd", "msync", "munlock", "munlockall", "munmap", "name_to_handle_at", "nanosleep", "newfstatat", "open",
    "openat", "openat2", "pause", "pidfd_open", "pidfd_send_signal", "pipe", "pipe2", "pkey_alloc", "pkey_free",
    "pkey_mprotect", "poll", "ppoll", "prctl", "pread64", "preadv", "preadv2", "prlimit64", "process_mrelease",
    "process_vm_readv", "process_vm_writev", "pselect6", "ptrace", "pwrite64", "pwritev", "pwritev2", "read",
    "readahead", "readlink", "readlinkat", "readv", "recvfrom", "recvmmsg", "recvmsg", "remap_file_pages",
    "removexattr", "removexattrat", "rename", "renameat", "renameat2", "restart_syscall", "rmdir", "rseq",
    "rt_sigaction", "rt_sigpending", "rt_sigprocmask", "rt_sigqueueinfo", "rt_sigreturn", "rt_sigsuspend",
    "rt_sigtimedwait", "rt_tgsigqueueinfo", "sched_get_priority_max", "sched_get_priority_min", "sched_getaffinity",
    "sched_getattr", "sched_getparam", "sched_getscheduler", "sched_rr_get_interval", "sched_setaffinity",
    "sched_setattr", "sched_setparam", "sched_setscheduler", "sched_yield", "seccomp", "select", "semctl", "semget",
    "semop", "semtimedop", "sendfile", "sendmmsg", "sendmsg", "sendto", "set_robust_list", "set_thread_area",
    "set_tid_address", "setfsgid", "setfsuid", "setgid", "setgroups", "setitimer", "setpgid", "setpriority",
    "setregid", "setresgid", "setresuid", "setreuid", "setrlimit", "setsid", "setsockopt", "setuid", "setxattr",
    "setxattrat", "shmat", "shmctl", "shmdt", "shmget", "shutdown", "sigaltstack", "signalfd", "signalfd4",
    "socketpair", "splice", "stat", "statfs", "statmount", "statx", "symlink", "symlinkat", "sync", "sync_file_range",
    "syncfs", "sysinfo", "tee", "tgkill", "time", "timer_create", "timer_delete", "timer_getoverrun", "timer_gettime",
    "timer_settime", "timerfd_create", "timerfd_gettime", "timerfd_settime", "times", "tkill", "truncate", "umask",
    "uname", "unlink", "unlinkat", "utime", "utimensat", "utimes", "vfork", "vmsplice", "wait4", "waitid", "write",
    "writev",
];

/// CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET (linux/sched.h).
const NEW_NAMESPACES: u64 = 0x7E02_0000;
/// `AF_VSOCK`: leads to the agent, and to the host.
const VSOCK: u64 = 40;
/// Bits of an address family: `AF_MAX` is below 64.
const FAMILY_BITS: u32 = 6;
/// Allowed arguments of `personality(2)`: PER_LINUX, PER_LINUX32, both with UNAME26, and the query.
const PERSONALITIES: [u64; 5] = [0x0, 0x8, 0x2_0000, 0x2_0008, 0xFFFF_FFFF];

/// The profile of a container with these capabilities.
pub(super) fn allowing(capabilities: &[String]) -> oci::LinuxSeccomp {
    let mut rules = vec![rule(ALLOWED, ALLOW, None)];
    for (capability, calls) in WITH_CAPABILITY {
        if capabilities.iter().any(|held| held == capability) {
            rules.push(rule(calls, ALLOW, None));
        }
    }
    if !capabilities.iter().any(|held| held == "CAP_SYS_ADMIN") {
        // Allows threads and processes, but no new namespaces.
        rules.push(rule(&["clone"], ALLOW, Some(masked(NEW_NAMESPACES, 0))));
        rules.push(oci::LinuxSyscall {
            ErrnoRet: Some(oci::linux_syscall::ErrnoRet::Errnoret(libc::ENOSYS as u32)),
            ..rule(&["clone3"], ERRNO, None)
        });
    }
    // Allows families that differ from AF_VSOCK in one of their low bits. The kernel reads 32 bits of the argument, so a comparison of all
    // 64 would admit AF_VSOCK with higher bits set. No family needs higher bits.
    let socket = |bit: u32| rule(&["socket"], ALLOW, Some(masked(1 << bit, !VSOCK & 1 << bit)));
    rules.extend((0..FAMILY_BITS).map(socket));
    let personality = |value| rule(&["personality"], ALLOW, Some(masked(u64::MAX, value)));
    rules.extend(PERSONALITIES.map(personality));
    oci::LinuxSeccomp {
        DefaultAction: ERRNO.into(),
        Architectures: vec!["SCMP_ARCH_X86_64".into()],
        Syscalls: rules,
        ..Default::default()
    }
}

fn rule(names: &[&str], action: &str, argument: Option<oci::LinuxSeccompArg>) -> oci::LinuxSyscall {
    oci::LinuxSyscall {
        Names: names.iter().map(|name| (*name).to_owned()).collect(),
        Action: action.into(),
        Args: argument.into_iter().collect(),
        ..Default::default()
    }
}

/// Matches if these bits of the first argument have this value.
fn masked(mask: u64, value: u64) -> oci::LinuxSeccompArg {
    oci::LinuxSeccompArg {
        Index: 0,
        Op: "SCMP_CMP_MASKED_EQ".into(),
        Value: mask,
        ValueTwo: value,
        ..Default::default()
    }
}

/// The system calls that a container may make.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Seccomp {
    /// Those of docker's default profile.
    #[default]
    Default,
    /// All.
    Unconfined,
    /// Those that the caller's profile allows.
    Profile(Profile),
}

impl From<SeccompProfile> for Seccomp {
    fn from(profile: SeccompProfile) -> Seccomp {
        match profile {
            SeccompProfile::Default => Seccomp::Default,
            SeccompProfile::Unconfined => Seccomp::Unconfined,
        }
    }
}

/// An option of `--security-opt`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SecurityOption {
    Seccomp(SeccompProfile),
    /// A profile in a file.
    SeccompFile(PathBuf),
    NoNewPrivileges(bool),
}

/// Parses `--security-opt`.
///
/// # Errors
/// The option is unsupported.
pub fn parse_security_option(text: &str) -> Result<SecurityOption, String> {
    let (name, value) = text.split_once(['=', ':']).unwrap_or((text, ""));
    match (name, value) {
        ("seccomp", "unconfined") => Ok(SecurityOption::Seccomp(SeccompProfile::Unconfined)),
        ("seccomp", "default" | "builtin") => Ok(SecurityOption::Seccomp(SeccompProfile::Default)),
        ("seccomp", "") => Err("seccomp is `default`, `unconfined` or a file with a profile".into()),
        ("seccomp", file) => Ok(SecurityOption::SeccompFile(file.into())),
        ("no-new-privileges", "" | "true") => Ok(SecurityOption::NoNewPrivileges(true)),
        ("no-new-privileges", "false") => Ok(SecurityOption::NoNewPrivileges(false)),
        _ => {
            let closest = closest(name, ["seccomp", "no-new-privileges"]);
            Err(format!(
                "{name:?} is no security option: there are `seccomp=default`, `seccomp=unconfined`, `seccomp=FILE` and \
                 `no-new-privileges`{closest}"
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn default() -> oci::LinuxSeccomp {
        allowing(&super::super::defaults::default_capabilities())
    }

    fn actions(name: &str) -> Vec<(String, usize)> {
        actions_of(default(), name)
    }

    fn actions_of(profile: oci::LinuxSeccomp, name: &str) -> Vec<(String, usize)> {
        let rules = profile.Syscalls;
        let of = rules.iter().filter(|rule| rule.Names.iter().any(|it| it == name));
        of.map(|rule| (rule.Action.clone(), rule.Args.len())).collect()
    }

    #[test]
    fn list_is_sorted_and_has_each_call_once() {
        assert!(ALLOWED.is_sorted_by(|a, b| a < b));
        for conditional in ["clone", "clone3", "personality", "socket"] {
            assert!(!ALLOWED.contains(&conditional), "{conditional}");
        }
    }

    #[test]
    fn calls_that_docker_denies_without_capabilities_are_denied() {
        for denied in [
            "acct",
            "add_key",
            "bpf",
            "delete_module",
            "fanotify_init",
            "finit_module",
            "fsconfig",
            "fsmount",
            "fsopen",
            "fspick",
            "get_mempolicy",
            "init_module",
            "io_uring_enter",
            "io_uring_register",
            "io_uring_setup",
            "ioperm",
            "iopl",
            "kcmp",
            "kexec_file_load",
            "kexec_load",
            "keyctl",
            "mbind",
            "mount",
            "mount_setattr",
            "move_mount",
            "move_pages",
            "open_by_handle_at",
            "open_tree",
            "perf_event_open",
            "pidfd_getfd",
            "pivot_root",
            "process_madvise",
            "quotactl",
            "reboot",
            "request_key",
            "set_mempolicy",
            "setdomainname",
            "sethostname",
            "setns",
            "settimeofday",
            "swapoff",
            "swapon",
            "syslog",
            "umount2",
            "unshare",
            "userfaultfd",
            "vhangup",
        ] {
            assert_eq!(actions(denied), [], "{denied}");
        }
        assert_eq!(default().DefaultAction, ERRNO);
        assert_eq!(actions("read"), [(ALLOW.into(), 0)]);
        assert_eq!(actions("clone"), [(ALLOW.into(), 1)]);
        assert_eq!(actions("clone3"), [(ERRNO.into(), 0)]);
    }

    #[test]
    fn capability_allows_the_calls_it_is_for() {
        let admin = || allowing(&["CAP_SYS_ADMIN".into()]);
        for call in ["mount", "unshare", "setns", "clone", "clone3"] {
            assert_eq!(actions_of(admin(), call), [(ALLOW.into(), 0)], "{call}");
        }
        assert_eq!(actions_of(admin(), "reboot"), []);
        let none = allowing(&[]);
        assert_eq!(actions_of(none, "mount"), []);
        for (_, calls) in WITH_CAPABILITY {
            assert!(calls.is_sorted_by(|a, b| a < b), "{calls:?}");
            assert!(calls.iter().all(|call| !ALLOWED.contains(call)), "{calls:?}");
        }
    }

    /// Whether the profile allows a call with this first argument.
    fn is_allowed(name: &str, argument: u64) -> bool {
        let rules = default().Syscalls;
        rules.iter().any(|rule| {
            let holds = |it: &oci::LinuxSeccompArg| argument & it.Value == it.ValueTwo;
            rule.Action == ALLOW && rule.Names.iter().any(|it| it == name) && rule.Args.iter().all(holds)
        })
    }

    #[test]
    fn new_namespaces_and_vsock_are_denied_whatever_the_other_bits() {
        for family in 0..64 {
            assert_eq!(is_allowed("socket", family), family != VSOCK, "{family}");
        }
        assert!(!is_allowed("socket", 1 << 32 | VSOCK));
        for flag in (0..64).map(|bit| 1 << bit) {
            assert_eq!(is_allowed("clone", flag), flag & NEW_NAMESPACES == 0, "{flag:#x}");
        }
        assert!(!is_allowed("clone", u64::MAX));
        assert!(is_allowed("personality", 0xFFFF_FFFF) && !is_allowed("personality", 0x4_0000));
    }

    #[test]
    fn security_options_are_read_and_others_are_named() {
        assert_eq!(
            parse_security_option("seccomp=unconfined"),
            Ok(SecurityOption::Seccomp(SeccompProfile::Unconfined))
        );
        assert_eq!(
            parse_security_option("seccomp=default"),
            Ok(SecurityOption::Seccomp(SeccompProfile::Default))
        );
        assert_eq!(
            parse_security_option("no-new-privileges"),
            Ok(SecurityOption::NoNewPrivileges(true))
        );
        assert_eq!(
            parse_security_option("seccomp=/profile.json"),
            Ok(SecurityOption::SeccompFile("/profile.json".into()))
        );
        for (wrong, told) in [
            ("seccomp", "`unconfined`"),
            ("seccomp=", "`unconfined`"),
            ("label=disable", "label"),
            ("", ""),
        ] {
            let refused = parse_security_option(wrong).unwrap_err();
            assert!(refused.contains(told), "{refused}");
        }
    }
}
