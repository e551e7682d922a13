//! The event loops of a machine: one for each disk, and one for all other devices without a thread of their own.
//!
//! A disk's requests are system calls that wait: for a sync, for bytes that are not in memory, for a file system that is full of unwritten
//! pages. So each disk has threads of its own, one for each request in flight: it delays no other device, and its sync does not
//! delay its reads.

use std::io;
use std::sync::Arc;

use thaw_protocol::control::DeviceId;

use crate::jail::threads::Thread;
use crate::virtio::blk::IN_FLIGHT;
use crate::virtio::device_thread::DeviceThread;
use crate::virtio::event_loop::EventLoop;
use crate::virtio::gate::Gate;

/// The disks, and the names of their threads.
const DISKS: [(DeviceId, &str); 4] = [
    (DeviceId::Blk0, "disk-0"),
    (DeviceId::Blk1, "disk-1"),
    (DeviceId::Blk2, "disk-2"),
    (DeviceId::Blk3, "disk-3"),
];

/// The loops before their threads start.
pub struct Loops {
    disks: Vec<EventLoop>,
    others: EventLoop,
}

impl Loops {
    pub fn new() -> io::Result<Loops> {
        let disks = DISKS.iter().map(|_| EventLoop::new());
        Ok(Loops {
            disks: disks.collect::<io::Result<_>>()?,
            others: EventLoop::new()?,
        })
    }

    /// The loop that serves `device`.
    pub fn of(&mut self, device: DeviceId) -> &mut EventLoop {
        let disk = DISKS.iter().position(|(disk, _)| *disk == device);
        match disk.and_then(|disk| self.disks.get_mut(disk)) {
            Some(disk) => disk,
            None => &mut self.others,
        }
    }

    /// Starts the threads. They call devices while `gate` is open.
    pub fn start(self, gate: &Arc<Gate>) -> io::Result<Vec<DeviceThread>> {
        let mut threads = vec![self.others.start("devices", Thread::Devices, gate.clone())?];
        for ((_, name), disk) in DISKS.iter().zip(self.disks) {
            threads.extend(disk.start_several(IN_FLIGHT, name, Thread::Disk, gate)?);
        }
        Ok(threads)
    }
}

#[cfg(test)]
#[path = "loops_test.rs"]
mod tests;
