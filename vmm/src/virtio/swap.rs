//! Whether a restored device has what it needs: a backend, or the word that it has none.
//!
//! Invariant: a device that had a backend when it was frozen is never thawed without one, and a device nobody mentioned is
//! never taken for one that needs none.

use std::sync::{Mutex, MutexGuard};
use thaw_sys::lock::Lock;

/// Whether one device is settled.
#[derive(Debug, Default)]
pub struct Swap(Mutex<State>);

#[derive(Clone, Copy, Debug, Default)]
enum State {
    /// It was never restored, or it got a backend since.
    #[default]
    Settled,
    /// It was restored and has got no backend since.
    Awaited {
        /// It had a backend when frozen.
        backed: bool,
    },
}

/// Why a machine cannot be thawed with a device as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unsettled {
    /// It got no backend since it was restored, and was not declared empty.
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

    /// Why the machine cannot be thawed, if anything. `declared_empty`: the device is declared to have no backend, and whether
    /// it has one.
    pub fn unsettled(&self, declared_empty: Option<bool>) -> Option<Unsettled> {
        match (*self.state(), declared_empty) {
            (State::Awaited { .. }, None) => Some(Unsettled::Unspoken),
            (State::Awaited { backed: true }, Some(_)) => Some(Unsettled::WasBacked),
            (_, Some(true)) => Some(Unsettled::IsBacked),
            (State::Awaited { backed: false }, Some(false)) | (State::Settled, _) => None,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.locked()
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
