//! Whether the host is well while a crowd ends, and afterwards.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::report::Report;

/// How long the kernel may take to free what a crowd leaves.
const PATIENCE: Duration = Duration::from_secs(60);
/// Between two looks.
const LOOK: Duration = Duration::from_millis(50);
/// Most kernel workers of one queue of one CPU, shared with others, that may wait at once before a larger crowd is tried. Such a
/// queue runs 1,024 works on each CPU; once all of them wait for one that is queued behind them, the host is lost. A crowd that comes
/// half as far is the last. The largest crowd may come farther: a VMM that ends frees one seccomp program, which is the one work of
/// it that can wait there (`bpf_prog_free_deferred`, for `pack_mutex`), and a thousand are fewer than 1,024.
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
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Waiting {
    /// Of one queue of one CPU, the fullest of those that all the kernel shares.
    pub shared: usize,
    /// Which queue that is, and where in the kernel one of its workers waits.
    pub fullest: String,
    /// Of KVM's queue for irqfds, on all CPUs.
    pub irqfds: usize,
}

impl Waiting {
    /// Samples both, of what is named.
    pub fn sample(&self, report: &mut Report, of: &str) {
        let queues = [
            ("a CPU's fullest shared queue", self.shared),
            ("KVM's irqfds", self.irqfds),
        ];
        for (queue, count) in queues {
            let name = format!("{of}: kernel workers of {queue} that waited at once");
            report.sample(&name, "tasks", count as f64);
        }
    }

    /// Whether a larger crowd may be tried.
    ///
    /// # Errors
    /// Names the queue that a larger crowd could fill, and where its workers waited.
    pub fn leaves_room(&self) -> io::Result<()> {
        match self.shared {
            0..MOST_WAITING => Ok(()),
            shared => Err(io::Error::other(format!(
                "{shared} kernel workers of {} waited at once; {MOST_WAITING} are too near the 1,024 of a queue",
                self.fullest
            ))),
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
                look(&mut most);
                std::thread::sleep(LOOK);
            }
            most
        });
        Watch { stop, watching }
    }

    /// The most of each that were seen waiting at once.
    pub fn most(self) -> io::Result<Waiting> {
        self.stop.store(true, Ordering::Release);
        self.watching
            .join()
            .map_err(|_| io::Error::other("the watching thread panicked"))
    }
}

/// Raises `most` to what waits now.
fn look(most: &mut Waiting) {
    let mut irqfds = 0;
    let mut queues: HashMap<String, (usize, PathBuf)> = HashMap::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let path = entry.path();
        // Gone since it was listed, or no process.
        let Ok(stat) = std::fs::read_to_string(path.join("stat")) else {
            continue;
        };
        match name_and_state(&stat) {
            Some((name, 'D')) if name.starts_with("kworker") => match name.ends_with(IRQFDS) {
                true => irqfds += 1,
                false => queues.entry(queue_of(name)).or_insert((0, path)).0 += 1,
            },
            _ => {}
        }
    }
    most.irqfds = most.irqfds.max(irqfds);
    if let Some((queue, (count, worker))) = queues.into_iter().max_by_key(|(_, (count, _))| *count)
        && count > most.shared
    {
        most.shared = count;
        most.fullest = format!("{queue}{}", stack(&worker));
    }
}

/// The queue, of one CPU, whose work a kernel worker of that name does: `kworker/CPU:NUMBER+QUEUE` (`wq_worker_comm`,
/// kernel/workqueue.c). A worker that serves all CPUs has `u` and its pool's number in CPU's place.
fn queue_of(name: &str) -> String {
    let parts = name
        .strip_prefix("kworker/")
        .and_then(|rest| rest.split_once(':'));
    match parts.and_then(|(cpu, rest)| Some((cpu, rest.split_once(['+', '-'])?.1))) {
        Some((cpu, queue)) => format!("{queue} on CPU {cpu}"),
        None => name.into(),
    }
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
    fn a_workers_queue_is_one_of_one_cpu() {
        assert_eq!(queue_of("kworker/0:12+events"), "events on CPU 0");
        assert_eq!(queue_of("kworker/1:3H-kblockd"), "kblockd on CPU 1");
        assert_eq!(
            queue_of("kworker/u8:1+ext4-rsv-conversion"),
            "ext4-rsv-conversion on CPU u8"
        );
        assert_eq!(queue_of("kworker/R-netns"), "kworker/R-netns");
    }

    #[test]
    fn a_name_with_parentheses_does_not_hide_the_state() {
        assert_eq!(name_and_state("7 (a) D (b)) D 1 2"), Some(("a) D (b)", 'D')));
        assert_eq!(name_and_state("7 (thaw-vmm) S 1"), Some(("thaw-vmm", 'S')));
        assert_eq!(name_and_state("nothing"), None);
    }
}
