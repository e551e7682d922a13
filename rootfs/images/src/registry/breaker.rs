//! A circuit breaker: an endpoint that keeps failing gets no requests for a while, then one probe at a time.
//!
//! Invariants: while the breaker is open, no request passes before its time is over; then one probe passes at a time.
//! However a probe ends (success, failure, cancellation), the breaker leaves that state, so that it cannot stay open
//! for ever.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use thaw_sys::lock::Lock;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::stats::{Count, EndpointStats};

/// When to open and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Failures in a row that open it; at least 1.
    pub failures: u32,
    /// How long it is open the first time.
    pub first: Duration,
    /// How long at most; each time is twice as long as the one before.
    pub longest: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Closed { failures: u32 },
    Open { until: Instant, times: u32 },
    Probing { times: u32 },
}

/// The state machine. The caller supplies the time.
#[derive(Debug)]
struct Machine {
    rules: Rules,
    state: State,
}

/// Whether a request may be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Pass,
    /// It may be sent, and its result decides the state.
    Probe,
    /// Not before then.
    Until(Instant),
    /// Not before the probe has ended.
    Probing,
}

impl Machine {
    fn new(rules: Rules) -> Self {
        Self {
            rules,
            state: State::Closed { failures: 0 },
        }
    }

    fn admit(&mut self, now: Instant) -> Verdict {
        match self.state {
            State::Closed { .. } => Verdict::Pass,
            State::Open { until, .. } if now < until => Verdict::Until(until),
            State::Open { times, .. } => {
                self.state = State::Probing { times };
                Verdict::Probe
            }
            State::Probing { .. } => Verdict::Probing,
        }
    }

    fn succeeded(&mut self, probe: bool) {
        // A request that was sent before the breaker opened proves less than the probe will.
        if probe || matches!(self.state, State::Closed { .. }) {
            self.state = State::Closed { failures: 0 };
        }
    }

    /// Returns whether the breaker opened.
    fn failed(&mut self, probe: bool, now: Instant) -> bool {
        let times = match self.state {
            State::Closed { failures } if failures + 1 < self.rules.failures => {
                self.state = State::Closed {
                    failures: failures + 1,
                };
                return false;
            }
            State::Closed { .. } => 0,
            State::Probing { times } if probe => times + 1,
            _ => return false,
        };
        let open = self
            .rules
            .first
            .saturating_mul(1 << times.min(16))
            .min(self.rules.longest);
        self.state = State::Open {
            until: now + open,
            times: times.min(16),
        };
        true
    }

    /// A probe ended without telling anything: the next one may try at once.
    fn abandoned(&mut self, now: Instant) {
        if let State::Probing { times } = self.state {
            self.state = State::Open { until: now, times };
        }
    }
}

/// The circuit breaker of one endpoint.
pub struct Breaker {
    machine: Mutex<Machine>,
    /// Notified when a probe has ended; of all breakers of a process.
    changed: Arc<Notify>,
    stats: Arc<EndpointStats>,
}

/// The result of [`Breaker::admit`].
pub enum Admission {
    Pass(Permit),
    /// Try again then, or when any breaker has changed.
    Later(Option<Instant>),
}

impl Breaker {
    pub fn new(rules: Rules, changed: Arc<Notify>, stats: Arc<EndpointStats>) -> Arc<Self> {
        Arc::new(Self {
            machine: Mutex::new(Machine::new(rules)),
            changed,
            stats,
        })
    }

    /// Whether a request may be sent now.
    pub fn admit(self: &Arc<Self>) -> Admission {
        let verdict = self.with(|machine| machine.admit(Instant::now()));
        let probe = match verdict {
            Verdict::Pass => false,
            Verdict::Probe => {
                self.stats.count(Count::BreakerProbe);
                true
            }
            Verdict::Until(until) => return Admission::Later(Some(until)),
            Verdict::Probing => return Admission::Later(None),
        };
        Admission::Pass(Permit {
            breaker: self.clone(),
            probe,
            settled: false,
        })
    }

    fn with<T>(&self, change: impl FnOnce(&mut Machine) -> T) -> T {
        change(&mut self.machine.locked())
    }
}

/// An admitted request. The caller reports its result; dropping the permit means that the request was given up.
pub struct Permit {
    breaker: Arc<Breaker>,
    probe: bool,
    settled: bool,
}

impl Permit {
    /// The answer has begun and a long body follows: a probe ends here. The returned permit reports the end of the body.
    pub fn answered(self) -> Permit {
        if !self.probe {
            return self;
        }
        let breaker = self.breaker.clone();
        self.succeeded();
        Permit {
            breaker,
            probe: false,
            settled: false,
        }
    }

    pub fn succeeded(mut self) {
        self.settled = true;
        self.breaker.with(|machine| machine.succeeded(self.probe));
    }

