//! Whether a device still owes an answer to "what stands behind you now?" since it was restored.
//!
//! Invariant: a device that had a backend when frozen never becomes one without; silence is never taken for an answer.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::device::AttachError;

/// One device's answer.
#[derive(Debug, Default)]
pub struct Swap(Mutex<State>);

#[derive(Clone, Copy, Debug, Default)]
enum State {
    /// It was never restored, or has been spoken of since.
    #[default]
    Settled,
    /// Nobody has spoken of it.
    Awaited {
        /// It had a backend when frozen.
        backed: bool,
    },
}

impl Swap {
    /// The device was restored; `backed` as it was frozen.
    pub fn restored(&self, backed: bool) {
        *self.state() = State::Awaited { backed };
    }

    /// It got a backend, or needs none.
    pub fn settle(&self) {
        *self.state() = State::Settled;
    }

    /// It is to have none. `has_one`: it has one now.
    pub fn declare_empty(&self, has_one: bool) -> Result<(), AttachError> {
        let mut state = self.state();
        match *state {
            State::Awaited { backed: true } => {
                return Err(AttachError::Frozen(
                    "it had a backend when frozen, and cannot be without".into(),
                ));
            }
            _ if has_one => {
                return Err(AttachError::Invalid(
                    "it has a backend, which cannot be taken away".into(),
                ));
            }
            _ => *state = State::Settled,
        }
        Ok(())
    }

    /// Whether nobody has spoken of it since it was restored.
    pub fn is_awaited(&self) -> bool {
        matches!(*self.state(), State::Awaited { .. })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_backed_may_not_be_empty_and_silence_is_no_answer() {
        let swap = Swap::default();
        assert!(!swap.is_awaited());
        swap.restored(true);
        assert!(matches!(swap.declare_empty(false), Err(AttachError::Frozen(_))));
        assert!(swap.is_awaited());
        swap.settle();
        assert!(!swap.is_awaited());
        assert!(matches!(swap.declare_empty(true), Err(AttachError::Invalid(_))));

        swap.restored(false);
        assert!(swap.is_awaited());
        swap.declare_empty(false).unwrap();
        assert!(!swap.is_awaited());
    }
}
