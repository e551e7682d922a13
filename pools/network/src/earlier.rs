//! Connections the host still tracks of a slot that had the number before.
//!
//! To look for them is to walk the host's whole table of connections, milliseconds, so it is not done for each slot. Invariant,
//! while slots that go are heard of: a number is looked at again once a slot of it went since the last look. Who listens hears
//! of that a moment late; numbers are taken in turn, so that one that went just now comes last.

use std::collections::HashSet;
use std::io;
use std::sync::{Mutex, MutexGuard};

use thaw_sys::lock::Lock;

/// What is known of numbers.
#[derive(Debug, Default)]
pub(super) struct Earlier(Mutex<Known>);

#[derive(Debug, Default)]
enum Known {
    /// Nobody tells of slots that go.
    #[default]
    Deaf,
    /// They are told of from now on, and nobody has looked since.
    Unlooked,
    /// Numbers whose slots went since the last look.
    Gone(HashSet<u32>),
}

impl Earlier {
    /// Slots that go are told of from now on; or again, after some were missed.
    pub fn heard(&self) {
        *self.known() = Known::Unlooked;
    }

    /// None is told of any more.
    pub fn deaf(&self) {
        *self.known() = Known::Deaf;
    }

    /// The slot of a number went.
    pub fn went(&self, number: u32) {
        if let Known::Gone(numbers) = &mut *self.known() {
            numbers.insert(number);
        }
    }

    /// Has a number be without connections of an earlier slot; `end` ends those of every number that has no slot now, and is
    /// called where that has to be looked at. Makers of slots wait for one another's look: it serves all of them.
    ///
    /// # Errors
    /// Of `end`: the number may have some.
    pub fn forget(&self, number: u32, end: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let mut known = self.known();
        if matches!(&*known, Known::Gone(numbers) if !numbers.contains(&number)) {
            return Ok(());
        }
        end()?;
        if !matches!(*known, Known::Deaf) {
            *known = Known::Gone(HashSet::new());
        }
        Ok(())
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.locked()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether it looks.
    fn looks(earlier: &Earlier, number: u32) -> bool {
        let mut looked = false;
        earlier
            .forget(number, || {
                looked = true;
                Ok(())
            })
            .unwrap();
        looked
    }

    #[test]
    fn earlier_without_listener_examines_each_number() {
        let earlier = Earlier::default();
        earlier.went(1);
        assert!([1, 1, 2].iter().all(|number| looks(&earlier, *number)));
    }

    #[test]
    fn earlier_examines_once_until_a_slot_goes() {
        let earlier = Earlier::default();
        earlier.heard();
        assert!(looks(&earlier, 1));
        assert!(![1, 2, 3].iter().any(|number| looks(&earlier, *number)));
        earlier.went(2);
        earlier.went(3);
        assert!(!looks(&earlier, 1));
        assert!(looks(&earlier, 3));
        // The same look served the other that went.
        assert!(!looks(&earlier, 2));
    }

    #[test]
    fn earlier_examines_again_after_loss_or_failure() {
        let earlier = Earlier::default();
        earlier.heard();
        assert!(earlier.forget(1, || Err(io::ErrorKind::Other.into())).is_err());
        assert!(looks(&earlier, 1));
        earlier.heard();
        assert!(looks(&earlier, 1) && !looks(&earlier, 1));
        earlier.deaf();
        assert!(looks(&earlier, 1) && looks(&earlier, 1));
    }
}
