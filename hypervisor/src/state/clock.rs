//! The guest's paravirtual clock.

use super::{StateError, decode_struct};

/// kvmclock as the guest sees it. It continues from here after [`crate::Vm::set_clock`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockState {
    /// Nanoseconds since the machine was created, without the time it was frozen.
    pub nanoseconds: u64,
}

impl ClockState {
    /// Encodes the nanoseconds, little-endian.
    pub fn to_bytes(&self) -> [u8; 8] {
        self.nanoseconds.to_le_bytes()
    }

    /// Decodes the state.
    ///
    /// # Errors
    /// [`StateError::Length`] unless there are 8 bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<ClockState, StateError> {
        Ok(ClockState {
            nanoseconds: u64::from_le_bytes(decode_struct("clock", bytes)?),
        })
    }
}
