//! Reads the packets of a VMM, whatever it sends.
//!
//! Invariant: besides the replies it owes, a VMM costs this process at most [`MAX_STRAYS`] packets and [`EVENTS_PER_SECOND`]
//! events a second, the memory of one packet, [`MAX_DESCRIPTORS`] descriptors, and a few log lines: the first stray packet, the
//! first delay, and the end, which counts both.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use thaw_protocol::control::{Event, FromVmm, Response};
use thaw_protocol::packet::{PacketError, Receiver};
use tokio::time::Instant;

use super::{Misconduct, Shared};

/// Maximum number of descriptors with a message: the userfaultfd of [`Response::Restored`]. The kernel closes any further ones.
const MAX_DESCRIPTORS: usize = 1;
/// Number of unrequested replies and descriptors that are dropped before the connection is closed.
pub(super) const MAX_STRAYS: u32 = 64;
/// Maximum burst of events. A VMM keeps one of each kind; a guest that rings the doorbell without end causes more.
pub(super) const EVENT_BURST: u32 = 128;
/// Number of events taken per second after that. The rest waits in the socket, and then in the VMM.
pub(super) const EVENTS_PER_SECOND: u32 = 64;

/// Reads until the connection ends. Ends it if the VMM misbehaves.
pub(super) async fn read_all(shared: Arc<Shared>) {
    let mut reader = Reader {
        shared: &shared,
        strays: 0,
        events: Allowance::new(),
    };
    let end = reader.read().await;
    if reader.strays > 0 || reader.events.waits > 0 {
        tracing::warn!(
            dropped = reader.strays,
            delayed = reader.events.waits,
            "what {} sent unasked over its control connection",
            shared.vmm
        );
    }
    let misconduct = match end {
        PacketError::Malformed(error) => Some(Misconduct::Malformed(error)),
        PacketError::Truncated => Some(Misconduct::Oversize),
        _ if reader.strays > MAX_STRAYS => Some(Misconduct::Strays(reader.strays)),
        end => {
            tracing::debug!("control connection ended: {end}");
            None
        }
    };
    if let Some(misconduct) = &misconduct {
        tracing::error!("{} broke the control protocol: {misconduct}", shared.vmm);
        let _ = rustix::net::shutdown(shared.socket.get_ref(), rustix::net::Shutdown::Both);
    }
    // Set before the waiting callers are woken: they read the reason.
    shared.life.send_modify(|life| {
        life.closed = true;
        life.misconduct = misconduct;
    });
    *shared.waiting() = None;
}

struct Reader<'a> {
    shared: &'a Shared,
    /// Replies and descriptors that were not requested.
    strays: u32,
    events: Allowance,
}

impl Reader<'_> {
    /// Reads until the connection ends, and returns why.
    async fn read(&mut self) -> PacketError {
        let mut receiver = Receiver::for_descriptors(MAX_DESCRIPTORS);
        loop {
            let mut ready = match self.shared.socket.readable().await {
                Ok(ready) => ready,
                Err(e) => return PacketError::Io(e),
            };
            match receiver.receive::<FromVmm>(self.shared.socket.get_ref().as_fd()) {
                Ok((message, descriptors)) => {
                    self.take(message, descriptors).await;
                    if self.strays > MAX_STRAYS {
                        return PacketError::Closed;
                    }
                    // A socket that is always readable must not keep other tasks from running.
                    tokio::task::coop::consume_budget().await;
                }
                Err(PacketError::Io(e)) if e.kind() == std::io::ErrorKind::WouldBlock => ready.clear_ready(),
                Err(e) => return e,
            }
        }
    }

    async fn take(&mut self, message: FromVmm, mut descriptors: Vec<OwnedFd>) {
        let brings = matches!(
            &message,
            FromVmm::Reply {
                result: Ok(Response::Restored { .. }),
                ..
            }
        );
        if !brings && !descriptors.is_empty() {
            descriptors.clear();
            self.stray("a descriptor");
        }
        match message {
            FromVmm::Reply { id, result } => {
                let waiting = self
                    .shared
                    .waiting()
                    .as_mut()
                    .and_then(|pending| pending.remove(&id));
                match waiting {
                    Some(sender) => drop(sender.send(result.map(|r| (r, descriptors)))),
                    None => self.stray("an answer to nothing"),
                }
            }
            FromVmm::Event(event) => {
                self.publish(event);
                if let Some(wait) = self.events.spend(Instant::now()) {
                    if self.events.waits == 1 {
                        tracing::warn!("{} sends event after event: they are delayed", self.shared.vmm);
                    }
                    tokio::time::sleep(wait).await;
                }
            }
        }
    }

    fn publish(&self, event: Event) {
        self.shared.life.send_modify(|life| match event {
            Event::Doorbell { at } => life.doorbell = Some(at),
            // The first reason is the one why the machine ended.
            Event::Exited(reason) => drop(life.exited.get_or_insert(reason)),
        });
    }

    fn stray(&mut self, what: &str) {
        self.strays += 1;
        if self.strays == 1 {
            tracing::warn!("{} sent {what}: such are dropped, and counted", self.shared.vmm);
        }
    }
}

/// The allowance for events: a token bucket.
struct Allowance {
    /// Available events, as the time in which they accrue.
    left: Duration,
    since: Instant,
    waits: u64,
}

impl Allowance {
    const ONE: Duration = Duration::from_nanos(1_000_000_000 / EVENTS_PER_SECOND as u64);
    const FULL: Duration = Duration::from_nanos(Self::ONE.as_nanos() as u64 * EVENT_BURST as u64);

    fn new() -> Allowance {
        Allowance {
            left: Self::FULL,
            since: Instant::now(),
            waits: 0,
        }
    }

    /// Accounts for one event. Returns how long to wait before the next is read, if none is left.
    fn spend(&mut self, now: Instant) -> Option<Duration> {
        let more = now.duration_since(self.since);
        self.since = now;
        self.left = (self.left + more).min(Self::FULL);
        match self.left.checked_sub(Self::ONE) {
            Some(left) => {
                self.left = left;
                None
            }
            None => {
                // The event accrued during the wait is spent.
                self.left = Duration::ZERO;
                self.since = now + Self::ONE;
                self.waits += 1;
                Some(Self::ONE)
            }
        }
    }
}
