//! Pauses between attempts: exponential, with full jitter, so that readers who failed together do not ask again together.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::Duration;

/// A sequence of pauses. The `n`th is anything from nothing to `first` doubled `n` times, or to `longest`.
#[derive(Debug)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    n: u32,
    seed: u64,
}

impl Backoff {
    pub fn new(first: Duration, longest: Duration) -> Self {
        // The standard library's hasher is seeded by the system.
        Self::seeded(first, longest, RandomState::new().build_hasher().finish())
    }

    fn seeded(first: Duration, longest: Duration, seed: u64) -> Self {
        Self {
            first,
            longest,
            n: 0,
            seed,
        }
    }

    /// The most the next pause can be.
    fn ceiling(&self) -> Duration {
        self.first.saturating_mul(1 << self.n.min(20)).min(self.longest)
    }

    pub fn next(&mut self) -> Duration {
        let ceiling = self.ceiling();
        self.n = self.n.saturating_add(1);
        // SplitMix64.
        self.seed = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.seed;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        ceiling.mul_f64((z >> 11) as f64 / (1u64 << 53) as f64)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn pauses_stay_under_a_ceiling_that_doubles(seed in any::<u64>(), first in 1u64..10_000, longest in 1u64..100_000) {
            let (first, longest) = (Duration::from_millis(first), Duration::from_millis(longest));
            let mut backoff = Backoff::seeded(first, longest, seed);
            for n in 0..40u32 {
                let ceiling = first.saturating_mul(1 << n.min(20)).min(longest);
                prop_assert!(backoff.next() <= ceiling);
            }
        }
    }

    #[test]
    fn pauses_are_spread_over_all_there_is() {
        let second = Duration::from_secs(1);
        let mut backoff = Backoff::seeded(second, second, 1);
        let pauses: Vec<_> = (0..1000).map(|_| backoff.next()).collect();
        for tenth in 0..10u32 {
            let range = second * tenth / 10..second * (tenth + 1) / 10;
            let count = pauses.iter().filter(|pause| range.contains(pause)).count();
            assert!((50..150).contains(&count), "{tenth}: {count}");
        }
    }
}
