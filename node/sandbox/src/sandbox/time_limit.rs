//! How long a sandbox may run.
//!
//! Invariant: a limit is recorded before it is in force, so that a later owner knows it.

use std::sync::Arc;

use tokio::sync::watch;

use super::Sandbox;
use crate::blocking::blocking;
use crate::error::Error;
use crate::state::{Record, TimeLimit};

impl Sandbox {
    /// Its time limit, and every later one.
    pub fn time_limit(&self) -> watch::Receiver<TimeLimit> {
        self.time_limit.subscribe()
    }

    /// Replaces its time limit.
    pub async fn set_time_limit(self: &Arc<Sandbox>, limit: TimeLimit) -> Result<(), Error> {
        let _one = self.freezing.lock().await;
        let sandbox = self.clone();
        blocking(move || {
            let now = sandbox.record_now();
            let record = Record {
                terms: now.terms.within(limit),
                ..now
            };
            sandbox.resources.directory.write(&record)?;
            sandbox.time_limit.send_replace(limit);
            Ok(())
        })
        .await
    }
}
