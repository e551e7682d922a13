//! What ends a sandbox beside its machine and its time limit.
//!
//! Invariant: a change is recorded before it is in force, so that a later owner knows it.

use std::sync::Arc;

use thaw_protocol::api::OnExit;
use tokio::sync::watch;

use super::Sandbox;
use crate::blocking::blocking;
use crate::error::Error;
use crate::state::{Ending, Record};

impl Sandbox {
    /// The process that it was made for, what happens when its container's process ends, and every later change of them.
    pub fn ending(&self) -> watch::Receiver<Ending> {
        self.ending.subscribe()
    }

    /// Replaces what happens to it when its container's process ends. From then on it does not end with the process that it was made for.
    pub async fn set_on_exit(self: &Arc<Sandbox>, on_exit: OnExit) -> Result<(), Error> {
        let _one = self.freezing.lock().await;
        let sandbox = self.clone();
        blocking(move || {
            let now = sandbox.record_now();
            let record = Record {
                client: None,
                terms: now.terms.with_exit(on_exit),
                ..now
            };
            sandbox.resources.directory.write(&record)?;
            sandbox.ending.send_replace(record.ending());
            Ok(())
        })
        .await
    }
}
