//! A token bucket: how long to wait so that a rate is kept on average.
//!
//! Invariant: in any interval the bucket admits no more than the rate allows, plus one burst and one taking that was already admitted. A
//! caller waits once, for a time that it learns immediately.

use std::time::Duration;

use tokio::time::Instant;

const NANOS: u128 = 1_000_000_000;

/// The bucket. Its level may be negative: a caller that takes more than it contains waits until the debt is paid.
#[derive(Debug)]
pub struct Bucket {
    /// Bytes a second, at least 1.
    rate: u64,
    /// Bytes it holds when full.
    burst: u64,
    /// When it was, or will be, empty.
    empty_at: Instant,
}

impl Bucket {
    /// A full one.
    pub fn new(rate: u64, now: Instant) -> Self {
        let rate = rate.max(1);
        // A quarter of a second's worth: enough to keep a link busy between two requests.
        let burst = (rate / 4).max(1);
        let mut bucket = Self {
            rate,
            burst,
            empty_at: now,
        };
        bucket.empty_at = now.checked_sub(bucket.fill_time()).unwrap_or(now);
        bucket
    }

    fn fill_time(&self) -> Duration {
        self.time(self.burst)
    }

    /// How long the rate takes for this number of bytes.
    fn time(&self, bytes: u64) -> Duration {
        let nanos = u128::from(bytes) * NANOS / u128::from(self.rate);
        // A year counts as forever here and overflows no clock.
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)).min(Duration::from_secs(365 * 86_400))
    }

    /// Takes `bytes` out and returns how long to wait before using them.
    pub fn take(&mut self, bytes: u64, now: Instant) -> Duration {
        if let Some(full) = now.checked_sub(self.fill_time()) {
            self.empty_at = self.empty_at.max(full);
        }
        let wait = self.empty_at.saturating_duration_since(now);
        self.empty_at += self.time(bytes);
        wait
    }

    /// Puts back bytes that were taken and not used.
    pub fn give_back(&mut self, bytes: u64) {
        if let Some(earlier) = self.empty_at.checked_sub(self.time(bytes)) {
            self.empty_at = earlier;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_burst_passes_and_then_the_rate_holds() {
        let now = Instant::now();
        let mut bucket = Bucket::new(1000, now);
        assert_eq!(bucket.take(250, now), Duration::ZERO);
        assert_eq!(bucket.take(1000, now), Duration::ZERO);
        assert_eq!(bucket.take(500, now), Duration::from_secs(1));
        assert_eq!(bucket.take(1, now), Duration::from_millis(1500));
        bucket.give_back(1);
        assert_eq!(
            bucket.take(0, now + Duration::from_secs(1)),
            Duration::from_millis(500)
        );
    }

    proptest! {
        #[test]
        fn bucket_never_exceeds_rate_and_burst(
            rate in 1u64..1_000_000,
            takes in proptest::collection::vec((0u64..200_000, 0u64..2_000), 1..60),
        ) {
            let start = Instant::now();
            let mut now = start;
            let mut bucket = Bucket::new(rate, start);
            // When each take may be used: one after another, like the readers of a queue.
            let mut used = Vec::new();
            for (bytes, gap) in takes {
                now += Duration::from_millis(gap);
                let wait = bucket.take(bytes, now);
                used.push((now + wait - start, bytes));
            }
            for (i, (from, _)) in used.iter().enumerate() {
                let mut sum = 0u128;
                for (until, bytes) in &used[i..] {
                    let before = sum;
                    sum += u128::from(*bytes);
                    // All but the last taken were paid for by the rate and the burst.
                    let allowed = (*until - *from).as_nanos() * u128::from(rate) / NANOS
                        + u128::from(bucket.burst) + 2 + used.len() as u128;
                    prop_assert!(before <= allowed, "{before} > {allowed}");
                }
            }
        }

        #[test]
        fn a_huge_take_does_not_overflow(bytes in any::<u64>(), rate in any::<u64>()) {
            let now = Instant::now();
            let mut bucket = Bucket::new(rate, now);
            bucket.take(bytes, now);
            bucket.take(bytes, now);
            bucket.give_back(bytes);
        }
    }
}
