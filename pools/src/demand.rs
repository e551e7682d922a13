//! How many resources a pool keeps ready: as many as it may, or as many as were recently claimed.
//!
//! Invariant: never more than the high watermark, and after a time without claims no more than the low one.

use std::collections::VecDeque;
use std::time::Instant;

use crate::plan::{Sizing, Watermarks};

/// The recent claims of a pool.
#[derive(Debug)]
pub(crate) struct Demand {
    sizing: Sizing,
    marks: Watermarks,
    /// Oldest first. Limited to the high watermark, because more would change nothing.
    claims: VecDeque<Instant>,
}

/// How many resources to keep ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    /// Refilling begins if fewer are ready.
    pub refill: usize,
    /// The level at which refilling ends.
    pub full: usize,
    /// When the target may fall if no claim comes before.
    pub falls: Option<Instant>,
}

impl Demand {
    pub(crate) fn new(sizing: Sizing, marks: Watermarks) -> Demand {
        Demand {
            sizing,
            marks,
            claims: VecDeque::new(),
        }
    }

    /// Counts a claim, whether it found a resource ready or not.
    pub(crate) fn claimed(&mut self, now: Instant) {
        if let Sizing::Demand { .. } = self.sizing {
            self.claims.push_back(now);
            if self.claims.len() > self.marks.high() {
                self.claims.pop_front();
            }
        }
    }

    pub(crate) fn target(&mut self, now: Instant) -> Target {
        let (low, high) = (self.marks.low(), self.marks.high());
        let Sizing::Demand { within } = self.sizing else {
            return Target {
                refill: low,
                full: high,
                falls: None,
            };
        };
        let recent = |at: &Instant| now.saturating_duration_since(*at) < within;
        while self.claims.front().is_some_and(|at| !recent(at)) {
            self.claims.pop_front();
        }
        let full = self.claims.len().max(low);
        let oldest = self.claims.front().filter(|_| full > low);
        Target {
            refill: full,
            full,
            falls: oldest.and_then(|at| at.checked_add(within)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;

    const MINUTE: Duration = Duration::from_secs(60);

    fn demand(low: usize, high: usize) -> Demand {
        Demand::new(
            Sizing::Demand { within: MINUTE },
            Watermarks::new(low, high).unwrap(),
        )
    }

    #[test]
    fn full_sizing_keeps_the_pool_full() {
        let mut full = Demand::new(Sizing::Full, Watermarks::new(2, 8).unwrap());
        let now = Instant::now();
        full.claimed(now);
        let target = Target {
            refill: 2,
            full: 8,
            falls: None,
        };
        assert_eq!(full.target(now), target);
        assert!(full.claims.is_empty());
    }

    #[test]
    fn demand_follows_recent_claims_and_falls_after_them() {
        let (mut demand, begin) = (demand(1, 4), Instant::now());
        assert_eq!((demand.target(begin).full, demand.target(begin).falls), (1, None));
        for second in [0, 10, 20] {
            demand.claimed(begin + Duration::from_secs(second));
        }
        let target = demand.target(begin + Duration::from_secs(30));
        assert_eq!(
            (target.refill, target.full, target.falls),
            (3, 3, Some(begin + MINUTE))
        );
        let target = demand.target(begin + MINUTE);
        assert_eq!(
            (target.full, target.falls),
            (2, Some(begin + Duration::from_secs(70)))
        );
        let target = demand.target(begin + 2 * MINUTE);
        assert_eq!((target.full, target.falls), (1, None));
    }

    proptest! {
        #[test]
        fn target_lies_between_the_watermarks(
            marks in (1usize..8, 0usize..8),
            pauses in prop::collection::vec(0u64..40, 0..60),
        ) {
            let (low, high) = (marks.0, marks.0 + marks.1);
            let (mut demand, mut now) = (demand(low, high), Instant::now());
            for pause in pauses {
                now += Duration::from_secs(pause);
                demand.claimed(now);
                let target = demand.target(now);
                prop_assert!(target.refill <= target.full && (low..=high).contains(&target.full));
                prop_assert!(demand.claims.len() <= high);
                prop_assert!(target.falls.is_none_or(|at| at > now));
            }
            prop_assert_eq!(demand.target(now + MINUTE).full, low);
        }
    }
}
