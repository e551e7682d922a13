//! A thread that serves devices: it waits for descriptors, and for nothing else.
//!
//! Invariant: it serves only while its [`Gate`] is open. It polls nothing. Without an event it wakes only after a [`Timeout`] that was set.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use super::device::DeviceError;
use super::gate::Gate;
use super::queue::DeviceQueue;
use crate::jail::threads::{self, Thread};

/// Most ready descriptors taken from the kernel at once, by a thread that serves its descriptors alone.
pub const BATCH: usize = 32;
/// Stack of a thread, in bytes. Small, so that the stacks of several threads share a page of page tables.
const STACK: usize = 256 * 1024;
/// Epoll data of [`DeviceThread::wake`]. No descriptor uses it.
pub const WAKE: u64 = u64::MAX;

/// Passed to `serve` when a [`Timeout`] has passed. No descriptor uses it.
pub const TIMEOUT: u64 = WAKE - 1;

/// The longest time that the thread waits before it serves [`TIMEOUT`]. It is unlimited at first. The served code sets it on the thread; if
/// another thread sets it, it takes effect at the next event.
#[derive(Clone, Debug)]
pub struct Timeout(Arc<AtomicI32>);

impl Default for Timeout {
    fn default() -> Timeout {
        Timeout(Arc::new(AtomicI32::new(-1)))
    }
}

impl Timeout {
    pub fn set(&self, wait: Option<Duration>) {
        // Rounded up: if it woke too early, it would wake again and again until the time has passed.
        let ms = wait.map_or(-1, |wait| {
            i32::try_from(wait.as_micros().div_ceil(1000)).unwrap_or(i32::MAX)
        });
        self.0.store(ms, Ordering::Relaxed);
    }

    fn get(&self) -> i32 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The running thread. It ends when this is dropped.
#[derive(Debug)]
pub struct DeviceThread {
    wake: Arc<EventFd>,
    gate: Arc<Gate>,
    thread: Option<JoinHandle<()>>,
}

impl DeviceThread {
    /// Starts the thread, for the given purpose. `serve` is called with the data and events of each ready descriptor of `epoll`, and when
    /// `timeout` has passed. At most `batch` ready descriptors, and [`BATCH`], are taken at once: 1, if others serve the same and one may take
    /// long.
    pub fn start(
        name: &str,
        kind: Thread,
        epoll: Arc<Epoll>,
        gate: Arc<Gate>,
        timeout: Timeout,
        batch: usize,
        serve: impl FnMut(u64, EventSet) + Send + 'static,
    ) -> io::Result<DeviceThread> {
        let wake = Arc::new(EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?);
        epoll.ctl(
            ControlOperation::Add,
            wake.as_raw_fd(),
            EpollEvent::new(EventSet::IN, WAKE),
        )?;
        let expected = threads::expect();
        let thread = thread::Builder::new()
            .name(name.into())
            .stack_size(STACK)
            .spawn({
                let (wake, gate) = (wake.clone(), gate.clone());
                move || {
                    expected.is(kind);
                    run(&epoll, &wake, (&gate, &timeout), batch, serve);
                }
            })?;
        Ok(DeviceThread {
            wake,
            gate,
            thread: Some(thread),
        })
    }

    /// Makes the thread serve [`WAKE`].
    pub fn wake(&self) {
        // Fails only if a wake-up is pending.
        let _ = self.wake.write(1);
    }
}

impl Drop for DeviceThread {
    fn drop(&mut self) {
        self.gate.end();
        self.wake();
        if let Some(thread) = self.thread.take() {
            // A panic in the thread was logged when it happened.
            let _ = thread.join();
        }
    }
}

fn run(
    epoll: &Epoll,
    wake: &EventFd,
    (gate, timeout): (&Gate, &Timeout),
    batch: usize,
    mut serve: impl FnMut(u64, EventSet),
) {
    let mut events = [EpollEvent::default(); BATCH];
    let events = &mut events[..batch.min(BATCH)];
    loop {
        let ready = match epoll.wait(timeout.get(), events) {
            Ok(ready) => ready,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => {
                tracing::error!(%error, "epoll_wait failed; devices of this thread are no longer served");
                return;
            }
        };
        let Some(_pass) = gate.enter() else { return };
        if ready == 0 {
            serve(TIMEOUT, EventSet::empty());
        }
        for event in &events[..ready] {
            if event.data() == WAKE {
                // Fails if another event of the same batch handled it; then there is nothing to read.
                let _ = wake.read();
            }
            serve(event.data(), event.event_set());
        }
    }
}

/// Waits for the kicks of a device that has its own thread. The epoll data is the queue's number.
pub fn wait_for_kicks(epoll: &Epoll, queues: &[DeviceQueue]) -> Result<(), DeviceError> {
    for (index, queue) in queues.iter().enumerate() {
        let event = EpollEvent::new(EventSet::IN, index as u64);
        let added = epoll.ctl(ControlOperation::Add, queue.kick().as_raw_fd(), event);
        added.map_err(epoll_error)?;
    }
    Ok(())
}

/// Stops waiting for the kicks of these queues.
pub fn forget_kicks(epoll: &Epoll, queues: &[DeviceQueue]) {
    for queue in queues {
        let nothing = EpollEvent::default();
        // Not registered if activation failed half-way.
        let _ = epoll.ctl(ControlOperation::Delete, queue.kick().as_raw_fd(), nothing);
    }
}

/// The device error for a failed `epoll_ctl`.
pub fn epoll_error(error: io::Error) -> DeviceError {
    DeviceError::System {
        what: "epoll_ctl",
        error,
    }
}
