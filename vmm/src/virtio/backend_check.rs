//! Checks that each restored device was given a backend or declared to have none.
//!
//! Invariant: a device that had a backend when it was frozen is never thawed without one, and a device that no request mentioned is never
//! taken for one that needs no backend.

use std::sync::{Mutex, MutexGuard};
use thaw_sys::lock::Lock;

/// The check of one device.
#[derive(Debug, Default)]
pub struct BackendCheck(Mutex<State>);

#[derive(Clone, Copy, Debug, Default)]
enum State {
    /// It was never restored, or it has got a backend since.
    #[default]
    Settled,
    /// It was restored and has got no backend since.
    Awaited {
        /// It had a backend when it was frozen.
        backed: bool,
    },
}

/// Why a device keeps its machine from being thawed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotSettled {
    /// It has got no backend since it was restored, and was not declared empty.
    NotMentioned,
    /// It is declared empty, but had a backend when it was frozen.
    WasBacked,
    /// It is declared empty, but has a backend.
    IsBacked,
}

impl BackendCheck {
    /// The device was restored. `backed`: whether it had a backend when it was frozen.
    pub fn restored(&self, backed: bool) {
        *self.state() = State::Awaited { backed };
    }

    /// The device got a backend, or needs none.
    pub fn settle(&self) {
        *self.state() = State::Settled;
    }

    /// Why the device keeps its machine from being thawed, or `None` if it does not. `declared_empty` is `None` unless the device is
    /// declared to have no backend; then it says whether the device has one all the same.
    pub fn not_settled(&self, declared_empty: Option<bool>) -> Option<NotSettled> {
        match (*self.state(), declared_empty) {
            (State::Awaited { .. }, None) => Some(NotSettled::NotMentioned),
            (State::Awaited { backed: true }, Some(_)) => Some(NotSettled::WasBacked),
            (_, Some(true)) => Some(NotSettled::IsBacked),
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
        let check = BackendCheck::default();
        assert_eq!(check.not_settled(None), None);
        assert_eq!(check.not_settled(Some(false)), None);
        check.restored(true);
        assert_eq!(check.not_settled(None), Some(NotSettled::NotMentioned));
        assert_eq!(check.not_settled(Some(false)), Some(NotSettled::WasBacked));
        check.settle();
        assert_eq!(check.not_settled(None), None);
        assert_eq!(check.not_settled(Some(true)), Some(NotSettled::IsBacked));

        check.restored(false);
        assert_eq!(check.not_settled(None), Some(NotSettled::NotMentioned));
        assert_eq!(check.not_settled(Some(false)), None);
        assert_eq!(check.not_settled(Some(true)), Some(NotSettled::IsBacked));
    }
}
