//! What a pool holds, and when its threads may work.
//!
//! Invariant: whoever yields to other work yields for a bounded time, and not at all once the pool has almost run out or much is doomed.

use std::collections::VecDeque;
use std::sync::{Condvar, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::demand::Demand;
use crate::failure_streak::FailureStreak;
use crate::plan::Plan;

/// A pool that holds at most this part of its low mark has almost run out.
const ALMOST_OUT: usize = 4;
/// No more than this part of what may wait to be destroyed waits for other work.
const MANY_DOOMED: usize = 4;
/// How long a pool yields to other work: a creation that pulls an image takes long, and costs the pool nothing. Tests must not depend on it.
const YIELDS: Duration = match cfg!(test) {
    true => Duration::from_secs(60),
    false => Duration::from_millis(200),
};

pub(super) struct State<R> {
    /// Oldest first.
    pub(super) ready: VecDeque<R>,
    pub(super) doomed: VecDeque<R>,
    /// How many makers are at work.
    pub(super) making: usize,
    /// Whether the pool has fallen below the low mark and not reached the high one since.
    pub(super) filling: bool,
    /// When makers no longer yield to other work.
    pub(super) fills_by: Option<Instant>,
    /// When the destroyer no longer does.
    pub(super) destroys_by: Option<Instant>,
    pub(super) closed: bool,
    pub(super) demand: Demand,
    /// Failures of making, and of checks.
    pub(super) failing: FailureStreak,
    pub(super) unfit: FailureStreak,
}

impl<R> State<R> {
    /// Of a pool that is to be filled.
    pub(super) fn new(demand: Demand) -> State<R> {
        State {
            ready: VecDeque::new(),
            doomed: VecDeque::new(),
            making: 0,
            filling: true,
            fills_by: None,
            destroys_by: None,
            closed: false,
            demand,
            failing: FailureStreak::default(),
            unfit: FailureStreak::default(),
        }
    }

    /// Whether makers may work. The pool must be below its mark, and one of these must hold: no other work is in progress, the pool has almost
    /// run out, or it has yielded long enough.
    pub(super) fn may_fill<W>(&mut self, plan: &Plan<W>, now: Instant) -> bool {
        self.filling
            && (plan.is_free()
                || self.ready.len() <= self.demand.target(now).refill / ALMOST_OUT
                || self.fills_by.is_none_or(|until| until <= now))
    }

    /// Whether the destroyer may work: no other work is in progress, much is doomed, or it has yielded long enough.
    pub(super) fn may_destroy<W>(&self, plan: &Plan<W>, now: Instant) -> bool {
        plan.is_free()
            || self.closed
            || self.doomed.len() > plan.doomed / MANY_DOOMED
            || self.destroys_by.is_none_or(|until| until <= now)
    }

    /// Begins to fill the pool.
    pub(super) fn fill(&mut self, now: Instant) {
        if !std::mem::replace(&mut self.filling, true) {
            self.fills_by = now.checked_add(YIELDS);
        }
    }

    /// The oldest ready resource, if more are ready than should be.
    pub(super) fn spare(&mut self, full: usize) -> Option<R> {
        (self.ready.len() > full)
            .then(|| self.ready.pop_front())
            .flatten()
    }

    /// Adds a resource that is to be destroyed.
    pub(super) fn doom(&mut self, resource: R, now: Instant) {
        if self.doomed.is_empty() {
            self.destroys_by = now.checked_add(YIELDS);
        }
        self.doomed.push_back(resource);
    }
}

/// Waits until it is notified, or until a time.
pub(super) fn wait_until<'a, T>(
    condition: &Condvar,
    state: MutexGuard<'a, T>,
    until: Option<Instant>,
    now: Instant,
) -> MutexGuard<'a, T> {
    match until {
        Some(until) => {
            let waited = condition.wait_timeout(state, until.saturating_duration_since(now));
            waited.unwrap_or_else(PoisonError::into_inner).0
        }
        None => condition.wait(state).unwrap_or_else(PoisonError::into_inner),
    }
}
