//! Counters of a pool, which are atomics so that updating them never waits.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::resource::SlowReason;

/// Upper bounds of a histogram's buckets, nanoseconds, each included; one bucket more is above the last.
pub const BOUNDS_NS: [u64; 22] = [
    1_000,
    2_000,
    5_000,
    10_000,
    20_000,
    50_000,
    100_000,
    200_000,
    500_000,
    1_000_000,
    2_000_000,
    5_000_000,
    10_000_000,
    20_000_000,
    50_000_000,
    100_000_000,
    200_000_000,
    500_000_000,
    1_000_000_000,
    2_000_000_000,
    5_000_000_000,
    10_000_000_000,
];
const BUCKETS: usize = BOUNDS_NS.len() + 1;
const REASONS: usize = SlowReason::ALL.len();

/// A histogram of durations.
#[derive(Debug, Default)]
pub(crate) struct Histogram {
    counts: [AtomicU64; BUCKETS],
    sum_ns: AtomicU64,
}

/// A snapshot of a histogram.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Times {
    /// The count of each bucket of [`BOUNDS_NS`], and of those above; not cumulative.
    pub counts: [u64; BUCKETS],
    /// The sum of all durations, nanoseconds.
    pub sum_ns: u64,
}

impl Histogram {
    pub(crate) fn record(&self, took: Duration) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let bucket = BOUNDS_NS.partition_point(|bound| *bound < ns);
        add(&self.counts[bucket]);
        self.sum_ns.fetch_add(ns, Ordering::Relaxed);
    }

    fn snapshot(&self) -> Times {
        Times {
            counts: self.counts.each_ref().map(get),
            sum_ns: get(&self.sum_ns),
        }
    }
}

/// A pool's counters.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub hits: AtomicU64,
    misses: [AtomicU64; REASONS],
    pub made: AtomicU64,
    pub failed: AtomicU64,
    pub quarantined: AtomicU64,
    pub destroyed: AtomicU64,
    pub claim: Histogram,
    pub make: Histogram,
}

/// The pool's level, and its counters since it was created.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct PoolStatistics {
    /// The name of its kind.
    pub kind: &'static str,
    /// How many are ready.
    pub ready: usize,
    /// How many are being prepared.
    pub making: usize,
    /// How many wait to be destroyed.
    pub doomed: usize,
    /// It refills when fewer than `low` are ready,
    pub low: usize,
    /// until there are `high`; 0 where nothing is made ahead.
    pub high: usize,
    /// All claims, hits and misses.
    pub claims: u64,
    /// Claims that got a ready resource.
    pub hits: u64,
    /// Claims that found nothing ready, by reason.
    pub misses: [(SlowReason, u64); REASONS],
    /// Resources made, ahead or for a waiting caller.
    pub made: u64,
    /// Failures to make one, ahead or for a waiting caller.
    pub failed: u64,
    /// Ready resources that failed their check.
    pub quarantined: u64,
    /// Resources destroyed, whether ready, released or unfit.
    pub destroyed: u64,
    /// How long successful claims took.
    pub claim_times: Times,
    /// How long successful making took.
    pub make_times: Times,
}

impl PoolStatistics {
    /// All zero, for pools of a kind that do not exist yet.
    pub fn none(kind: &'static str) -> PoolStatistics {
        Counters::default().snapshot(kind)
    }

    /// The sum of these and another pool's of the same kind.
    pub fn and(mut self, other: &PoolStatistics) -> PoolStatistics {
        self.ready += other.ready;
        self.making += other.making;
        self.doomed += other.doomed;
        self.low += other.low;
        self.high += other.high;
        for (mine, theirs) in self.misses.iter_mut().zip(&other.misses) {
            mine.1 += theirs.1;
        }
        self.claims += other.claims;
        self.hits += other.hits;
        self.made += other.made;
        self.failed += other.failed;
        self.quarantined += other.quarantined;
        self.destroyed += other.destroyed;
        self.claim_times.add(&other.claim_times);
        self.make_times.add(&other.make_times);
        self
    }

