//! Whether devices may take memory from the guest: give pages that it reports as free back to the host, plug and unplug blocks.
//!
//! A freeze that the guest runs through needs the contents, and the mappings, of the moment that the snapshot is of. Invariant: once
//! [`Discards::hold`] returns, no device changes either before [`Discards::allow`].

use std::sync::Mutex;

use thaw_sys::lock::Lock;

/// Shared by the devices of a machine that change mappings of its memory.
#[derive(Debug, Default)]
pub struct Discards {
    is_held: Mutex<bool>,
}

impl Discards {
    pub fn hold(&self) {
        *self.is_held.locked() = true;
    }

    pub fn allow(&self) {
        *self.is_held.locked() = false;
    }

    /// Calls `change`, or returns `None` while this is held.
    pub fn unless_held<T>(&self, change: impl FnOnce() -> T) -> Option<T> {
        let is_held = self.is_held.locked();
        (!*is_held).then(change)
    }
}
