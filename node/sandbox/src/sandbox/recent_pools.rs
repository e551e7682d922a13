//! One pool for each recently requested variant of a resource ("want"): for machines that come in many variants.
//!
//! Invariant: there are never more pools than planned. The second request for a want makes a pool for it, and the least recently used pool
//! is closed to make room.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use thaw_pools::foreground::Foreground;
use thaw_pools::plan::Sizing;
use thaw_pools::plan::{Plan, Watermarks};
use thaw_pools::pool::Pool;
use thaw_pools::resource::{Kind, SlowReason};
use thaw_pools::statistics::PoolStatistics;
use thaw_sys::lock::Lock;

use crate::config::pools::{ParkedConfig, ShellsConfig};

/// How many wants get a pool, and the size of each pool.
#[derive(Clone, Debug)]
pub struct RecentPlan {
    /// Maximum number of wants with a pool.
    pub wants: usize,
    /// Watermarks of each pool.
    pub marks: Watermarks,
    pub sizing: Sizing,
    /// How many makers each pool has.
    pub makers: usize,
    /// The work that the pools do not refill beside.
    pub yields_to: Option<Arc<Foreground>>,
}

impl RecentPlan {
    /// The plan for shells, with this many makers for each shape.
    pub fn of_shells(config: &ShellsConfig, makers: usize, yields_to: &Arc<Foreground>) -> RecentPlan {
        RecentPlan {
            wants: config.shapes.into(),
            marks: config.each.into(),
            sizing: Sizing::Full,
            makers,
            yields_to: Some(yields_to.clone()),
        }
    }

    /// The plan for parked machines of so many templates or snapshots, with this many makers for each.
    pub fn of_parked(
        config: &ParkedConfig,
        wants: u8,
        makers: usize,
        yields_to: &Arc<Foreground>,
    ) -> RecentPlan {
        let within = Duration::from_secs(config.within_s.get().into());
        RecentPlan {
            wants: wants.into(),
            marks: config.each.into(),
            sizing: Sizing::Demand { within },
            makers,
            yields_to: Some(yields_to.clone()),
        }
    }
}

/// Pools of one kind, one for each want recently in demand.
pub struct RecentPools<K: Kind> {
    /// `None`: nothing is made ahead.
    plan: Option<RecentPlan>,
    recent: Mutex<Recent<K>>,
}

struct Recent<K: Kind> {
    closed: bool,
    /// Statistics of closed pools, and of claims for which there was no pool.
    past: PoolStatistics,
    /// The most recently used first.
    pools: VecDeque<(K::Want, Arc<Pool<K>>)>,
    /// Wants recently requested once; a second request makes a pool.
    once: VecDeque<K::Want>,
}

impl<K: Kind> Default for RecentPools<K> {
    fn default() -> Self {
        RecentPools {
            plan: None,
            recent: Mutex::new(Recent {
                closed: false,
                past: PoolStatistics::none(K::NAME),
                pools: VecDeque::new(),
                once: VecDeque::new(),
            }),
        }
    }
}

impl<K: Kind> fmt::Debug for RecentPools<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecentPools")
            .field("kind", &K::NAME)
            .field("plan", &self.plan)
            .finish_non_exhaustive()
    }
}

impl<K: Kind> RecentPools<K>
where
    K::Want: Clone,
{
    pub fn new(plan: RecentPlan) -> Self {
        RecentPools {
            plan: (plan.wants > 0 && plan.marks.high() > 0).then_some(plan),
            ..RecentPools::default()
        }
    }

    /// Empty pools with the same plan.
    pub(super) fn others(&self) -> Self {
        RecentPools {
            plan: self.plan.clone(),
            ..RecentPools::default()
        }
    }

    /// Takes a ready resource, or returns why there is none. Does not block. `kind` makes the pool, if a new one is due.
    pub(super) fn ready(&self, want: &K::Want, kind: impl FnOnce() -> K) -> Result<K::Resource, SlowReason> {
        let plan = self.plan.as_ref().ok_or(SlowReason::NoPool)?;
        let (pool, outdated) = {
            let mut recent = self.lock();
            if recent.closed {
                return Err(SlowReason::Closed);
            }
            let pool = recent.used(want, plan.wants, || {
                let plan = Plan {
                    makers: plan.makers,
                    sizing: plan.sizing,
                    yields_to: plan.yields_to.clone(),
                    ..Plan::new(want.clone(), plan.marks)
                };
                Pool::filled(kind(), plan)
            });
            if pool.is_none() {
                recent.past.missed(SlowReason::NoPool);
            }
            (pool, recent.outdated(plan.wants))
        };
        outdated.into_iter().for_each(close_aside);
        let claim = pool.ok_or(SlowReason::NoPool)?.ready(want);
        claim.map(|c| c.resource).map_err(|miss| miss.reason)
    }

    /// Closes the pools of wants that `is_outdated` selects, and forgets first requests for those. Does not block.
    pub(super) fn retire(&self, is_outdated: impl Fn(&K::Want) -> bool) {
        let mut recent = self.lock();
        recent.once.retain(|want| !is_outdated(want));
        for (want, pool) in std::mem::take(&mut recent.pools) {
            match is_outdated(&want) {
                true => {
                    recent.past = recent.past.clone().and(&pool.statistics().closed());
                    close_aside(pool);
                }
                false => recent.pools.push_back((want, pool)),
            }
        }
    }

    /// The sum of the statistics of all pools, including closed ones.
    pub fn statistics(&self) -> PoolStatistics {
        let (past, pools) = {
            let recent = self.lock();
            let pools: Vec<_> = recent.pools.iter().map(|(_, pool)| pool.clone()).collect();
            (recent.past.clone(), pools)
        };
        pools.iter().fold(past, |sum, pool| sum.and(&pool.statistics()))
    }

    /// Stops making resources, and destroys the ready ones. Blocks until that is done.
    pub fn close(&self) {
        let pools = {
            let mut recent = self.lock();
            recent.closed = true;
            std::mem::take(&mut recent.pools)
        };
        pools.iter().for_each(|(_, pool)| pool.close());
    }

    fn lock(&self) -> MutexGuard<'_, Recent<K>> {
        self.recent.locked()
    }
}

