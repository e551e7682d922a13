//! The priority of threads that make and destroy resources: lower than that of threads whose work a caller waits for.
//!
//! A process that such a thread starts inherits the low priority, and gets the usual one when it is complete ([`raise`]). Invariant: a
//! thread is lowered only if this process may raise the priority of others again, so no sandbox runs with the low one.

use std::cell::Cell;
use std::sync::OnceLock;

use rustix::process::{Pid, getpriority_process, setpriority_pgrp, setpriority_process};

/// How much nicer these threads are. With 10 they get a tenth of a processor that others want too, and so do not hold a lock for long.
const NICER: i32 = 10;

thread_local! {
    /// The priority of this thread before it was lowered.
    static USUAL: Cell<Option<i32>> = const { Cell::new(None) };
}

/// Lowers the priority of this thread, for as long as it lives.
pub(crate) fn lower() {
    if !may_raise() {
        return;
    }
    let lowered = getpriority_process(None).and_then(|usual| {
        setpriority_process(None, usual + NICER)?;
        USUAL.set(Some(usual));
        Ok(())
    });
    if let Err(e) = lowered {
        tracing::debug!("a pool's thread keeps the priority of others: {e}");
    }
}

/// Gives all threads of a process group that this thread started the priority that this thread had before it was lowered.
pub(crate) fn raise(leader: i32) {
    let (Some(usual), Some(group)) = (USUAL.get(), Pid::from_raw(leader)) else {
        return;
    };
    match setpriority_pgrp(Some(group), usual) {
        // It has ended.
        Ok(()) | Err(rustix::io::Errno::SRCH) => {}
        Err(e) => tracing::warn!("process {leader} keeps the priority of the thread that started it: {e}"),
    }
}

/// Whether this process may raise a priority. Tried on a thread of its own, which might be unable to raise itself again.
fn may_raise() -> bool {
    static MAY: OnceLock<bool> = OnceLock::new();
    let tried = || {
        let usual = getpriority_process(None)?;
        setpriority_process(None, usual + 1)?;
        setpriority_process(None, usual)
    };
    *MAY.get_or_init(|| matches!(std::thread::spawn(tried).join(), Ok(Ok(()))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::CommandExt;

    #[test]
    fn lowered_thread_starts_processes_that_are_raised_later() {
        let ours = getpriority_process(None).unwrap();
        let lowered = std::thread::spawn(move || {
            lower();
            let mut sleeps = std::process::Command::new("sleep");
            let mut child = sleeps.arg("60").process_group(0).spawn().unwrap();
            let (thread, pid) = (getpriority_process(None).unwrap(), child.id() as i32);
            let born = getpriority_process(Pid::from_raw(pid)).unwrap();
            raise(pid);
            let raised = getpriority_process(Pid::from_raw(pid)).unwrap();
            child.kill().unwrap();
            child.wait().unwrap();
            (thread, born, raised)
        });
        let low = match may_raise() {
            true => (ours + NICER).min(19),
            false => ours,
        };
        assert_eq!(lowered.join().unwrap(), (low, low, ours));
        assert_eq!(getpriority_process(None).unwrap(), ours);
    }
}
