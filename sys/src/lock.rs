//! Locks whose data stays usable after a panic.
//!
//! A thread that panics while it holds a standard lock poisons it. Thaw's processes either end at a panic or keep data behind locks that
//! every statement leaves consistent, so this module ignores the poison. `parking_lot` has no poison either, but would add four crates to
//! each process that a guest can reach.

use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// [`Mutex::lock`] that ignores poison.
pub trait Lock {
    type Data: ?Sized;

    /// Waits for the lock.
    fn locked(&self) -> MutexGuard<'_, Self::Data>;
}

impl<T: ?Sized> Lock for Mutex<T> {
    type Data = T;

    fn locked(&self) -> MutexGuard<'_, T> {
        self.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// [`RwLock::read`] and [`RwLock::write`] that ignore poison.
pub trait Share {
    type Data: ?Sized;

    /// Waits until no thread writes.
    fn reading(&self) -> RwLockReadGuard<'_, Self::Data>;

    /// Waits until no other thread has the lock.
    fn writing(&self) -> RwLockWriteGuard<'_, Self::Data>;
}

impl<T: ?Sized> Share for RwLock<T> {
    type Data = T;

    fn reading(&self) -> RwLockReadGuard<'_, T> {
        self.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn writing(&self) -> RwLockWriteGuard<'_, T> {
        self.write().unwrap_or_else(PoisonError::into_inner)
    }
}
