//! Threads that serve devices: they wait for kicks, backends and timers, and call the device. The disks have a loop with several threads;
//! virtio-fs devices have threads of another kind.
//!
//! Waits for backends are level-triggered unless a device requests otherwise: a device that takes only part of what is ready is called again,
//! after the others. Waits for kicks are edge-triggered, so that a kick wakes one thread. A queue over its rate limit waits for a timer
//! ([`super::alarms`]). A device is called with its lock held. What it hands out as a [`Call`] is made without the lock, while other threads
//! may call the device: so no thread passes work to another, and a thread that comes back takes the next request itself. A device that fails
//! is reset and marked `DEVICE_NEEDS_RESET`; the others are not disturbed.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use thaw_log::LogLimit;
use thaw_protocol::control::DeviceId;
use thaw_sys::lock::Lock;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use super::alarms::Alarms;
use super::device::{Call, DeviceError, VirtioDevice};
use super::device_thread::{BATCH, DeviceThread, Timeout};
use super::gate::Gate;
use super::interrupt::Interrupt;
use super::shared_threads::SharedThreads;
use crate::jail::threads::Thread;

/// Most calls that a thread makes before it looks at other events.
const TURNS: usize = 256;

/// The source of an epoll event, packed in its 64 bits of data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    /// A queue of a device was kicked.
    Kick { device: u8, queue: u32 },
    /// A descriptor that a device registered.
    Backend { device: u8, token: u32 },
    /// The timer: the time that some device waits for has come.
    Alarm,
}

impl Source {
    fn pack(self) -> u64 {
        match self {
            Source::Kick { device, queue } => 1 << 56 | u64::from(device) << 32 | u64::from(queue),
            Source::Backend { device, token } => 2 << 56 | u64::from(device) << 32 | u64::from(token),
            Source::Alarm => 3 << 56,
        }
    }

    fn unpack(data: u64) -> Option<Source> {
        let (device, low) = ((data >> 32) as u8, data as u32);
        match data >> 56 {
            1 => Some(Source::Kick { device, queue: low }),
            2 => Some(Source::Backend { device, token: low }),
            3 => Some(Source::Alarm),
            _ => None,
        }
    }
}

/// Registers a device's backend descriptors and its timer with the event loop, from any thread.
#[derive(Clone, Debug)]
pub struct Registrar {
    epoll: Arc<Epoll>,
    alarms: Arc<Alarms>,
    shared: Arc<SharedThreads>,
    device: DeviceId,
}

impl Registrar {
    /// Calls [`VirtioDevice::backend_ready`] with `token` whenever `fd` is ready for one of `events`.
    pub fn add(&self, fd: RawFd, token: u32, events: EventSet) -> io::Result<()> {
        self.control(ControlOperation::Add, fd, token, events)
    }

    /// Changes which events of `fd` are waited for. With none, only errors and hang-ups are reported.
    pub fn modify(&self, fd: RawFd, token: u32, events: EventSet) -> io::Result<()> {
        self.control(ControlOperation::Modify, fd, token, events)
    }

    /// Stops waiting for `fd`. An event already taken from the kernel may still be delivered.
    pub fn remove(&self, fd: RawFd) -> io::Result<()> {
        self.control(ControlOperation::Delete, fd, 0, EventSet::empty())
    }

    /// Calls [`VirtioDevice::woken`] at this time, CLOCK_MONOTONIC nanoseconds, instead of a time set before. With `None` it is not called.
    pub fn wake_at(&self, moment: Option<u64>) {
        self.alarms.set(self.device, moment);
    }

    /// The threads that devices of the loop share.
    pub fn shared_threads(&self) -> Arc<SharedThreads> {
        self.shared.clone()
    }

    fn control(
        &self,
        operation: ControlOperation,
        fd: RawFd,
        token: u32,
        events: EventSet,
    ) -> io::Result<()> {
        let data = Source::Backend {
            device: self.device as u8,
            token,
        }
        .pack();
        self.epoll.ctl(operation, fd, EpollEvent::new(events, data))
    }
}

/// A device that the loop serves.
struct Served {
    id: DeviceId,
    device: Arc<Mutex<dyn VirtioDevice>>,
    interrupt: Arc<Interrupt>,
    kicks: Vec<Kick>,
    log: LogLimit,
}

/// The kicks of a queue.
struct Kick {
    event: Arc<EventFd>,
    /// Whether a thread has taken a kick and waits for the device's lock.
    has_waiting: AtomicBool,
}

impl Kick {
    fn new(event: Arc<EventFd>) -> Kick {
        Kick {
            event,
            has_waiting: AtomicBool::new(false),
        }
    }

    /// Takes a pending kick, if no other thread that has taken one will look at the queue. So a device whose lock is held for long keeps one
    /// thread waiting, not one for each kick.
    fn take(&self) -> Option<Waiting<'_>> {
        // Fails if another event of the same batch, or another thread, took it.
        self.event.read().ok()?;
        let is_first = !self.has_waiting.swap(true, Ordering::AcqRel);
        is_first.then(|| Waiting(self))
    }
}

/// The thread that waits for the device's lock after a kick, until this is dropped.
struct Waiting<'a>(&'a Kick);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        // Reads what the threads wrote that left their kicks to this one, so their requests are seen afterwards.
        self.0.has_waiting.swap(false, Ordering::AcqRel);
    }
}

impl Served {
    /// Tells the device of an event, and makes the calls that it hands out, until it has none or `goes_on` is false.
    fn serve(
        &self,
        goes_on: &dyn Fn() -> bool,
        event: impl FnOnce(&mut dyn VirtioDevice) -> Result<(), DeviceError>,
    ) {
        let mut next = self.call(|device| {
            event(device)?;
            device.next_call()
        });
        let mut turns = TURNS;
        while let Some(call) = next {
            call.make();
            turns -= 1;
            next = match turns > 0 && goes_on() {
                true => self.call(|device| device.next_call()),
                false => self.call(|device| device.calls_ended().map(|()| None)),
            };
        }
    }

