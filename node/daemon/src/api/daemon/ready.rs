//! Sandboxes whose container is to become ready: shown from the beginning, answered for only then.
//!
//! Invariant: one that is not answered for as ready goes, because it failed or because whoever asked hung up.

use thaw_protocol::api::{CreatedSandbox, Readiness};

use super::{Daemon, Described, none};
use crate::api::problem::Refusal;
use crate::api::readying::Readying;
use crate::api::scope::Wanted;

/// A sandbox nobody was told is ready. Dropped, it goes.
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
        // As of every making that is given up, nothing is left when this returns: its name may be asked for again.
        let held = {
            // It may be failing, or have failed: neither is known to anybody.
            let _failing = self.daemon.failing();
            let mut table = self.daemon.table();
            self.daemon.cache.remove(self.id);
            table.remove(self.id)
        };
        match held {
            Some(held) => held.machine.kill(),
            None => self.daemon.forget_now(self.id),
        }
    }
}

impl Daemon {
    /// Waits until the container of a sandbox that is shown is ready. Dropped, the sandbox goes.
    ///
    /// # Errors
    /// It does not become ready; the sandbox is gone.
    pub(super) async fn until_ready(
        &self,
        created: CreatedSandbox,
        readying: Readying,
    ) -> Result<CreatedSandbox, Refusal> {
        let id = created.sandbox.id.clone();
        let mut unanswered = Unanswered {
            daemon: self,
            id: &id,
            answered: false,
        };
        let ready = readying.0.await;
        let readiness = match &ready {
            Ok(_) => Readiness::Ready,
            Err(_) => Readiness::Failed,
        };
        self.cache
            .update(&id, |described| described.readiness = Some(readiness));
        match ready {
            Ok(account) => {
                // Somebody may have deleted it meanwhile.
                let shown = self.cache.get(&id).ok_or_else(|| none(&id))?;
                unanswered.answered = true;
                Ok(CreatedSandbox {
                    sandbox: Described::clone(&shown),
                    account,
                    ..created
                })
            }
            Err(failure) => {
                // It may be gone already, with its container or by another's hand.
                let _ = self.delete(&Wanted::on_node(&id)).await;
                Err(failure.into())
            }
        }
    }
}

#[cfg(test)]
#[path = "ready_test.rs"]
mod tests;
