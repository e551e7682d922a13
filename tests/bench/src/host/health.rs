//! Whether the host is well while a crowd ends, and afterwards.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::report::Report;

/// How long the kernel may take to free what a crowd leaves.
const PATIENCE: Duration = Duration::from_secs(60);
/// Between two looks.
const LOOK: Duration = Duration::from_millis(50);
/// Most kernel workers of a queue shared with others that may wait at once. Such a queue runs 1,024 works on each CPU; once all
/// of them wait for one that is queued behind them, the host is lost. A crowd that comes half as far is the last.
const MOST_WAITING: usize = 512;
/// The queue that alone does not count: KVM's own, on which one work for each irqfd of a VM that ended waits for a grace period
/// of SRCU, which does not go through this queue (`irqfd_shutdown`, virt/kvm/eventfd.c).
const IRQFDS: &str = "kvm-irqfd-cleanup";

/// Waits until no thaw-vmm of this process is left and no task is in uninterruptible sleep; how long that took.
///
/// # Errors
/// The processes that are left, and the stacks of those that are stuck, when the host is not well in time.
pub fn recovered() -> io::Result<Duration> {
    let start = Instant::now();
    loop {
        let unwell = unwell()?;
        if unwell.is_empty() {
            return Ok(start.elapsed());
        }
        if start.elapsed() > PATIENCE {
            return Err(io::Error::other(format!(
                "{} processes are left or stuck after {PATIENCE:?}: {}",
                unwell.len(),
                unwell
                    .iter()
                    .take(8)
                    .map(String::as_str)
                    .collect::<Vec<_>>()
                    .join("; ")
            )));
        }
        std::thread::sleep(LOOK);
    }
}

/// Counts, while it lives, how many workers of the kernel wait.
pub struct Watch {
    stop: Arc<AtomicBool>,
    watching: JoinHandle<Waiting>,
}

/// Kernel workers that wait at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waiting {
    /// Of queues that all the kernel shares.
    pub shared: usize,
    /// Of KVM's queue for irqfds.
    pub irqfds: usize,
}

impl Waiting {
    /// Samples both, of what is named.
    pub fn sample(self, report: &mut Report, of: &str) {
        for (queue, count) in [("shared queues", self.shared), ("KVM's irqfds", self.irqfds)] {
            let name = format!("{of}: kernel workers of {queue} that waited at once");
            report.sample(&name, "tasks", count as f64);
        }
    }
}

impl Watch {
    pub fn begin() -> Watch {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let watching = std::thread::spawn(move || {
            let mut most = Waiting::default();
            while !stopped.load(Ordering::Acquire) {
                let now = waiting_workers();
                most.shared = most.shared.max(now.shared);
                most.irqfds = most.irqfds.max(now.irqfds);
                std::thread::sleep(LOOK);
            }
            most
        });
        Watch { stop, watching }
    }

    /// The most of each that were seen waiting at once.
    ///
    /// # Errors
    /// When those of shared queues were so many that a larger crowd could block the host.
    pub fn most(self) -> io::Result<Waiting> {
        self.stop.store(true, Ordering::Release);
        let most = self
            .watching
            .join()
            .map_err(|_| io::Error::other("the watching thread panicked"))?;
        match most.shared {
            0..MOST_WAITING => Ok(most),
            shared => Err(io::Error::other(format!(
                "{shared} kernel workers of shared queues waited at once; {MOST_WAITING} are too near the 1,024 of a queue"
            ))),
        }
    }
}

fn waiting_workers() -> Waiting {
    let mut waiting = Waiting::default();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        // Gone since it was listed, or no process.
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else {
            continue;
        };
        match name_and_state(&stat) {
            Some((name, 'D')) if name.starts_with("kworker") => match name.ends_with(IRQFDS) {
                true => waiting.irqfds += 1,
                false => waiting.shared += 1,
            },
            _ => {}
        }
    }
    waiting
}

/// One line for each process that should not be there, or waits where nothing can interrupt it.
fn unwell() -> io::Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let path = entry.path();
        // Gone since it was listed, or no process.
        let Ok(stat) = std::fs::read_to_string(path.join("stat")) else {
            continue;
        };
        if let Some((name, state)) = name_and_state(&stat)
            && (state == 'D' || name == "thaw-vmm")
        {
            found.push(format!("{} {name} {state}{}", path.display(), stack(&path)));
        }
    }
    Ok(found)
}

/// From /proc/PID/stat (proc_pid_stat(5)): the name is in parentheses and may have any character.
fn name_and_state(stat: &str) -> Option<(&str, char)> {
    let (head, tail) = stat.rsplit_once(')')?;
    let name = head.split_once('(')?.1;
    Some((name, tail.trim_start().chars().next()?))
}

/// Where in the kernel it waits, if that may be read.
fn stack(process: &Path) -> String {
    let stack = std::fs::read_to_string(process.join("stack")).unwrap_or_default();
    stack
        .lines()
        .take(3)
        .map(|line| format!(" {}", line.trim()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_parentheses_does_not_hide_the_state() {
        assert_eq!(name_and_state("7 (a) D (b)) D 1 2"), Some(("a) D (b)", 'D')));
        assert_eq!(name_and_state("7 (thaw-vmm) S 1"), Some(("thaw-vmm", 'S')));
        assert_eq!(name_and_state("nothing"), None);
    }
}
