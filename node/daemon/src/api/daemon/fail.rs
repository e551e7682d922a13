//! Ended sandboxes that stay listed, and for how long: those whose machine ended by itself, which have failed, and those whose container
//! exited, if the caller that deleted them kept the record, or they were to end so.
//!
//! Invariants: an end is recorded before anything of its sandbox is removed, and listed when everything is removed, so that its name
//! and its ports are free by then; deleting a sandbox that is failing leaves nothing of it. An ended sandbox is in the cache and not in
//! the table.

use std::collections::HashMap;
use std::sync::{Arc, MutexGuard, Weak};
use std::time::Duration;

use thaw_protocol::api::{Sandbox as Described, SandboxAction, SandboxEvent};
use thaw_sandbox::blocking::blocking;
use thaw_sandbox::error::Error;
use thaw_sandbox::state::RunDirectory;
use thaw_sandbox::state::ended::{Retention, ended_at, log_failure, now};
use thaw_sys::lock::Lock;
use tokio::sync::{Notify, watch};

use super::Daemon;
use crate::api::machine::{Condition, Machine};
use crate::api::scope::Wanted;

/// How long a VMM may take to answer whether its machine has ended.
const ASK_LIMIT: Duration = Duration::from_secs(1);
/// How long the monitor of a container that is said to have exited may take to report it.
const EXIT_LIMIT: Duration = Duration::from_secs(5);
/// Maximum sleep of the retention timer, whose clock stops while the host sleeps.
const LONGEST_WAIT: Duration = Duration::from_secs(60 * 60);

/// The records that a deletion keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Keep {
    /// That of a sandbox that has failed.
    pub failed: bool,
    /// That of a sandbox whose container's process has exited, with its output.
    pub exited: bool,
}

impl Keep {
    fn applies_to(self, shown: &Described) -> bool {
        match &shown.failure {
            Some(_) => self.failed,
            None => self.exited && shown.ended_at().is_some(),
        }
    }
}

/// The sandboxes that are ending and whose record is kept. A sandbox's channel closes once it is listed as ended.
pub(super) type Failing = HashMap<String, watch::Receiver<()>>;

/// Where ended sandboxes are recorded, and for how long.
#[derive(Debug)]
pub(super) struct Kept {
    /// `None`: only in memory.
    pub run: Option<RunDirectory>,
    pub retention: Retention,
    /// Signals another end.
    pub more: Notify,
}

impl Daemon {
    /// Lists the sandboxes that ended under earlier thawds, and starts to remove each when its retention is over.
    pub(super) async fn keep_ended(self: &Arc<Daemon>) {
        if let Some(run) = self.kept.run.clone() {
            let retention = self.kept.retention;
            let read = move || {
                run.expire_ended(retention);
                Ok(run.ended())
            };
            for ended in blocking(read).await.unwrap_or_default() {
                self.cache.put(ended);
            }
        }
        tokio::spawn(expire(Arc::downgrade(self)));
    }

    /// Records why a sandbox's machine ended by itself, removes what the sandbox has, and lists it as failed.
    pub(super) async fn fail(self: &Arc<Daemon>, id: &str) {
        let Some((machine, _failing)) = self.begin_end(id) else {
            return;
        };
        let failure = machine.failure().await;
        self.metrics.failed(&failure.reason);
        let exit_code = self.cache.get(id).and_then(|shown| shown.exit_code);
        let failed = machine.record().failed(exit_code, failure);
        log_failure(&failed);
        self.finish_end(machine, failed).await;
    }

    /// Removes what a sandbox has whose container's process has exited, and lists the sandbox as exited, with its output.
    pub(super) async fn keep_exited(self: &Arc<Daemon>, id: &str, status: i32) {
        let Some((machine, _failing)) = self.begin_end(id) else {
            return;
        };
        let exited = machine.record().exited(status);
        self.finish_end(machine, exited).await;
    }

    /// Takes the machine of a sandbox whose end is to be recorded. A concurrent deletion waits until the returned sender is dropped.
    fn begin_end(&self, id: &str) -> Option<(Arc<dyn Machine>, watch::Sender<()>)> {
        let (sender, waiting) = watch::channel(());
        let mut failing = self.failing();
        let mut table = self.table();
        let machine = table.get(id)?.body.machine()?.clone();
        table.remove(id);
        failing.insert(id.to_owned(), waiting);
        Some((machine, sender))
    }

