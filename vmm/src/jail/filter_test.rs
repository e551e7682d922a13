use std::process::Command;

use super::*;
use crate::jail::signals::install;
use thaw_protocol::control::{FORBIDDEN_CALL, FORBIDDEN_CODE};

/// In the environment of [`one_call`]: a stage's name, a thread's name and a call's place in [`ATTEMPTS`].
const ATTEMPT: &str = "THAW_TEST_ATTEMPT";

/// A call that no list has, or only that of the first stage: name in the log, number, first three arguments, when.
type Attempt = (&'static str, i64, [i64; 3], &'static [Stage]);

use Stage::Made;

const NEVER: &[Stage] = &Stage::ALL;
const MADE: &[Stage] = &[Made];
const EXEC: i64 = libc::PROT_EXEC as i64 | libc::PROT_READ as i64;

#[rustfmt::skip]
const ATTEMPTS: &[Attempt] = &[
    ("open", libc::SYS_open, [0, 0, 0], NEVER),
    ("openat", libc::SYS_openat, [-100, 0, 0], NEVER),
    ("openat2", libc::SYS_openat2, [-100, 0, 0], NEVER),
    ("socket", libc::SYS_socket, [1, 1, 0], NEVER),
    ("connect", libc::SYS_connect, [0, 0, 0], NEVER),
    ("bind", libc::SYS_bind, [0, 0, 0], NEVER),
    ("execve", libc::SYS_execve, [0, 0, 0], NEVER),
    ("fork", libc::SYS_fork, [0, 0, 0], NEVER),
    ("clone", libc::SYS_clone, [libc::SIGCHLD as i64, 0, 0], NEVER),
    ("ptrace", libc::SYS_ptrace, [0, 0, 0], NEVER),
    ("kill", libc::SYS_kill, [1, 0, 0], NEVER),
    ("tgkill", libc::SYS_tgkill, [1, 1, 34], NEVER),
    ("mmap", libc::SYS_mmap, [0, 4096, EXEC], NEVER),
    ("mprotect", libc::SYS_mprotect, [0, 4096, EXEC], NEVER),
    ("memfd_create", libc::SYS_memfd_create, [0, 0, 0], NEVER),
    ("io_uring_setup", libc::SYS_io_uring_setup, [1, 0, 0], NEVER),
    ("unshare", libc::SYS_unshare, [0, 0, 0], NEVER),
    ("mount", libc::SYS_mount, [0, 0, 0], NEVER),
    ("bpf", libc::SYS_bpf, [0, 0, 0], NEVER),
    // TIOCSTI.
    ("ioctl", libc::SYS_ioctl, [2, 0x5412, 0], NEVER),
    ("fcntl", libc::SYS_fcntl, [0, libc::F_SETOWN as i64, 0], NEVER),
    ("prctl", libc::SYS_prctl, [libc::PR_SET_DUMPABLE as i64, 1, 0], NEVER),
    ("unknown", 100_000, [0, 0, 0], NEVER),
    ("clone", libc::SYS_clone, [(libc::CLONE_THREAD | libc::CLONE_VM | libc::CLONE_SIGHAND) as i64, 0, 0], MADE),
    ("seccomp", libc::SYS_seccomp, [libc::SECCOMP_SET_MODE_FILTER as i64, 0, 0], MADE),
    ("capset", libc::SYS_capset, [0, 0, 0], MADE),
    ("ioctl", libc::SYS_ioctl, [0, 0xae01, 0], MADE),
    ("ioctl", libc::SYS_ioctl, [0, 0x4020_ae76, 0], MADE),
    ("eventfd2", libc::SYS_eventfd2, [0, 0, 0], MADE),
    ("prctl", libc::SYS_prctl, [libc::PR_SET_NAME as i64, 0, 0], MADE),
    ("set_robust_list", libc::SYS_set_robust_list, [0, 0, 0], MADE),
];

/// Not a test: the process that tries one call, run by those below.
#[test]
#[ignore = "run by the other tests"]
fn one_call() {
    let Ok(attempt) = std::env::var(ATTEMPT) else {
        return;
    };
    let mut words = attempt.split(' ');
    let mut word = || words.next().unwrap();
    let sealed = word() == "Made";
    let name = word();
    let thread = Thread::ALL
        .into_iter()
        .find(|thread| thread.name() == name)
        .unwrap();
    let (_, number, [a, b, c], _) = ATTEMPTS[word().parse::<usize>().unwrap()];
    install().unwrap();
    confine_process().unwrap();
    // Threads that were there before the seal: it must reach them.
    let (may_try, wait) = std::sync::mpsc::channel();
    let expected = threads::expect();
    let trying = std::thread::spawn(move || {
        expected.is(thread);
        wait.recv().unwrap();
        // SAFETY: no argument is a pointer that the call could use. If the filter allowed it, it would fail, or map memory
        // that no code refers to.
        unsafe { libc::syscall(number, a, b, c, -1, -1, 0) };
        // SAFETY: ends the process: it was not stopped.
        unsafe { libc::_exit(0) }
    });
    if sealed {
        seal();
    }
    may_try.send(()).unwrap();
    let _ = trying.join();
}

#[test]
fn a_forbidden_call_ends_the_process_and_the_log_names_it() {
    for (index, (name, number, _, stages)) in ATTEMPTS.iter().enumerate() {
        for stage in *stages {
            let thread = Thread::ALL[index % Thread::ALL.len()];
            let tried = Command::new(std::env::current_exe().unwrap())
                .args([
                    "--exact",
                    "jail::filter::tests::one_call",
                    "--ignored",
                    "--nocapture",
                ])
                .env(ATTEMPT, format!("{stage:?} {} {index}", thread.name()))
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&tried.stderr);
            let what = format!("{name} by {thread:?} at {stage:?}: {:?} {said}", tried.status);
            assert_eq!(tried.status.code(), Some(FORBIDDEN_CODE), "{what}");
            let expected = format!(
                "{FORBIDDEN_CALL} {name} ({number}) of a {} thread, arguments",
                thread.name()
            );
            assert!(said.contains(&expected), "{what}");
        }
    }
}

#[test]
fn every_filter_fits_the_kernel_and_allows_no_more_than_the_first() {
    let [start, made] = Stage::ALL.map(|stage| compile(stage).unwrap().len());
    assert!(made <= start && start < 4096, "{made} {start}");
}
