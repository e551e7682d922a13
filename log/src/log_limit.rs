//! Limits how often a guest or its VMM can cause a log line.
//!
//! The VMM logs a guest's misuse of a device, thawd a VMM's misuse of its sockets, and both can go on without
//! end. Each device and each socket may therefore write a burst of lines, then one line per period. The next
//! line that is written says how many were dropped.

use std::sync::Mutex;

use rustix::time::{ClockId, clock_gettime};
use thaw_sys::lock::Lock;

/// Lines in a burst.
const BURST: u32 = 10;
/// Nanoseconds until another line is permitted.
const PERIOD: u64 = 10_000_000_000;

/// The remaining lines of one device, a part of it, or one socket.
#[derive(Debug)]
pub struct LogLimit(Mutex<Budget>);

#[derive(Debug)]
struct Budget {
    lines: u32,
    /// When the last line became available.
    earned: u64,
    dropped: u64,
}

impl Default for LogLimit {
    fn default() -> LogLimit {
        LogLimit(Mutex::new(Budget::new(monotonic_ns())))
    }
}

impl LogLimit {
    /// Takes one line from the budget. Returns the number of lines dropped since the last one, or `None` if
    /// this line must be dropped.
    pub fn pass(&self) -> Option<u64> {
        let mut budget = self.0.locked();
        budget.pass(monotonic_ns())
    }
}

impl Budget {
    fn new(now: u64) -> Budget {
        Budget {
            lines: BURST,
            earned: now,
            dropped: 0,
        }
    }

    fn pass(&mut self, now: u64) -> Option<u64> {
        self.earn(now);
        if self.lines == 0 {
            self.dropped = self.dropped.saturating_add(1);
            return None;
        }
        self.lines -= 1;
        Some(std::mem::take(&mut self.dropped))
    }

    fn earn(&mut self, now: u64) {
        let periods = now.saturating_sub(self.earned) / PERIOD;
        let left = u64::from(BURST - self.lines);
        self.lines += periods.min(left) as u32;
        self.earned += periods * PERIOD;
    }
}

/// CLOCK_MONOTONIC in nanoseconds.
fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pass_million_misuses_at_once_writes_a_burst() {
        let mut budget = Budget::new(7);
        let written = (0..1_000_000).filter(|_| budget.pass(7).is_some()).count();
        assert_eq!(written, BURST as usize);
        assert_eq!(budget.pass(7 + PERIOD), Some(1_000_000 - u64::from(BURST)));
        assert_eq!(budget.pass(7 + PERIOD), None);
    }

    #[test]
    fn pass_million_misuses_over_time_writes_one_a_period() {
        let mut budget = Budget::new(0);
        // One per millisecond for 1000 seconds.
        let passed: Vec<u64> = (0..1_000_000u64)
            .filter_map(|i| budget.pass(i * 1_000_000))
            .collect();
        assert_eq!(passed.len(), BURST as usize + 99);
        assert_eq!(
            passed.iter().sum::<u64>() + passed.len() as u64 + budget.dropped,
            1_000_000
        );
    }

    #[test]
    fn pass_after_a_quiet_year_writes_no_more_than_a_burst() {
        let mut budget = Budget::new(0);
        while budget.pass(0).is_some() {}
        let later = 365 * 24 * 3600 * 1_000_000_000;
        let written = (0..1000).filter(|_| budget.pass(later).is_some()).count();
        assert_eq!(written, BURST as usize);
    }

    #[test]
    fn pass_clock_that_stands_still_or_goes_back_drops() {
        let mut budget = Budget::new(PERIOD);
        while budget.pass(PERIOD).is_some() {}
        assert_eq!(budget.pass(0), None);
        assert_eq!(budget.pass(2 * PERIOD), Some(2));
    }

    #[test]
    fn log_limit_many_misuses_are_bounded() {
        let limit = LogLimit::default();
        let written = (0..100_000).filter(|_| limit.pass().is_some()).count();
        assert!((BURST as usize..100).contains(&written));
    }
}