    /// Calls the device unless it has failed.
    fn call(
        &self,
        what: impl FnOnce(&mut dyn VirtioDevice) -> Result<Option<Box<dyn Call>>, DeviceError>,
    ) -> Option<Box<dyn Call>> {
        let mut device = self.device.locked();
        if self.interrupt.failed() {
            // Before the lock is free: a thread that has taken a kick is seen to wait until then.
            drop(what);
            return None;
        }
        what(&mut *device).unwrap_or_else(|error| {
            if let Some(dropped) = self.log.pass() {
                tracing::warn!(device = ?self.id, %error, dropped, "device stopped until the guest resets it");
            }
            device.reset();
            self.interrupt.fail();
            None
        })
    }
}

/// The event loop before its threads start.
pub struct EventLoop {
    epoll: Arc<Epoll>,
    alarms: Arc<Alarms>,
    shared: Arc<SharedThreads>,
    served: Vec<Served>,
}

impl EventLoop {
    pub fn new() -> io::Result<EventLoop> {
        let (epoll, alarms) = (Epoll::new()?, Alarms::new()?);
        let event = EpollEvent::new(EventSet::IN, Source::Alarm.pack());
        epoll.ctl(ControlOperation::Add, alarms.as_raw_fd(), event)?;
        Ok(EventLoop {
            epoll: Arc::new(epoll),
            alarms: Arc::new(alarms),
            shared: Arc::default(),
            served: Vec::new(),
        })
    }

    /// The registrar for a device that is about to be made.
    pub fn registrar(&self, device: DeviceId) -> Registrar {
        Registrar {
            epoll: self.epoll.clone(),
            alarms: self.alarms.clone(),
            shared: self.shared.clone(),
            device,
        }
    }

    /// Serves `device` from now on, including its kicks.
    pub fn serve(
        &mut self,
        id: DeviceId,
        device: Arc<Mutex<dyn VirtioDevice>>,
        interrupt: Arc<Interrupt>,
        kicks: Vec<Arc<EventFd>>,
    ) -> io::Result<()> {
        for (queue, kick) in kicks.iter().enumerate() {
            let source = Source::Kick {
                device: id as u8,
                queue: queue as u32,
            };
            let event = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, source.pack());
            self.epoll.ctl(ControlOperation::Add, kick.as_raw_fd(), event)?;
        }
        self.served.push(Served {
            id,
            device,
            interrupt,
            kicks: kicks.into_iter().map(Kick::new).collect(),
            log: LogLimit::default(),
        });
        Ok(())
    }

    /// Starts a thread. It calls devices while `gate` is open.
    pub fn start(self, name: &str, kind: Thread, gate: Arc<Gate>) -> io::Result<DeviceThread> {
        Arc::new(self).thread(name, kind, gate, BATCH)
    }

    /// Starts so many threads of one name. They call devices while `gate` is open. None takes an event before it has served another.
    pub fn start_several(
        self,
        threads: usize,
        name: &str,
        kind: Thread,
        gate: &Arc<Gate>,
    ) -> io::Result<Vec<DeviceThread>> {
        let event_loop = Arc::new(self);
        let thread = |_| event_loop.thread(name, kind, gate.clone(), 1);
        (0..threads).map(thread).collect()
    }

    fn thread(
        self: &Arc<Self>,
        name: &str,
        kind: Thread,
        gate: Arc<Gate>,
        batch: usize,
    ) -> io::Result<DeviceThread> {
        let (event_loop, epoll) = (self.clone(), self.epoll.clone());
        let never = Timeout::default();
        DeviceThread::start(
            name,
            kind,
            epoll,
            gate.clone(),
            never,
            batch,
            move |data, events| {
                event_loop.event(data, events, &|| gate.is_open());
            },
        )
    }

    /// Serves what is ready, once, on this thread and without waiting. For fuzzing, where a run must be repeatable.
    #[cfg(fuzzing)]
    pub fn turn(&self) -> io::Result<()> {
        let mut events = [EpollEvent::default(); 32];
        let ready = self.epoll.wait(0, &mut events)?;
        for event in &events[..ready] {
            self.event(event.data(), event.event_set(), &|| true);
        }
        Ok(())
    }

    /// Serves an event. Calls are made while `goes_on`.
    fn event(&self, data: u64, events: EventSet, goes_on: &dyn Fn() -> bool) {
        match Source::unpack(data) {
            Some(Source::Kick { device, queue }) => self.kicked(device, queue as usize, goes_on),
            Some(Source::Backend { device, token }) => {
                if let Some(served) = self.find(device) {
                    served.serve(goes_on, |device| device.backend_ready(token, events));
                }
            }
            Some(Source::Alarm) => self.alarm(goes_on),
            None => {}
        }
    }

    fn kicked(&self, device: u8, queue: usize, goes_on: &dyn Fn() -> bool) {
        let Some(served) = self.find(device) else { return };
        if let Some(waiting) = served.kicks.get(queue).and_then(Kick::take) {
            served.serve(goes_on, |device| {
                drop(waiting);
                device.queue_ready(queue)
            });
        }
    }

    fn alarm(&self, goes_on: &dyn Fn() -> bool) {
        if let Some(served) = self.alarms.due().and_then(|device| self.find(device as u8)) {
            served.serve(goes_on, |device| device.woken());
        }
    }

    fn find(&self, device: u8) -> Option<&Served> {
        self.served.iter().find(|served| served.id as u8 == device)
    }
}

#[cfg(test)]
#[path = "event_loop_test.rs"]
mod tests;
