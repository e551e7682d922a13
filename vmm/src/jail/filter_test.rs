use std::process::Command;

use super::*;
use crate::jail::signals::install;
use thaw_protocol::control::{FORBIDDEN_CALL, FORBIDDEN_CODE};

/// In the environment of [`one_call`]: a thread's name and a call's place in [`ATTEMPTS`].
const ATTEMPT: &str = "THAW_TEST_ATTEMPT";

/// What nobody may, and what some may not: name in the log, number, first three arguments, who may not.
type Attempt = (&'static str, i64, [i64; 3], &'static [Thread]);

use Thread::{Control, Devices, Files, Start, Vcpu};

const NOBODY: &[Thread] = &Thread::ALL;
const MADE: &[Thread] = &[Control, Devices, Vcpu, Files];
const EXEC: i64 = libc::PROT_EXEC as i64 | libc::PROT_READ as i64;

#[rustfmt::skip]
const ATTEMPTS: &[Attempt] = &[
    ("open", libc::SYS_open, [0, 0, 0], NOBODY),
    ("openat", libc::SYS_openat, [-100, 0, 0], NOBODY),
    ("openat2", libc::SYS_openat2, [-100, 0, 0], NOBODY),
    ("socket", libc::SYS_socket, [1, 1, 0], NOBODY),
    ("connect", libc::SYS_connect, [0, 0, 0], NOBODY),
    ("bind", libc::SYS_bind, [0, 0, 0], NOBODY),
    ("execve", libc::SYS_execve, [0, 0, 0], NOBODY),
    ("fork", libc::SYS_fork, [0, 0, 0], NOBODY),
    ("clone", libc::SYS_clone, [libc::SIGCHLD as i64, 0, 0], NOBODY),
    ("ptrace", libc::SYS_ptrace, [0, 0, 0], NOBODY),
    ("kill", libc::SYS_kill, [1, 0, 0], NOBODY),
    ("tgkill", libc::SYS_tgkill, [1, 1, 34], NOBODY),
    ("mmap", libc::SYS_mmap, [0, 4096, EXEC], NOBODY),
    ("mprotect", libc::SYS_mprotect, [0, 4096, EXEC], NOBODY),
    ("memfd_create", libc::SYS_memfd_create, [0, 0, 0], NOBODY),
    ("io_uring_setup", libc::SYS_io_uring_setup, [1, 0, 0], NOBODY),
    ("unshare", libc::SYS_unshare, [0, 0, 0], NOBODY),
    ("mount", libc::SYS_mount, [0, 0, 0], NOBODY),
    ("bpf", libc::SYS_bpf, [0, 0, 0], NOBODY),
    // TIOCSTI.
    ("ioctl", libc::SYS_ioctl, [2, 0x5412, 0], NOBODY),
    ("fcntl", libc::SYS_fcntl, [0, libc::F_SETOWN as i64, 0], NOBODY),
    ("prctl", libc::SYS_prctl, [libc::PR_SET_DUMPABLE as i64, 1, 0], NOBODY),
    ("unknown", 100_000, [0, 0, 0], NOBODY),
    ("clone", libc::SYS_clone, [(libc::CLONE_THREAD | libc::CLONE_VM | libc::CLONE_SIGHAND) as i64, 0, 0], MADE),
    ("seccomp", libc::SYS_seccomp, [libc::SECCOMP_SET_MODE_FILTER as i64, 0, 0], MADE),
    ("capset", libc::SYS_capset, [0, 0, 0], MADE),
    ("ioctl", libc::SYS_ioctl, [0, 0xae01, 0], MADE),
    ("ioctl", libc::SYS_ioctl, [0, 0xae80, 0], &[Control, Devices, Files]),
    ("ioctl", libc::SYS_ioctl, [0, 0x4020_ae46, 0], &[Files]),
    ("accept4", libc::SYS_accept4, [0, 0, 0], &[Vcpu, Files]),
    ("recvmsg", libc::SYS_recvmsg, [0, 0, 0], &[Vcpu]),
    ("pwritev", libc::SYS_pwritev, [0, 0, 0], &[Vcpu, Files]),
    ("preadv", libc::SYS_preadv, [0, 0, 0], &[Vcpu]),
    ("ftruncate", libc::SYS_ftruncate, [0, 0, 0], &[Devices, Vcpu, Files]),
];

/// Not a test: the process that tries one call, run by those below.
#[test]
#[ignore = "run by the other tests"]
fn one_call() {
    let Ok(attempt) = std::env::var(ATTEMPT) else {
        return;
    };
    let (name, index) = attempt.split_once(' ').unwrap();
    let thread = Thread::ALL
        .into_iter()
        .find(|thread| thread.name() == name)
        .unwrap();
    let (_, number, [a, b, c], _) = ATTEMPTS[index.parse::<usize>().unwrap()];
    install().unwrap();
    confine_process().unwrap();
    if thread != Start {
        confine(thread);
    }
    // SAFETY: no argument is a pointer the call could use: were it allowed, it would fail, or make memory nobody knows of.
    unsafe { libc::syscall(number, a, b, c, -1, -1, 0) };
    // SAFETY: ends the process: it was not stopped.
    unsafe { libc::_exit(0) }
}

#[test]
fn a_forbidden_call_ends_the_process_and_the_log_names_it() {
    let tries = ATTEMPTS.iter().enumerate();
    let tries =
        tries.flat_map(|(index, attempt)| attempt.3.iter().map(move |thread| (index, attempt, thread)));
    for (index, (name, number, ..), thread) in tries {
        let tried = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "jail::filter::tests::one_call",
                "--ignored",
                "--nocapture",
            ])
            .env(ATTEMPT, format!("{} {index}", thread.name()))
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&tried.stderr);
        let what = format!("{name} by {thread:?}: {:?} {said}", tried.status);
        assert_eq!(tried.status.code(), Some(FORBIDDEN_CODE), "{what}");
        let expected = format!(
            "{FORBIDDEN_CALL} {name} ({number}) of a {} thread, arguments",
            thread.name()
        );
        assert!(said.contains(&expected), "{what}");
    }
}

#[test]
fn every_filter_fits_the_kernel_and_allows_no_more_than_the_first() {
    let first = Thread::ALL.map(|thread| compile(thread).unwrap().len());
    assert!(
        first.iter().all(|length| *length <= first[0] && *length < 4096),
        "{first:?}"
    );
}
