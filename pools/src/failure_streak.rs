//! Failures of a pool in a row: how many rounds of them, and how long it pauses.

use std::time::{Duration, Instant};

use thaw_sys::backoff::Backoff;

/// Failures in a row, and the pause after them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FailureStreak {
    pub failures: u32,
    /// When the next try is due.
    pub until: Option<Instant>,
}

impl FailureStreak {
    /// Counts a failure, unless one of its round was counted already. Returns the pause of that round.
    pub fn next_pause(&mut self, backoff: &Backoff, now: Instant) -> Duration {
        if self.until.is_none_or(|until| until <= now) {
            self.failures = self.failures.saturating_add(1);
            self.until = now.checked_add(backoff.pause(self.failures));
        }
        backoff.pause(self.failures)
    }

    pub fn reset(&mut self) {
        *self = FailureStreak::default();
    }
}
