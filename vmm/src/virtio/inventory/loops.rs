//! The event loops of a machine: one for its disks, and one for all other devices without a thread of their own.
//!
//! A disk's requests are system calls that wait: for a sync, for bytes that are not in memory, for a file system that is full of unwritten
//! pages. So disks have a thread for each request in flight: a disk delays no other device, and its sync does not delay its reads. Each disk
//! has one of the threads, and they share the others ([`shared_threads`](crate::virtio::shared_threads)). One more may wait for a disk that is
//! being reset or taken away.

use std::io;
use std::sync::Arc;

use thaw_protocol::control::DeviceId;

use crate::jail::threads::Thread;
use crate::virtio::device_thread::DeviceThread;
use crate::virtio::event_loop::EventLoop;
use crate::virtio::gate::Gate;
use crate::virtio::shared_threads::SHARED;

const DISKS: [DeviceId; 4] = [DeviceId::Blk0, DeviceId::Blk1, DeviceId::Blk2, DeviceId::Blk3];
/// Threads of the disks.
pub const DISK_THREADS: usize = DISKS.len() + SHARED + 1;

/// The loops before their threads start.
pub struct Loops {
    disks: EventLoop,
    others: EventLoop,
}

impl Loops {
    pub fn new() -> io::Result<Loops> {
        Ok(Loops {
            disks: EventLoop::new()?,
            others: EventLoop::new()?,
        })
    }

    /// The loop that serves `device`.
    pub fn of(&mut self, device: DeviceId) -> &mut EventLoop {
        match DISKS.contains(&device) {
            true => &mut self.disks,
            false => &mut self.others,
        }
    }

    /// Starts the threads. They call devices while `gate` is open.
    pub fn start(self, gate: &Arc<Gate>) -> io::Result<Vec<DeviceThread>> {
        let mut threads = self
            .disks
            .start_several(DISK_THREADS, "disk", Thread::Disk, gate)?;
        threads.push(self.others.start("devices", Thread::Devices, gate.clone())?);
        Ok(threads)
    }
}

#[cfg(test)]
#[path = "loops_test.rs"]
mod tests;
