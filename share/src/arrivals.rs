//! What wakes the threads that serve: bytes that arrive on the stream, and a thread that leaves some for another.
//!
//! Invariant: while bytes are there that no thread is about to take, an event is pending. An arrival is an event
//! (epoll(7), edge-triggered), which one thread gets; arrivals before it is got are one event together. So who takes
//! a message wakes another, unless it saw that nothing was behind it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{retry_on_intr, write};

/// The events of one stream. Made before the jail, which allows only to wait for them.
pub struct Arrivals {
    epoll: OwnedFd,
    /// Signalled for another thread. It is never read: each signal is an event.
    more: OwnedFd,
}

impl Arrivals {
    /// Those of `stream`, of whose bytes none has been taken.
    ///
    /// # Errors
    /// No descriptor or no memory is left.
    pub fn of(stream: impl AsFd) -> io::Result<Arrivals> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let more = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let arrival = EventFlags::IN | EventFlags::ET;
        epoll::add(&epoll, stream, EventData::new_u64(0), arrival)?;
        epoll::add(&epoll, &more, EventData::new_u64(0), arrival)?;
        Ok(Arrivals { epoll, more })
    }

    /// Waits for an event that no other thread gets. Returns whether the other end was closed.
    pub fn wait(&self) -> io::Result<bool> {
        let mut event = [Event {
            flags: EventFlags::empty(),
            data: EventData::new_u64(0),
        }];
        retry_on_intr(|| epoll::wait(&self.epoll, &mut event, None))?;
        let [Event { flags, .. }] = event;
        Ok(flags.contains(EventFlags::HUP))
    }

    /// Wakes another thread, or the next that waits.
    pub fn wake_another(&self) {
        // Fails only after 2⁶⁴ - 2 signals.
        let _ = write(&self.more, &1u64.to_ne_bytes());
    }
}