    /// These statistics after the pool is closed: its level is 0, and its counters stay.
    pub fn closed(self) -> PoolStatistics {
        PoolStatistics {
            destroyed: self.destroyed + (self.ready + self.doomed) as u64,
            ready: 0,
            making: 0,
            doomed: 0,
            low: 0,
            high: 0,
            ..self
        }
    }

    /// Counts a claim of a kind that has no pool.
    pub fn missed(&mut self, reason: SlowReason) {
        self.claims += 1;
        self.misses[reason as usize].1 += 1;
    }
}

impl Times {
    fn add(&mut self, other: &Times) {
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine += theirs;
        }
        self.sum_ns += other.sum_ns;
    }
}

impl Counters {
    pub(crate) fn miss(&self, reason: SlowReason) {
        add(&self.misses[reason as usize]);
    }

    /// The statistics of a pool of this kind that is empty.
    pub(crate) fn snapshot(&self, kind: &'static str) -> PoolStatistics {
        let misses = SlowReason::ALL.map(|reason| (reason, get(&self.misses[reason as usize])));
        let hits = get(&self.hits);
        PoolStatistics {
            kind,
            ready: 0,
            making: 0,
            doomed: 0,
            low: 0,
            high: 0,
            claims: hits + misses.iter().map(|(_, count)| count).sum::<u64>(),
            hits,
            misses,
            made: get(&self.made),
            failed: get(&self.failed),
            quarantined: get(&self.quarantined),
            destroyed: get(&self.destroyed),
            claim_times: self.claim.snapshot(),
            make_times: self.make.snapshot(),
        }
    }
}

pub(crate) fn add(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn duration_falls_into_the_first_bucket_that_holds_it() {
        let histogram = Histogram::default();
        for ns in [0, 1_000, 1_001, 10_000_000_000, 10_000_000_001] {
            histogram.record(Duration::from_nanos(ns));
        }
        let times = histogram.snapshot();
        assert_eq!((times.counts[0], times.counts[1]), (2, 1));
        assert_eq!((times.counts[BUCKETS - 2], times.counts[BUCKETS - 1]), (1, 1));
        assert_eq!(times.sum_ns, 20_000_002_002);
    }

    #[test]
    fn miss_is_counted_under_its_reason() {
        let counters = Counters::default();
        for (n, reason) in SlowReason::ALL.into_iter().enumerate() {
            (0..=n).for_each(|_| counters.miss(reason));
        }
        add(&counters.hits);
        let seen = counters.snapshot("shell");
        assert_eq!(seen.misses.map(|(_, count)| count), [1, 2, 3, 4, 5]);
        assert_eq!((seen.claims, seen.hits), (16, 1));
    }

    #[test]
    fn statistics_of_one_kind_add_up_and_outlive_pools() {
        let counters = Counters::default();
        counters.miss(SlowReason::Empty);
        add(&counters.hits);
        counters.make.record(Duration::from_micros(3));
        let one = PoolStatistics {
            ready: 2,
            making: 1,
            doomed: 1,
            low: 2,
            high: 4,
            ..counters.snapshot("shell")
        };
        let mut sum = PoolStatistics::none("shell").and(&one).and(&one);
        sum.missed(SlowReason::NoPool);
        assert_eq!(
            (sum.ready, sum.making, sum.doomed, sum.low, sum.high),
            (4, 2, 2, 4, 8)
        );
        assert_eq!((sum.claims, sum.hits, sum.make_times.sum_ns), (5, 2, 6_000));
        assert_eq!(sum.misses.map(|(_, count)| count), [1, 2, 0, 0, 0]);
        let closed = one.clone().closed();
        assert_eq!((closed.ready, closed.high, closed.destroyed), (0, 0, 3));
        assert_eq!((closed.claims, closed.make_times), (one.claims, one.make_times));
    }
}
