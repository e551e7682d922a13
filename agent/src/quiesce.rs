//! Workloads stopped for a freeze of the whole guest, and let go afterwards.
//!
//! The invariant: from [`Stopped::all`] to its release no workload executes an instruction of its own, and no process
//! is made, started, paused or removed: the sandbox's `motion` lock is held, for which every such call waits. A container
//! that its user had paused is not touched, so it stays paused.

use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::runtime::Handle;
use tokio::sync::OwnedRwLockWriteGuard;

use crate::container::Container;
use crate::container::cgroup::Cgroup;
use crate::error::{Error, For, Result};
use crate::sandbox::Sandbox;
use crate::{info, warning};

/// How long calls in flight, and then processes, may take to come to a stop.
const PATIENCE: Duration = Duration::from_secs(10);
/// After this, processes that sleep in the kernel need not come back from there first.
const SLEEPERS: Duration = Duration::from_millis(50);

/// Workloads that stand still while this is held; [`Stopped::release`] or dropping it lets them go.
#[derive(Debug)]
pub struct Stopped {
    containers: Vec<Arc<Container>>,
    _motion: OwnedRwLockWriteGuard<()>,
}

impl Stopped {
    /// Stops everything. Blocks, but not for ever; not on the runtime's own thread. On failure everything goes on.
    pub fn all(sandbox: &Sandbox, runtime: &Handle) -> Result<Self> {
        let motion = match sandbox.motion.clone().try_write_owned() {
            Ok(motion) => motion,
            Err(_busy) => runtime
                .block_on(async {
                    tokio::time::timeout(PATIENCE, sandbox.motion.clone().write_owned()).await
                })
                .map_err(|_| {
                    Error::State(format!(
                        "a container is still being made, started or removed after {} s",
                        PATIENCE.as_secs()
                    ))
                })?,
        };
        let mut stopped = Stopped {
            containers: Vec::new(),
            _motion: motion,
        };
        for container in sandbox.all() {
            if container.cgroup.is_told_to_freeze()? {
                continue;
            }
            stopped.containers.push(container.clone());
            container.cgroup.freeze(true)?;
        }
        let end = Instant::now() + PATIENCE;
        for container in &stopped.containers {
            wait_until_still(&container.cgroup, end)
                .map_err(|e| Error::State(format!("container {}: {e}", container.id)))?;
        }
        info!("{} containers stand still", stopped.containers.len());
        Ok(stopped)
    }

    /// Lets everything go on.
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

/// Waits until nothing in a cgroup that was told to freeze can execute an instruction in user mode.
///
/// The kernel says `frozen` once every thread is in its trap. A thread that sleeps in the kernel where no signal wakes it (a
/// read of the root file system that waits for the host) gets there only afterwards, but is marked: it enters the trap
/// instead of returning to user mode. So once no thread is runnable, it is as good.
fn wait_until_still(cgroup: &Cgroup, end: Instant) -> Result<()> {
    let events = cgroup.open_events("cgroup.events")?;
    let mut patience = SLEEPERS;
    loop {
        // Reading is what re-arms the kernel's notification.
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
                        PATIENCE.as_secs()
                    )));
                }
                patience = (patience * 2).min(Duration::from_millis(800));
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e).for_(|| "wait for a cgroup to freeze".into()),
        }
    }
}

/// Processes of which a thread runs or could run.
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

/// The state letter of a `stat` file (proc(5)): behind the command's name, which may hold anything.
fn state(stat: &str) -> Option<char> {
    stat.rsplit_once(") ")?.1.chars().next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_threads_state_is_read_whatever_its_name() {
        assert_eq!(state("1 (a) R 0 1"), Some('R'));
        assert_eq!(state("1 (x) R (y) D 0"), Some('D'));
        assert_eq!(state("1 (x"), None);
    }
}
