//! The clock that timestamps are taken from.

use rustix::time::{ClockId, clock_gettime};

/// CLOCK_MONOTONIC of the host, in nanoseconds.
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
