//! OOM kills: the containers in which the kernel killed a process for lack of memory, for `GetOOMEvent`.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Mutex;

use thaw_sys::lock::Lock;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;

use crate::error::{Result, WithContext};
use crate::stdio::watch;

/// Most events kept for a host that does not ask. The oldest are dropped first.
const MAX_EVENTS: usize = 256;

/// Events that were not reported yet.
#[derive(Debug, Default)]
pub struct OomEvents {
    queue: Mutex<VecDeque<String>>,
    arrived: Notify,
}

impl OomEvents {
    /// Adds an event of this container.
    pub fn push(&self, container: &str) {
        let mut queue = self.queue.locked();
        if queue.len() == MAX_EVENTS {
            queue.pop_front();
        }
        queue.push_back(container.to_owned());
        self.arrived.notify_one();
    }

    /// Waits for the next event and returns its container's id.
    pub async fn next(&self) -> String {
        loop {
            let arrived = self.arrived.notified();
            if let Some(container) = self.queue.locked().pop_front() {
                return container;
            }
            arrived.await;
        }
    }
}

/// Watches a cgroup file for changes (kernfs sets POLLPRI until the file is read again).
#[derive(Debug)]
pub struct ChangeWatch(AsyncFd<OwnedFd>);

impl ChangeWatch {
    /// Must be called within the runtime.
    pub fn new(file: OwnedFd) -> Result<Self> {
        let watch = ChangeWatch(watch(file, Interest::PRIORITY)?);
        watch.read();
        Ok(watch)
    }

    /// Reads the file, which re-arms the kernel's notification.
    fn read(&self) {
        let mut buffer = [0u8; 512];
        // An error means that the cgroup is gone, which the caller finds out itself.
        let _ = rustix::io::pread(self.0.get_ref(), &mut buffer, 0);
    }

    /// Returns when the file may have changed since the last call.
    pub async fn changed(&self) -> Result<()> {
        let mut ready = self
            .0
            .ready(Interest::PRIORITY)
            .await
            .with_context(|| "wait for a cgroup".into())?;
        ready.clear_ready();
        self.read();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oom_events_come_in_order_and_oldest_are_dropped() {
        let events = OomEvents::default();
        (0..MAX_EVENTS + 2).for_each(|i| events.push(&i.to_string()));
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        assert_eq!(runtime.block_on(events.next()), "2");
        assert_eq!(runtime.block_on(events.next()), "3");
    }
}
