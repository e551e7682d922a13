//! What one cycle, a sandbox's creation and its deletion, takes of the machine's processors, beside a bare program's: one that forks a
//! process which makes a VM of the same memory, runs it to its first byte, and ends.
//!
//! Invariant: what is counted is the time in which any processor was not idle. So the work that the kernel does after a deletion counts
//! (ends of VMs and of network namespaces), and that of refilling the pools, and that of anything else that runs: a busy machine gives no
//! result. Idle time is taken, which the kernel measures, and not user and system time, for which it looks at each tick what runs: a
//! process that starts after one tick and ends before the next is never seen.

use std::io;
use std::process::{Command, Stdio};
use std::time::Instant;

use super::{Node, cycles};
use crate::Report;
use crate::thaw::floor::{Frozen, template_memory};

/// The argument with which this program is the bare one.
pub const BARE: &str = "--bare-cycles";
/// Guest memory, MiB: that of the creations.
const MEMORY_MIB: u32 = 128;
const THAWD: &str = "CPU of one cycle: create and delete, 4 on their way";
const FLOOR: &str = "CPU of one cycle: a bare program's fork, VM and exit";

/// Runs `rounds` of `count` cycles through thawd and of as many of the bare program, in turn.
pub async fn run(node: &Node, rounds: usize, count: usize, report: &mut Report) -> Result<(), String> {
    cycles::many(node, count).await?;
    for _ in 0..rounds {
        report.sample(THAWD, "ms", of_one(node, count).await?);
        let bare = bare_program(count).map_err(|e| e.to_string())?;
        report.sample(FLOOR, "ms", bare / count as f64);
    }
    report.ratio("cycle_cpu_over_floor", THAWD, FLOOR)
}

/// What one cycle through thawd takes, ms, of `count`.
pub async fn of_one(node: &Node, count: usize) -> Result<f64, String> {
    node.settle().await?;
    let before = Moment::now().map_err(|e| e.to_string())?;
    cycles::many(node, count).await?;
    node.settle().await?;
    let used = before.busy_ms().map_err(|e| e.to_string())?;
    Ok(used / count as f64)
}

/// What `count` cycles of the bare program take, ms. It is a process of its own, since one with threads must not fork.
fn bare_program(count: usize) -> io::Result<f64> {
    let output = Command::new(std::env::current_exe()?)
        .args([BARE, &count.to_string()])
        .stderr(Stdio::inherit())
        .output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    said.trim()
        .parse()
        .map_err(|_| io::Error::other(format!("the bare program: {}: {said}", output.status)))
}

/// The bare program: runs `count` cycles, and prints what they took, ms.
pub fn bare(count: usize) -> io::Result<()> {
    let frozen = Frozen::new(template_memory(MEMORY_MIB)?)?;
    frozen.cycle_in_child()?;
    let before = Moment::now()?;
    for _ in 0..count {
        frozen.cycle_in_child()?;
    }
    println!("{}", before.busy_ms()?);
    Ok(())
}

/// A moment, and what the processors had idled until then.
struct Moment {
    at: Instant,
    idle_ms: f64,
}

impl Moment {
    fn now() -> io::Result<Moment> {
        let stat = std::fs::read_to_string("/proc/stat")?;
        let ticks =
            idle_ticks(&stat).ok_or_else(|| io::Error::other("/proc/stat has no line of all processors"))?;
        Ok(Moment {
            at: Instant::now(),
            idle_ms: ticks as f64 * 1e3 / rustix::param::clock_ticks_per_second() as f64,
        })
    }

    /// For how long processors were not idle since then, ms, all of them added up. In steps of 10 ms.
    fn busy_ms(&self) -> io::Result<f64> {
        let (now, processors) = (Moment::now()?, std::thread::available_parallelism()?);
        let passed = (now.at - self.at).as_secs_f64() * 1e3 * processors.get() as f64;
        Ok(passed - (now.idle_ms - self.idle_ms))
    }
}

/// idle, iowait and steal of proc_stat(5).
fn idle_ticks(stat: &str) -> Option<u64> {
    let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let ticks: Vec<u64> = line.split_whitespace().map_while(|n| n.parse().ok()).collect();
    [3, 4, 7].iter().map(|field| ticks.get(*field)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_waiting_and_stolen_time_are_idle() {
        let stat = "cpu  1000 1000 1000 1 2 1000 1000 4 1000 1000\ncpu0 9 9 9 9 9 9 9 9 9 9\n";
        assert_eq!(idle_ticks(stat), Some(7));
        assert_eq!(idle_ticks("intr 5\n"), None);
        assert_eq!(idle_ticks("cpu 1 2\n"), None);
    }

    #[test]
    fn a_thread_that_runs_makes_a_processor_busy() {
        // Its own time: of other time the host may have taken all, and that counts as idle.
        let ran_ms = || {
            let ran = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
            ran.tv_sec * 1000 + ran.tv_nsec / 1_000_000
        };
        let (before, begun) = (Moment::now().unwrap(), ran_ms());
        while ran_ms() - begun < 100 {}
        assert!(before.busy_ms().unwrap() > 10.0);
    }
}
