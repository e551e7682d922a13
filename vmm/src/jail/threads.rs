//! The threads of this process: the purpose of each, and the wait until all have started, which precedes sealing.
//!
//! Invariant: a thread is announced ([`expect`]) before it is started. When it reports its purpose ([`Expected::is`]), it has made every
//! system call of its start, because a sealed process may not make them.

use std::cell::Cell;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use thaw_sys::lock::Lock;

/// The purpose of a thread. All threads have the same filter; the purpose is logged if a thread makes a forbidden call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thread {
    /// Makes the machine, then serves the control socket.
    Control,
    /// Serves every device but disks and those of virtio-fs.
    Devices,
    /// Serves disks, beside others.
    Disk,
    /// Runs a vCPU, and a device's registers when the guest touches them.
    Vcpu,
    /// Serves a virtio-fs device.
    Files,
    /// Copies pages of guest memory before they change, during a freeze.
    Protection,
}

impl Thread {
    pub const ALL: [Thread; 6] = [
        Thread::Control,
        Thread::Devices,
        Thread::Disk,
        Thread::Vcpu,
        Thread::Files,
        Thread::Protection,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Thread::Control => "control",
            Thread::Devices => "devices",
            Thread::Disk => "disk",
            Thread::Vcpu => "vcpu",
            Thread::Files => "fs",
            Thread::Protection => "protection",
        }
    }
}

thread_local! {
    /// Read by a signal handler. It has neither destructor nor initializer, so reading it does nothing else.
    static THREAD: Cell<Option<Thread>> = const { Cell::new(None) };
}

/// Sets the calling thread's purpose, for the log.
pub(super) fn this_thread_is(thread: Thread) {
    THREAD.set(Some(thread));
}

pub(super) fn this_thread() -> Option<Thread> {
    THREAD.get()
}

/// How many announced threads have not reported their purpose yet.
static STARTING: Mutex<usize> = Mutex::new(0);
static STARTED: Condvar = Condvar::new();

fn starting() -> MutexGuard<'static, usize> {
    STARTING.locked()
}

/// A thread that is about to start. Drop it if the thread could not be started.
#[must_use]
pub struct Expected(());

/// Call this before a thread is started, and give the result to that thread.
pub fn expect() -> Expected {
    *starting() += 1;
    Expected(())
}

impl Expected {
    /// The thread must call this before anything else.
    pub fn is(self, thread: Thread) {
        this_thread_is(thread);
    }
}

impl Drop for Expected {
    fn drop(&mut self) {
        *starting() -= 1;
        STARTED.notify_all();
    }
}

/// Returns when every announced thread has started.
pub(super) fn wait_until_started() {
    let mut count = starting();
    while *count > 0 {
        count = STARTED.wait(count).unwrap_or_else(PoisonError::into_inner);
    }
}
