//! How the time of a start is spent: named stages, each timed by a guard.

use std::sync::{Arc, Mutex, MutexGuard};

use thaw_sys::lock::Lock;

pub use thaw_protocol::api::{Account, Reason, Stage};

use crate::slow::Slow;

/// The stages of one start. Clones write to the same trace.
#[derive(Clone, Debug)]
pub struct Trace {
    /// CLOCK_MONOTONIC, nanoseconds, as all times here: other processes report theirs on that clock.
    began: u64,
    is_detailed: bool,
    account: Arc<Mutex<Account>>,
}

/// Records its stage when it is dropped.
#[must_use = "a stage lasts as long as its guard"]
#[derive(Debug)]
pub struct StageGuard {
    trace: Trace,
    name: &'static str,
    start_ns: u64,
}

impl Default for Trace {
    fn default() -> Self {
        Trace::new()
    }
}

impl Trace {
    /// A trace that begins now.
    pub fn new() -> Trace {
        Trace {
            began: monotonic_ns(),
            is_detailed: false,
            account: Arc::default(),
        }
    }

    /// The same. With `timings`, the start waits for what only its machine knows of it.
    pub fn asked(timings: bool) -> Trace {
        Trace {
            is_detailed: timings,
            ..Trace::new()
        }
    }

    /// A trace of the same start, with nothing in it.
    pub fn anew(&self) -> Trace {
        Trace {
            account: Arc::default(),
            ..self.clone()
        }
    }

    /// Whether the start waits for what only its machine knows of it: its caller has asked for that, or it is a slow one already.
    pub fn is_detailed(&self) -> bool {
        self.is_detailed || !self.lock().reasons.is_empty()
    }

    /// Begins a stage.
    pub fn stage(&self, name: &'static str) -> StageGuard {
        tracing::debug!(stage = name, "begins");
        StageGuard {
            trace: self.clone(),
            name,
            start_ns: self.elapsed_ns(),
        }
    }

    /// Adds a stage that another process timed on CLOCK_MONOTONIC. Ignores it if its times are out of order.
    pub fn add_monotonic(&self, name: &str, from: u64, to: u64) {
        if from >= self.began && to >= from {
            self.push(Stage {
                name: name.into(),
                start_ns: from - self.began,
                duration_ns: to - from,
            });
        }
    }

    /// Adds a reason why the start was slower than it could be. A repeated reason counts once.
    pub fn reason(&self, slow: Slow, text: &str) {
        self.push_reason(slow.code(), text);
    }

    fn push_reason(&self, code: &str, text: &str) {
        let mut account = self.lock();
        if !account.reasons.iter().any(|r| r.code == code) {
            tracing::info!(reason = code, "{text}");
            account.reasons.push(Reason {
                code: code.into(),
                text: text.into(),
            });
        }
    }

    /// Records a number.
    pub fn count(&self, name: &str, value: u64) {
        self.lock().counts.insert(name.into(), value);
    }

    /// Records what was done in a stage.
    pub fn note(&self, stage: &str, text: &str) {
        self.lock().notes.insert(stage.into(), text.into());
    }

    /// Adds the trace of another process, which began when this trace was at `offset_ns`.
    pub fn add_all(&self, other: Account, offset_ns: u64) {
        for stage in other.stages {
            self.push(Stage {
                start_ns: stage.start_ns + offset_ns,
                ..stage
            });
        }
        for reason in other.reasons {
            self.push_reason(&reason.code, &reason.text);
        }
        let mut account = self.lock();
        account.counts.extend(other.counts);
        account.notes.extend(other.notes);
    }

    /// Nanoseconds since the trace began.
    pub fn elapsed_ns(&self) -> u64 {
        monotonic_ns().saturating_sub(self.began)
    }

    /// The account so far.
    pub fn account(&self) -> Account {
        let mut account = self.lock().clone();
        account.stages.sort_by_key(|s| s.start_ns);
        account
    }

    fn push(&self, stage: Stage) {
        tracing::debug!(stage = stage.name, us = stage.duration_ns / 1000, "done");
        self.lock().stages.push(stage);
    }

    fn lock(&self) -> MutexGuard<'_, Account> {
        self.account.locked()
    }
}

impl Drop for StageGuard {
    fn drop(&mut self) {
        self.trace.push(Stage {
            name: self.name.into(),
            start_ns: self.start_ns,
            duration_ns: self.trace.elapsed_ns().saturating_sub(self.start_ns),
        });
    }
}

/// CLOCK_MONOTONIC, nanoseconds.
pub fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_are_kept_in_order_of_start_with_others_clocks_aligned() {
        let trace = Trace::new();
        let outer = trace.stage("outer");
        drop(trace.stage("inner"));
        drop(outer);
        let now = monotonic_ns();
        trace.add_monotonic("elsewhere", now, now + 5_000);
        trace.add_monotonic("before we began", 1, 2);
        let stages = trace.account().stages;
        let names: Vec<_> = stages.iter().map(|s| s.name.as_str()).collect();
        assert_eq!(names, ["outer", "inner", "elsewhere"]);
        assert_eq!(stages[2].duration_ns, 5_000);
        assert!(stages[2].start_ns < 1_000_000_000);
    }

    #[test]
    fn start_is_detailed_if_it_was_asked_or_is_slow() {
        let trace = Trace::new();
        trace.count("pages", 1);
        assert!(!trace.is_detailed() && Trace::asked(true).is_detailed());
        trace.reason(Slow::NoShell, "none was ready");
        assert!(trace.is_detailed());
        let anew = trace.anew();
        assert_eq!((anew.account(), anew.began), (Account::default(), trace.began));
        assert!(!anew.is_detailed());
    }

    #[test]
    fn foreign_account_is_shifted_in_time_with_reasons_once() {
        let trace = Trace::new();
        trace.reason(Slow::PagesNotResident, "the pages were cold");
        let stage = |name: &str, start_ns| Stage {
            name: name.into(),
            start_ns,
            duration_ns: 1,
        };
        let other = Account {
            stages: vec![stage("theirs", 5)],
            reasons: [Slow::PagesNotResident.code(), "late"]
                .map(|c| Reason {
                    code: c.into(),
                    text: String::new(),
                })
                .into(),
            counts: [("faults".to_owned(), 7)].into(),
            notes: Default::default(),
        };
        trace.add_all(other, 100);
        let account = trace.account();
        assert_eq!(account.stages, [stage("theirs", 105)]);
        let codes: Vec<_> = account.reasons.iter().map(|r| r.code.as_str()).collect();
        assert_eq!(codes, ["pages-not-resident", "late"]);
        assert_eq!(account.counts["faults"], 7);
    }
}
