//! The stored snapshots and their changes, behind one lock that is held for memory accesses only.
//!
//! The disk decides which snapshots there are, and another process may change it. Changes of this process are noted as they happen
//! ([`Observer`]), those of other processes when a caller lists snapshots ([`SnapshotCache::reconcile`]).

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::{Arc, RwLock};
use std::time::{Duration, Instant};

use thaw_protocol::api::Snapshot;
use thaw_sandbox::snapshot::store::Observer;
use thaw_sys::lock::Share;
use tokio::sync::watch;

use super::ring::{Change, Gone, Ring};
use super::selector::Selector;
use super::source::{Newest, Source};
use super::version::Versions;
use crate::api::scope::Scope;

/// All stored snapshots that were read.
#[derive(Debug)]
pub struct SnapshotCache {
    state: RwLock<State>,
    newest: watch::Sender<Newest>,
    began: Instant,
}

#[derive(Debug)]
struct State {
    versions: Versions,
    objects: BTreeMap<String, Arc<Snapshot>>,
    ring: Ring<Snapshot>,
    /// Whether all snapshots of the node have been read.
    is_complete: bool,
}

/// A part of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotPage {
    /// The version whose state it shows.
    pub version: u64,
    /// Ordered by id.
    pub items: Vec<Snapshot>,
    /// Whether there are more.
    pub more: bool,
}

impl SnapshotCache {
    /// A cache that has read nothing.
    pub fn new(versions: Versions) -> SnapshotCache {
        let version = versions.last();
        SnapshotCache {
            state: RwLock::new(State {
                versions,
                objects: BTreeMap::new(),
                ring: Ring::new(version),
                is_complete: false,
            }),
            newest: watch::Sender::new(Newest {
                version,
                closed: false,
            }),
            began: Instant::now(),
        }
    }

    /// Whether all snapshots of the node have been read.
    pub fn is_complete(&self) -> bool {
        self.state.reading().is_complete
    }

    /// Takes over what was found on disk in a scope. The search began at the version `before`: what changed after that is newer than what was
    /// found, and stays.
    pub fn reconcile(&self, before: u64, scope: &Scope, found: Vec<Snapshot>) {
        let state = &mut *self.state.writing();
        if state.ring.known(before, state.versions.last()).is_err() {
            return;
        }
        let newer: BTreeSet<String> = state.ring.after(before).map(|it| it.id().to_owned()).collect();
        let gone: Vec<String> = {
            let ids: BTreeSet<&str> = found.iter().map(|it| it.id.as_str()).collect();
            let is_there = |id: &String| ids.contains(id.as_str()) || newer.contains(id);
            let known = state.objects.values();
            let gone = known.filter(|it| scope.reaches_tenant(it.tenant.as_deref()) && !is_there(&it.id));
            gone.map(|it| it.id.clone()).collect()
        };
        for id in gone {
            self.remove(state, &id);
        }
        for snapshot in found.into_iter().filter(|it| !newer.contains(&it.id)) {
            self.put(state, snapshot);
        }
        if scope.is_node() && !state.is_complete {
            state.is_complete = true;
            // Snapshots that were stored before the first caller asked are not reported as changes.
            state.ring = Ring::new(state.versions.last());
        }
    }

    /// The snapshots that match, ordered by id, beginning after an id, at most `limit`.
    pub fn list(&self, selector: &Selector, after: Option<&str>, limit: usize) -> SnapshotPage {
        let state = self.state.reading();
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let objects = state.objects.range::<str, _>((from, Bound::Unbounded));
        let mut wanted = objects.map(|(_, it)| it).filter(|it| selector.wants_snapshot(it));
        let items = wanted
            .by_ref()
            .take(limit)
            .map(|it| Snapshot::clone(it))
            .collect();
        SnapshotPage {
            version: state.versions.last(),
            items,
            more: wanted.next().is_some(),
        }
    }

    /// How many callers watch.
    pub fn watchers(&self) -> usize {
        self.newest.receiver_count()
    }

    /// Ends every watch.
    pub fn close(&self) {
        self.newest.send_modify(|newest| newest.closed = true);
    }

    /// Adds a snapshot, or replaces it. One that is as it was is no change.
    fn put(&self, state: &mut State, snapshot: Snapshot) {
        let before = state.objects.get(&snapshot.id).cloned();
        let found = Snapshot {
            resource_version: before.as_ref().and_then(|before| before.resource_version),
            ..snapshot
        };
        if before.as_deref() == Some(&found) {
            return;
        }
        let after = Arc::new(Snapshot {
            resource_version: Some(state.versions.advance()),
            ..found
        });
        state.objects.insert(after.id.clone(), after.clone());
        self.keep(state, before, Some(after));
    }

    fn remove(&self, state: &mut State, id: &str) {
        if let Some(before) = state.objects.remove(id) {
            state.versions.advance();
            self.keep(state, Some(before), None);
        }
    }

    /// Records the change of the last version, and wakes the watchers.
    fn keep(&self, state: &mut State, before: Option<Arc<Snapshot>>, after: Option<Arc<Snapshot>>) {
        let version = state.versions.last();
        let change = Arc::new(Change::new(version, before, after));
        state.ring.push(change, self.began.elapsed());
        // Under the lock, so that it never decreases.
        self.newest.send_modify(|newest| newest.version = version);
    }
}

impl Observer for SnapshotCache {
    fn stored(&self, snapshot: Snapshot) {
        self.put(&mut self.state.writing(), snapshot);
    }

    fn removed(&self, id: &str) {
        self.remove(&mut self.state.writing(), id);
    }
}

impl Source for SnapshotCache {
    type Object = Snapshot;

    fn version(&self) -> u64 {
        self.state.reading().versions.last()
    }

    fn version_before(&self, age: Duration) -> u64 {
        let since = self.began.elapsed().saturating_sub(age);
        self.state.reading().ring.version_at(since)
    }

    fn changes(&self, after: u64, most: usize) -> Result<Vec<Arc<Change<Snapshot>>>, Gone> {
        let state = self.state.reading();
        state.ring.known(after, state.versions.last())?;
        Ok(state.ring.after(after).take(most).cloned().collect())
    }

    fn follow(&self) -> watch::Receiver<Newest> {
        self.newest.subscribe()
    }
}

#[cfg(test)]
#[path = "snapshots_test.rs"]
mod tests;
