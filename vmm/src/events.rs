//! Events: messages that the VMM sends without a request.
//!
//! Invariant: [`EventSink::send`] never waits, and stored events do not grow in number: the latest event of each kind is kept, so
//! that a client that connects later still receives it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard};

use thaw_hypervisor::EventFd;
use thaw_protocol::control::{Event, ExitReason};
use thaw_sys::lock::Lock;

/// Takes reports from vCPU and device threads. Clones report to the same control connection.
#[derive(Clone, Debug)]
pub struct EventSink {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    held: Mutex<Held>,
    wake: EventFd,
}

/// The latest doorbell and the first exit, each with a flag that is set until the event has been sent.
#[derive(Debug, Default)]
struct Held {
    doorbell: Option<(u64, bool)>,
    exited: Option<(ExitReason, bool)>,
}

impl EventSink {
    /// # Errors
    /// If the eventfd cannot be created.
    pub fn new() -> io::Result<EventSink> {
        let wake = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?;
        Ok(EventSink {
            shared: Arc::new(Shared {
                held: Mutex::default(),
                wake,
            }),
        })
    }

    /// Reports an event, from any thread. A second exit is dropped: the first is why the machine ended.
    pub fn send(&self, event: Event) {
        {
            let mut held = self.held();
            match event {
                Event::Doorbell { at } => held.doorbell = Some((at, true)),
                Event::Exited(reason) => {
                    held.exited.get_or_insert((reason, true));
                }
            }
        }
        // Fails only if the counter is full, and then the reader has been woken already.
        let _ = self.shared.wake.write(1);
    }

    /// Readable when an event was sent; for poll.
    pub fn wake(&self) -> BorrowedFd<'_> {
        // SAFETY: the eventfd is owned by `shared`, which the returned borrow keeps borrowed.
        unsafe { BorrowedFd::borrow_raw(self.shared.wake.as_raw_fd()) }
    }

    /// Returns the events since the last call, the doorbell before the exit, and makes [`Self::wake`] unreadable.
    pub fn take_new(&self) -> Vec<Event> {
        let _ = self.shared.wake.read();
        let mut held = self.held();
        let mut new = Vec::new();
        if let Some((at, fresh)) = &mut held.doorbell
            && std::mem::take(fresh)
        {
            new.push(Event::Doorbell { at: *at });
        }
        if let Some((reason, fresh)) = &mut held.exited
            && std::mem::take(fresh)
        {
            new.push(Event::Exited(reason.clone()));
        }
        new
    }

    /// Marks the stored events as unsent, because a new peer has connected.
    pub fn renew(&self) {
        let mut held = self.held();
        if let Some((_, fresh)) = &mut held.doorbell {
            *fresh = true;
        }
        if let Some((_, fresh)) = &mut held.exited {
            *fresh = true;
        }
    }

    /// Why the machine ended, if it has.
    pub fn exited(&self) -> Option<ExitReason> {
        self.held().exited.as_ref().map(|(reason, _)| reason.clone())
    }

    /// Whether the guest has rung the doorbell.
    pub fn rang(&self) -> bool {
        self.held().doorbell.is_some()
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.shared.held.locked()
    }
}

impl AsFd for EventSink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    fn woken(sink: &EventSink) -> bool {
        poll(
            &mut [PollFd::new(sink, PollFlags::IN)],
            Some(&Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            }),
        )
        .unwrap()
            == 1
    }

    #[test]
    fn an_event_is_new_once_and_held_for_the_next_peer() {
        let sink = EventSink::new().unwrap();
        assert!(!woken(&sink));
        sink.clone().send(Event::Doorbell { at: 5 });
        assert!(woken(&sink));
        assert_eq!(sink.take_new(), [Event::Doorbell { at: 5 }]);
        assert!(!woken(&sink));
        assert!(sink.take_new().is_empty());
        sink.renew();
        assert_eq!(sink.take_new(), [Event::Doorbell { at: 5 }]);
    }

    #[test]
    fn a_flood_of_events_holds_one_of_each_kind() {
        let sink = EventSink::new().unwrap();
        for at in 0..10_000 {
            sink.send(Event::Doorbell { at });
        }
        sink.send(Event::Exited(ExitReason::PowerOff));
        sink.send(Event::Exited(ExitReason::Reset));
        assert_eq!(
            sink.take_new(),
            [Event::Doorbell { at: 9_999 }, Event::Exited(ExitReason::PowerOff)]
        );
        assert_eq!(sink.exited(), Some(ExitReason::PowerOff));
    }
}
