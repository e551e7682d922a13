//! Out of memory: which containers had a process killed for it, for `GetOOMEvent`.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Mutex;

use thaw_sys::lock::Lock;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;

use crate::error::{For, Result};
use crate::stdio::watch;

/// Events kept for a host that does not ask; the oldest go first.
const MOST: usize = 256;

/// Events not yet told.
#[derive(Debug, Default)]
pub struct OomEvents {
    queue: Mutex<VecDeque<String>>,
    arrived: Notify,
}

impl OomEvents {
    /// Something in this container was killed.
    pub fn push(&self, container: &str) {
        let mut queue = self.queue.locked();
        if queue.len() == MOST {
            queue.pop_front();
        }
        queue.push_back(container.to_owned());
        self.arrived.notify_one();
    }

    /// The next event, once there is one.
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

/// A cgroup file that says when it changes (kernfs: POLLPRI until it is read again).
#[derive(Debug)]
pub struct ChangeWatch(AsyncFd<OwnedFd>);

impl ChangeWatch {
    /// Within the runtime.
    pub fn new(file: OwnedFd) -> Result<Self> {
        let watch = ChangeWatch(watch(file, Interest::PRIORITY)?);
        watch.read();
        Ok(watch)
    }

    /// Reading is what re-arms the kernel's notification.
    fn read(&self) {
        let mut buffer = [0u8; 512];
        // An error means that the cgroup is gone: whoever waits looks for itself.
        let _ = rustix::io::pread(self.0.get_ref(), &mut buffer, 0);
    }

    /// Returns when the file may have changed since the last call.
    pub async fn changed(&self) -> Result<()> {
        let mut ready = self
            .0
            .ready(Interest::PRIORITY)
            .await
            .for_(|| "wait for a cgroup".into())?;
        ready.clear_ready();
        self.read();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_in_order_and_the_oldest_are_given_up() {
        let events = OomEvents::default();
        (0..MOST + 2).for_each(|i| events.push(&i.to_string()));
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        assert_eq!(runtime.block_on(events.next()), "2");
        assert_eq!(runtime.block_on(events.next()), "3");
    }
}
