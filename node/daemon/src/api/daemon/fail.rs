//! Failed sandboxes: those whose machine ended by itself, and how long they stay listed.
//!
//! Invariants: a failure is recorded before anything of its sandbox is removed, and listed when everything is removed, so that its name
//! and its ports are free by then; deleting a sandbox that is failing leaves nothing of it. A failed sandbox is in the cache and not in
//! the table.

use std::collections::HashMap;
use std::sync::{Arc, MutexGuard, Weak};
use std::time::Duration;

use thaw_protocol::api::{FAILED, Sandbox as Described};
use thaw_sandbox::blocking::blocking;
use thaw_sandbox::error::Error;
use thaw_sandbox::state::RunDirectory;
use thaw_sandbox::state::failed::{Retention, failed_at, log_failure, now};
use thaw_sys::lock::Lock;
use tokio::sync::{Notify, watch};

use super::Daemon;
use crate::api::machine::Condition;
use crate::api::scope::Wanted;

/// How long a VMM may take to answer whether its machine has ended.
const ASK_LIMIT: Duration = Duration::from_secs(1);
/// Maximum sleep of the retention timer, whose clock stops while the host sleeps.
const LONGEST_WAIT: Duration = Duration::from_secs(60 * 60);

/// The sandboxes that are failing. A sandbox's channel closes once it has failed.
pub(super) type Failing = HashMap<String, watch::Receiver<()>>;

/// Where failed sandboxes are recorded, and for how long.
#[derive(Debug)]
pub(super) struct Kept {
    /// `None`: only in memory.
    pub run: Option<RunDirectory>,
    pub retention: Retention,
    /// Signals another failure.
    pub more: Notify,
}

impl Daemon {
    /// Lists the sandboxes that failed under earlier thawds, and starts to remove each when its retention is over.
    pub(super) async fn keep_failed(self: &Arc<Daemon>) {
        if let Some(run) = self.kept.run.clone() {
            let retention = self.kept.retention;
            let read = move || {
                run.expire_failed(retention);
                Ok(run.failed())
            };
            for failed in blocking(read).await.unwrap_or_default() {
                self.cache.put(failed);
            }
        }
        tokio::spawn(expire(Arc::downgrade(self)));
    }

    /// Records why a sandbox's machine ended by itself, removes what the sandbox has, and lists it as failed.
    pub(super) async fn fail(self: &Arc<Daemon>, id: &str) {
        // Dropped when it has failed. A concurrent deletion waits for that.
        let (_failing, waiting) = watch::channel(());
        let machine = {
            let mut failing = self.failing();
            let Some(held) = self.table().remove(id) else {
                return;
            };
            failing.insert(id.to_owned(), waiting);
            held.machine.clone()
        };
        let failure = machine.failure().await;
        self.metrics.failed(&failure.reason);
        let exit_code = self.cache.get(id).and_then(|shown| shown.exit_code);
        let failed = machine.record().failed(exit_code, failure);
        log_failure(&failed);
        self.note_failed(&failed).await;
        machine.destroy().await;
        let is_wanted = {
            let mut failing = self.failing();
            failing.remove(id);
            let is_kept = self.kept.retention.seconds > 0 && self.kept.retention.most > 0;
            match is_kept {
                true => self.cache.update(id, |shown| *shown = failed),
                false => {
                    self.cache.update(id, |shown| *shown = failed);
                    self.cache.remove(id);
                    false
                }
            }
        };
        match is_wanted {
            true => self.kept.more.notify_one(),
            // It was deleted meanwhile.
            false => self.forget(id).await,
        }
    }

