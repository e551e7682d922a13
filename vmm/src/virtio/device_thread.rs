//! A thread that serves devices: it waits for descriptors, and for nothing else.
//!
//! Invariant: it serves only while its [`Gate`] is open. It polls nothing, and wakes without an event only after a
//! [`Timeout`] that was set.

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

/// Ready descriptors taken from the kernel at once.
const BATCH: usize = 32;
/// Epoll data of [`DeviceThread::wake`]; no descriptor has it.
pub const WAKE: u64 = u64::MAX;

/// What is served when a [`Timeout`] has passed; no descriptor has it.
pub const TIMEOUT: u64 = WAKE - 1;

/// How long the thread waits at most before it serves [`TIMEOUT`]: at first for ever. What it serves sets it, on the thread; set
/// elsewhere, it takes effect at the next event.
#[derive(Clone, Debug)]
pub struct Timeout(Arc<AtomicI32>);

impl Default for Timeout {
    fn default() -> Timeout {
        Timeout(Arc::new(AtomicI32::new(-1)))
    }
}

impl Timeout {
    pub fn set(&self, wait: Option<Duration>) {
        // Never short of it, or it would serve for nothing until it has passed.
        let ms = wait.map_or(-1, |wait| {
            i32::try_from(wait.as_micros().div_ceil(1000)).unwrap_or(i32::MAX)
        });
        self.0.store(ms, Ordering::Relaxed);
    }

    fn get(&self) -> i32 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The running thread; dropped, it ends.
#[derive(Debug)]
pub struct DeviceThread {
    wake: Arc<EventFd>,
    gate: Arc<Gate>,
    thread: Option<JoinHandle<()>>,
}

impl DeviceThread {
    /// Starts it, as a thread of this kind. `serve` is called with the data and events of each descriptor of `epoll`
    /// that is ready, and when `timeout` has passed.
    pub fn start(
        name: &str,
        kind: Thread,
        epoll: Arc<Epoll>,
        gate: Arc<Gate>,
        timeout: Timeout,
        serve: impl FnMut(u64, EventSet) + Send + 'static,
    ) -> io::Result<DeviceThread> {
        let wake = Arc::new(EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?);
        epoll.ctl(
            ControlOperation::Add,
            wake.as_raw_fd(),
            EpollEvent::new(EventSet::IN, WAKE),
        )?;
        let expected = threads::expect();
        let thread = thread::Builder::new().name(name.into()).spawn({
            let (wake, gate) = (wake.clone(), gate.clone());
            move || {
                expected.is(kind);
                run(&epoll, &wake, &gate, &timeout, serve);
            }
        })?;
        Ok(DeviceThread {
            wake,
            gate,
            thread: Some(thread),
        })
    }

    /// Has it serve [`WAKE`].
    pub fn wake(&self) {
        // Fails only when a wake-up is pending.
        let _ = self.wake.write(1);
    }
}

impl Drop for DeviceThread {
    fn drop(&mut self) {
        self.gate.end();
        self.wake();
        if let Some(thread) = self.thread.take() {
            // A panic in the thread was reported when it happened.
            let _ = thread.join();
        }
    }
}

fn run(epoll: &Epoll, wake: &EventFd, gate: &Gate, timeout: &Timeout, mut serve: impl FnMut(u64, EventSet)) {
    let mut events = [EpollEvent::default(); BATCH];
    loop {
        let ready = match epoll.wait(timeout.get(), &mut events) {
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
                // Nothing to read: another event of the same batch has seen to it.
                let _ = wake.read();
            }
            serve(event.data(), event.event_set());
        }
    }
}

/// Waits for the kicks of a device that has a thread of its own: their data is the queue's number.
pub fn wait_for_kicks(epoll: &Epoll, queues: &[DeviceQueue]) -> Result<(), DeviceError> {
    for (index, queue) in queues.iter().enumerate() {
        let event = EpollEvent::new(EventSet::IN, index as u64);
        let added = epoll.ctl(ControlOperation::Add, queue.kick().as_raw_fd(), event);
        added.map_err(epoll_error)?;
    }
    Ok(())
}

/// Waits for them no more.
pub fn forget_kicks(epoll: &Epoll, queues: &[DeviceQueue]) {
    for queue in queues {
        let nothing = EpollEvent::default();
        // Not registered if activation failed half-way.
        let _ = epoll.ctl(ControlOperation::Delete, queue.kick().as_raw_fd(), nothing);
    }
}

/// What a refused `epoll_ctl` is to a device.
pub fn epoll_error(error: io::Error) -> DeviceError {
    DeviceError::System {
        what: "epoll_ctl",
        error,
    }
}
