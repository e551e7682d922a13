//! Changes how long a sandbox may run, and pauses it when its time is over.

use std::sync::Arc;

use thaw_protocol::api::{ChangeSandbox, OnTimeout};
use thaw_sandbox::error::Error;

use super::describe::limit_time;
use super::turn::Turn;
use super::{Body, Daemon, Described, no_such_sandbox};
use crate::api::problem::Refusal;
use crate::api::scope::Wanted;

/// Why a sandbox is due to be paused.
#[derive(Clone, Copy, Debug)]
pub(super) enum Due {
    TimeIsOver,
    /// It is idle, if there were no more requests for it than these.
    Idle {
        requests: u64,
    },
}

impl Daemon {
    /// Applies all of a change, or, if a part fails, the parts before it: first what happens when its container's process ends, then the
    /// rate limits, then the timeout.
    pub async fn change(&self, wanted: &Wanted, change: &ChangeSandbox) -> Result<Arc<Described>, Refusal> {
        if let Some(on_exit) = change.on_exit {
            let changed = self.set_on_exit(wanted, on_exit).await?;
            if change.rate_limits.is_none() && !change.has_timeout() {
                return Ok(changed);
            }
        }
        if !change.has_timeout() {
            return Ok(self.set_rate_limits(wanted, change.rate_limits).await?);
        }
        if !change.rate_limits.is_none() {
            self.set_rate_limits(wanted, change.rate_limits).await?;
        }
        Ok(self.set_timeout(wanted, change).await?)
    }

    /// Changes how long a sandbox may run from now on, and what happens then. Ignores the other parts of the change.
    pub async fn set_timeout(
        &self,
        wanted: &Wanted,
        change: &ChangeSandbox,
    ) -> Result<Arc<Described>, Error> {
        let (id, body, _alone) = self.turn_of(wanted).await?;
        self.count_request(&id);
        let limit = body.time_limit().borrow().changed(change);
        body.set_time_limit(limit).await?;
        self.cache.update(&id, |described| limit_time(described, limit));
        self.cache.get(&id).ok_or_else(|| no_such_sandbox(&wanted.text))
    }

    /// Starts the timeout of a paused sandbox again, if it is the one that paused it.
    pub(super) async fn renew_timeout(&self, turn: &Turn) -> Result<(), Error> {
        let before = *turn.machine.time_limit().borrow();
        let limit = before.renewed();
        if limit == before {
            return Ok(());
        }
        turn.machine.set_time_limit(limit).await?;
        self.cache
            .update(&turn.id, |described| limit_time(described, limit));
        Ok(())
    }

    /// Pauses a sandbox that is due and releases its memory, unless that was changed meanwhile. If its memory cannot be released, its CPUs
    /// stop.
    pub(super) async fn pause_in_time(self: &Arc<Daemon>, id: &str, due: Due) {
        let wanted = Wanted::on_node(id);
        let Ok((id, body, alone)) = self.turn_of(&wanted).await else {
            return;
        };
        let limit = *body.time_limit().borrow();
        let Body::Machine(machine) = body else { return };
        let is_due = match due {
            Due::TimeIsOver => limit.is_over(),
            Due::Idle { requests } => limit.idle_s.is_some() && self.requests(&id) == Some(requests),
        };
        if !is_due || limit.on_timeout != OnTimeout::Pause {
            return;
        }
        let turn = Turn::new(id.clone(), machine, alone);
        // A `thaw run` has no place for paused sandboxes.
        if self.factory.is_some() {
            match self.release_in(turn).await {
                Ok(()) => return,
                Err(e) => tracing::warn!(sandbox = id, "it is due to be paused, but keeps its memory: {e}"),
            }
        } else {
            drop(turn);
        }
        if let Err(e) = self.pause(&wanted).await {
            tracing::warn!(sandbox = id, "it is due to be paused, but it is not: {e}");
        }
    }
}

#[cfg(test)]
#[path = "timeout_test.rs"]
mod tests;
