//! Lets a machine's vCPU threads run guest code, and stops them.
//!
//! Invariant: a vCPU enters guest code only while [`Wanted::Run`] holds. Any other wanted state is stored before the vCPU is kicked, so no
//! kick is lost ([`thaw_hypervisor::kick`]). Each thread waits on its own condition variable: a start wakes first the vCPUs that should run
//! first, and no other thread contends with them for a lock they need.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use thaw_hypervisor::{GuestTime, Kicker, Vcpu};
use thaw_sys::lock::Lock;

use crate::clock::monotonic_ns;

/// What the vCPUs must do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// Stay out of the guest.
    Hold,
    Run,
    /// End their threads.
    Quit,
}

/// Prepares a vCPU on its own thread before it first runs.
pub type Prepare = Box<dyn FnOnce(&mut Vcpu) -> thaw_hypervisor::Result<()> + Send>;

/// What a vCPU's thread must do next.
pub enum Turn {
    /// Call this with its vCPU, then [`RunControl::prepared`].
    Prepare(Prepare),
    /// Run the vCPU, then call [`RunControl::stopped`].
    Run,
    Quit,
}

/// What the vCPUs of one machine must do, and what they are doing.
pub struct RunControl {
    state: Mutex<State>,
    lanes: Vec<Lane>,
    /// Notified when a vCPU is ready, has stopped, or has counted its faults.
    news: Condvar,
    /// When the first vCPU entered the guest, CLOCK_MONOTONIC nanoseconds; 0 before.
    entered: AtomicU64,
    /// A thawed machine's time, set before the first start.
    time: OnceLock<GuestTime>,
}

/// The condition variable and the kicker of one vCPU.
struct Lane {
    turn: Condvar,
    kicker: Arc<Kicker>,
}

struct State {
    wanted: Wanted,
    /// By vCPU: the preparation that its thread has not begun.
    preparations: Vec<Option<Prepare>>,
    /// How many vCPUs are being prepared.
    coming: usize,
    /// How many vCPUs run guest code or handle an exit.
    running: usize,
    /// The error of the first preparation that failed.
    failed: Option<thaw_hypervisor::Error>,
    /// Incremented each time the faults are requested.
    census: u64,
    /// By vCPU: page faults of its thread, the census it last answered, and whether it runs.
    counts: Vec<Count>,
}

#[derive(Clone, Debug, Default)]
struct Count {
    faults: u64,
    census: u64,
    running: bool,
}

impl RunControl {
    /// Starts in [`Wanted::Hold`].
    pub fn new(kickers: Vec<Arc<Kicker>>) -> RunControl {
        let state = State {
            wanted: Wanted::Hold,
            preparations: kickers.iter().map(|_| None).collect(),
            coming: 0,
            running: 0,
            failed: None,
            census: 0,
            counts: vec![Count::default(); kickers.len()],
        };
        let lane = |kicker| Lane {
            turn: Condvar::new(),
            kicker,
        };
        RunControl {
            state: Mutex::new(state),
            lanes: kickers.into_iter().map(lane).collect(),
            news: Condvar::new(),
            entered: AtomicU64::new(0),
            time: OnceLock::new(),
        }
    }

    /// Sets the preparations, in vCPU order, and wakes the threads to run them. Only while all vCPUs are stopped.
    pub fn prepare(&self, preparations: impl IntoIterator<Item = Prepare>) {
        let mut state = self.state();
        for (place, preparation) in state.preparations.iter_mut().zip(preparations) {
            *place = Some(preparation);
        }
        state.coming = state.preparations.iter().flatten().count();
        drop(state);
        self.wake(0..self.lanes.len());
    }

    /// Reports that a vCPU's preparation has ended.
    pub fn prepared(&self, outcome: thaw_hypervisor::Result<()>) {
        let mut state = self.state();
        state.coming -= 1;
        if let Err(why) = outcome {
            state.failed.get_or_insert(why);
        }
        drop(state);
        self.news.notify_all();
    }

    /// Returns when every vCPU is ready.
    ///
    /// # Errors
    /// The error of the first preparation that failed.
    pub fn await_prepared(&self) -> thaw_hypervisor::Result<()> {
        let mut state = self.state();
        while state.coming > 0 {
            state = self.wait_for_news(state);
        }
        state.failed.take().map_or(Ok(()), Err)
    }

