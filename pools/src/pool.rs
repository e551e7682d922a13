//! A pool: resources of one kind made ahead of time, handed out once each, and destroyed away from their users' path.
//!
//! Invariants:
//! - A claim that finds a resource ready takes one short lock and a check. It never waits for a maker, of this pool or another. If
//!   nothing is ready, the claim makes its own resource and says why ([`SlowReason`]).
//! - Never more than [`high`](crate::plan::Watermarks::high) are ready. A pool sized by demand destroys what was not claimed in time,
//!   down to [`low`](crate::plan::Watermarks::low).
//! - Every resource is handed out once or destroyed once: never both, never neither, also when the pool is closed.
//! - A pool yields to the work that its plan names: it neither makes nor destroys beside it, for a short time, unless it has almost run
//!   out or much waits to be destroyed.
//! - After a resource could not be made, or was unfit, the pool retries after a pause that doubles each time.
//!
//! A pool has threads of its own: makers, which sleep until claims have taken it below its low mark, and one that destroys. Their priority
//! is low (`priority`). An empty pool ([`Pool::empty`]) has no threads: its callers do all the work.

use std::fmt;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::demand::Demand;
use crate::foreground::Wake;
use crate::plan::{Plan, Sizing, Watermarks};
use crate::priority;
use crate::resource::{Claim, Kind, SlowReason, Unfit};
use crate::statistics::{Counters, PoolStatistics, add};
use thaw_failpoint::{Failpoint, reach};
use thaw_sys::lock::Lock;

mod state;

use state::{State, wait_until};

/// Resources of one kind.
pub struct Pool<K: Kind> {
    shared: Arc<Shared<K>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// A claim that found nothing ready; [`Pool::make`] makes its resource.
#[derive(Clone, Copy, Debug)]
pub struct Miss {
    pub reason: SlowReason,
    began: Instant,
}

struct Shared<K: Kind> {
    kind: K,
    /// `None` of a pool that makes nothing ahead.
    plan: Option<Plan<K::Want>>,
    state: Mutex<State<K::Resource>>,
    /// Wakes makers: the pool is to be filled, or closed.
    refill: Condvar,
    /// Wakes the destroyer: a resource waits to be destroyed, or the pool closed.
    destroy: Condvar,
    counters: Counters,
}

impl<K: Kind> Pool<K> {
    /// A pool that makes nothing ahead and does all its work on its callers' threads.
    pub fn empty(kind: K) -> Pool<K> {
        Pool {
            shared: Shared::new(kind, None),
            threads: Mutex::default(),
        }
    }

    /// A pool that is filled from now on.
    ///
    /// # Errors
    /// Its threads cannot be started.
    pub fn filled(kind: K, plan: Plan<K::Want>) -> io::Result<Pool<K>> {
        let (makers, has_any) = (plan.makers.max(1), plan.watermarks.high() > 0);
        if !has_any {
            return Ok(Pool::empty(kind));
        }
        let yields_to = plan.yields_to.clone();
        let pool = Pool {
            shared: Shared::new(kind, Some(plan)),
            threads: Mutex::default(),
        };
        if let Some(work) = yields_to {
            let shared: Arc<dyn Wake> = pool.shared.clone();
            work.wakes(Arc::downgrade(&shared));
        }
        for _ in 0..makers {
            pool.start("make", Shared::make_ahead)?;
        }
        pool.start("end", Shared::destroy_doomed)?;
        Ok(pool)
    }

    fn start(&self, what: &str, work: fn(&Shared<K>)) -> io::Result<()> {
        let shared = self.shared.clone();
        let work = move || {
            priority::lower();
            work(&shared);
        };
        let thread = std::thread::Builder::new()
            .name(format!("{what} {}", K::NAME))
            .spawn(work)?;
        self.threads.locked().push(thread);
        Ok(())
    }

    /// The kind of its resources.
    pub fn kind(&self) -> &K {
        &self.shared.kind
    }

    /// Takes a ready resource, or makes one, which blocks.
    pub fn claim(&self, want: &K::Want) -> Result<Claim<K::Resource>, K::Error> {
        match self.ready(want) {
            Ok(claim) => Ok(claim),
            Err(miss) => self.make(want, miss),
        }
    }

    /// Takes a ready resource. Does not block.
    ///
    /// # Errors
    /// No resource is ready, and why.
    pub fn ready(&self, want: &K::Want) -> Result<Claim<K::Resource>, Miss> {
        let began = Instant::now();
        match self.shared.take(want) {
            Ok(resource) => {
                add(&self.shared.counters.hits);
                Ok(self.shared.claim(resource, None, began))
            }
            Err(reason) => {
                self.shared.counters.miss(reason);
                Err(Miss { reason, began })
            }
        }
    }

