//! Work that callers wait for: pools that yield to it make and destroy a little later.
//!
//! Making and destroying processes, networks and files takes the same processors and the same locks of the kernel as the creation or the
//! deletion that caused it. Invariant: when the last work ends, every pool that waited for that is woken. A pool that has almost run out, or
//! has much to destroy, does not wait.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use thaw_sys::lock::Lock;

/// Counts the work in progress. One for a process.
#[derive(Default)]
pub struct Foreground {
    active: AtomicUsize,
    waiting: Mutex<Vec<Weak<dyn Wake>>>,
}

/// A pool that may have waited for the end of the work.
pub(crate) trait Wake: Send + Sync {
    fn wake(&self);
}

/// Work in progress, until it is dropped.
pub struct Active(Arc<Foreground>);

impl Foreground {
    /// Begins work.
    pub fn begin(self: &Arc<Foreground>) -> Active {
        self.active.fetch_add(1, Ordering::SeqCst);
        Active(self.clone())
    }

    /// Whether no work is in progress.
    pub(crate) fn is_idle(&self) -> bool {
        self.active.load(Ordering::SeqCst) == 0
    }

    /// Wakes this pool whenever the last work ends.
    pub(crate) fn wakes(&self, pool: Weak<dyn Wake>) {
        let mut waiting = self.waiting.locked();
        waiting.retain(|pool| pool.strong_count() > 0);
        waiting.push(pool);
    }
}

impl Drop for Active {
    fn drop(&mut self) {
        if self.0.active.fetch_sub(1, Ordering::SeqCst) != 1 {
            return;
        }
        let pools: Vec<_> = self.0.waiting.locked().iter().filter_map(Weak::upgrade).collect();
        pools.iter().for_each(|pool| pool.wake());
    }
}

impl std::fmt::Debug for Foreground {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Foreground")
            .field("active", &self.active)
            .finish_non_exhaustive()
    }
}
