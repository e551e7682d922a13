//! Stops workloads for a freeze of the whole guest, and continues them afterwards.
//!
//! Invariant: from [`Stopped::all`] to its release, no workload executes an instruction of its own, and no
//! process is created, started, paused or removed, because the sandbox's `activity` lock is held, for which
//! every such call waits. A container that its user has paused stays paused.

use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::runtime::Handle;
use tokio::sync::OwnedRwLockWriteGuard;

use crate::container::Container;
use crate::container::cgroup::Cgroup;
use crate::error::{Error, Result, WithContext};
use crate::sandbox::Sandbox;
use crate::{info, warning};

/// Limit for calls in progress to complete, and again for processes to stop.
const TIMEOUT: Duration = Duration::from_secs(10);
/// After this time, a process that sleeps in the kernel counts as stopped.
const SLEEPERS: Duration = Duration::from_millis(50);

/// Workloads that are stopped while this exists; [`Stopped::release`] or dropping it continues them.
#[derive(Debug)]
pub struct Stopped {
    containers: Vec<Arc<Container>>,
    _motion: OwnedRwLockWriteGuard<()>,
}

impl Stopped {
    /// Stops all workloads. Blocks, within limits, so it must not be called on the runtime's own thread. If it
    /// fails, all workloads continue.
    pub fn all(sandbox: &Sandbox, runtime: &Handle) -> Result<Self> {
        let activity = match sandbox.activity.clone().try_write_owned() {
            Ok(activity) => activity,
            Err(_busy) => runtime
                .block_on(async {
                    tokio::time::timeout(TIMEOUT, sandbox.activity.clone().write_owned()).await
                })
                .map_err(|_| {
                    Error::State(format!(
                        "a container is still being made, started or removed after {} s",
                        TIMEOUT.as_secs()
                    ))
                })?,
        };
        let mut stopped = Stopped {
            containers: Vec::new(),
            _motion: activity,
        };
        for container in sandbox.all() {
            if container.cgroup.is_told_to_freeze()? {
                continue;
            }
            stopped.containers.push(container.clone());
            container.cgroup.freeze(true)?;
        }
        let end = Instant::now() + TIMEOUT;
        for container in &stopped.containers {
            wait_until_still(&container.cgroup, end)
                .map_err(|e| Error::State(format!("container {}: {e}", container.id)))?;
        }
        info!("{} containers stopped", stopped.containers.len());
        Ok(stopped)
    }

    /// Continues all workloads.
    pub fn release(mut self) -> Result<()> {
        let mut failure = None;
        for container in std::mem::take(&mut self.containers) {
            if let Err(e) = container.cgroup.freeze(false) {
                failure = Some(e);
            }
        }
        failure.map_or(Ok(()), Err)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        for container in &self.containers {
            if let Err(e) = container.cgroup.freeze(false) {
                warning!("container {} stays frozen: {e}", container.id);
            }
        }
    }
}

/// Waits until no process of a cgroup that is being frozen can execute an instruction in user mode.
///
/// The kernel reports `frozen` once every thread is in its freezer trap. A thread in an uninterruptible sleep
/// (such as a read of the root file system that waits for the host) enters the trap only after that, but
/// instead of returning to user mode. So a cgroup without a runnable thread is as good as frozen.
fn wait_until_still(cgroup: &Cgroup, end: Instant) -> Result<()> {
    let events = cgroup.open_events("cgroup.events")?;
    let mut patience = SLEEPERS;
    loop {
        // Reading re-arms the kernel's notification.
        let _ = rustix::io::pread(&events, &mut [0u8; 128], 0);
        let now = cgroup.events();
        if now.frozen || !now.populated {
            return Ok(());
        }
        let mut polled = [PollFd::new(&events, PollFlags::PRI)];
        let most = Timespec {
            tv_sec: 0,
            tv_nsec: patience.as_nanos() as i64,
        };
        match poll(&mut polled, Some(&most)) {
            Ok(0) => {
                let runnable = runnable(cgroup);
                if runnable.is_empty() {
                    return Ok(());
                }
                if Instant::now() >= end {
                    return Err(Error::State(format!(
                        "processes {runnable:?} did not stop within {} s",
                        TIMEOUT.as_secs()
                    )));
                }
                patience = (patience * 2).min(Duration::from_millis(800));
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e).with_context(|| "wait for a cgroup to freeze".into()),
        }
    }
}

/// Processes that have a running or runnable thread.
fn runnable(cgroup: &Cgroup) -> Vec<i32> {
    let runs = |pid: &i32| {
        let tasks = fs::read_dir(format!("/proc/{pid}/task"))
            .into_iter()
            .flatten()
            .flatten();
        tasks.into_iter().any(|task| {
            fs::read_to_string(task.path().join("stat")).is_ok_and(|stat| state(&stat) == Some('R'))
        })
    };
    cgroup.processes().into_iter().filter(runs).collect()
}

/// The state letter in a `stat` file (proc(5)). It follows the command's name, which may contain anything.
fn state(stat: &str) -> Option<char> {
    stat.rsplit_once(") ")?.1.chars().next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_state_is_read_with_any_name() {
        assert_eq!(state("1 (a) R 0 1"), Some('R'));
        assert_eq!(state("1 (x) R (y) D 0"), Some('D'));
        assert_eq!(state("1 (x"), None);
    }
}
