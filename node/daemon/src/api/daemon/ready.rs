//! Creations that wait for a readiness probe: the sandbox is listed at once, and the caller gets its answer when the container is ready.
//!
//! Invariant: if the caller does not get that answer, because the container failed or the caller hung up, the sandbox is removed.

use thaw_protocol::api::{CreatedSandbox, Readiness};

use super::{Daemon, Described, no_such_sandbox};
use crate::api::problem::Refusal;
use crate::api::readiness::ReadinessWait;
use crate::api::scope::Wanted;

/// A sandbox whose caller has no answer yet. Dropping it before the answer removes the sandbox.
struct Unanswered<'a> {
    daemon: &'a Daemon,
    id: &'a str,
    answered: bool,
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        if self.answered {
            return;
        }
        // The sandbox is completely removed when this returns, so that its name can be used again.
        let held = {
            // It may be failing or have failed: no caller has seen it, so it must not be listed.
            let _failing = self.daemon.failing();
            let mut table = self.daemon.table();
            self.daemon.cache.remove(self.id);
            table.remove(self.id)
        };
        match held {
            Some(held) => held.body.machine().into_iter().for_each(|machine| machine.kill()),
            None => self.daemon.forget_now(self.id),
        }
    }
}

impl Daemon {
    /// Waits until the container of a listed sandbox is ready. If the future is dropped, the sandbox is removed.
    ///
    /// # Errors
    /// The container does not become ready; the sandbox is removed.
    pub(super) async fn until_ready(
        &self,
        created: CreatedSandbox,
        readiness_wait: ReadinessWait,
    ) -> Result<CreatedSandbox, Refusal> {
        let id = created.sandbox.id.clone();
        let mut unanswered = Unanswered {
            daemon: self,
            id: &id,
            answered: false,
        };
        let ready = readiness_wait.0.await;
        let readiness = match &ready {
            Ok(_) => Readiness::Ready,
            Err(_) => Readiness::Failed,
        };
        self.cache
            .update(&id, |described| described.readiness = Some(readiness));
        match ready {
            Ok(account) => {
                // Another caller may have deleted it meanwhile.
                let shown = self.cache.get(&id).ok_or_else(|| no_such_sandbox(&id))?;
                unanswered.answered = true;
                Ok(CreatedSandbox {
                    sandbox: Described::clone(&shown),
                    account,
                    ..created
                })
            }
            Err(failure) => {
                // It may be gone already: its container ended, or another caller deleted it.
                let _ = self.delete(&Wanted::on_node(&id)).await;
                Err(failure.into())
            }
        }
    }
}

#[cfg(test)]
#[path = "ready_test.rs"]
mod tests;
