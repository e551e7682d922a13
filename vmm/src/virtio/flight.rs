//! The requests of a device that are in flight: a thread makes the system call of each, without the device's lock.
//!
//! Invariants: a request is in flight once, and ends as one [`Completion`], which is taken once. Each in flight has a thread, the disk's own
//! or a shared one ([`SharedThreads`]), whatever the driver does; the others stay in its queue until a call of the disk ends, or another disk
//! gives a shared thread back. A call ends without the device's lock, so [`Flight::drain`] may be called with it.
//!
//! Requests in flight end in any order, because the device does not offer `F_IN_ORDER` (virtio 1.2 §2.7.9). If two of them touch the same sectors, the order of
//! their effects is not defined. A flush is the exception: it begins when every change that was taken from the queue before it has ended.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use thaw_sys::lock::Lock;
use vmm_sys_util::eventfd::EventFd;

use crate::virtio::shared_threads::{self, SHARED, SharedThreads};

/// Most requests of a disk in flight.
pub const IN_FLIGHT: usize = 1 + SHARED;

/// A request whose call has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    pub head: u16,
    /// Bytes written to the request's buffers.
    pub written: u32,
}

/// A request in flight.
#[derive(Debug)]
struct Running {
    /// Requests are numbered as they are taken from the queue.
    number: u64,
    head: u16,
    /// Whether it changes the disk.
    changes: bool,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    /// Whether the disk's own thread has a request, or will have one.
    own_is_taken: bool,
    /// How many of the shared threads it has.
    shared: usize,
    running: Vec<Running>,
    completions: Vec<Completion>,
    /// Threads that wait for a call to end.
    waiting: usize,
}

/// The requests of one disk.
#[derive(Debug, Default)]
pub struct Flight {
    state: Mutex<State>,
    /// Signalled when a call ends.
    ended: Condvar,
    shared: Arc<SharedThreads>,
}

impl Flight {
    /// Of a disk that shares these threads.
    pub fn new(shared: Arc<SharedThreads>) -> Flight {
        Flight {
            shared,
            ..Flight::default()
        }
    }

    /// A thread for one more request, if there is one.
    pub fn seat(self: &Arc<Self>) -> Option<Seat> {
        let mut state = self.state();
        let is_shared = state.own_is_taken;
        if is_shared && !self.shared.take() {
            return None;
        }
        state.own_is_taken = true;
        state.shared += usize::from(is_shared);
        Some(Seat {
            flight: self.clone(),
            is_shared,
        })
    }

    /// Whether a request with this head is in flight or not answered yet. If so, the driver made a descriptor available that is in use.
    pub fn has(&self, head: u16) -> bool {
        let state = self.state();
        state.running.iter().any(|running| running.head == head)
            || state.completions.iter().any(|completion| completion.head == head)
    }

    /// Whether there is no thread for one more request.
    pub fn is_full(&self) -> bool {
        self.state().own_is_taken && self.shared.are_taken()
    }

    /// Kicks this queue when there is a thread for one more request, perhaps now. A disk that has all that it can have is not kicked: when one
    /// of its calls ends, it looks at its queue anyway.
    pub fn kick_when_free(&self, kick: &Arc<EventFd>) {
        let state = self.state();
        if !state.own_is_taken {
            shared_threads::kick_again(kick);
        } else if state.shared < SHARED {
            self.shared.kick_when_free(kick);
        }
    }

    /// Removes and returns the completions.
    pub fn completions(&self) -> Vec<Completion> {
        std::mem::take(&mut self.state().completions)
    }

    /// Waits until no request is in flight.
    pub fn drain(&self) {
        self.wait_while(|state| !state.running.is_empty());
    }

    fn wait_while(&self, busy: impl Fn(&State) -> bool) {
        let mut state = self.state();
        state.waiting += 1;
        while busy(&state) {
            state = self.ended.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.waiting -= 1;
    }

    fn end(&self, number: u64, written: Option<u32>) {
        let mut state = self.state();
        let Some(at) = state.running.iter().position(|running| running.number == number) else {
            return;
        };
        let Running { head, .. } = state.running.swap_remove(at);
        state
            .completions
            .extend(written.map(|written| Completion { head, written }));
        if state.waiting > 0 {
            self.ended.notify_all();
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.locked()
    }
}

/// A thread that is reserved for one request until this is dropped.
#[derive(Debug)]
pub struct Seat {
    flight: Arc<Flight>,
    /// Whether it is one of those that disks share.
    is_shared: bool,
}

impl Seat {
    /// A request is in flight from now on. `changes`: it changes the disk.
    pub fn begin(self, head: u16, changes: bool) -> InFlight {
        let mut state = self.flight.state();
        let number = state.next;
        state.next += 1;
        state.running.push(Running {
            number,
            head,
            changes,
        });
        drop(state);
        InFlight {
            seat: self,
            number,
            written: None,
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut state = self.flight.state();
        match self.is_shared {
            true => {
                state.shared -= 1;
                drop(state);
                self.flight.shared.give_back();
            }
            false => state.own_is_taken = false,
        }
    }
}

/// A request in flight until this is dropped. If that happens before [`InFlight::end`], the request is not answered.
#[derive(Debug)]
pub struct InFlight {
    seat: Seat,
    number: u64,
    written: Option<u32>,
}

impl InFlight {
    /// Waits until every change of the disk that was taken from the queue before this request has ended. They wait for nothing that this
    /// request has, because each is made by a thread of its own.
    pub fn wait_for_changes(&self) {
        let earlier = |running: &Running| running.changes && running.number < self.number;
        let flight = &self.seat.flight;
        flight.wait_while(|state| state.running.iter().any(earlier));
    }

    /// The call has ended, and wrote this many bytes to the request's buffers.
    pub fn end(mut self, written: u32) {
        self.written = Some(written);
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.seat.flight.end(self.number, self.written);
    }
}

#[cfg(test)]
#[path = "flight_test.rs"]
mod tests;
