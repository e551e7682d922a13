//! A queue under a rate limit.
//!
//! Invariant: requests over the limit stay available in their queue, so a reset or a freeze has nothing to return. While the queue waits,
//! kicks are ignored; its device is called when the wait is over ([`super::event_loop::Registrar::wake_at`]). The limit survives a reset,
//! because a driver could otherwise refill its buckets.

use thaw_protocol::device_limits::DeviceLimit;

use super::token_bucket::RateLimiter;
use crate::clock::monotonic_ns;

/// The limit of one queue.
#[derive(Debug)]
pub struct Throttle {
    limiter: RateLimiter,
    /// When the request at the head of the queue may be served, if it must wait.
    until: Option<u64>,
    clock: fn() -> u64,
}

impl Default for Throttle {
    /// A throttle without a limit.
    fn default() -> Throttle {
        Throttle {
            limiter: RateLimiter::default(),
            until: None,
            clock: monotonic_ns,
        }
    }
}

impl Throttle {
    /// Sets another limit with full buckets. Nothing waits for the old one any more.
    pub fn set(&mut self, limit: DeviceLimit) {
        self.limiter = RateLimiter::new(limit, (self.clock)());
        self.until = None;
    }

    /// Whether anything is limited.
    pub fn limits(&self) -> bool {
        self.limiter.limits()
    }

    /// Whether the queue must still wait.
    pub fn waits(&mut self) -> bool {
        let clock = self.clock;
        self.until = self.until.filter(|until| clock() < *until);
        self.until.is_some()
    }

    /// Whether this many bytes and operations are within the limit now. If not, the queue waits until they are.
    pub fn admits(&mut self, bytes: u64, operations: u64) -> bool {
        self.until = match self.limiter.limits() {
            true => self.limiter.later(bytes, operations, (self.clock)()),
            false => None,
        };
        self.until.is_none()
    }

    /// Charges the limit for an executed request.
    pub fn charge(&mut self, bytes: u64, operations: u64) {
        if self.limiter.limits() {
            self.limiter.charge(bytes, operations, (self.clock)());
        }
    }

    /// When the queue must be served again, if it waits.
    pub fn until(&self) -> Option<u64> {
        self.until
    }

    /// The queue is reset, so nothing in it waits.
    pub fn forget(&mut self) {
        self.until = None;
    }

    /// Uses this clock and sets the limit with full buckets.
    #[cfg(test)]
    pub fn go_by(&mut self, clock: fn() -> u64, limit: DeviceLimit) {
        self.clock = clock;
        self.set(limit);
    }
}

/// A clock that stands still. Each thread has its own.
#[cfg(test)]
pub mod test_clock {
    use std::cell::Cell;

    pub const SECOND: u64 = 1_000_000_000;

    thread_local! {
        static NOW: Cell<u64> = const { Cell::new(SECOND) };
    }

    pub fn now() -> u64 {
        NOW.get()
    }

    pub fn pass(nanoseconds: u64) {
        NOW.set(NOW.get() + nanoseconds);
    }
}
