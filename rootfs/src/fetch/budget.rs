//! The time a read may take.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

/// When a read has to be over. A prefetch that stands back for demands gets that time on top.
pub struct Budget(Mutex<Instant>);

impl Budget {
    pub fn new(time: Duration) -> Self {
        Self(Mutex::new(Instant::now() + time))
    }

    pub fn deadline(&self) -> Instant {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn extend(&self, time: Duration) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) += time;
    }

    /// What `work` yields, unless the time is over before.
    pub async fn within<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        let mut work = std::pin::pin!(work);
        loop {
            let deadline = self.deadline();
            tokio::select! {
                biased;
                done = &mut work => return Some(done),
                () = sleep_until(deadline) => {
                    if self.deadline() <= deadline {
                        return None;
                    }
                }
            }
        }
    }
}
