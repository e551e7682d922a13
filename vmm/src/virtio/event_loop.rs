//! The one thread that serves every device but virtio-fs: it waits for kicks and backends, and calls the device.
//!
//! Edge or level is the registrant's choice; there is no timer and nothing is polled. A device is called with its lock
//! held, and a failing one is stopped ([`Interrupt::fail`]) without disturbing the others.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;

use thaw_protocol::control::DeviceId;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use super::device::{DeviceError, VirtioDevice};
use super::interrupt::Interrupt;

/// Ready descriptors taken from the kernel at once.
const BATCH: usize = 32;

/// Bit of an epoll token that says "queue kick", not "backend".
const KICK: u64 = 1 << 32;

/// Registers a device's backend descriptors with the event loop, from any thread.
#[derive(Clone, Debug)]
pub struct Registrar {
    epoll: Arc<Epoll>,
    device: DeviceId,
}

impl Registrar {
    /// Calls [`VirtioDevice::backend_ready`] with `token` when `fd` is ready for one of `events`.
    pub fn add(&self, fd: RawFd, token: u32, events: EventSet) -> io::Result<()> {
        self.control(ControlOperation::Add, fd, token, events)
    }

    /// Changes the events `fd` is waited for.
    pub fn modify(&self, fd: RawFd, token: u32, events: EventSet) -> io::Result<()> {
        self.control(ControlOperation::Modify, fd, token, events)
    }

    /// Forgets `fd`. An event already taken from the kernel may still be delivered.
    pub fn remove(&self, fd: RawFd) -> io::Result<()> {
        self.control(ControlOperation::Delete, fd, 0, EventSet::empty())
    }

    fn control(&self, operation: ControlOperation, fd: RawFd, token: u32, events: EventSet) -> io::Result<()> {
        let data = token_of(self.device, false, token);
        self.epoll.ctl(operation, fd, EpollEvent::new(events, data))
    }
}

fn token_of(device: DeviceId, kick: bool, low: u32) -> u64 {
    (device as u64) << 40 | if kick { KICK } else { 0 } | u64::from(low)
}
