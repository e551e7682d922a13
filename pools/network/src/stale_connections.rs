//! Connections of an earlier slot with the same number that the host still tracks.
//!
//! Finding them means walking the host's whole connection table, which takes milliseconds, so it is not done for each slot. Invariant,
//! while this process listens for removed slots: a number is examined again if a slot of it was removed since the last walk. The event
//! arrives a moment late; but numbers are taken in turn, so one that was just freed is used last.

use std::collections::HashSet;
use std::io;
use std::sync::{Mutex, MutexGuard};

use thaw_sys::lock::Lock;

/// Which numbers may have stale connections.
#[derive(Debug, Default)]
pub(super) struct StaleConnections(Mutex<State>);

#[derive(Debug, Default)]
enum State {
    /// This process does not listen for removed slots.
    #[default]
    NotListening,
    /// It listens, and the table was not walked since it began to.
    Unexamined,
    /// The numbers whose slots were removed since the last walk.
    Removed(HashSet<u32>),
}

impl StaleConnections {
    /// Events of removed slots arrive from now on; or again, after some were lost.
    pub fn listening(&self) {
        *self.state() = State::Unexamined;
    }

    /// No more events arrive.
    pub fn not_listening(&self) {
        *self.state() = State::NotListening;
    }

    /// The slot with a number was removed.
    pub fn slot_removed(&self, number: u32) {
        if let State::Removed(numbers) = &mut *self.state() {
            numbers.insert(number);
        }
    }

    /// Makes sure that a number has no connections of an earlier slot. If necessary it calls `end`, which ends the connections of every
    /// number that has no slot now. Makers of slots wait for each other here, because one walk serves all of them.
    ///
    /// # Errors
    /// The error of `end`: the number may have stale connections.
    pub fn clear(&self, number: u32, end: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let mut state = self.state();
        if matches!(&*state, State::Removed(numbers) if !numbers.contains(&number)) {
            return Ok(());
        }
        end()?;
        if !matches!(*state, State::NotListening) {
            *state = State::Removed(HashSet::new());
        }
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.locked()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether it calls `end`.
    fn examines(stale: &StaleConnections, number: u32) -> bool {
        let mut examined = false;
        stale
            .clear(number, || {
                examined = true;
                Ok(())
            })
            .unwrap();
        examined
    }

    #[test]
    fn stale_connections_without_listener_examines_each_number() {
        let stale = StaleConnections::default();
        stale.slot_removed(1);
        assert!([1, 1, 2].iter().all(|number| examines(&stale, *number)));
    }

    #[test]
    fn stale_connections_examines_once_until_a_slot_goes() {
        let stale = StaleConnections::default();
        stale.listening();
        assert!(examines(&stale, 1));
        assert!(![1, 2, 3].iter().any(|number| examines(&stale, *number)));
        stale.slot_removed(2);
        stale.slot_removed(3);
        assert!(!examines(&stale, 1));
        assert!(examines(&stale, 3));
        // The same walk served the other removed slot.
        assert!(!examines(&stale, 2));
    }

    #[test]
    fn stale_connections_examines_again_after_loss_or_failure() {
        let stale = StaleConnections::default();
        stale.listening();
        assert!(stale.clear(1, || Err(io::ErrorKind::Other.into())).is_err());
        assert!(examines(&stale, 1));
        stale.listening();
        assert!(examines(&stale, 1) && !examines(&stale, 1));
        stale.not_listening();
        assert!(examines(&stale, 1) && examines(&stale, 1));
    }
}
