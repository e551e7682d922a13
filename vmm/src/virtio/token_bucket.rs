//! Token buckets: how much a device may do (protocol's [`Bucket`]).
//!
//! Invariant: in any span of time, what is taken is at most the burst and what the rate gives in that span, and the tokens
//! that come once. There is one exception, without which a request larger than the burst would wait for ever: such a request
//! is let through when the bucket is full, and the bucket is in debt until the rate has paid for it.
//!
//! Time is CLOCK_MONOTONIC nanoseconds, given by the caller. A bucket counts in billionths of a token, so that a nanosecond
//! at any rate is a whole number of them: nothing is rounded, and 128 bits hold every product of two 64-bit numbers.

use thaw_protocol::limits::{Bucket, RateLimit};

/// Units of a token.
const UNITS: u128 = 1_000_000_000;

/// One bucket.
#[derive(Clone, Debug)]
pub struct TokenBucket {
    per_second: u64,
    burst: u64,
    /// Tokens left of those that do not come again.
    once: u64,
    /// Units missing for the bucket to be full; more than its size is a debt.
    missing: u128,
    /// When `missing` was right.
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

    /// Takes `tokens`, whether or not there are so many: the bucket may go into debt.
    pub fn take(&mut self, tokens: u64, now: u64) {
        self.refill(now);
        let from_once = tokens.min(self.once);
        self.once -= from_once;
        let more = u128::from(tokens - from_once) * UNITS;
        self.missing = self.missing.saturating_add(more);
    }

    /// A clock that goes back gives nothing.
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
    /// With full buckets.
    pub fn new(limit: RateLimit, now: u64) -> RateLimiter {
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

    /// When these bytes may be done, in so many operations, if that is later than now.
    pub fn later(&mut self, bytes: u64, operations: u64, now: u64) -> Option<u64> {
        let wait = |bucket: &mut Option<TokenBucket>, tokens| {
            bucket.as_mut().map_or(0, |bucket| bucket.wait(tokens, now))
        };
        let wait = wait(&mut self.bytes, bytes).max(wait(&mut self.operations, operations));
        (wait > 0).then(|| now.saturating_add(wait))
    }

    /// They were done.
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
