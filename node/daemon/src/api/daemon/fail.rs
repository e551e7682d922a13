//! Sandboxes that failed: what becomes of one that ended unasked, and how long it stays listed.
//!
//! Invariants: a failure is written down before anything of its sandbox is removed, and shown when all of that is gone, so
//! whoever sees it finds its name and its ports free; whoever deletes a sandbox that is failing leaves nothing of it. A
//! sandbox that failed is in the cache and not in the table.

use std::collections::HashMap;
use std::sync::{Arc, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use thaw_protocol::api::{FAILED, Sandbox as Described};
use thaw_sandbox::blocking::blocking;
use thaw_sandbox::error::Error;
use thaw_sandbox::state::RunDirectory;
use thaw_sandbox::state::failed::{Retention, failed_at, log_failure, now};
use tokio::sync::{Notify, watch};

use super::Daemon;
use crate::api::machine::Condition;
use crate::api::scope::Wanted;

/// How long a VMM may take to say whether its machine has ended.
const ASK_LIMIT: Duration = Duration::from_secs(1);
/// How long the timer of retention runs at most: it stands still while the host sleeps.
const LONGEST_WAIT: Duration = Duration::from_secs(60 * 60);

/// Those being taken down: each closes when it is done.
pub(super) type Failing = HashMap<String, watch::Receiver<()>>;

/// Where failures are kept, and for how long.
#[derive(Debug)]
pub(super) struct Kept {
    /// None: in memory alone.
    pub run: Option<RunDirectory>,
    pub retention: Retention,
    /// Another failed.
    pub more: Notify,
}

impl Daemon {
    /// Shows what failed before this thawd, and from now on forgets each when its time is over.
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

    /// A sandbox ended unasked: notes why, removes what it has, and lists it as failed.
    pub(super) async fn fail(self: &Arc<Daemon>, id: &str) {
        // Dropped when all is done: whoever deletes it meanwhile waits for that.
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

    /// Ends a sandbox and removes all it has; if it ended unasked before, it is listed as failed, or stays so.
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
            // Nothing is ever sent: it changes by closing alone.
            let _ = waiting.changed().await;
        }
    }

    /// Removes a sandbox that is not in the table: one that failed, or is failing. Says whether there is one.
    pub(super) async fn delete_failed(&self, id: &str) -> bool {
        let (there, waiting) = {
            let failing = self.failing();
            (self.cache.remove(id), failing.get(id).cloned())
        };
        match waiting {
            // What fails it finds that it is not wanted any more.
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

    /// The same, where nothing can be waited for.
    pub(super) fn forget_now(&self, id: &str) {
        if let Some(run) = &self.kept.run {
            run.forget_failed(id);
        }
    }

    pub(super) fn failing(&self) -> MutexGuard<'_, Failing> {
        self.failing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets those whose time is over; how long until that of the next is.
    async fn expire_failed(&self) -> Option<Duration> {
        let retention = self.kept.retention;
        let failed = self.cache.failed();
        let known: Vec<&Described> = failed.iter().map(|failed| &**failed).collect();
        for id in retention.overdue(&known, now()) {
            self.cache.remove(id);
            self.forget(id).await;
        }
        // Those that `thaw` noted, whose sandboxes were never ours.
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

/// Forgets failed sandboxes as their time is over. Ends with the daemon.
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