    /// Records the end of a sandbox, removes what it has, and lists it.
    async fn finish_end(&self, machine: Arc<dyn Machine>, ended: Described) {
        let id = ended.id.clone();
        self.note_ended(&ended).await;
        machine.destroy().await;
        let is_wanted = {
            let mut failing = self.failing();
            failing.remove(&id);
            let is_kept = self.kept.retention.seconds > 0 && self.kept.retention.most > 0;
            let was_there = self.cache.update(&id, |shown| {
                // The end of its container's process may be shown already.
                let is_known = shown.exit_code.is_some() && ended.failure.is_none();
                *shown = ended;
                shown.event = (!is_known).then(|| SandboxEvent {
                    exit_code: shown.exit_code,
                    ..SandboxEvent::now(SandboxAction::Die)
                });
            });
            if !is_kept {
                self.cache.remove(&id);
            }
            is_kept && was_there
        };
        match is_wanted {
            true => self.kept.more.notify_one(),
            // It was deleted meanwhile.
            false => self.forget(&id).await,
        }
    }

    /// Ends a sandbox and removes everything it has. If it had ended by itself, it is listed as failed, or stays so.
    ///
    /// # Errors
    /// There is no such sandbox.
    pub async fn delete_unless_failed(self: &Arc<Daemon>, wanted: &Wanted) -> Result<(), Error> {
        let keep = Keep {
            failed: true,
            exited: false,
        };
        self.delete_keeping(wanted, keep).await
    }

    /// Ends a sandbox and removes everything it has, except the record of its end if `keep` says so.
    ///
    /// # Errors
    /// There is no such sandbox.
    pub async fn delete_keeping(self: &Arc<Daemon>, wanted: &Wanted, keep: Keep) -> Result<(), Error> {
        let Some(id) = self.cache.find(wanted).map(|shown| shown.id.clone()) else {
            return self.delete(wanted).await;
        };
        if self.factory.is_some() {
            if keep.failed {
                self.fail_if_ended(&id).await;
            }
            if keep.exited
                && let Some(status) = self.exited(&id, EXIT_LIMIT).await
            {
                self.keep_exited(&id, status).await;
            }
            self.until_failed(&id).await;
            if self.cache.get(&id).is_some_and(|shown| keep.applies_to(&shown)) {
                return Ok(());
            }
        }
        let found = Wanted {
            text: id,
            scope: wanted.scope.clone(),
        };
        self.delete(&found).await
    }

    /// Lists a sandbox as failed if its machine has ended.
    async fn fail_if_ended(self: &Arc<Daemon>, id: &str) {
        let Ok(machine) = self.look_up(id) else { return };
        let condition = tokio::time::timeout(ASK_LIMIT, machine.condition()).await;
        drop(machine);
        if let Ok(Condition::Ended(_)) = condition {
            self.fail(id).await;
        }
    }

    /// Waits until a sandbox that is failing has failed.
    async fn until_failed(&self, id: &str) {
        let waiting = self.failing().get(id).cloned();
        if let Some(mut waiting) = waiting {
            // Nothing is ever sent; the channel only closes.
            let _ = waiting.changed().await;
        }
    }

    /// Removes a sandbox that has ended or is failing, and returns whether there is one.
    pub(super) async fn delete_ended(&self, id: &str) -> bool {
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

    async fn note_ended(&self, ended: &Described) {
        let Some(run) = self.kept.run.clone() else { return };
        let (id, ended) = (ended.id.clone(), ended.clone());
        if let Err(e) = blocking(move || run.note_ended(&ended)).await {
            tracing::error!(sandbox = id, "a later thawd will not list it: {e}");
        }
    }

    async fn forget(&self, id: &str) {
        let Some(run) = self.kept.run.clone() else { return };
        let id = id.to_owned();
        let _ = blocking(move || Ok(run.forget_ended(&id))).await;
    }

    /// The same where waiting is not possible.
    pub(super) fn forget_now(&self, id: &str) {
        if let Some(run) = &self.kept.run {
            run.forget_ended(id);
        }
    }

    pub(super) fn failing(&self) -> MutexGuard<'_, Failing> {
        self.failing.locked()
    }

    /// Removes ended sandboxes whose retention is over, and returns the time until the next one is due.
    async fn expire_ended(&self) -> Option<Duration> {
        let retention = self.kept.retention;
        let ended = self.cache.ended();
        let known: Vec<&Described> = ended.iter().map(|ended| &**ended).collect();
        for id in retention.overdue(&known, now()) {
            self.cache.remove(id);
            self.forget(id).await;
        }
        // Also those that `thaw run` recorded, whose sandboxes thawd never owned.
        if let Some(run) = self.kept.run.clone() {
            let _ = blocking(move || {
                run.expire_ended(retention);
                Ok(())
            })
            .await;
        }
        let first = self.cache.ended().first().map(|first| ended_at(first))?;
        let left = first.saturating_add(retention.seconds).saturating_sub(now());
        Some(Duration::from_secs(left))
    }
}

/// Removes ended sandboxes as their retention ends. Ends with the daemon.
async fn expire(daemon: Weak<Daemon>) {
    loop {
        let next = match daemon.upgrade() {
            Some(daemon) => daemon.expire_ended().await,
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
