use super::*;
use crate::failure_streak::FailureStreak;
use crate::foreground::Foreground;
use crate::plan::Watermarks;
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use thaw_sys::backoff::Backoff;

/// Serial numbers: each is made once and alive until it is destroyed.
#[derive(Default)]
struct Serials {
    next: AtomicU64,
    alive: Mutex<BTreeSet<u64>>,
    /// Makers, but no claimer, wait while it is shut.
    gate: Gate,
    /// Makers at work, and their maximum.
    making: AtomicUsize,
    /// One in this many resources cannot be made, or is unfit when it is checked; 0: none.
    unmakeable: u64,
    unfit: u64,
    broken: AtomicBool,
}

#[derive(Default)]
struct Gate {
    shut: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    fn set(&self, shut: bool) {
        *self.shut.locked() = shut;
        self.opened.notify_all();
    }

    fn pass(&self) {
        let shut = self.opened.wait_while(self.shut.locked(), |shut| *shut);
        drop(shut.unwrap());
    }
}

fn is_maker() -> bool {
    std::thread::current().name() == Some("make serial")
}

fn every(n: u64, of: u64) -> bool {
    of > 0 && n.is_multiple_of(of)
}

impl Kind for Arc<Serials> {
    const NAME: &'static str = "serial";
    type Want = &'static str;
    type Resource = u64;
    type Error = &'static str;

    fn make(&self, _: &&'static str) -> Result<u64, &'static str> {
        if is_maker() {
            self.making.fetch_add(1, Ordering::SeqCst);
            self.gate.pass();
            self.making.fetch_sub(1, Ordering::SeqCst);
        }
        let serial = self.next.fetch_add(1, Ordering::SeqCst) + 1;
        if every(serial, self.unmakeable) || self.broken.load(Ordering::SeqCst) {
            return Err("not today");
        }
        assert!(self.alive.locked().insert(serial), "made twice: {serial}");
        Ok(serial)
    }

    fn check(&self, serial: &u64) -> Result<(), Unfit> {
        match every(*serial, self.unfit) {
            true => Err(Unfit(format!("{serial} is odd"))),
            false => Ok(()),
        }
    }

    fn destroy(&self, serial: u64) {
        assert!(self.alive.locked().remove(&serial), "destroyed twice: {serial}");
    }
}

fn plan(low: usize, high: usize) -> Plan<&'static str> {
    Plan {
        doomed: 4,
        backoff: Backoff {
            first: Duration::from_micros(10),
            longest: Duration::from_micros(100),
        },
        ..Plan::new("this", Watermarks::new(low, high).unwrap())
    }
}

#[test]
fn pool_refills_after_the_work_it_yields_to() {
    let work = Arc::<Foreground>::default();
    let serials = Arc::<Serials>::default();
    let plan = Plan {
        yields_to: Some(work.clone()),
        makers: 1,
        ..plan(8, 8)
    };
    let pool = Pool::filled(serials, plan).unwrap();
    until(&pool, |seen| seen.ready == 8);
    let active = work.begin();
    let claim = pool.claim(&"this").unwrap();
    assert_eq!(pool.statistics().made, 8, "it waits while the work goes on");
    drop(active);
    until(&pool, |seen| seen.ready == 8);
    pool.release(claim.resource);
}

#[test]
fn pool_destroys_after_the_work_it_yields_to() {
    let work = Arc::<Foreground>::default();
    let plan = Plan {
        yields_to: Some(work.clone()),
        doomed: 8,
        ..plan(8, 8)
    };
    let pool = Pool::filled(Arc::<Serials>::default(), plan).unwrap();
    until(&pool, |seen| seen.ready == 8);
    let active = work.begin();
    let claims: Vec<_> = (0..3).map(|_| pool.claim(&"this").unwrap()).collect();
    let mut used = claims.into_iter().map(|claim| claim.resource);
    used.by_ref().take(2).for_each(|resource| pool.release(resource));
    let seen = pool.statistics();
    assert_eq!(
        (seen.doomed, seen.destroyed),
        (2, 0),
        "it waits while the work goes on"
    );
    used.for_each(|resource| pool.release(resource));
    until(&pool, |seen| seen.destroyed > 0);
    drop(active);
    until(&pool, |seen| seen.destroyed == 3);
}

#[test]
fn pool_that_has_almost_run_out_does_not_yield() {
    let work = Arc::<Foreground>::default();
    let plan = Plan {
        yields_to: Some(work.clone()),
        ..plan(4, 4)
    };
    let pool = Pool::filled(Arc::<Serials>::default(), plan).unwrap();
    until(&pool, |seen| seen.ready == 4);
    let _active = work.begin();
    let claims: Vec<_> = (0..3).map(|_| pool.claim(&"this").unwrap()).collect();
    until(&pool, |seen| seen.made > 4);
    claims.into_iter().for_each(|claim| pool.release(claim.resource));
}

