//! The resource usage of this process, under the names that Prometheus's client libraries use.

use std::fs;

use rustix::param::{clock_ticks_per_second, page_size};
use rustix::process::{Resource, getrlimit};
use thaw_pools::process::Stat;

use super::Families;

/// Reads `/proc`, which involves no disk. Blocks while the kernel lists this process's descriptors.
pub fn collect(families: &mut Families) {
    if let Some(stat) = Stat::of_self() {
        let ticks = clock_ticks_per_second() as f64;
        families.gauge(
            "process_resident_memory_bytes",
            "Memory that is resident.",
            stat.resident_pages as f64 * page_size() as f64,
        );
        families.gauge(
            "process_virtual_memory_bytes",
            "Memory that is mapped.",
            stat.virtual_bytes as f64,
        );
        families.gauge("process_threads", "Threads.", stat.threads as f64);
        families.seconds(
            "process_cpu_seconds_total",
            "Time on a CPU, user and system.",
            stat.cpu_ticks as f64 / ticks,
        );
        if let Some(boot) = boot_time() {
            families.gauge(
                "process_start_time_seconds",
                "When it started, since the Unix epoch.",
                boot as f64 + stat.start_time as f64 / ticks,
            );
        }
    }
    if let Ok(open) = fs::read_dir("/proc/self/fd") {
        // Excludes the descriptor of the listing itself.
        let open = open.count().saturating_sub(1);
        families.gauge("process_open_fds", "Open descriptors.", open as f64);
    }
    let most = getrlimit(Resource::Nofile).current;
    families.gauge(
        "process_max_fds",
        "Most descriptors it may have open.",
        most.map_or(f64::INFINITY, |m| m as f64),
    );
}

/// Seconds since the Unix epoch (proc(5), stat, btime).
fn boot_time() -> Option<u64> {
    let stat = fs::read_to_string("/proc/stat").ok()?;
    let line = stat.lines().find_map(|l| l.strip_prefix("btime "))?;
    line.trim().parse().ok()
}
