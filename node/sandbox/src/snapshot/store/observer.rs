//! An observer of the changes that this process makes to stored snapshots.

use std::sync::{Arc, OnceLock};

use thaw_protocol::api::Snapshot;

use super::SnapshotStore;
use super::index::Stored;

/// Is told of each change that this process makes to stored snapshots, in the order of the changes. Must not block.
pub trait Observer: std::fmt::Debug + Send + Sync {
    /// A snapshot was stored, or its description may have changed.
    fn stored(&self, snapshot: Snapshot);
    /// The snapshot with this id was removed.
    fn removed(&self, id: &str);
}

/// The observer of a store and of the stores below it. Clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct Observed(OnceObserver);

type OnceObserver = Arc<OnceLock<Arc<dyn Observer>>>;

impl SnapshotStore {
    /// Tells an observer of each later change, also in the stores [below](SnapshotStore::below) this one. The first observer stays.
    pub fn observe(&self, observer: Arc<dyn Observer>) {
        let _ = self.0.observed.0.set(observer);
    }

    /// The caller holds the lock of the whole store, which keeps the changes in order. Blocks.
    pub(super) fn tell_stored(&self, stored: &Arc<Stored>) {
        if let Some(observer) = self.0.observed.0.get() {
            observer.stored(self.describe_one(stored));
        }
    }

    /// The same for a removal.
    pub(super) fn tell_removed(&self, id: &str) {
        if let Some(observer) = self.0.observed.0.get() {
            observer.removed(id);
        }
    }
}
