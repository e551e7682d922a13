//! The callers that wait for parts of a snapshot in a registry, so that the background begins only when there are none.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

/// Counts callers.
#[derive(Debug)]
pub(super) struct Demands(watch::Sender<Now>);

#[derive(Clone, Copy, Debug)]
struct Now {
    waiting: usize,
    /// When the last one ceased to wait.
    ended: Instant,
}

/// A caller that waits. It ceases to when this is dropped.
#[derive(Debug)]
pub(super) struct Demand<'a>(&'a Demands);

impl Demands {
    /// Nobody waits, from now on.
    pub(super) fn new() -> Demands {
        Demands(watch::Sender::new(Now {
            waiting: 0,
            ended: Instant::now(),
        }))
    }

    /// A caller waits from now on.
    pub(super) fn begin(&self) -> Demand<'_> {
        self.0.send_modify(|now| now.waiting += 1);
        Demand(self)
    }

    /// Returns once no caller has waited for so long.
    pub(super) async fn quiet(&self, time: Duration) {
        let mut changes = self.0.subscribe();
        loop {
            let ended = changes
                .wait_for(|now| now.waiting == 0)
                .await
                .map(|now| now.ended);
            // The sender belongs to us, so it still exists.
            let Ok(ended) = ended else { return };
            let until = ended + time;
            if Instant::now() >= until {
                return;
            }
            sleep_until(until).await;
        }
    }
}

impl Drop for Demand<'_> {
    fn drop(&mut self) {
        self.0.0.send_modify(|now| {
            now.waiting = now.waiting.saturating_sub(1);
            now.ended = Instant::now();
        });
    }
}

#[cfg(test)]
#[path = "remote_demands_test.rs"]
mod tests;