fn until(pool: &Pool<Arc<Serials>>, reached: impl Fn(&PoolStatistics) -> bool) -> PoolStatistics {
    loop {
        let seen = pool.statistics();
        if reached(&seen) {
            return seen;
        }
        std::thread::yield_now();
    }
}

fn alive(kind: &Arc<Serials>) -> Vec<u64> {
    kind.alive.locked().iter().copied().collect()
}

#[test]
fn empty_pool_makes_claims_and_destroys_releases() {
    let kind = Arc::new(Serials {
        unmakeable: 3,
        ..Default::default()
    });
    let pool = Pool::empty(kind.clone());
    let claims = [pool.claim(&"this").unwrap(), pool.claim(&"this").unwrap()];
    assert!(claims.iter().all(|c| c.slow == Some(SlowReason::NoPool)));
    assert_eq!(pool.claim(&"this").unwrap_err(), "not today");
    claims.into_iter().for_each(|c| pool.release(c.resource));
    assert!(alive(&kind).is_empty());
    let seen = pool.statistics();
    assert_eq!((seen.claims, seen.hits, seen.made, seen.failed), (3, 0, 2, 1));
    assert_eq!((seen.destroyed, seen.misses[0]), (2, (SlowReason::NoPool, 3)));
}

#[test]
fn pool_fills_to_high_mark_once_below_low_mark() {
    let kind = Arc::new(Serials::default());
    let pool = Pool::filled(kind.clone(), plan(2, 4)).unwrap();
    until(&pool, |s| s.ready == 4 && s.making == 0);
    let claimed: Vec<_> = (0..2).map(|_| pool.claim(&"this").unwrap()).collect();
    assert!(claimed.iter().all(|c| c.slow.is_none()));
    let serials: Vec<u64> = claimed.iter().map(|c| c.resource).collect();
    assert!(serials.iter().all(|s| *s <= 4), "{serials:?}");
    // At the low mark nothing is made; below it, the pool fills up to the high one.
    let seen = pool.statistics();
    assert_eq!((seen.ready, seen.making, seen.made), (2, 0, 4));
    pool.claim(&"this").unwrap();
    let seen = until(&pool, |s| s.ready == 4 && s.making == 0);
    assert_eq!((seen.made, seen.hits, seen.claims), (7, 3, 3));
    assert_eq!(seen.claim_times.counts.iter().sum::<u64>(), 3);
    assert_eq!(seen.make_times.counts.iter().sum::<u64>(), 7);
}

#[test]
fn claim_does_not_wait_for_a_stuck_maker() {
    let kind = Arc::new(Serials::default());
    let pool = Pool::filled(kind.clone(), plan(4, 4)).unwrap();
    until(&pool, |s| s.ready == 4 && s.making == 0);
    kind.gate.set(true);
    let slow: Vec<_> = (0..6).map(|_| pool.claim(&"this").unwrap().slow).collect();
    // All makers have reached the gate, and there are no more of them.
    until(&pool, |s| s.making == 2);
    assert!(slow[..4].iter().all(Option::is_none), "{slow:?}");
    assert_eq!(slow[4..], [Some(SlowReason::Empty); 2]);
    assert_eq!(pool.claim(&"that").unwrap().slow, Some(SlowReason::OtherWant));
    assert!(kind.making.load(Ordering::SeqCst) <= 2);
    kind.gate.set(false);
    until(&pool, |s| s.ready == 4);
}

#[test]
fn pool_closed_while_makers_work_leaves_nothing() {
    let kind = Arc::new(Serials::default());
    let pool = Pool::filled(kind.clone(), plan(2, 4)).unwrap();
    until(&pool, |s| s.ready == 4);
    let held = pool.claim(&"this").unwrap().resource;
    kind.gate.set(true);
    for _ in 0..2 {
        pool.release(pool.claim(&"this").unwrap().resource);
    }
    until(&pool, |s| s.making == 2);
    std::thread::scope(|scope| {
        scope.spawn(|| pool.close());
        until(&pool, |s| s.ready == 0);
        kind.gate.set(false);
    });
    assert_eq!(alive(&kind), [held]);
    let late = pool.claim(&"this").unwrap();
    assert_eq!(late.slow, Some(SlowReason::Closed));
    pool.release(late.resource);
    pool.release(held);
    assert!(alive(&kind).is_empty());
    pool.close();
}

