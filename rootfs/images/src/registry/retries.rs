//! Retries: the pause before each attempt, and when an operation gives up.
//!
//! Every operation on a registry (a request, an upload, a read of a range) has one [`Retries`]. A pause grows exponentially with jitter,
//! and is at least as long as the server requested.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::Duration;

use thaw_sys::backoff;
use tokio::time::Instant;

use super::budget::Budget;

/// The rule for retries of requests to a registry.
#[derive(Clone, Copy, Debug)]
pub struct Retry {
    /// Requests before giving up; at least 1.
    pub attempts: u32,
    /// The first pause; each further one is twice as long.
    pub first: Duration,
    /// The longest pause. If a registry requests a longer one, the operation fails.
    pub longest: Duration,
}

impl Default for Retry {
    fn default() -> Self {
        Self {
            attempts: 5,
            first: Duration::from_millis(300),
            longest: Duration::from_secs(30),
        }
    }
}

impl Retry {
    /// The retries of an operation with a limited number of attempts. A pause is up to a quarter longer than the rule's, so that many
    /// clients do not retry at the same time.
    pub(crate) fn begin(self) -> Retries<'static> {
        Retries {
            backoff: Backoff::new(self.first, self.longest, Jitter::Quarter),
            limit: Limit::Attempts(self.attempts),
            failed: 0,
        }
    }
}

/// The failed attempts of one operation.
pub struct Retries<'a> {
    backoff: Backoff,
    limit: Limit<'a>,
    failed: u32,
}

/// When an operation is given up.
enum Limit<'a> {
    /// Ends after this number of attempts, or if the server requests more than the longest pause.
    Attempts(u32),
    /// When the time has passed.
    Time(&'a Budget),
}

impl<'a> Retries<'a> {
    /// The retries of an operation with a time limit. A pause is random, from zero to the rule's, because the many readers that wait for
    /// one blob failed together.
    pub fn within(budget: &'a Budget, first: Duration, longest: Duration) -> Self {
        Self {
            backoff: Backoff::new(first, longest, Jitter::Full),
            limit: Limit::Time(budget),
            failed: 0,
        }
    }

    /// Counts a failed attempt. Returns the pause before the next one, at least what the server requested (`asked`), or `None` if there is
    /// no next one.
    pub fn next(&mut self, asked: Option<Duration>) -> Option<Duration> {
        self.failed += 1;
        let pause = self.backoff.next().max(asked.unwrap_or_default());
        let over = match self.limit {
            Limit::Attempts(most) => self.failed >= most || pause > self.backoff.longest(),
            Limit::Time(budget) => Instant::now() + pause >= budget.deadline(),
        };
        (!over).then_some(pause)
    }

    /// Like [`Self::next`], for a failure that is given up after `most` attempts.
    pub fn next_of(&mut self, most: u32) -> Option<Duration> {
        self.next(None).filter(|_| self.failed < most)
    }

    /// Leaves the failure that was counted last to a caller that counts it itself.
    pub fn uncount(&mut self) {
        self.failed = self.failed.saturating_sub(1);
    }

    /// The operation made progress: earlier failures no longer count.
    pub fn progressed(&mut self) {
        self.failed = 0;
        self.backoff.n = 0;
    }
}

/// How far a pause is from its ceiling.
#[derive(Clone, Copy, Debug)]
enum Jitter {
    /// Random, from zero to the ceiling.
    Full,
    /// The ceiling and up to a quarter more.
    Quarter,
}

/// A sequence of pauses. The ceiling of the `n`th is that after `n` failures.
#[derive(Debug)]
struct Backoff {
    ceiling: backoff::Backoff,
    jitter: Jitter,
    n: u32,
    seed: u64,
}

impl Backoff {
    fn new(first: Duration, longest: Duration, jitter: Jitter) -> Self {
        // The standard library's hasher is seeded by the system.
        Self::seeded(first, longest, jitter, RandomState::new().build_hasher().finish())
    }

    fn seeded(first: Duration, longest: Duration, jitter: Jitter, seed: u64) -> Self {
        Self {
            ceiling: backoff::Backoff { first, longest },
            jitter,
            n: 0,
            seed,
        }
    }

    /// The longest pause of this sequence.
    fn longest(&self) -> Duration {
        match self.jitter {
            Jitter::Full => self.ceiling.longest,
            Jitter::Quarter => self.ceiling.longest.mul_f64(1.25),
        }
    }

    fn next(&mut self) -> Duration {
        self.n = self.n.saturating_add(1);
        let ceiling = self.ceiling.pause(self.n);
        let random = self.random();
        match self.jitter {
            Jitter::Full => ceiling.mul_f64(random),
            Jitter::Quarter => ceiling + ceiling.mul_f64(random / 4.0),
        }
    }

    /// A number from 0 to below 1, by SplitMix64.
    fn random(&mut self) -> f64 {
        self.seed = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.seed;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        (z >> 11) as f64 / (1u64 << 53) as f64
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
            let mut backoff = Backoff::seeded(first, longest, Jitter::Full, seed);
            for n in 0..40u32 {
                let ceiling = first.saturating_mul(1 << n.min(20)).min(longest);
                prop_assert!(backoff.next() <= ceiling);
            }
        }
    }

    #[test]
    fn pauses_are_spread_over_all_there_is() {
        let second = Duration::from_secs(1);
        let mut backoff = Backoff::seeded(second, second, Jitter::Full, 1);
        let pauses: Vec<_> = (0..1000).map(|_| backoff.next()).collect();
        for tenth in 0..10u32 {
            let range = second * tenth / 10..second * (tenth + 1) / 10;
            let count = pauses.iter().filter(|pause| range.contains(pause)).count();
            assert!((50..150).contains(&count), "{tenth}: {count}");
        }
    }

    #[test]
    fn failure_left_to_the_caller_counts_once() {
        let retry = Retry {
            attempts: 3,
            first: Duration::from_millis(1),
            longest: Duration::from_secs(1),
        };
        let mut retries = retry.begin();
        for _ in 0..2 {
            assert!(retries.next(None).is_some());
            retries.uncount();
            assert!(retries.next(None).is_some());
        }
        assert!(retries.next(None).is_none());
    }

    #[test]
    fn pauses_grow_and_are_bounded() {
        let retry = Retry {
            attempts: 100,
            first: Duration::from_millis(100),
            longest: Duration::from_secs(1),
        };
        let mut retries = retry.begin();
        let pauses: Vec<_> = (0..60).map(|_| retries.next(None).unwrap().as_millis()).collect();
        for (asked, least) in [(1, 100), (2, 200), (4, 800), (5, 1000), (60, 1000)] {
            let pause = pauses[asked - 1];
            assert!((least..=least * 5 / 4).contains(&pause), "{asked}: {pause}");
        }
    }

    #[test]
    fn attempts_and_too_long_a_pause_end_an_operation() {
        let retry = Retry {
            attempts: 3,
            first: Duration::from_millis(1),
            longest: Duration::from_secs(1),
        };
        let mut retries = retry.begin();
        let second = Duration::from_secs(1);
        assert_eq!(retries.next(Some(second)), Some(second));
        assert!(retries.next(None).is_some());
        retries.progressed();
        assert!(retries.next(None).is_some() && retries.next(None).is_some());
        assert_eq!(retries.next(None), None);
        assert_eq!(retry.begin().next(Some(second * 2)), None);
        assert_eq!(retry.begin().next_of(1), None);
    }
}