    /// Makes a resource for a claim that found none. Blocks.
    pub fn make(&self, want: &K::Want, miss: Miss) -> Result<Claim<K::Resource>, K::Error> {
        let resource = self.shared.make(want)?;
        reach(Failpoint::ClaimMade);
        let claim = self.shared.claim(resource, Some(miss.reason), miss.began);
        tracing::debug!(kind = K::NAME, took = ?claim.took, reason = %miss.reason, "made");
        Ok(claim)
    }

    /// Takes a used resource back and destroys it: no other sandbox gets it. Blocks only if too many wait for that already, or if the pool
    /// is empty or closed.
    pub fn release(&self, resource: K::Resource) {
        self.shared.doom(resource);
    }

    /// The pool's level and counters.
    pub fn statistics(&self) -> PoolStatistics {
        let watermarks = self.shared.plan.as_ref().map(|plan| plan.watermarks);
        let state = self.shared.lock();
        let (ready, making, doomed) = (state.ready.len(), state.making, state.doomed.len());
        drop(state);
        PoolStatistics {
            ready,
            making,
            doomed,
            low: watermarks.map_or(0, |w| w.low()),
            high: watermarks.map_or(0, |w| w.high()),
            ..self.shared.counters.snapshot(K::NAME)
        }
    }

    /// Stops preparing resources, destroys the ready ones and those that wait for the destroyer, and ends its threads. Blocks until that is
    /// done. Later claims work as in an empty pool.
    pub fn close(&self) {
        let ready = {
            let mut state = self.shared.lock();
            state.closed = true;
            std::mem::take(&mut state.ready)
        };
        reach(Failpoint::CloseBegun);
        self.shared.refill.notify_all();
        self.shared.destroy.notify_all();
        for resource in ready {
            self.shared.destroy(resource);
            reach(Failpoint::CloseDestroyed);
        }
        let threads = std::mem::take(&mut *self.threads.locked());
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!(kind = K::NAME, "a thread of the pool panicked");
            }
        }
        reach(Failpoint::CloseEnded);
    }
}

impl<K: Kind> Drop for Pool<K> {
    fn drop(&mut self) {
        self.close();
    }
}

impl<K: Kind> fmt::Debug for Pool<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("kind", &K::NAME)
            .finish_non_exhaustive()
    }
}

impl<K: Kind> Wake for Shared<K> {
    fn wake(&self) {
        // Under the lock: a thread that has just decided to wait cannot miss it.
        let (filling, doomed) = {
            let state = self.lock();
            (state.filling, !state.doomed.is_empty())
        };
        if filling {
            self.refill.notify_all();
        }
        if doomed {
            self.destroy.notify_one();
        }
    }
}

