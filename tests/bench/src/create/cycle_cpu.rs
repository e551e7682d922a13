//! What one cycle, a sandbox's creation and its deletion, takes of the machine's processors, beside a bare program's: one that forks a
//! process which makes a VM of the same memory, runs it to its first byte, and ends.
//!
//! Invariant: what is counted is the time in which any processor was not idle. So the work that the kernel does after a deletion counts
//! (ends of VMs and of network namespaces), and that of refilling the pools, and that of anything else that runs: a busy machine gives no
//! result.

use std::io;
use std::process::{Command, Stdio};

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
    let text = |e: io::Error| e.to_string();
    cycles::many(node, count).await?;
    for _ in 0..rounds {
        node.settle().await?;
        let before = busy_ms().map_err(text)?;
        cycles::many(node, count).await?;
        node.settle().await?;
        let used = busy_ms().map_err(text)? - before;
        report.sample(THAWD, "ms", used / count as f64);
        report.sample(FLOOR, "ms", bare_program(count).map_err(text)? / count as f64);
    }
    report.ratio("cycle_cpu_over_floor", THAWD, FLOOR)
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
    let before = busy_ms()?;
    for _ in 0..count {
        frozen.cycle_in_child()?;
    }
    println!("{}", busy_ms()? - before);
    Ok(())
}

/// For how long the processors were not idle since the host's start, ms, all of them added up. In steps of 10 ms.
fn busy_ms() -> io::Result<f64> {
    let stat = std::fs::read_to_string("/proc/stat")?;
    busy_ticks(&stat)
        .map(|ticks| ticks as f64 * 1e3 / rustix::param::clock_ticks_per_second() as f64)
        .ok_or_else(|| io::Error::other("/proc/stat has no line of all processors"))
}

/// user, nice, system, irq and softirq of proc_stat(5); a guest's time is in the first two.
fn busy_ticks(stat: &str) -> Option<u64> {
    let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let ticks: Vec<u64> = line.split_whitespace().map_while(|n| n.parse().ok()).collect();
    [0, 1, 2, 5, 6].iter().map(|field| ticks.get(*field)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_waiting_and_stolen_time_are_not_counted() {
        let stat = "cpu  1 2 4 1000 1000 8 16 1000 1 1\ncpu0 9 9 9 9 9 9 9 9 9 9\n";
        assert_eq!(busy_ticks(stat), Some(31));
        assert_eq!(busy_ticks("intr 5\n"), None);
        assert_eq!(busy_ticks("cpu 1 2\n"), None);
    }
}
