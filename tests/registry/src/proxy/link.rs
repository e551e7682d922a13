//! The wire: one queue for all connections, emptied at a fixed rate.

use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

/// What a link can do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Link {
    /// None: as fast as it goes.
    pub bits_per_second: Option<u64>,
    /// From a request's last byte to its response's first; as much again before a new connection's first request.
    pub round_trip: Duration,
}

impl Link {
    /// 100 Mbit/s and 5 ms.
    pub const SLOW: Link = Link {
        bits_per_second: Some(100_000_000),
        round_trip: Duration::from_millis(5),
    };
}

pub(super) struct Wire {
    link: Link,
    /// When what was accepted so far will have left.
    free: Mutex<Instant>,
}

impl Wire {
    pub(super) fn new(link: Link) -> Wire {
        Wire {
            link,
            free: Mutex::new(Instant::now()),
        }
    }

    pub(super) fn round_trip(&self) {
        if !self.link.round_trip.is_zero() {
            thread::sleep(self.link.round_trip);
        }
    }

    /// Waits until `bytes` more have left. A wire that was idle carries no more for it.
    pub(super) fn carry(&self, bytes: usize) {
        let Some(rate) = self.link.bits_per_second else {
            return;
        };
        let takes = Duration::from_secs_f64(bytes as f64 * 8.0 / rate as f64);
        let now = Instant::now();
        let until = {
            let mut free = self.free.lock().unwrap();
            *free = (*free).max(now) + takes;
            *free
        };
        if let Some(wait) = until.checked_duration_since(now) {
            thread::sleep(wait);
        }
    }
}
