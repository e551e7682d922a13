//! The time limit of a read.

use std::sync::Mutex;
use std::time::Duration;

use thaw_sys::lock::Lock;
use tokio::time::{Instant, sleep_until};

/// Longer than anything waits.
const FOR_EVER: Duration = Duration::from_secs(30 * 86_400);

/// When a read has to be over. A prefetch that stands back for demands gets that time on top.
pub struct Budget(Mutex<Instant>);

impl Budget {
    pub fn new(time: Duration) -> Self {
        Self(Mutex::new(Instant::now() + time))
    }

    pub fn deadline(&self) -> Instant {
        *self.0.locked()
    }

    fn change(&self, change: impl FnOnce(&mut Instant)) {
        change(&mut self.0.locked());
    }

    /// The output of `wait`, whose duration does not count against the budget. Also returns the duration.
    pub async fn without<T>(&self, wait: impl Future<Output = T>) -> (T, Duration) {
        let start = Instant::now();
        self.change(|deadline| *deadline += FOR_EVER);
        let done = wait.await;
        let waited = start.elapsed();
        self.change(|deadline| *deadline = *deadline - FOR_EVER + waited);
        (done, waited)
    }

    /// The output of `work`, or `None` if the budget ends first.
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

#[cfg(test)]
mod tests {
    use tokio::time::sleep;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn standing_back_does_not_count() {
        let second = Duration::from_secs(1);
        let budget = Budget::new(second * 10);
        let work = async {
            sleep(second * 9).await;
            budget.without(sleep(second * 100)).await;
            sleep(second / 2).await;
        };
        assert_eq!(budget.within(work).await, Some(()));
        assert_eq!(budget.within(sleep(second)).await, None);
    }
}
