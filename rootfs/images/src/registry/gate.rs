//! Priorities: reads on demand start at once; prefetches start a few at a time, while no demand runs, and within their
//! bandwidth.
//!
//! Invariants: a demand never waits here. A prefetch starts only while there are no demands, and prefetches start in
//! the order in which they came. Nothing polls.

use std::sync::Mutex;

use thaw_sys::lock::Lock;
use tokio::sync::{Semaphore, SemaphorePermit, watch};
use tokio::time::Instant;

use super::bucket::Bucket;

pub struct Gate {
    /// Reads on demand in progress.
    demands: watch::Sender<usize>,
    slots: Semaphore,
    bucket: Option<Mutex<Bucket>>,
}

/// A read on demand in progress.
pub struct Demand<'a>(&'a Gate);

/// A prefetch in progress.
pub struct Turn<'a> {
    _slot: SemaphorePermit<'a>,
}

impl Gate {
    /// At most `slots` prefetches at once, which take `bandwidth` bytes a second.
    pub fn new(slots: usize, bandwidth: Option<u64>) -> Self {
        Self {
            demands: watch::Sender::new(0),
            slots: Semaphore::new(slots.clamp(1, Semaphore::MAX_PERMITS)),
            bucket: bandwidth.map(|rate| Mutex::new(Bucket::new(rate, Instant::now()))),
        }
    }

    pub fn demand(&self) -> Demand<'_> {
        self.demands.send_modify(|demands| *demands += 1);
        Demand(self)
    }

    /// Waits for a turn to prefetch `bytes`. `None` if the process ends.
    pub async fn prefetch(&self, bytes: u64) -> Option<Turn<'_>> {
        let slot = self.slots.acquire().await.ok()?;
        self.idle().await;
        if let Some(bucket) = &self.bucket {
            let wait = with(bucket, |bucket| bucket.take(bytes, Instant::now()));
            let mut taken = Taken {
                bucket,
                bytes: Some(bytes),
            };
            tokio::time::sleep(wait).await;
            taken.bytes = None;
            self.idle().await;
        }
        Some(Turn { _slot: slot })
    }

    /// Whether any demand is in progress.
    pub fn is_busy(&self) -> bool {
        *self.demands.borrow() > 0
    }

    /// Waits for a moment without demands.
    pub async fn idle(&self) {
        // The sender belongs to us, so it still exists.
        let _ = self.demands.subscribe().wait_for(|demands| *demands == 0).await;
    }
}

impl Drop for Demand<'_> {
    fn drop(&mut self) {
        self.0
            .demands
            .send_modify(|demands| *demands = demands.saturating_sub(1));
    }
}

/// Bytes taken from the bucket; those not used are returned.
struct Taken<'a> {
    bucket: &'a Mutex<Bucket>,
    bytes: Option<u64>,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        if let Some(bytes) = self.bytes {
            with(self.bucket, |bucket| bucket.give_back(bytes));
        }
    }
}

fn with<T>(bucket: &Mutex<Bucket>, change: impl FnOnce(&mut Bucket) -> T) -> T {
    change(&mut bucket.locked())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn a_prefetch_waits_for_demands_and_a_demand_for_nobody() {
        let gate = Gate::new(1, None);
        let demand = gate.demand();
        let second = gate.demand();
        let mut prefetch = Box::pin(gate.prefetch(10));
        assert!(prefetch.as_mut().now_or_never().is_none());
        drop(demand);
        assert!(prefetch.as_mut().now_or_never().is_none());
        drop(second);
        let turn = prefetch.await;
        assert!(turn.is_some());
        // The slot is taken, but demands still start.
        assert!(gate.prefetch(10).now_or_never().is_none());
        let _demand = gate.demand();
        drop(turn);
        assert!(gate.prefetch(10).now_or_never().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn prefetches_keep_bandwidth_and_return_the_rest() {
        let gate = Gate::new(8, Some(1000));
        let start = Instant::now();
        drop(gate.prefetch(1250).await);
        assert_eq!(start.elapsed(), Duration::ZERO);
        // A waiting prefetch that is given up takes no bandwidth.
        assert!(gate.prefetch(1_000_000).now_or_never().flatten().is_none());
        drop(gate.prefetch(500).await);
        assert!(
            (1000..1010).contains(&start.elapsed().as_millis()),
            "{:?}",
            start.elapsed()
        );
    }
}
