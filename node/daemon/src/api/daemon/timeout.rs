//! Changes how long a sandbox may run, and pauses it when its time is over.

use std::sync::Arc;

use thaw_protocol::api::{ChangeSandbox, OnTimeout};
use thaw_sandbox::error::Error;

use super::describe::limit_time;
use super::operations::Turn;
use super::{Daemon, Described, no_such_sandbox};
use crate::api::scope::Wanted;

impl Daemon {
    /// Applies all of a change, or, if a part fails, the parts before it: first the rate limits, then the timeout.
    pub async fn change(&self, wanted: &Wanted, change: &ChangeSandbox) -> Result<Arc<Described>, Error> {
        if !change.has_timeout() {
            return self.set_rate_limits(wanted, change.rate_limits).await;
        }
        if !change.rate_limits.is_none() {
            self.set_rate_limits(wanted, change.rate_limits).await?;
        }
        self.set_timeout(wanted, change).await
    }

    /// Changes how long a sandbox may run from now on, and what happens then. Ignores the other parts of the change.
    pub async fn set_timeout(
        &self,
        wanted: &Wanted,
        change: &ChangeSandbox,
    ) -> Result<Arc<Described>, Error> {
        let turn = self.turn(wanted).await?;
        let limit = turn.machine.time_limit().borrow().changed(change);
        turn.machine.set_time_limit(limit).await?;
        self.cache
            .update(&turn.id, |described| limit_time(described, limit));
        self.cache
            .get(&turn.id)
            .ok_or_else(|| no_such_sandbox(&wanted.text))
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

    /// Pauses a sandbox whose time is over, unless the limit was changed meanwhile.
    pub(super) async fn pause_in_time(&self, id: &str) {
        let paused = async {
            let turn = self.turn(&Wanted::on_node(id)).await?;
            let limit = *turn.machine.time_limit().borrow();
            match limit.is_over() && limit.on_timeout == OnTimeout::Pause {
                true => self.pause_in(turn).await,
                false => Ok(()),
            }
        };
        if let Err(e) = paused.await {
            tracing::warn!(sandbox = id, "its time is over, but it is not paused: {e}");
        }
    }
}

#[cfg(test)]
#[path = "timeout_test.rs"]
mod tests;
