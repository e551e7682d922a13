//! Keeps device threads from guest memory while a machine is parked or being frozen.
//!
//! Invariant: once [`Gate::close`] returns, no thread is inside, and none enters before [`Gate::open`]. A thread enters for each batch of
//! events it serves. A thread that waits at the gate keeps its events, so none is lost.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use thaw_sys::lock::Lock;

/// The gate of one machine. Its device threads share it.
#[derive(Debug, Default)]
pub struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    open: bool,
    /// Set when the machine ends: threads no longer wait.
    ended: bool,
    inside: u32,
}

/// A thread is inside while it holds this.
#[derive(Debug)]
pub struct Pass<'g>(&'g Gate);

impl Gate {
    /// A closed gate.
    pub fn new() -> Gate {
        Gate::default()
    }

    /// Lets threads in.
    pub fn open(&self) {
        self.state().open = true;
        self.changed.notify_all();
    }

    /// Keeps threads out and waits until those inside have left. Returns whether the gate was open.
    pub fn close(&self) -> bool {
        let mut state = self.state();
        let was_open = std::mem::replace(&mut state.open, false);
        while state.inside > 0 {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        was_open
    }

    /// Whether threads may go on inside. One that is inside leaves soon if they may not.
    pub fn is_open(&self) -> bool {
        let state = self.state();
        state.open && !state.ended
    }

    /// Waits until the gate is open. `None` if the machine ends.
    pub fn enter(&self) -> Option<Pass<'_>> {
        let mut state = self.state();
        while !state.open && !state.ended {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.ended {
            return None;
        }
        state.inside += 1;
        Some(Pass(self))
    }

    /// The machine ends: threads that wait, or try to enter later, get `None`.
    pub fn end(&self) {
        self.state().ended = true;
        self.changed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Plain values, valid even if a thread panicked while it held the lock.
        self.state.locked()
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.inside -= 1;
        if state.inside == 0 && !state.open {
            self.0.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::{TryRecvError, channel};
    use std::thread;

    use super::*;

    #[test]
    fn closed_gate_has_no_thread_inside_and_lets_them_in_later() {
        let gate = Arc::new(Gate::new());
        let (entered, enters) = channel();
        let (leave, leaves) = channel::<()>();
        let guest = thread::spawn({
            let gate = gate.clone();
            move || {
                for _ in 0..2 {
                    let pass = gate.enter();
                    entered.send(pass.is_some()).unwrap();
                    leaves.recv().unwrap();
                }
            }
        });
        assert_eq!(enters.try_recv(), Err(TryRecvError::Empty));
        gate.open();
        assert!(enters.recv().unwrap());
        let closer = thread::spawn({
            let gate = gate.clone();
            move || gate.close()
        });
        while gate.state().open {
            thread::yield_now();
        }
        leave.send(()).unwrap();
        // `close` returns only after the thread has left.
        assert!(closer.join().unwrap());
        assert_eq!(gate.state().inside, 0);
        assert!(!gate.close());
        gate.open();
        assert!(enters.recv().unwrap());
        leave.send(()).unwrap();
        guest.join().unwrap();
    }

    #[test]
    fn a_thread_that_waits_is_sent_away_when_the_machine_ends() {
        let gate = Arc::new(Gate::new());
        let waiting = thread::spawn({
            let gate = gate.clone();
            move || gate.enter().is_none()
        });
        gate.end();
        assert!(waiting.join().unwrap());
    }
}
