//! Lets a machine's vCPU threads run guest code, and stops them.
//!
//! Invariant: a vCPU enters guest code only while [`Wanted::Run`] holds, and what is wanted instead is stored before the
//! vCPU is kicked, so no kick is lost ([`thaw_hypervisor::kick`]). Each thread waits on a condition of its own: a start wakes
//! first those that shall run first, and no other thread contends with them for a lock they need.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use thaw_hypervisor::{GuestTime, Kicker, Vcpu};
use thaw_sys::lock::Lock;

use crate::clock::monotonic_ns;

/// What the vCPUs shall do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// Stay out of the guest.
    Hold,
    Run,
    /// End their threads.
    Quit,
}

/// What makes a vCPU ready, on its own thread, before it first runs.
pub type Prepare = Box<dyn FnOnce(&mut Vcpu) -> thaw_hypervisor::Result<()> + Send>;

/// What a vCPU's thread is to do next.
pub enum Turn {
    /// Make its vCPU ready, then [`RunControl::prepared`].
    Prepare(Prepare),
    /// Run it, then [`RunControl::stopped`].
    Run,
    Quit,
}

/// What the vCPUs of one machine shall do, and what they do.
pub struct RunControl {
    state: Mutex<State>,
    lanes: Vec<Lane>,
    /// For threads that wait for the vCPUs: one is ready, has stopped, or has counted its faults.
    news: Condvar,
    /// When the first vCPU entered the guest, CLOCK_MONOTONIC nanoseconds; 0 before.
    entered: AtomicU64,
    /// A thawed machine's time, set before the first start.
    time: OnceLock<GuestTime>,
}

/// What belongs to one vCPU.
struct Lane {
    turn: Condvar,
    kicker: Arc<Kicker>,
}

struct State {
    wanted: Wanted,
    /// By vCPU: what its thread has not begun to do.
    preparations: Vec<Option<Prepare>>,
    /// vCPUs that are being made ready.
    coming: usize,
    /// vCPUs that run, or answer an exit.
    running: usize,
    /// Why a vCPU could not be made ready.
    failed: Option<thaw_hypervisor::Error>,
    /// Counts how often faults were asked for.
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
    /// All shall stay out of the guest.
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

    /// Has the threads make their vCPUs ready, by vCPU. While all are stopped.
    pub fn prepare(&self, preparations: impl IntoIterator<Item = Prepare>) {
        let mut state = self.state();
        for (place, preparation) in state.preparations.iter_mut().zip(preparations) {
            *place = Some(preparation);
        }
        state.coming = state.preparations.iter().flatten().count();
        drop(state);
        self.wake(0..self.lanes.len());
    }

    /// A vCPU is ready to run, or never will be.
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
    /// Why the first of those could not be made ready that could not.
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

    /// vCPU `index` is about to enter the guest.
    pub fn entering(&self) {
        if self.entered.load(Ordering::Relaxed) == 0 {
            let now = monotonic_ns();
            // Another may have been first.
            let _ = self
                .entered
                .compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// vCPU `index` was interrupted: whether it shall go on. `faults` counts the page faults of its thread, and is called only
    /// during a census.
    pub fn go_on(&self, index: usize, faults: impl FnOnce() -> u64) -> bool {
        let mut state = self.state();
        if state.counts[index].census != state.census {
            state.count(index, faults());
            self.news.notify_all();
        }
        state.wanted == Wanted::Run
    }

    /// vCPU `index` has left the guest and answers no exit any more.
    pub fn stopped(&self, index: usize, faults: u64) {
        let mut state = self.state();
        state.count(index, faults);
        state.counts[index].running = false;
        state.running -= 1;
        drop(state);
        self.news.notify_all();
    }

    /// What the vCPUs' time shall be when they first enter. Once.
    pub fn set_time(&self, time: GuestTime) {
        // A second one cannot be: a machine is thawed once.
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

    /// Has the vCPUs do something else than run. Once quitting, always quitting.
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

    /// As [`Self::await_stopped`], for at most `patience`. Says which vCPUs are stopped.
    pub fn await_stopped_for(&self, patience: Duration) -> Vec<bool> {
        let deadline = Instant::now() + patience;
        let state = self.wait_until(deadline, |state| state.running == 0);
        state.counts.iter().map(|count| !count.running).collect()
    }

    /// Page faults of all vCPU threads, as they count them now; one that does not answer within `patience`, because it
    /// waits for something itself, is counted as it last was.
    pub fn faults(&self, patience: Duration) -> u64 {
        let deadline = Instant::now() + patience;
        {
            let mut state = self.state();
            state.census += 1;
            // Not those that are stopped: their next entry would be cut short.
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
