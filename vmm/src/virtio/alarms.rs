//! Timers for devices of the event loop: one point in time for each device, one timerfd for all.
//!
//! Invariant: the timerfd is always set to the earliest of them. It is made with the event loop, because the sealed process cannot create
//! descriptors.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, MutexGuard};

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use thaw_protocol::control::DeviceId;
use thaw_sys::lock::Lock;

use crate::clock::monotonic_ns;

const DEVICES: usize = DeviceId::ALL.len();

/// The points in time, CLOCK_MONOTONIC nanoseconds, by slot.
#[derive(Debug)]
pub struct Alarms {
    timer: OwnedFd,
    moments: Mutex<[Option<u64>; DEVICES]>,
}

impl Alarms {
    pub fn new() -> io::Result<Alarms> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        Ok(Alarms {
            timer: timerfd_create(TimerfdClockId::Monotonic, flags)?,
            moments: Mutex::new([None; DEVICES]),
        })
    }

    /// Sets when the device is called, instead of an earlier setting. With `None` it is not called.
    pub fn set(&self, device: DeviceId, moment: Option<u64>) {
        let mut moments = self.moments();
        let slot = &mut moments[device as usize];
        if *slot != moment {
            *slot = moment;
            self.arm(&moments);
        }
    }

    /// Removes and returns a device whose time has come: the one that has waited longest. If there is another, the timer expires again at
    /// once, so that another thread may serve that one.
    pub fn due(&self) -> Option<DeviceId> {
        // Fails if the timer was set again since it expired; then there is nothing to read.
        let _ = rustix::io::read(&self.timer, &mut [0; 8]);
        let mut moments = self.moments();
        let now = monotonic_ns();
        let device = DeviceId::ALL
            .into_iter()
            .filter(|device| moments[*device as usize].is_some_and(|moment| moment <= now))
            .min_by_key(|device| moments[*device as usize]);
        if let Some(device) = device {
            moments[device as usize] = None;
        }
        self.arm(&moments);
        device
    }

    fn arm(&self, moments: &[Option<u64>; DEVICES]) {
        // A timer set to 0 is off.
        let earliest = moments
            .iter()
            .flatten()
            .min()
            .map_or(0, |moment| (*moment).max(1));
        let setting = Itimerspec {
            it_interval: Timespec::default(),
            it_value: Timespec {
                tv_sec: (earliest / 1_000_000_000) as i64,
                tv_nsec: (earliest % 1_000_000_000) as i64,
            },
        };
        if let Err(error) = timerfd_settime(&self.timer, TimerfdTimerFlags::ABSTIME, &setting) {
            tracing::error!(%error, "the timer of the devices cannot be set; requests over a rate limit wait");
        }
    }

    fn moments(&self) -> MutexGuard<'_, [Option<u64>; DEVICES]> {
        // Plain values, valid even if a thread panicked while it held the lock.
        self.moments.locked()
    }
}

impl AsRawFd for Alarms {
    fn as_raw_fd(&self) -> RawFd {
        self.timer.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, poll};

    use super::*;

    fn rings(alarms: &Alarms, patience_ms: i64) -> bool {
        let patience = Timespec {
            tv_sec: 0,
            tv_nsec: patience_ms * 1_000_000,
        };
        poll(&mut [PollFd::new(&alarms.timer, PollFlags::IN)], Some(&patience)).unwrap() == 1
    }

    #[test]
    fn alarm_rings_for_whose_moment_has_come() {
        let alarms = Alarms::new().unwrap();
        let now = monotonic_ns();
        alarms.set(DeviceId::Net, Some(now + 3_600_000_000_000));
        alarms.set(DeviceId::Blk2, Some(now));
        alarms.set(DeviceId::Blk0, Some(0));
        for device in [DeviceId::Blk0, DeviceId::Blk2] {
            assert!(rings(&alarms, 900));
            assert_eq!(alarms.due(), Some(device));
        }
        assert!(!rings(&alarms, 0), "set to the one that is left");
        assert_eq!(alarms.due(), None);
        alarms.set(DeviceId::Net, Some(now + 1));
        assert!(rings(&alarms, 900));
        assert_eq!(alarms.due(), Some(DeviceId::Net));
    }

    #[test]
    fn alarm_taken_back_does_not_ring() {
        let alarms = Alarms::new().unwrap();
        alarms.set(DeviceId::Blk0, Some(1));
        alarms.set(DeviceId::Blk1, Some(u64::MAX));
        alarms.set(DeviceId::Blk0, None);
        assert!(!rings(&alarms, 20));
        assert_eq!(alarms.due(), None);
    }
}