impl<K: Kind> Shared<K> {
    fn new(kind: K, plan: Option<Plan<K::Want>>) -> Arc<Shared<K>> {
        let demand = match &plan {
            Some(plan) => Demand::new(plan.sizing, plan.watermarks),
            None => Demand::new(Sizing::Full, Watermarks::half_of(0)),
        };
        Arc::new(Shared {
            kind,
            plan,
            state: Mutex::new(State::new(demand)),
            refill: Condvar::new(),
            destroy: Condvar::new(),
            counters: Counters::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State<K::Resource>> {
        self.state.locked()
    }

    fn claim(&self, resource: K::Resource, slow: Option<SlowReason>, began: Instant) -> Claim<K::Resource> {
        let took = began.elapsed();
        self.counters.claim.record(took);
        Claim { resource, slow, took }
    }

    /// Takes the oldest ready resource that is fit.
    fn take(&self, want: &K::Want) -> Result<K::Resource, SlowReason> {
        let plan = self.plan.as_ref().ok_or(SlowReason::NoPool)?;
        if plan.want != *want {
            return Err(SlowReason::OtherWant);
        }
        let mut none = SlowReason::Empty;
        let now = Instant::now();
        let mut counted = false;
        // Resources that makers add meanwhile are left to other claims.
        for _ in 0..plan.watermarks.high() {
            let mut state = self.lock();
            if state.closed {
                return Err(SlowReason::Closed);
            }
            if !std::mem::replace(&mut counted, true) {
                state.demand.claimed(now);
            }
            let resource = state.ready.pop_front();
            let refill = state.ready.len() < state.demand.target(now).refill;
            if refill {
                state.fill(now);
            }
            let may_fill = refill && state.may_fill(plan, now);
            let doubted = state.unfit.failures > 0;
            drop(state);
            if may_fill {
                self.refill.notify_all();
            }
            let resource = resource.ok_or(none)?;
            reach(Failpoint::ClaimPopped);
            match self.kind.check(&resource) {
                Ok(()) => {
                    reach(Failpoint::ClaimChecked);
                    if doubted {
                        self.lock().unfit.reset();
                    }
                    return Ok(resource);
                }
                Err(unfit) => {
                    self.quarantine(plan, resource, &unfit);
                    none = SlowReason::Unfit;
                }
            }
        }
        Err(none)
    }

    fn quarantine(&self, plan: &Plan<K::Want>, resource: K::Resource, unfit: &Unfit) {
        add(&self.counters.quarantined);
        let pause = self.lock().unfit.next_pause(&plan.backoff, Instant::now());
        log_failure::<K>(plan, pause, &format_args!("not handed out: {unfit}"));
        self.doom(resource);
    }

    /// Makes a resource and counts it.
    fn make(&self, want: &K::Want) -> Result<K::Resource, K::Error> {
        let began = Instant::now();
        let made = self.kind.make(want);
        match &made {
            Ok(_) => {
                self.counters.make.record(began.elapsed());
                add(&self.counters.made);
            }
            Err(_) => add(&self.counters.failed),
        }
        made
    }

    fn destroy(&self, resource: K::Resource) {
        self.kind.destroy(resource);
        add(&self.counters.destroyed);
    }

    /// Leaves a resource to the destroyer, unless too many wait for it or there is none.
    fn doom(&self, resource: K::Resource) {
        let most = self.plan.as_ref().map_or(0, |plan| plan.doomed);
        let mut state = self.lock();
        if state.closed || state.doomed.len() >= most {
            drop(state);
            return self.destroy(resource);
        }
        state.doom(resource, Instant::now());
        drop(state);
        reach(Failpoint::ReleaseQueued);
        self.destroy.notify_one();
    }

    /// Runs a maker until the pool is closed.
    fn make_ahead(&self) {
        let Some(plan) = &self.plan else { return };
        let mut state = self.lock();
        while !state.closed {
            let now = Instant::now();
            let pause = [state.failing.until, state.unfit.until]
                .into_iter()
                .flatten()
                .max()
                .map_or(Duration::ZERO, |until| until.saturating_duration_since(now));
            let target = state.demand.target(now);
            if let Some(spare) = state.spare(target.full) {
                drop(state);
                self.destroy(spare);
                state = self.lock();
                continue;
            }
            if !state.may_fill(plan, now) || state.ready.len() + state.making >= target.full {
                let fills_by = state.fills_by.filter(|by| state.filling && *by > now);
                let until = target.falls.into_iter().chain(fills_by).min();
                state = wait_until(&self.refill, state, until, now);
                continue;
            }
            if !pause.is_zero() {
                state = wait_until(&self.refill, state, now.checked_add(pause), now);
                continue;
            }
            state.making += 1;
            drop(state);
            let made = self.make(&plan.want);
            reach(Failpoint::FillMade);
            state = self.lock();
            state.making -= 1;
            state = self.made_ahead(plan, state, made);
            reach(Failpoint::FillReady);
        }
    }

    /// Adds a resource made ahead, or counts the failure.
    fn made_ahead<'a>(
        &'a self,
        plan: &Plan<K::Want>,
        mut state: MutexGuard<'a, State<K::Resource>>,
        made: Result<K::Resource, K::Error>,
    ) -> MutexGuard<'a, State<K::Resource>> {
        match made {
            Ok(resource) if state.closed => {
                drop(state);
                self.destroy(resource);
                self.lock()
            }
            Ok(resource) => {
                state.failing.reset();
                state.ready.push_back(resource);
                state.filling = state.ready.len() < state.demand.target(Instant::now()).full;
                state
            }
            Err(error) => {
                // Other makers may have counted on it.
                state.fill(Instant::now());
                let pause = state.failing.next_pause(&plan.backoff, Instant::now());
                drop(state);
                log_failure::<K>(plan, pause, &format_args!("cannot be made ahead: {error}"));
                self.lock()
            }
        }
    }

    /// Runs the destroyer until the pool is closed and nothing is left to destroy.
    fn destroy_doomed(&self) {
        let Some(plan) = &self.plan else { return };
        let mut state = self.lock();
        loop {
            let (now, by) = (Instant::now(), state.destroys_by);
            state = match state.may_destroy(plan, now) {
                false => wait_until(&self.destroy, state, by, now),
                true => match state.doomed.pop_front() {
                    Some(resource) => {
                        drop(state);
                        reach(Failpoint::ReleaseTaken);
                        self.destroy(resource);
                        reach(Failpoint::ReleaseDestroyed);
                        self.lock()
                    }
                    None if state.closed => return,
                    None => wait_until(&self.destroy, state, None, now),
                },
            };
        }
    }
}

/// Logs a failure. A lasting one is logged while pauses grow; afterwards only its counter shows it.
fn log_failure<K: Kind>(plan: &Plan<K::Want>, pause: Duration, what: &dyn fmt::Display) {
    match pause < plan.backoff.longest {
        true => tracing::warn!(kind = K::NAME, again_in = ?pause, "{what}"),
        false => tracing::debug!(kind = K::NAME, again_in = ?pause, "{what}"),
    }
}

#[cfg(test)]
#[path = "pool_test.rs"]
mod tests;
