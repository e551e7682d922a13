//! Where the time of a start goes: named stages, each timed by a guard.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use serde::{Deserialize, Serialize};

/// One stage. Nanoseconds since the trace began.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stage {
    pub name: String,
    pub start_ns: u64,
    pub duration_ns: u64,
}

/// The stages of one start. Clones write to the same trace.
#[derive(Clone, Debug)]
pub struct Trace {
    began: Instant,
    /// CLOCK_MONOTONIC nanoseconds at `began`: other processes' times are given on that clock.
    began_monotonic: u64,
    stages: Arc<Mutex<Vec<Stage>>>,
}

/// Records its stage when dropped.
#[must_use = "a stage lasts as long as its guard"]
#[derive(Debug)]
pub struct StageGuard {
    trace: Trace,
    name: &'static str,
    start: Instant,
}

impl Default for Trace {
    fn default() -> Self {
        Trace::new()
    }
}

impl Trace {
    /// Begins now.
    pub fn new() -> Trace {
        Trace {
            began: Instant::now(),
            began_monotonic: monotonic_ns(),
            stages: Arc::default(),
        }
    }

    /// Begins a stage.
    pub fn stage(&self, name: &'static str) -> StageGuard {
        tracing::debug!(stage = name, "begins");
        StageGuard {
            trace: self.clone(),
            name,
            start: Instant::now(),
        }
    }

    /// Adds a stage timed by another process on CLOCK_MONOTONIC. One that is not in order is left out.
    pub fn add_monotonic(&self, name: &str, from: u64, to: u64) {
        if from >= self.began_monotonic && to >= from {
            self.push(Stage {
                name: name.into(),
                start_ns: from - self.began_monotonic,
                duration_ns: to - from,
            });
        }
    }

    /// Adds stages another process traced from the moment this trace had reached `offset_ns`.
    pub fn add_all(&self, stages: Vec<Stage>, offset_ns: u64) {
        for stage in stages {
            self.push(Stage {
                start_ns: stage.start_ns + offset_ns,
                ..stage
            });
        }
    }

    /// Nanoseconds since the trace began.
    pub fn elapsed_ns(&self) -> u64 {
        nanoseconds(self.began.elapsed())
    }

    /// The stages so far, by start.
    pub fn stages(&self) -> Vec<Stage> {
        let mut stages = self.stages.lock().unwrap_or_else(PoisonError::into_inner).clone();
        stages.sort_by_key(|s| s.start_ns);
        stages
    }

    fn push(&self, stage: Stage) {
        tracing::debug!(stage = stage.name, us = stage.duration_ns / 1000, "done");
        self.stages
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(stage);
    }
}

impl Drop for StageGuard {
    fn drop(&mut self) {
        self.trace.push(Stage {
            name: self.name.into(),
            start_ns: nanoseconds(self.start.duration_since(self.trace.began)),
            duration_ns: nanoseconds(self.start.elapsed()),
        });
    }
}

/// CLOCK_MONOTONIC, nanoseconds.
pub fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

fn nanoseconds(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
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
        let stages = trace.stages();
        let names: Vec<_> = stages.iter().map(|s| s.name.as_str()).collect();
        assert_eq!(names, ["outer", "inner", "elsewhere"]);
        assert_eq!(stages[2].duration_ns, 5_000);
        assert!(stages[2].start_ns < 1_000_000_000);
    }
}
