use std::process::Command;

use super::*;
use crate::jail::signals::install;
use thaw_protocol::control::{FORBIDDEN_CALL, FORBIDDEN_CODE};

/// Environment variable of [`one_call`]: a thread's name, and an index of [`ATTEMPTS`].
const ATTEMPT: &str = "THAW_TEST_ATTEMPT";

/// A call that is not on the list: name in the log, number, first three arguments.
type Attempt = (&'static str, i64, [i64; 3]);

const EXEC: i64 = libc::PROT_EXEC as i64 | libc::PROT_READ as i64;

#[rustfmt::skip]
const ATTEMPTS: &[Attempt] = &[
    ("open", libc::SYS_open, [0, 0, 0]),
    ("openat", libc::SYS_openat, [-100, 0, 0]),
    ("openat2", libc::SYS_openat2, [-100, 0, 0]),
    ("socket", libc::SYS_socket, [1, 1, 0]),
    ("connect", libc::SYS_connect, [0, 0, 0]),
    ("bind", libc::SYS_bind, [0, 0, 0]),
    ("execve", libc::SYS_execve, [0, 0, 0]),
    ("fork", libc::SYS_fork, [0, 0, 0]),
    ("clone", libc::SYS_clone, [libc::SIGCHLD as i64, 0, 0]),
    ("ptrace", libc::SYS_ptrace, [0, 0, 0]),
    ("kill", libc::SYS_kill, [1, 0, 0]),
    ("tgkill", libc::SYS_tgkill, [1, 1, 34]),
    ("mmap", libc::SYS_mmap, [0, 4096, EXEC]),
    ("mprotect", libc::SYS_mprotect, [0, 4096, EXEC]),
    ("memfd_create", libc::SYS_memfd_create, [0, 0, 0]),
    ("io_uring_setup", libc::SYS_io_uring_setup, [1, 0, 0]),
    ("unshare", libc::SYS_unshare, [0, 0, 0]),
    ("mount", libc::SYS_mount, [0, 0, 0]),
    ("bpf", libc::SYS_bpf, [0, 0, 0]),
    // TIOCSTI.
    ("ioctl", libc::SYS_ioctl, [2, 0x5412, 0]),
    ("fcntl", libc::SYS_fcntl, [0, libc::F_SETOWN as i64, 0]),
    ("prctl", libc::SYS_prctl, [libc::PR_SET_DUMPABLE as i64, 1, 0]),
    ("unknown", 100_000, [0, 0, 0]),
    ("clone", libc::SYS_clone, [(libc::CLONE_THREAD | libc::CLONE_VM | libc::CLONE_SIGHAND) as i64, 0, 0]),
    ("seccomp", libc::SYS_seccomp, [libc::SECCOMP_SET_MODE_FILTER as i64, 0, 0]),
    ("capset", libc::SYS_capset, [0, 0, 0]),
    ("ioctl", libc::SYS_ioctl, [0, 0xae01, 0]),
    ("ioctl", libc::SYS_ioctl, [0, 0x4020_ae76, 0]),
    ("eventfd2", libc::SYS_eventfd2, [0, 0, 0]),
    ("prctl", libc::SYS_prctl, [libc::PR_SET_NAME as i64, 0, 0]),
    ("set_robust_list", libc::SYS_set_robust_list, [0, 0, 0]),
];

/// Not a test, but the process that tries one call. The tests below run it.
#[test]
#[ignore = "run by the other tests"]
fn one_call() {
    let Ok(attempt) = std::env::var(ATTEMPT) else {
        return;
    };
    let mut words = attempt.split(' ');
    let mut word = || words.next().unwrap();
    let name = word();
    let thread = Thread::ALL
        .into_iter()
        .find(|thread| thread.name() == name)
        .unwrap();
    let (_, number, [a, b, c]) = ATTEMPTS[word().parse::<usize>().unwrap()];
    install().unwrap();
    will_seal();
    // This thread exists before the seal, which must reach it too.
    let (may_try, wait) = std::sync::mpsc::channel();
    let expected = threads::expect();
    let trying = std::thread::spawn(move || {
        expected.is(thread);
        wait.recv().unwrap();
        // SAFETY: no argument is a pointer that the call could use. If the filter allowed it, it would fail, or map memory
        // that no code refers to.
        unsafe { libc::syscall(number, a, b, c, -1, -1, 0) };
        // SAFETY: ends the process, which the filter did not stop.
        unsafe { libc::_exit(0) }
    });
    seal();
    may_try.send(()).unwrap();
    let _ = trying.join();
}

#[test]
fn a_forbidden_call_ends_the_process_and_the_log_names_it() {
    for (index, (name, number, _)) in ATTEMPTS.iter().enumerate() {
        let thread = Thread::ALL[index % Thread::ALL.len()];
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
fn the_filter_fits_the_kernel() {
    // BPF_MAXINSNS of linux/bpf_common.h.
    assert!(compile().unwrap().len() <= 4096);
}
