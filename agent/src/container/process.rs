//! A launched process: its PID, streams and exit.

use std::os::fd::OwnedFd;

use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open, pidfd_send_signal};

use super::journal::Journal;
use super::launch::{Launch, Launched, Place, Status, launch};
use super::seccomp::Filter;
use super::spec::ProcessSpec;
use crate::error::{Error, Result, WithContext};
use crate::reaper::{Child, ExitCode, Reaper};
use crate::stdio::{Stdio, pipes};
use std::sync::{Arc, OnceLock};

/// A launched process.
#[derive(Debug)]
pub struct Process {
    pub child: Child,
    pub stdio: Stdio,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// Its last output, if the agent reads it.
    pub journal: OnceLock<Arc<Journal>>,
    /// Signals are sent to this: a PID may belong to another process by now.
    pidfd: OwnedFd,
}

impl Process {
    /// Launches a process. The status reports when its program is executed. Blocks. Must be called within the
    /// runtime.
    pub fn launch(
        reaper: &Arc<Reaper>,
        process: &ProcessSpec,
        seccomp: Option<&Filter>,
        cgroup: OwnedFd,
        place: Place<'_>,
    ) -> Result<(Self, Status)> {
        let (theirs, ours) = if process.terminal {
            (None, None)
        } else {
            pipes().map(|(t, o)| (Some(t), Some(o)))?
        };
        let mut hold = Some(reaper.hold());
        let mut child = None;
        let launched = launch(
            Launch {
                process,
                seccomp,
                cgroup,
                stdio: theirs,
                place,
            },
            |pid| {
                // The exit status is kept at least until the hold is dropped, so the PID belongs to no other
                // process.
                child = hold
                    .as_ref()
                    .map(|hold| (reaper.expect(hold, pid), Pid::from_raw(pid).map(open)));
                hold = None;
            },
        );
        drop(hold);
        let Launched { console, status } = launched?;
        let stdio = match (ours, console) {
            (Some(ours), _) => Stdio::of_pipes(ours)?,
            (None, Some(master)) => Stdio::of_terminal(master)?,
            (None, None) => return Err(Error::State("the process has no terminal".into())),
        };
        match child {
            Some((child, Some(pidfd))) => Ok((
                Process {
                    child,
                    stdio,
                    command: process.args.clone(),
                    journal: OnceLock::new(),
                    pidfd: pidfd?,
                },
                status,
            )),
            _ => Err(Error::State("the process was set up without a PID".into())),
        }
    }

    /// Its exit code, if it has ended.
    pub fn exit_code(&self) -> Option<ExitCode> {
        self.child.exit_code()
    }

    /// Waits for its end.
    pub async fn wait(&self) -> ExitCode {
        self.child.wait().await
    }

    /// Its pidfd, for joining its namespaces.
    pub fn pidfd(&self) -> Result<OwnedFd> {
        self.pidfd.try_clone().with_context(|| "copy a pidfd".into())
    }

    /// Kills its process group, which [`launch`](super::launch) makes: itself, and the children that have begun no group of their own.
    /// Does nothing if it has ended.
    pub fn kill_group(&self, reaper: &Arc<Reaper>) -> Result<()> {
        // Held so that its PID belongs to no other process.
        let _hold = reaper.hold();
        let group = Pid::from_raw(self.child.pid).filter(|_| self.exit_code().is_none());
        match group.map(|group| kill_process_group(group, Signal::KILL)) {
            None | Some(Err(rustix::io::Errno::SRCH)) => Ok(()),
            Some(killed) => killed.with_context(|| "kill a process group".into()),
        }
    }

    /// Sends a signal; 0 only checks that the process exists.
    pub fn signal(&self, number: u32) -> Result<()> {
        let gone = || Error::State("the process has ended".into());
        if self.exit_code().is_some() {
            return Err(gone());
        }
        if number == 0 {
            return Ok(());
        }
        match pidfd_send_signal(&self.pidfd, signal(number)?) {
            Err(rustix::io::Errno::SRCH) => Err(gone()),
            other => other.with_context(|| format!("send signal {number}")),
        }
    }
}

fn open(pid: Pid) -> Result<OwnedFd> {
    pidfd_open(pid, PidfdFlags::empty()).with_context(|| "open a pidfd".into())
}

/// A signal by its number, including real-time signals.
pub fn signal(number: u32) -> Result<Signal> {
    let unknown = || Error::Invalid(format!("there is no signal {number}"));
    let n = i32::try_from(number)
        .ok()
        .filter(|n| (1..=64).contains(n))
        .ok_or_else(unknown)?;
    if let Some(named) = Signal::from_named_raw(n) {
        return Ok(named);
    }
    // SAFETY: real-time signals are only sent here, to other processes; glibc's reserved ones mean nothing to a pidfd.
    Ok(unsafe { Signal::from_raw_unchecked(n) })
}
