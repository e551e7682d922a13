//! Collects the exit statuses of all children, and reaps orphans.
//!
//! PID 1 inherits every process that loses its parent, so it waits for any child. A new child whose PID is not
//! known here yet must not be taken for an orphan, so nothing is reaped while a [`Hold`] exists.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::process::{WaitOptions, WaitStatus, wait};
use thaw_sys::lock::Lock;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Notify, watch};

use crate::error::{Result, WithContext};

/// A process's exit code, or 128 plus the number of the signal that killed it.
pub type ExitCode = i32;

/// A child process whose exit code the reaper keeps.
#[derive(Clone, Debug)]
pub struct Child {
    pub pid: i32,
    exit: watch::Receiver<Option<ExitCode>>,
}

impl Child {
    /// Its exit code, if it has ended. Until then its PID belongs to no other process.
    pub fn exit_code(&self) -> Option<ExitCode> {
        *self.exit.borrow()
    }

    /// Waits for its end.
    pub async fn wait(&self) -> ExitCode {
        let mut exit = self.exit.clone();
        // The sender lives as long as the agent.
        exit.wait_for(Option::is_some)
            .await
            .ok()
            .and_then(|code| *code)
            .unwrap_or(255)
    }
}

/// The children whose exit codes are waited for.
#[derive(Debug, Default)]
pub struct Reaper {
    state: Mutex<State>,
    released: Notify,
}

#[derive(Debug, Default)]
struct State {
    holds: usize,
    waiting: BTreeMap<i32, watch::Sender<Option<ExitCode>>>,
}

/// Nothing is reaped while this exists.
#[derive(Debug)]
pub struct Hold(Arc<Reaper>);

impl Drop for Hold {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.holds -= 1;
        if state.holds == 0 {
            self.0.released.notify_one();
        }
    }
}

impl Reaper {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.locked()
    }

    /// Stops reaping until the hold is dropped.
    pub fn hold(self: &Arc<Self>) -> Hold {
        self.state().holds += 1;
        Hold(self.clone())
    }

    /// Keeps the exit code of child `pid`. The [`Hold`] must be older than the child.
    pub fn expect(&self, _older: &Hold, pid: i32) -> Child {
        let (tx, exit) = watch::channel(None);
        self.state().waiting.insert(pid, tx);
        Child { pid, exit }
    }

    /// Reaps forever.
    pub async fn run(self: Arc<Self>) -> Result<()> {
        let mut children = signal(SignalKind::child()).with_context(|| "watch for SIGCHLD".into())?;
        loop {
            self.reap();
            tokio::select! {
                _ = children.recv() => {}
                () = self.released.notified() => {}
            }
        }
    }

    fn reap(&self) {
        let mut state = self.state();
        while state.holds == 0 {
            let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) else {
                return;
            };
            if let Some(waiting) = state.waiting.remove(&pid.as_raw_nonzero().get()) {
                waiting.send_replace(Some(exit_code(status)));
            }
        }
    }
}

fn exit_code(status: WaitStatus) -> ExitCode {
    status
        .exit_status()
        .or_else(|| status.terminating_signal().map(|s| 128 + s))
        .unwrap_or(255)
}
