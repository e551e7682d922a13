//! The clock everything is timed by.

use std::fmt::Display;
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

/// Says on stderr what a benchmark does next, and how many seconds after the first such line.
pub fn progress(benchmark: &str, what: impl Display) {
    static FIRST: OnceLock<Instant> = OnceLock::new();
    let seconds = FIRST.get_or_init(Instant::now).elapsed().as_secs();
    eprintln!("{benchmark}: {seconds} s: {what}");
}
