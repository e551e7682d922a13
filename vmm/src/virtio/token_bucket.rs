//! Token buckets: the rate limits of devices (protocol's [`Bucket`]).
//!
//! Invariant: in any span of time, the tokens taken are at most the burst, plus the tokens that the rate adds in that span, plus the
//! one-time tokens. There is one exception, without which a request larger than the burst would wait for ever: such a request is admitted
//! when the bucket is full, and the bucket is then in debt until the rate has paid for it.
//!
//! Time is CLOCK_MONOTONIC nanoseconds, given by the caller. A bucket counts in billionths of a token, so that a nanosecond
//! at any rate is a whole number of them: nothing is rounded, and 128 bits hold every product of two 64-bit numbers.

use thaw_protocol::device_limits::{Bucket, DeviceLimit};

/// Units in one token.
const UNITS: u128 = 1_000_000_000;

/// One bucket.
#[derive(Clone, Debug)]
pub struct TokenBucket {
    per_second: u64,
    burst: u64,
    /// One-time tokens left.
    once: u64,
    /// Units that the bucket lacks to be full. If they exceed its size, it is in debt.
    missing: u128,
    /// The time for which `missing` is right.
    at: u64,
}

impl TokenBucket {
    /// A full bucket.
    pub fn new(bucket: Bucket, now: u64) -> TokenBucket {
        TokenBucket {
            per_second: bucket.per_second.get(),
            burst: bucket.burst.get(),
            once: bucket.once,
            missing: 0,
            at: now,
        }
    }

    /// Nanoseconds until `tokens` can be taken; 0 if they can be now.
    pub fn wait(&mut self, tokens: u64, now: u64) -> u64 {
        self.refill(now);
        let tokens = tokens.saturating_sub(self.once);
        if tokens == 0 {
            return 0;
        }
        let allowed = u128::from(self.burst.saturating_sub(tokens)) * UNITS;
        let excess = self.missing.saturating_sub(allowed);
        let wait = excess.div_ceil(u128::from(self.per_second));
        u64::try_from(wait).unwrap_or(u64::MAX)
    }

    /// Takes `tokens` even if there are fewer: the bucket may go into debt.
    pub fn take(&mut self, tokens: u64, now: u64) {
        self.refill(now);
        let from_once = tokens.min(self.once);
        self.once -= from_once;
        let more = u128::from(tokens - from_once) * UNITS;
        self.missing = self.missing.saturating_add(more);
    }

    /// Refills the bucket for the time that has passed. Adds nothing if the clock went back.
    fn refill(&mut self, now: u64) {
        let passed = now.saturating_sub(self.at);
        let gained = u128::from(passed) * u128::from(self.per_second);
        self.missing = self.missing.saturating_sub(gained);
        self.at = self.at.max(now);
    }
}

/// The buckets of a disk, or of one direction of a network.
#[derive(Clone, Debug, Default)]
pub struct RateLimiter {
    bytes: Option<TokenBucket>,
    operations: Option<TokenBucket>,
}

impl RateLimiter {
    /// Limits with full buckets.
    pub fn new(limit: DeviceLimit, now: u64) -> RateLimiter {
        let bucket = |bucket: Option<Bucket>| bucket.map(|bucket| TokenBucket::new(bucket, now));
        RateLimiter {
            bytes: bucket(limit.bytes),
            operations: bucket(limit.operations),
        }
    }

    /// Whether anything is limited.
    pub fn limits(&self) -> bool {
        self.bytes.is_some() || self.operations.is_some()
    }

    /// When this many bytes and operations are within the limit, or `None` if they are now.
    pub fn later(&mut self, bytes: u64, operations: u64, now: u64) -> Option<u64> {
        let wait = |bucket: &mut Option<TokenBucket>, tokens| {
            bucket.as_mut().map_or(0, |bucket| bucket.wait(tokens, now))
        };
        let wait = wait(&mut self.bytes, bytes).max(wait(&mut self.operations, operations));
        (wait > 0).then(|| now.saturating_add(wait))
    }

    /// Charges the buckets for an executed request.
    pub fn charge(&mut self, bytes: u64, operations: u64, now: u64) {
        if let Some(bucket) = &mut self.bytes {
            bucket.take(bytes, now);
        }
        if let Some(bucket) = &mut self.operations {
            bucket.take(operations, now);
        }
    }
}

#[cfg(test)]
#[path = "token_bucket_test.rs"]
mod tests;
