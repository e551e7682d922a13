//! The pause before something that failed is tried again.
//!
//! Hand-written because it is one line of arithmetic; crates for retries bring their own loops, clocks or async runtimes.

use std::time::Duration;

/// Pauses that double with each failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    /// The pause after one failure.
    pub first: Duration,
    /// However many failed.
    pub longest: Duration,
}

impl Default for Backoff {
    fn default() -> Backoff {
        Backoff {
            first: Duration::from_millis(100),
            longest: Duration::from_secs(30),
        }
    }
}

impl Backoff {
    /// The pause after this many failures in a row.
    pub fn pause(&self, failures: u32) -> Duration {
        let doubled = 1u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX);
        self.first.saturating_mul(doubled).min(self.longest)
    }
}

#[cfg(test)]
#[path = "backoff_test.rs"]
mod tests;
