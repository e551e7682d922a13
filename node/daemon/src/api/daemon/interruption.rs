//! Interruptions of sandboxes: a pause, a resume of one whose memory was released, and the end. Connections from before an interruption
//! are of no use after it.
//!
//! Invariant: while a period of [`Daemon::uninterrupted`] lasts, the sandbox has its machine, so no other sandbox has its address.

use super::Daemon;
use crate::api::period::{During, Period};

impl Daemon {
    /// The period for which a sandbox has its machine and is not paused; `None` if it has no machine. An address that is read after this
    /// was called is the sandbox's until the period is over.
    pub fn uninterrupted(&self, id: &str) -> Option<During> {
        let table = self.table();
        let held = table.get(id).filter(|held| held.body.machine().is_some())?;
        Some(held.uninterrupted.refer())
    }

    /// Begins another period.
    pub(super) fn interrupt(&self, id: &str) {
        if let Some(held) = self.table().get_mut(id) {
            held.uninterrupted = Period::default();
        }
    }
}

#[cfg(test)]
#[path = "interruption_test.rs"]
mod tests;
