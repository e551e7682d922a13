//! The thread of a virtio-fs device: it waits for kicks and for its backend's descriptor, and for nothing else.
//!
//! The served state is behind a lock that the thread takes for each event. So other threads can attach, reset and save the device without
//! the thread's cooperation. The thread is started with the device and sleeps until the driver is ready: starting one later would be slow,
//! and would give it the rights of a vCPU thread.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use thaw_log::LogLimit;
use thaw_sys::lock::Lock;
use vmm_sys_util::epoll::Epoll;

use super::FsBackend;
use crate::jail::threads::Thread;
use crate::virtio::device::{Activation, Call, DeviceError, Saved};
use crate::virtio::device_thread::{
    BATCH, DeviceThread, TIMEOUT, Timeout, WAKE, forget_kicks, wait_for_kicks,
};
use crate::virtio::gate::Gate;
use crate::virtio::state::FsState;

/// Epoll data of the backend's descriptor. Smaller values are queue numbers.
pub const BACKEND: u64 = TIMEOUT - 1;

/// An event that the thread serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// This queue was kicked.
    Kick(usize),
    /// The descriptor that the backend registered as [`BACKEND`] is ready.
    Backend,
    /// The backend's [`Timeout`] has passed.
    Timeout,
    /// The device has work without an outside event.
    Wake,
    /// The call that the backend returned has been made.
    Called,
}

/// The running thread and its state. Dropping this ends the thread.
pub struct Worker<B> {
    served: Arc<Mutex<Served<B>>>,
    thread: DeviceThread,
}

impl<B: FsBackend> Worker<B> {
    /// Starts the thread of the device `tag`, which has no queues yet. The thread touches guest memory only while `gate` is open. `backend`
    /// is made from the thread's epoll and timeout.
    pub fn start(
        tag: &'static str,
        gate: Arc<Gate>,
        backend: impl FnOnce(&Arc<Epoll>, &Timeout) -> B,
    ) -> io::Result<Worker<B>> {
        let epoll = Arc::new(Epoll::new()?);
        let timeout = Timeout::default();
        let served = Arc::new(Mutex::new(Served {
            tag,
            backend: backend(&epoll, &timeout),
            epoll: epoll.clone(),
            active: None,
            log: LogLimit::default(),
        }));
        let thread = DeviceThread::start(
            &format!("fs-{tag}"),
            Thread::Files,
            epoll,
            gate,
            timeout,
            BATCH,
            {
                let served = served.clone();
                move |event, _| {
                    let mut call = served.locked().ready(event);
                    while let Some(made) = call {
                        made.make();
                        call = served.locked().serve(Event::Called);
                    }
                }
            },
        )?;
        Ok(Worker { served, thread })
    }

    /// The driver is up.
    pub fn activate(&self, activation: Activation) -> Result<(), DeviceError> {
        self.served().activate(activation)
    }

    /// The driver of a restored device is up. Continues from `state`.
    pub fn restore(&self, activation: Activation, state: &FsState) -> Result<(), DeviceError> {
        let mut served = self.served();
        served.activate(activation)?;
        if served.backend.restore(state) {
            self.thread.wake();
        }
        Ok(())
    }

    /// When this returns, the thread no longer touches guest memory.
    pub fn reset(&self) {
        self.served().deactivate();
    }

    /// The state a freeze keeps, or `None` if the device is not active.
    pub fn save(&self) -> Option<Saved> {
        let served = self.served();
        let active = served.active.as_ref()?;
        let state = served.backend.save(active.queues.len());
        Some(Saved::new(state, Some(active)))
    }

    /// Calls `call` with the backend while the thread is kept out.
    pub fn with<T>(&self, call: impl FnOnce(&mut B) -> T) -> T {
        call(&mut self.served().backend)
    }

    fn served(&self) -> MutexGuard<'_, Served<B>> {
        self.served.locked()
    }
}

/// The state that the thread serves.
struct Served<B> {
    tag: &'static str,
    epoll: Arc<Epoll>,
    active: Option<Activation>,
    backend: B,
    log: LogLimit,
}

impl<B: FsBackend> Served<B> {
    /// Serves the ready descriptor with this epoll data.
    fn ready(&mut self, event: u64) -> Option<Box<dyn Call>> {
        let event = match event {
            WAKE => Event::Wake,
            TIMEOUT => Event::Timeout,
            BACKEND => Event::Backend,
            queue => {
                let queues = self.active.as_ref().map(|active| &active.queues);
                let queue = queues.and_then(|queues| queues.get(queue as usize))?;
                // Fails if another event of the same batch handled this kick; then there is nothing to read.
                let _ = queue.kick().read();
                Event::Kick(queue.index())
            }
        };
        self.serve(event)
    }

    /// Serves an event. Returns the call to make next.
    fn serve(&mut self, event: Event) -> Option<Box<dyn Call>> {
        match self.backend.serve(&mut self.active, event) {
            Ok(call) => call,
            Err(error) => {
                self.fail(&error);
                None
            }
        }
    }

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        self.deactivate();
        self.backend.activate(&activation.memory)?;
        wait_for_kicks(&self.epoll, &activation.queues)?;
        self.active = Some(activation);
        Ok(())
    }

    fn deactivate(&mut self) {
        self.backend.reset();
        if let Some(active) = self.active.take() {
            forget_kicks(&self.epoll, &active.queues);
        }
    }

    /// The device cannot continue until the driver resets it.
    fn fail(&mut self, error: &DeviceError) {
        if let Some(dropped) = self.log.pass() {
            tracing::warn!(tag = self.tag, %error, dropped, "virtio-fs stopped until the guest resets it");
        }
        if let Some(queue) = self.active.as_ref().and_then(|active| active.queues.first()) {
            queue.interrupt().fail();
        }
        self.deactivate();
    }
}