    /// Waits for something to do.
    pub fn turn(&self, index: usize) -> Turn {
        let mut state = self.state();
        loop {
            if state.wanted == Wanted::Quit {
                return Turn::Quit;
            }
            if let Some(prepare) = state.preparations[index].take() {
                return Turn::Prepare(prepare);
            }
            if state.wanted == Wanted::Run {
                break;
            }
            state = self.lanes[index]
                .turn
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        let census = state.census;
        state.running += 1;
        let count = &mut state.counts[index];
        (count.running, count.census) = (true, census);
        Turn::Run
    }

    /// Records that a vCPU is about to enter the guest.
    pub fn entering(&self) {
        if self.entered.load(Ordering::Relaxed) == 0 {
            let now = monotonic_ns();
            // Fails if another vCPU was first.
            let _ = self
                .entered
                .compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// Reports that vCPU `index` was interrupted. Returns whether it must continue. `faults` counts the page faults of its thread, and is
    /// called only during a census.
    pub fn go_on(&self, index: usize, faults: impl FnOnce() -> u64) -> bool {
        let mut state = self.state();
        if state.counts[index].census != state.census {
            state.count(index, faults());
            self.news.notify_all();
        }
        state.wanted == Wanted::Run
    }

    /// Reports that vCPU `index` has left the guest and has handled its last exit.
    pub fn stopped(&self, index: usize, faults: u64) {
        let mut state = self.state();
        state.count(index, faults);
        state.counts[index].running = false;
        state.running -= 1;
        drop(state);
        self.news.notify_all();
    }

    /// Sets the guest time that the vCPUs start with when they first enter. Must be called once.
    pub fn set_time(&self, time: GuestTime) {
        // Fails only on a second call, and a machine is thawed once.
        let _ = self.time.set(time);
    }

    pub fn time(&self) -> Option<&GuestTime> {
        self.time.get()
    }

    /// Lets the vCPUs run and wakes those in `first`, in order; [`Self::wake`] must do so for the others.
    pub fn start(&self, first: impl IntoIterator<Item = usize>) {
        let mut state = self.state();
        if state.wanted == Wanted::Hold {
            state.wanted = Wanted::Run;
        }
        drop(state);
        self.wake(first);
    }

    /// Wakes vCPUs that may run and wait.
    pub fn wake(&self, indices: impl IntoIterator<Item = usize>) {
        for index in indices {
            self.lanes[index].turn.notify_one();
        }
    }

    /// Makes the vCPUs stop and do what is `wanted`. After [`Wanted::Quit`] nothing else takes effect.
    pub fn stop(&self, wanted: Wanted) {
        let mut state = self.state();
        if state.wanted != Wanted::Quit {
            state.wanted = wanted;
        }
        drop(state);
        for lane in &self.lanes {
            lane.turn.notify_one();
            lane.kicker.kick();
        }
    }

    /// Returns when no vCPU runs, after [`Self::stop`].
    pub fn await_stopped(&self) {
        let mut state = self.state();
        while state.running > 0 {
            state = self.wait_for_news(state);
        }
    }

    /// As [`Self::await_stopped`], for at most `patience`. Returns which vCPUs are stopped.
    pub fn await_stopped_for(&self, patience: Duration) -> Vec<bool> {
        let deadline = Instant::now() + patience;
        let state = self.wait_until(deadline, |state| state.running == 0);
        state.counts.iter().map(|count| !count.running).collect()
    }

    /// Page faults of all vCPU threads, counted now. A vCPU that does not answer within `patience`, because it waits for something itself,
    /// is counted as of its last answer.
    pub fn faults(&self, patience: Duration) -> u64 {
        let deadline = Instant::now() + patience;
        {
            let mut state = self.state();
            state.census += 1;
            // Stopped vCPUs are not kicked: a kick would cut their next entry short.
            let running = self
                .lanes
                .iter()
                .zip(&state.counts)
                .filter(|(_, count)| count.running);
            running.for_each(|(lane, _)| lane.kicker.kick());
        }
        let state = self.wait_until(deadline, |state| {
            let answered = |count: &Count| !count.running || count.census == state.census;
            state.counts.iter().all(answered)
        });
        state.counts.iter().map(|count| count.faults).sum()
    }

    /// When the first vCPU entered the guest, CLOCK_MONOTONIC nanoseconds; 0 if none has.
    pub fn entered(&self) -> u64 {
        self.entered.load(Ordering::Relaxed)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.locked()
    }

    fn wait_for_news<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.news.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_until(&self, deadline: Instant, done: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let mut state = self.state();
        while !done(&state) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = self
                .news
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        state
    }
}

impl State {
    fn count(&mut self, index: usize, faults: u64) {
        let census = self.census;
        let count = &mut self.counts[index];
        (count.faults, count.census) = (faults, census);
    }
}
