//! Tells whether a sandbox is idle: no request comes for its machine or for a port of it, no caller is connected to a process in it, its
//! container writes nothing, and it takes next to no CPU time.
//!
//! Connections to a published port, or to the sandbox's own address, do not pass through thawd. thawd notices them by the packets that the
//! sandbox receives.
//!
//! Nothing reports these events, so thawd looks at a sandbox [`LOOKS`] times within its idle timeout. It does not look at one without a
//! timeout.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use thaw_sandbox::blocking::blocking;
use tokio::time::Instant;

use super::{Body, Daemon};
use crate::api::scope::Wanted;

/// How often a sandbox is looked at during its idle timeout.
const LOOKS: u32 = 10;
/// A sandbox that takes more than this part of a CPU between two looks is not idle, in thousandths. A guest without work takes less.
pub(super) const IDLE_CPU_MILLIS: u64 = 20;
/// A sandbox that receives more packets than this between two looks is not idle. Address resolution and the keepalives of an unused
/// connection are fewer.
const IDLE_PACKETS: u64 = 3;

/// What callers ask of one sandbox.
#[derive(Debug, Default)]
pub(super) struct Requests {
    begun: AtomicU64,
    /// Processes and ports that callers are connected to.
    sessions: AtomicU64,
}

/// A caller's connection to a process or a port of a sandbox, which is not idle meanwhile.
#[derive(Debug)]
pub struct Connected(Arc<Requests>);

impl Requests {
    /// Counts a request.
    pub(super) fn count(&self) {
        self.begun.fetch_add(1, Ordering::Relaxed);
    }

    /// How many there were.
    pub(super) fn begun(&self) -> u64 {
        self.begun.load(Ordering::Relaxed)
    }

    pub(super) fn connect(self: &Arc<Requests>) -> Connected {
        self.sessions.fetch_add(1, Ordering::Relaxed);
        Connected(self.clone())
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        self.0.sessions.fetch_sub(1, Ordering::Relaxed);
        // Its end is an action too.
        self.0.count();
    }
}

/// What is seen of a sandbox at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Seen {
    /// Not idle, whatever else is seen: a caller is connected, or it is paused.
    is_in_use: bool,
    requests: u64,
    /// Bytes of output.
    output: u64,
    /// Packets that it received. `None` if it has no network or they cannot be counted.
    received: Option<u64>,
    /// CPU time, and when it was measured, nanoseconds. `None` if that cannot be measured.
    cpu_ns: Option<u64>,
    at_ns: u64,
}

impl Seen {
    /// Whether nothing has happened since `before`.
    fn is_idle_since(&self, before: &Seen) -> bool {
        let is_calm = match (before.cpu_ns, self.cpu_ns) {
            (Some(before_ns), Some(now_ns)) => {
                let (taken, time) = (
                    now_ns.saturating_sub(before_ns),
                    self.at_ns.saturating_sub(before.at_ns),
                );
                taken.saturating_mul(1000) <= time.saturating_mul(IDLE_CPU_MILLIS)
            }
            _ => true,
        };
        let received = self.received.zip(before.received);
        let is_quiet = received.is_none_or(|(now, before)| now.saturating_sub(before) <= IDLE_PACKETS);
        let is_unused = !self.is_in_use && self.requests == before.requests;
        is_unused && self.output == before.output && is_calm && is_quiet
    }
}

impl Daemon {
    /// Waits until a sandbox has been idle for so long. Returns how many requests there had been. For ever if it has no machine.
    pub(super) async fn until_idle(daemon: &Weak<Daemon>, id: &str, limit: Duration) -> u64 {
        let look = async || match daemon.upgrade() {
            Some(daemon) => daemon.look_at(id).await,
            None => None,
        };
        let (mut before, mut since) = (look().await.unwrap_or_default(), Instant::now());
        loop {
            tokio::time::sleep(limit / LOOKS).await;
            let Some(now) = look().await else {
                return std::future::pending().await;
            };
            if !now.is_idle_since(&before) {
                since = Instant::now();
            }
            before = now;
            if since.elapsed() >= limit {
                return now.requests;
            }
        }
    }

    /// Notes that a caller is connected to a process of a sandbox, until the result is dropped.
    pub(super) fn connect(&self, wanted: &Wanted) -> Option<Connected> {
        let shown = self.cache.find(wanted)?;
        Some(self.table().get(&shown.id)?.requests.connect())
    }

    /// Counts a request for a port of a sandbox, which is in use until the result is dropped. `None` if there is no such sandbox.
    pub fn use_port(&self, id: &str) -> Option<Connected> {
        let requests = self.table().get(id)?.requests.clone();
        requests.count();
        Some(requests.connect())
    }

    /// How many requests for a sandbox there were.
    pub(super) fn requests(&self, id: &str) -> Option<u64> {
        Some(self.table().get(id)?.requests.begun())
    }

    async fn look_at(&self, id: &str) -> Option<Seen> {
        // Held as long as the machine is, which a thawd that ends releases only if nothing uses it.
        let finishing = self.finishing.clone().read_owned().await;
        let (machine, requests) = {
            let table = self.table();
            let held = table.get(id)?;
            match &held.body {
                Body::Machine(machine) => (machine.clone(), held.requests.clone()),
                Body::Paused(_) => return None,
            }
        };
        let is_paused = self.cache.get(id).is_some_and(|shown| shown.state == "paused");
        let output = machine
            .journal()
            .map_or(0, |journal| journal.extent().borrow().end);
        let measured = blocking(move || {
            let usage = machine.usage();
            drop((machine, finishing));
            Ok(usage)
        });
        let usage = measured.await.ok()?;
        Some(Seen {
            is_in_use: is_paused || requests.sessions.load(Ordering::Relaxed) > 0,
            requests: requests.begun(),
            output,
            received: usage.received_packets,
            cpu_ns: usage.cpu_ns,
            at_ns: usage.at_ns,
        })
    }
}

#[cfg(test)]
#[path = "idle_test.rs"]
mod tests;
