//! The clock everything is timed by.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs;
use std::sync::OnceLock;
use std::time::Instant;

/// CLOCK_MONOTONIC, nanoseconds.
pub fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Microseconds since `start`, which was a [`monotonic_ns`].
pub fn us_since(start: u64) -> f64 {
    (monotonic_ns() - start) as f64 / 1e3
}

/// How long a process has run on processors, ms, in steps of 10. Also of one that has ended, until its parent has waited for it.
///
/// # Errors
/// There is none, or proc(5) has changed.
pub fn ran_ms(pid: i32) -> Result<f64, String> {
    let path = format!("/proc/{pid}/stat");
    let stat = fs::read_to_string(&path).map_err(|e| format!("{path}: {e}"))?;
    // Behind the name, which is in parentheses, `utime` and `stime` are the twelfth and thirteenth field.
    let fields = stat
        .rsplit_once(") ")
        .map(|(_, fields)| fields.split(' ').skip(11));
    let ticks = fields.map(|fields| fields.take(2).map_while(|field| field.parse::<u64>().ok()));
    let ticks: u64 = ticks.ok_or_else(|| format!("{path}: {stat:?}"))?.sum();
    Ok(ticks as f64 * 1e3 / rustix::param::clock_ticks_per_second() as f64)
}

/// How long the threads of a process have run on processors, ms, by name.
///
/// # Errors
/// There is no such process.
pub fn threads_ran_ms(pid: i32) -> Result<BTreeMap<String, f64>, String> {
    let mut ran = BTreeMap::new();
    let path = format!("/proc/{pid}/task");
    for thread in fs::read_dir(&path).map_err(|e| format!("{path}: {e}"))?.flatten() {
        let read = |name: &str| fs::read_to_string(thread.path().join(name));
        // It may have ended.
        let (Ok(name), Ok(times)) = (read("comm"), read("schedstat")) else {
            continue;
        };
        let ns = times.split(' ').next().and_then(|ns| ns.parse::<u64>().ok());
        *ran.entry(name.trim_end().to_owned()).or_default() += ns.unwrap_or(0) as f64 / 1e6;
    }
    Ok(ran)
}

/// Says on stderr what a benchmark does next, and how many seconds after the first such line.
pub fn progress(benchmark: &str, what: impl Display) {
    static FIRST: OnceLock<Instant> = OnceLock::new();
    let seconds = FIRST.get_or_init(Instant::now).elapsed().as_secs();
    eprintln!("{benchmark}: {seconds} s: {what}");
}