/// Closes a pool in the background.
fn close_aside<K: Kind>(pool: Arc<Pool<K>>) {
    let closing = std::thread::Builder::new().name(format!("close {}", K::NAME));
    let closed = closing.spawn(move || pool.close());
    if let Err(e) = closed {
        tracing::warn!(kind = K::NAME, "a pool is closed on a caller's path: {e}");
    }
}

impl<K: Kind> Recent<K>
where
    K::Want: Clone,
{
    /// The pool of this want, if it has one or now gets one.
    fn used(
        &mut self,
        want: &K::Want,
        wants: usize,
        make: impl FnOnce() -> std::io::Result<Pool<K>>,
    ) -> Option<Arc<Pool<K>>> {
        if let Some(at) = self.pools.iter().position(|(w, _)| w == want) {
            let found = self.pools.remove(at)?;
            let pool = found.1.clone();
            self.pools.push_front(found);
            return Some(pool);
        }
        let Some(at) = self.once.iter().position(|w| w == want) else {
            self.once.push_front(want.clone());
            self.once.truncate(wants);
            return None;
        };
        self.once.remove(at);
        match make() {
            Ok(pool) => {
                let pool = Arc::new(pool);
                self.pools.push_front((want.clone(), pool.clone()));
                Some(pool)
            }
            Err(e) => {
                tracing::warn!(kind = K::NAME, "none are made ahead: {e}");
                None
            }
        }
    }

    /// Removes one pool if there are more than planned.
    fn outdated(&mut self, wants: usize) -> Option<Arc<Pool<K>>> {
        match self.pools.len() > wants {
            true => {
                let (_, pool) = self.pools.pop_back()?;
                self.past = self.past.clone().and(&pool.statistics().closed());
                Some(pool)
            }
            false => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use thaw_pools::resource::Unfit;

    /// A kind whose resources are numbers: each is its want.
    struct Numbers;

    impl Kind for Numbers {
        const NAME: &'static str = "number";
        type Want = u8;
        type Resource = u8;
        type Error = String;

        fn make(&self, want: &u8) -> Result<u8, String> {
            Ok(*want)
        }

        fn check(&self, _: &u8) -> Result<(), Unfit> {
            Ok(())
        }

        fn destroy(&self, _: u8) {}
    }

    fn plan(wants: usize, high: usize) -> RecentPlan {
        RecentPlan {
            wants,
            marks: Watermarks::half_of(high),
            sizing: Sizing::Full,
            makers: 1,
            yields_to: None,
        }
    }

    #[test]
    fn want_used_twice_gets_a_pool_and_evicts_the_oldest() {
        let pools = RecentPools::default();
        let mut recent = pools.lock();
        let mut used = |want: u8| {
            let pool = recent.used(&want, 2, || Ok(Pool::empty(Numbers))).is_some();
            let outdated = recent.outdated(2).is_some();
            let wants: Vec<u8> = recent.pools.iter().map(|(w, _)| *w).collect();
            assert!(recent.once.len() <= 2);
            (pool, outdated, wants)
        };
        assert_eq!(used(1), (false, false, vec![]));
        assert_eq!(used(1), (true, false, vec![1]));
        assert_eq!(used(2), (false, false, vec![1]));
        assert_eq!(used(2), (true, false, vec![2, 1]));
        assert_eq!(used(1), (true, false, vec![1, 2]));
        // Many wants, each requested once, displace no pool.
        for want in 3..9 {
            assert_eq!(used(want), (false, false, vec![1, 2]));
        }
        assert_eq!(used(8), (true, true, vec![8, 1]));
    }

    #[test]
    fn retiring_a_want_closes_its_pool_and_no_other() {
        let pools = RecentPools::new(plan(4, 0));
        {
            let mut recent = pools.lock();
            for want in [1, 1, 2, 2, 3] {
                recent.used(&want, 4, || Ok(Pool::empty(Numbers)));
            }
        }
        pools.retire(|want| *want == 1 || *want == 3);
        let recent = pools.lock();
        assert_eq!(recent.pools.iter().map(|(w, _)| *w).collect::<Vec<_>>(), [2]);
        assert!(recent.once.is_empty());
    }

    #[test]
    fn recent_pools_without_plan_or_after_close_are_none() {
        let why = |pools: &RecentPools<Numbers>| pools.ready(&1, || Numbers).unwrap_err();
        assert_eq!(why(&RecentPools::default()), SlowReason::NoPool);
        assert_eq!(why(&RecentPools::new(plan(0, 4))), SlowReason::NoPool);
        assert_eq!(why(&RecentPools::new(plan(4, 0))), SlowReason::NoPool);
        let pools = RecentPools::new(plan(2, 4));
        assert_eq!(why(&pools), SlowReason::NoPool);
        let counted = pools.statistics();
        assert_eq!((counted.claims, counted.ready, counted.high), (1, 0, 0));
        pools.close();
        assert_eq!(why(&pools), SlowReason::Closed);
    }
}
