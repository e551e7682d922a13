//! A process of a task: its phase, its streams and its exit status.
//!
//! Invariants: the phase only advances, Created, Starting, Running, Ended, and may skip. Only the caller that
//! sets Ended first publishes the exit. A process whose start failed is not published. No lock is held during
//! a call to the guest.

use std::sync::{Mutex, MutexGuard};

use thaw_protocol::shim::{EnumOrUnknown, Timestamp, task_types::Status};
use thaw_sys::lock::Lock;
use tokio::sync::watch;

use crate::agent::ProcessId;
use crate::error::{Error, Result};
use crate::stdio::{Stdio, Streams};

/// Exit status of a process whose machine was killed.
pub const KILLED: u32 = 128 + libc::SIGKILL as u32;

/// How a process ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Exit {
    /// Exit code, or 128 plus the number of the signal that ended it.
    pub status: u32,
    pub at: Timestamp,
}

impl Exit {
    pub fn now(status: u32) -> Exit {
        Exit {
            status,
            at: Timestamp::now(),
        }
    }
}

/// Where a process is in its life.
#[derive(Clone, Debug, PartialEq)]
pub enum Phase {
    Created,
    /// The guest was asked to start it.
    Starting,
    Running,
    Ended(Exit),
}

/// A container's init process, or an exec.
#[derive(Debug)]
pub struct Process {
    /// Its name in the guest.
    pub id: ProcessId,
    /// containerd's id of an exec; empty for the init process.
    pub exec_id: String,
    pub stdio: Stdio,
    phase: watch::Sender<Phase>,
    streams: Mutex<Option<Streams>>,
}

impl Process {
    pub fn new(id: ProcessId, exec_id: &str, stdio: Stdio) -> Process {
        Process {
            id,
            exec_id: exec_id.into(),
            stdio,
            phase: watch::Sender::new(Phase::Created),
            streams: Mutex::default(),
        }
    }

    pub fn phase(&self) -> Phase {
        self.phase.borrow().clone()
    }

    /// The phase as containerd names it.
    pub fn status(&self) -> EnumOrUnknown<Status> {
        let status = match *self.phase.borrow() {
            Phase::Created | Phase::Starting => Status::CREATED,
            Phase::Running => Status::RUNNING,
            Phase::Ended(_) => Status::STOPPED,
        };
        status.into()
    }

    /// Sets the phase to Starting.
    ///
    /// # Errors
    /// [`Error::State`] if the process was started before.
    pub fn begin(&self) -> Result<()> {
        let begun = self.phase.send_if_modified(|phase| {
            let begins = *phase == Phase::Created;
            if begins {
                *phase = Phase::Starting;
            }
            begins
        });
        match begun {
            true => Ok(()),
            false => Err(Error::State(format!(
                "process {} was already started",
                self.id.exec
            ))),
        }
    }

    /// Sets the phase to Running.
    pub fn started(&self) {
        self.phase.send_if_modified(|phase| {
            let runs = *phase == Phase::Starting;
            if runs {
                *phase = Phase::Running;
            }
            runs
        });
    }

    /// Sets the phase to Ended, also for a process that will never start. Returns whether this was the first
    /// call; that caller publishes the exit.
    pub fn end(&self, exit: Exit) -> bool {
        let first = self.phase.send_if_modified(|phase| {
            let first = !matches!(phase, Phase::Ended(_));
            if first {
                *phase = Phase::Ended(exit);
            }
            first
        });
        if first && let Some(streams) = &*self.streams() {
            streams.end_input();
        }
        first
    }

    /// Waits until the process is not Starting, so that its exit is published after its start.
    pub async fn settled(&self) {
        let mut phase = self.phase.subscribe();
        let _ = phase.wait_for(|phase| *phase != Phase::Starting).await;
    }

    /// Waits for the process to end.
    pub async fn exit(&self) -> Exit {
        let mut phase = self.phase.subscribe();
        let ended = phase.wait_for(|phase| matches!(phase, Phase::Ended(_))).await;
        match ended.as_deref() {
            Ok(Phase::Ended(exit)) => exit.clone(),
            // Unreachable: this process holds the sender.
            _ => Exit::now(KILLED),
        }
    }

    /// Its streams, which it has once the guest has created it.
    pub fn streams(&self) -> MutexGuard<'_, Option<Streams>> {
        self.streams.locked()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process() -> Process {
        let id = ProcessId {
            container: "c".into(),
            exec: "c".into(),
        };
        Process::new(id, "", Stdio::default())
    }

    #[tokio::test]
    async fn it_is_started_once_and_ends_once_after_its_start() {
        let process = process();
        process.begin().unwrap();
        assert!(matches!(process.begin(), Err(Error::State(_))));
        let mut settled = Box::pin(process.settled());
        tokio::select! {
            biased;
            () = settled.as_mut() => panic!("it is being started"),
            () = std::future::ready(()) => {}
        }
        process.started();
        settled.await;
        assert!(process.end(Exit::now(3)));
        assert!(!process.end(Exit::now(4)));
        assert_eq!(process.exit().await.status, 3);
        process.started();
        assert!(matches!(process.phase(), Phase::Ended(_)));
    }
}
