//! The guest's clocks.

use rustix::time::{ClockId, Timespec, clock_gettime, clock_settime};

use crate::error::{Error, Result, WithContext};

/// CLOCK_BOOTTIME, in nanoseconds.
pub fn boottime_ns() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// CLOCK_REALTIME, in nanoseconds since the Unix epoch.
pub fn wall_clock_ns() -> u64 {
    let now = clock_gettime(ClockId::Realtime);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Sets the wall clock to `ns` nanoseconds after the Unix epoch.
pub fn set_wall_clock(ns: u64) -> Result<()> {
    if ns == 0 {
        return Err(Error::Invalid("wall clock: 0 is not a valid time".into()));
    }
    let time = Timespec {
        tv_sec: (ns / 1_000_000_000) as i64,
        tv_nsec: (ns % 1_000_000_000) as i64,
    };
    clock_settime(ClockId::Realtime, time).with_context(|| "set the wall clock".into())
}
