//! The threads that the disks of a machine share. Each disk has one besides.
//!
//! Invariant: a disk's first call is made at once, however long the calls of other disks take, unless one of those disks is being reset or
//! removed meanwhile. A disk gets a shared thread for each further call, if one is free, and else as soon as one is. So there are as many
//! threads as disks, the shared ones, and one that may wait for the lock of a disk
//! ([`inventory::loops`](crate::virtio::inventory)).

use std::sync::{Arc, Mutex, MutexGuard};

use thaw_sys::lock::Lock;
use vmm_sys_util::eventfd::EventFd;

/// How many there are: enough for a sync, a write that waits, and reads beside them, with the disk's own.
pub const SHARED: usize = 3;

#[derive(Debug)]
struct State {
    free: usize,
    /// The kicks of disks that want one, each once.
    wanted: Vec<Arc<EventFd>>,
}

/// Which of them are free.
#[derive(Debug)]
pub struct SharedThreads(Mutex<State>);

impl Default for SharedThreads {
    fn default() -> SharedThreads {
        SharedThreads(Mutex::new(State {
            free: SHARED,
            wanted: Vec::new(),
        }))
    }
}

impl SharedThreads {
    /// Takes one, if one is free. It is to be given back.
    pub fn take(&self) -> bool {
        let mut state = self.state();
        let is_free = state.free > 0;
        state.free -= usize::from(is_free);
        is_free
    }

    /// Gives one back, and kicks the queues that want one: all, because one may no longer need it.
    pub fn give_back(&self) {
        let mut state = self.state();
        state.free += 1;
        let wanted = std::mem::take(&mut state.wanted);
        drop(state);
        wanted.iter().for_each(|kick| kick_again(kick));
    }

    /// Whether none is free.
    pub fn are_taken(&self) -> bool {
        self.state().free == 0
    }

    /// Kicks this queue once, when one is free.
    pub fn kick_when_free(&self, kick: &Arc<EventFd>) {
        let mut state = self.state();
        if state.free > 0 {
            drop(state);
            kick_again(kick);
        } else if !state.wanted.iter().any(|other| Arc::ptr_eq(other, kick)) {
            state.wanted.push(kick.clone());
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.locked()
    }
}

/// Makes the event loop serve this queue.
pub fn kick_again(kick: &EventFd) {
    // Fails only if a kick is pending.
    let _ = kick.write(1);
}
