//! The threads of this process: what each is for, and that all have started before the process is sealed.
//!
//! Invariant: a thread is expected ([`expect`]) before it is started, and has made every system call of its start, which a
//! sealed process may not make, when it says what it is ([`Expected::is`]).

use std::cell::Cell;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use thaw_sys::lock::Lock;

/// What a thread is for. All have the same filters; the log names it where one makes a forbidden call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thread {
    /// Makes the machine, then serves the control socket.
    Control,
    /// Serves every device but those of virtio-fs.
    Devices,
    /// Runs a vCPU, and a device's registers when the guest touches them.
    Vcpu,
    /// Serves a virtio-fs device.
    Files,
}

impl Thread {
    pub const ALL: [Thread; 4] = [Thread::Control, Thread::Devices, Thread::Vcpu, Thread::Files];

    pub const fn name(self) -> &'static str {
        match self {
            Thread::Control => "control",
            Thread::Devices => "devices",
            Thread::Vcpu => "vcpu",
            Thread::Files => "fs",
        }
    }
}

thread_local! {
    /// For a signal handler. Without a destructor or an initializer: reading it does nothing else.
    static THREAD: Cell<Option<Thread>> = const { Cell::new(None) };
}

/// The calling thread's kind, for the log.
pub(super) fn this_thread_is(thread: Thread) {
    THREAD.set(Some(thread));
}

pub(super) fn this_thread() -> Option<Thread> {
    THREAD.get()
}

/// How many threads are expected and have not said what they are.
static STARTING: Mutex<usize> = Mutex::new(0);
static STARTED: Condvar = Condvar::new();

fn starting() -> MutexGuard<'static, usize> {
    STARTING.locked()
}

/// A thread that is about to start. Dropped where it could not be started.
#[must_use]
pub struct Expected(());

/// Call this before a thread is started, and give the result to that thread.
pub fn expect() -> Expected {
    *starting() += 1;
    Expected(())
}

impl Expected {
    /// To be called by the thread, first of all.
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

/// Returns once no thread is expected.
pub(super) fn wait_until_started() {
    let mut count = starting();
    while *count > 0 {
        count = STARTED.wait(count).unwrap_or_else(PoisonError::into_inner);
    }
}