#[test]
fn unfit_resource_is_counted_and_never_handed_out() {
    let kind = Arc::new(Serials {
        unfit: 1,
        ..Default::default()
    });
    let pool = Pool::filled(kind.clone(), plan(2, 4)).unwrap();
    until(&pool, |s| s.ready == 4);
    assert_eq!(pool.claim(&"this").unwrap().slow, Some(SlowReason::Unfit));
    let seen = pool.statistics();
    assert!(seen.quarantined >= 4, "{seen:?}");
    assert_eq!(seen.hits, 0);
}

#[test]
fn pool_recovers_once_making_succeeds() {
    let kind = Arc::new(Serials::default());
    kind.broken.store(true, Ordering::SeqCst);
    let pool = Pool::filled(kind.clone(), plan(2, 4)).unwrap();
    until(&pool, |s| s.failed > 5);
    assert_eq!(pool.claim(&"this").unwrap_err(), "not today");
    kind.broken.store(false, Ordering::SeqCst);
    until(&pool, |s| s.ready == 4);
}

#[test]
fn failures_of_one_round_count_once() {
    let backoff = Backoff::default();
    let (mut streak, now) = (FailureStreak::default(), Instant::now());
    for _ in 0..3 {
        assert_eq!(streak.next_pause(&backoff, now), backoff.first);
    }
    let later = now + backoff.first;
    assert_eq!(streak.next_pause(&backoff, later), 2 * backoff.first);
    streak.reset();
    assert_eq!(streak.next_pause(&backoff, later), backoff.first);
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Claim,
    ClaimOther,
    Release,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => Just(Step::Claim),
        1 => Just(Step::ClaimOther),
        3 => Just(Step::Release),
    ];
    prop::collection::vec(step, 0..40)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..Default::default() })]

    /// Whatever threads claim and release, whatever fails, and whenever it is closed.
    #[test]
    fn made_resources_are_held_or_destroyed_once(
        threads in prop::collection::vec(steps(), 1..4),
        (high, low) in (1usize..6).prop_flat_map(|high| (Just(high), 1..=high)),
        (unmakeable, unfit) in (0u64..5, 0u64..5),
        close_after in 0usize..40,
    ) {
        let kind = Arc::new(Serials { unmakeable, unfit, ..Default::default() });
        let pool = Pool::filled(kind.clone(), plan(low, high)).unwrap();
        let walk = |thread: usize, steps: &[Step]| {
            let mut held = Vec::new();
            for (n, step) in steps.iter().enumerate() {
                let want = match step { Step::ClaimOther => "that", _ => "this" };
                match step {
                    Step::Claim | Step::ClaimOther => held.extend(pool.claim(&want).map(|c| {
                        // A resource that was made ahead of time has passed its check.
                        assert!(c.slow.is_some() || !every(c.resource, unfit));
                        c.resource
                    })),
                    Step::Release => held.pop().into_iter().for_each(|r| pool.release(r)),
                }
                assert!(pool.statistics().ready <= high);
                if thread == 0 && n == close_after {
                    pool.close();
                }
            }
            held
        };
        let held: BTreeSet<u64> = std::thread::scope(|scope| {
            let walks: Vec<_> = threads.iter().enumerate()
                .map(|(n, steps)| scope.spawn(move || walk(n, steps)))
                .collect();
            walks.into_iter().flat_map(|w| w.join().unwrap()).collect()
        });
        pool.close();
        prop_assert_eq!(&*kind.alive.locked(), &held);
        let seen = pool.statistics();
        prop_assert_eq!((seen.ready, seen.making, seen.doomed), (0, 0, 0));
        prop_assert_eq!(seen.made, seen.destroyed + held.len() as u64);
        let claims: usize = threads.iter().flatten()
            .filter(|s| matches!(s, Step::Claim | Step::ClaimOther)).count();
        prop_assert_eq!(seen.claims, claims as u64);
        prop_assert_eq!(seen.claims, seen.hits + seen.misses.iter().map(|(_, n)| n).sum::<u64>());
    }
}

#[test]
fn demand_sized_pool_grows_and_shrinks_with_claims() {
    let kind = Arc::new(Serials::default());
    let sizing = Sizing::Demand {
        within: Duration::from_millis(300),
    };
    let plan = Plan { sizing, ..plan(1, 8) };
    let pool = Pool::filled(kind.clone(), plan).unwrap();
    until(&pool, |s| s.ready == 1);
    while pool.statistics().ready < 3 {
        pool.release(pool.claim(&"this").unwrap().resource);
        std::thread::yield_now();
    }
    until(&pool, |s| s.ready == 1 && s.making == 0);
    drop(pool);
    assert!(alive(&kind).is_empty());
}
