//! The guest's paravirtual clock.

use super::{StateError, one};

/// kvmclock as the guest sees it. It goes on from here when [`crate::Vm::set_clock`] sets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockState {
    /// Nanoseconds since the machine was first made, less the time it was frozen.
    pub nanoseconds: u64,
}

impl ClockState {
    /// The state as bytes: the nanoseconds, little-endian.
    pub fn to_bytes(&self) -> [u8; 8] {
        self.nanoseconds.to_le_bytes()
    }

    /// The state from its bytes.
    ///
    /// # Errors
    /// [`StateError::Length`] unless there are 8.
    pub fn from_bytes(bytes: &[u8]) -> Result<ClockState, StateError> {
        Ok(ClockState {
            nanoseconds: u64::from_le_bytes(one("clock", bytes)?),
        })
    }
}