    pub fn failed(mut self) {
        self.settled = true;
        let opened = self
            .breaker
            .with(|machine| machine.failed(self.probe, Instant::now()));
        if opened {
            self.breaker.stats.count(Count::BreakerOpen);
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if self.probe {
            if !self.settled {
                self.breaker.with(|machine| machine.abandoned(Instant::now()));
            }
            self.breaker.changed.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const RULES: Rules = Rules {
        failures: 3,
        first: Duration::from_secs(1),
        longest: Duration::from_secs(5),
    };

    #[test]
    fn it_opens_after_failures_in_a_row_and_closes_after_a_probe() {
        let now = Instant::now();
        let mut machine = Machine::new(RULES);
        assert!(!machine.failed(false, now));
        assert!(!machine.failed(false, now));
        machine.succeeded(false);
        assert!(!machine.failed(false, now));
        assert!(!machine.failed(false, now));
        assert!(machine.failed(false, now));
        let until = now + Duration::from_secs(1);
        assert_eq!(machine.admit(now), Verdict::Until(until));
        // A request that was sent before does not close it.
        machine.succeeded(false);
        assert_eq!(machine.admit(now), Verdict::Until(until));
        assert_eq!(machine.admit(until), Verdict::Probe);
        assert_eq!(machine.admit(until), Verdict::Probing);
        machine.succeeded(true);
        assert_eq!(machine.admit(until), Verdict::Pass);
    }

    #[test]
    fn it_stays_open_longer_each_time_up_to_a_bound() {
        let mut now = Instant::now();
        let mut machine = Machine::new(RULES);
        (0..3).for_each(|_| _ = machine.failed(false, now));
        for seconds in [1, 2, 4, 5, 5] {
            let Verdict::Until(until) = machine.admit(now) else {
                panic!("not open")
            };
            assert_eq!(until - now, Duration::from_secs(seconds));
            now = until;
            assert_eq!(machine.admit(now), Verdict::Probe);
            assert!(machine.failed(true, now));
        }
    }

    /// Fails once, and begins the probe that follows.
    async fn probe_after_failure(breaker: &Arc<Breaker>) -> Permit {
        let Admission::Pass(permit) = breaker.admit() else {
            panic!("shut")
        };
        permit.failed();
        tokio::time::advance(Duration::from_secs(1)).await;
        let Admission::Pass(probe) = breaker.admit() else {
            panic!("no probe")
        };
        probe
    }

    #[tokio::test(start_paused = true)]
    async fn a_probe_that_is_given_up_lets_the_next_one_try() {
        let rules = Rules { failures: 1, ..RULES };
        let changed = Arc::new(Notify::new());
        let breaker = Breaker::new(rules, changed.clone(), Arc::default());
        let probe = probe_after_failure(&breaker).await;
        assert!(matches!(breaker.admit(), Admission::Later(None)));
        let waiting = changed.notified();
        drop(probe);
        waiting.await;
        assert!(matches!(breaker.admit(), Admission::Pass(_)));
    }

    #[tokio::test(start_paused = true)]
    async fn an_answered_probe_lets_others_pass_while_its_body_comes() {
        let rules = Rules { failures: 1, ..RULES };
        let breaker = Breaker::new(rules, Arc::default(), Arc::default());
        let probe = probe_after_failure(&breaker).await;
        let body = probe.answered();
        assert!(matches!(breaker.admit(), Admission::Pass(_)));
        body.failed();
        assert!(matches!(breaker.admit(), Admission::Later(Some(_))));
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Admit,
        Succeed(usize),
        Fail(usize),
        Abandon(usize),
        Wait(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            Just(Step::Admit),
            (0usize..8).prop_map(Step::Succeed),
            (0usize..8).prop_map(Step::Fail),
            (0usize..8).prop_map(Step::Abandon),
            (1u64..3000).prop_map(Step::Wait),
        ]
    }

    proptest! {
        #[test]
        fn breaker_probes_one_at_a_time_and_always_recovers(steps in proptest::collection::vec(step(), 0..200)) {
            let mut now = Instant::now();
            let mut machine = Machine::new(RULES);
            let mut open: Vec<bool> = Vec::new();
            for step in steps {
                let until = match machine.state { State::Open { until, .. } => Some(until), _ => None };
                match step {
                    Step::Wait(milliseconds) => now += Duration::from_millis(milliseconds),
                    Step::Admit => match machine.admit(now) {
                        Verdict::Pass => { prop_assert!(until.is_none()); open.push(false) }
                        Verdict::Probe => {
                            prop_assert!(until.is_some_and(|until| until <= now));
                            prop_assert!(!open.contains(&true));
                            open.push(true);
                        }
                        Verdict::Until(until) => {
                            prop_assert!(until > now && until - now <= RULES.longest);
                        }
                        Verdict::Probing => prop_assert!(open.contains(&true)),
                    },
                    Step::Succeed(at) if at < open.len() => machine.succeeded(open.swap_remove(at)),
                    Step::Fail(at) if at < open.len() => _ = machine.failed(open.swap_remove(at), now),
                    Step::Abandon(at) if at < open.len() && open.swap_remove(at) => machine.abandoned(now),
                    _ => {}
                }
            }
            // In any case, once all requests are done and time has passed, a request may pass.
            for probe in open { if probe { machine.abandoned(now) } }
            let verdict = machine.admit(now + RULES.longest);
            prop_assert!(matches!(verdict, Verdict::Pass | Verdict::Probe));
        }
    }
}
