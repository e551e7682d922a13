//! Whether a device still owes an answer to "what stands behind you now?" since it was restored.
//!
//! Invariant: a device that had a backend when frozen never becomes one without; silence is never taken for an answer.

use std::sync::{Mutex, MutexGuard, PoisonError};

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

/// Why a machine cannot be thawed with a device as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unsettled {
    /// Nobody has spoken of it since it was restored.
    Unspoken,
    /// It is declared empty, and had a backend when frozen.
    WasBacked,
    /// It is declared empty, and has a backend.
    IsBacked,
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

    /// What forbids a thaw, if the device is to have a backend (None) or none (whether it has one now).
    pub fn unsettled(&self, declared_empty: Option<bool>) -> Option<Unsettled> {
        match (*self.state(), declared_empty) {
            (State::Awaited { .. }, None) => Some(Unsettled::Unspoken),
            (State::Awaited { backed: true }, Some(_)) => Some(Unsettled::WasBacked),
            (_, Some(true)) => Some(Unsettled::IsBacked),
            (State::Awaited { backed: false }, Some(false)) | (State::Settled, _) => None,
        }
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
        assert_eq!(swap.unsettled(None), None);
        assert_eq!(swap.unsettled(Some(false)), None);
        swap.restored(true);
        assert_eq!(swap.unsettled(None), Some(Unsettled::Unspoken));
        assert_eq!(swap.unsettled(Some(false)), Some(Unsettled::WasBacked));
        swap.settle();
        assert_eq!(swap.unsettled(None), None);
        assert_eq!(swap.unsettled(Some(true)), Some(Unsettled::IsBacked));

        swap.restored(false);
        assert_eq!(swap.unsettled(None), Some(Unsettled::Unspoken));
        assert_eq!(swap.unsettled(Some(false)), None);
        assert_eq!(swap.unsettled(Some(true)), Some(Unsettled::IsBacked));
    }
}
