//! The one thread that serves every device but virtio-fs: it waits for kicks and backends, and calls the device.
//!
//! There is no timer and nothing is polled. The thread serves events while the [`Gate`] is open. Waits are level-triggered unless a device asks otherwise, so one that takes
//! only part of what is ready is called again, after the others. A device is called with its lock held; one that fails is reset to idle and marked
//! `DEVICE_NEEDS_RESET`, without disturbing the others.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use thaw_protocol::control::DeviceId;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use super::device::{DeviceError, VirtioDevice};
use super::gate::Gate;
use super::interrupt::Interrupt;
use crate::jail::{self, syscalls::Thread};

/// Ready descriptors taken from the kernel at once.
const BATCH: usize = 32;

/// What an epoll event is about, packed in its 64 bits of data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    /// The loop must end.
    Exit,
    /// A queue of a device was kicked.
    Kick { device: u8, queue: u32 },
    /// A descriptor a device registered.
    Backend { device: u8, token: u32 },
}

impl Source {
    fn pack(self) -> u64 {
        match self {
            Source::Exit => 0,
            Source::Kick { device, queue } => 1 << 56 | u64::from(device) << 32 | u64::from(queue),
            Source::Backend { device, token } => 2 << 56 | u64::from(device) << 32 | u64::from(token),
        }
    }

    fn unpack(data: u64) -> Source {
        let (device, low) = ((data >> 32) as u8, data as u32);
        match data >> 56 {
            1 => Source::Kick { device, queue: low },
            2 => Source::Backend { device, token: low },
            _ => Source::Exit,
        }
    }
}

/// Registers a device's backend descriptors with the event loop, from any thread.
#[derive(Clone, Debug)]
pub struct Registrar {
    epoll: Arc<Epoll>,
    device: DeviceId,
}

impl Registrar {
    /// Calls [`VirtioDevice::backend_ready`] with `token` whenever `fd` is ready for one of `events`.
    pub fn add(&self, fd: RawFd, token: u32, events: EventSet) -> io::Result<()> {
        self.control(ControlOperation::Add, fd, token, events)
    }

    /// Changes the events `fd` is waited for. With none, only errors and hang-ups come.
    pub fn modify(&self, fd: RawFd, token: u32, events: EventSet) -> io::Result<()> {
        self.control(ControlOperation::Modify, fd, token, events)
    }

    /// Forgets `fd`. An event already taken from the kernel may still be delivered.
    pub fn remove(&self, fd: RawFd) -> io::Result<()> {
        self.control(ControlOperation::Delete, fd, 0, EventSet::empty())
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

/// A device the loop serves.
struct Served {
    id: DeviceId,
    device: Arc<Mutex<dyn VirtioDevice>>,
    interrupt: Arc<Interrupt>,
    kicks: Vec<Arc<EventFd>>,
}

impl Served {
    /// Calls the device unless it has failed.
    fn call(&self, what: impl FnOnce(&mut dyn VirtioDevice) -> Result<(), DeviceError>) {
        let mut device = self.device.lock().unwrap_or_else(PoisonError::into_inner);
        if self.interrupt.failed() {
            return;
        }
        if let Err(error) = what(&mut *device) {
            tracing::warn!(device = ?self.id, %error, "device stopped until the guest resets it");
            device.reset();
            self.interrupt.fail();
        }
    }
}

/// The event loop, before its thread starts.
pub struct EventLoop {
    epoll: Arc<Epoll>,
    exit: Arc<EventFd>,
    served: Vec<Served>,
}

/// The running thread; dropped, it ends.
#[derive(Debug)]
pub struct Running {
    exit: Arc<EventFd>,
    gate: Arc<Gate>,
    thread: Option<JoinHandle<()>>,
}

impl EventLoop {
    pub fn new() -> io::Result<EventLoop> {
        let epoll = Arc::new(Epoll::new()?);
        let exit = Arc::new(EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?);
        epoll.ctl(
            ControlOperation::Add,
            exit.as_raw_fd(),
            EpollEvent::new(EventSet::IN, Source::Exit.pack()),
        )?;
        Ok(EventLoop {
            epoll,
            exit,
            served: Vec::new(),
        })
    }

    /// For a device about to be made: how it will register descriptors.
    pub fn registrar(&self, device: DeviceId) -> Registrar {
        Registrar {
            epoll: self.epoll.clone(),
            device,
        }
    }

    /// Serves `device`: its kicks from now on.
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
            self.epoll.ctl(
                ControlOperation::Add,
                kick.as_raw_fd(),
                EpollEvent::new(EventSet::IN, source.pack()),
            )?;
        }
        self.served.push(Served {
            id,
            device,
            interrupt,
            kicks,
        });
        Ok(())
    }

    /// Starts the thread, which calls devices while `gate` is open.
    pub fn start(self, gate: Arc<Gate>) -> io::Result<Running> {
        let exit = self.exit.clone();
        let thread = thread::Builder::new().name("devices".into()).spawn({
            let gate = gate.clone();
            move || {
                jail::confine(Thread::Devices);
                self.run(&gate)
            }
        })?;
        Ok(Running {
            exit,
            gate,
            thread: Some(thread),
        })
    }

    fn run(self, gate: &Gate) {
        let mut events = vec![EpollEvent::default(); BATCH];
        loop {
            let ready = match self.epoll.wait(-1, &mut events) {
                Ok(n) => n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    tracing::error!(%error, "epoll_wait failed; devices are no longer served");
                    return;
                }
            };
            let Some(_pass) = gate.enter() else { return };
            for event in &events[..ready] {
                match Source::unpack(event.data()) {
                    Source::Exit => return,
                    Source::Kick { device, queue } => self.kicked(device, queue as usize),
                    Source::Backend { device, token } => {
                        if let Some(served) = self.find(device) {
                            served.call(|device| device.backend_ready(token, event.event_set()));
                        }
                    }
                }
            }
        }
    }

    fn kicked(&self, device: u8, queue: usize) {
        let Some(served) = self.find(device) else { return };
        // Nothing to read: another event of the same batch has served it.
        if served.kicks.get(queue).is_some_and(|kick| kick.read().is_ok()) {
            served.call(|device| device.queue_ready(queue));
        }
    }

    fn find(&self, device: u8) -> Option<&Served> {
        self.served.iter().find(|served| served.id as u8 == device)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.gate.end();
        // Fails only when a signal to exit is pending.
        let _ = self.exit.write(1);
        if let Some(thread) = self.thread.take() {
            // A panic in the thread was reported when it happened.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
#[path = "event_loop_test.rs"]
mod tests;