    /// Ends a sandbox and removes everything it has. If it had ended by itself, it is listed as failed, or stays so.
    ///
    /// # Errors
    /// There is no such sandbox.
    pub async fn delete_unless_failed(self: &Arc<Daemon>, wanted: &Wanted) -> Result<(), Error> {
        let Some(id) = self.cache.find(wanted).map(|shown| shown.id.clone()) else {
            return self.delete(wanted).await;
        };
        if self.factory.is_some() {
            let machine = self.table().get(&id).map(|held| held.machine.clone());
            if let Some(machine) = machine {
                let condition = tokio::time::timeout(ASK_LIMIT, machine.condition()).await;
                drop(machine);
                if let Ok(Condition::Ended(_)) = condition {
                    self.fail(&id).await;
                }
            }
            self.until_failed(&id).await;
            if self.cache.get(&id).is_some_and(|shown| shown.state == FAILED) {
                return Ok(());
            }
        }
        let found = Wanted {
            text: id,
            scope: wanted.scope.clone(),
        };
        self.delete(&found).await
    }

    /// Waits until a sandbox that is failing has failed.
    async fn until_failed(&self, id: &str) {
        let waiting = self.failing().get(id).cloned();
        if let Some(mut waiting) = waiting {
            // Nothing is ever sent; the channel only closes.
            let _ = waiting.changed().await;
        }
    }

    /// Removes a sandbox that has failed or is failing, and returns whether there is one.
    pub(super) async fn delete_failed(&self, id: &str) -> bool {
        let (there, waiting) = {
            let failing = self.failing();
            (self.cache.remove(id), failing.get(id).cloned())
        };
        match waiting {
            // The task that fails it finds the deletion, and removes the rest.
            Some(mut waiting) => drop(waiting.changed().await),
            None if there => self.forget(id).await,
            None => {}
        }
        there
    }

    async fn note_failed(&self, failed: &Described) {
        let Some(run) = self.kept.run.clone() else { return };
        let (id, failed) = (failed.id.clone(), failed.clone());
        if let Err(e) = blocking(move || run.note_failed(&failed)).await {
            tracing::error!(sandbox = id, "a later thawd will not list it: {e}");
        }
    }

    async fn forget(&self, id: &str) {
        let Some(run) = self.kept.run.clone() else { return };
        let id = id.to_owned();
        let _ = blocking(move || Ok(run.forget_failed(&id))).await;
    }

    /// The same where waiting is not possible.
    pub(super) fn forget_now(&self, id: &str) {
        if let Some(run) = &self.kept.run {
            run.forget_failed(id);
        }
    }

    pub(super) fn failing(&self) -> MutexGuard<'_, Failing> {
        self.failing.locked()
    }

    /// Removes failed sandboxes whose retention is over, and returns the time until the next one is due.
    async fn expire_failed(&self) -> Option<Duration> {
        let retention = self.kept.retention;
        let failed = self.cache.failed();
        let known: Vec<&Described> = failed.iter().map(|failed| &**failed).collect();
        for id in retention.overdue(&known, now()) {
            self.cache.remove(id);
            self.forget(id).await;
        }
        // Also those that `thaw run` recorded, whose sandboxes thawd never owned.
        if let Some(run) = self.kept.run.clone() {
            let _ = blocking(move || {
                run.expire_failed(retention);
                Ok(())
            })
            .await;
        }
        let first = self.cache.failed().first().map(|first| failed_at(first))?;
        let left = first.saturating_add(retention.seconds).saturating_sub(now());
        Some(Duration::from_secs(left))
    }
}

/// Removes failed sandboxes as their retention ends. Ends with the daemon.
async fn expire(daemon: Weak<Daemon>) {
    loop {
        let next = match daemon.upgrade() {
            Some(daemon) => daemon.expire_failed().await,
            None => return,
        };
        let wait = next.unwrap_or(LONGEST_WAIT).min(LONGEST_WAIT);
        let Some(more) = daemon.upgrade().map(|daemon| daemon.kept.clone()) else {
            return;
        };
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = more.more.notified() => {}
        }
    }
}

#[cfg(test)]
#[path = "fail_test.rs"]
mod tests;
