//! A small init for a container, as `docker run --init` adds one: PID 1 that forwards signals to the program and reaps orphans.
//!
//! It is the container's first process with all its limits in force: the user, capabilities, seccomp filter and namespaces of the program,
//! which it starts as its child. It ends with the program and passes its exit status on.

use rustix::process::{DumpableBehavior, WaitOptions};

use super::fork::{self, fork};

/// Exit status of a process that a signal has killed: this and the signal's number.
const KILLED_BY: i32 = 128;
/// If the program cannot be started at all.
const FAILED: i32 = 125;

/// Starts `program` as a child, which must not return, and waits for its end. `terminal`: stdin is the session's terminal.
pub fn supervise(terminal: bool, program: impl FnOnce()) -> ! {
    // Where the container has no PID namespace of its own, orphans would go to the agent.
    let _ = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
    // This process has a copy of the agent's memory, which the program must not read. Executing a program undoes this in the child.
    let _ = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable);
    // Blocked signals are queued until they are waited for, also those that PID 1 would otherwise ignore.
    let all = fork::block_signals();
    let child = fork(|| {
        enter_own_group(terminal);
        fork::reset_signals();
        program();
    });
    match child {
        Ok(child) => {
            // The agent learns that the program was executed when its own end of the status socket is the last.
            fork::close_all_but(Vec::new());
            forward_until_end(child, &all)
        }
        Err(_) => fork::exit(FAILED),
    }
}

/// Gives the program a process group, and the terminal to it: Ctrl-C is for the program, not for its init.
fn enter_own_group(terminal: bool) {
    // A failure leaves the program in the group of its init, where it runs as well.
    let _ = rustix::process::setpgid(None, None);
    if terminal {
        let _ = rustix::termios::tcsetpgrp(rustix::stdio::stdin(), rustix::process::getpid());
    }
}

fn forward_until_end(child: i32, signals: &fork::Signals) -> ! {
    loop {
        match fork::wait_signal(signals) {
            libc::SIGCHLD => reap(child),
            // Only for this process: it has no terminal to read or write.
            libc::SIGTTIN | libc::SIGTTOU => {}
            signal => fork::send_signal(child, signal),
        }
    }
}

/// Reaps all that have ended. Ends this process if `child` is among them.
fn reap(child: i32) {
    while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
        if pid.as_raw_nonzero().get() == child && !status.stopped() {
            fork::exit(exit_status(status.exit_status(), status.terminating_signal()));
        }
    }
}

fn exit_status(code: Option<i32>, signal: Option<i32>) -> i32 {
    code.or(signal.map(|signal| KILLED_BY + signal)).unwrap_or(FAILED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_status_is_as_a_shell_tells_it() {
        assert_eq!(exit_status(Some(3), None), 3);
        assert_eq!(exit_status(None, Some(15)), 143);
        assert_eq!(exit_status(None, None), FAILED);
    }
}
