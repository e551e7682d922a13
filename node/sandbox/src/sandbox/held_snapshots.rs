//! The snapshots that this process has thawed sandboxes from: verified, and ready to be restored.
//!
//! Invariant: a snapshot is read and compared once, however many thaws ask for it at once. Snapshots that no sandbox uses stay held
//! within [`SnapshotsConfig::held`](crate::config::SnapshotsConfig), and the least recently thawed are let go first.

use std::collections::{HashMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use thaw_sys::lock::Lock;

use super::{Node, parked};
use crate::error::Error;
use crate::snapshot::{Hash, Registered, Scratch};

/// Maximum number of snapshots held without use, whatever their size: each has open descriptors.
const MOST_HELD: usize = 64;

/// The held snapshots of a node. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Snapshots(Arc<Held>);

#[derive(Debug, Default)]
struct Held {
    /// Maximum number of bytes of memory held without use.
    budget: u64,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    /// By directory: those that a sandbox uses or that are kept.
    known: HashMap<PathBuf, Known>,
    /// Those that are kept, also without use; the most recently thawed first.
    kept: VecDeque<Arc<Registered>>,
}

#[derive(Debug, Default)]
struct Known {
    held: Weak<Registered>,
    /// Held by the one that reads it.
    reading: Arc<Mutex<()>>,
}

impl Table {
    fn get(&self, directory: &Path, hash: Hash) -> Option<Arc<Registered>> {
        let held = self.known.get(directory)?.held.upgrade()?;
        (held.hash == hash).then_some(held)
    }

    /// What the one that reads this snapshot holds meanwhile.
    fn reading(&mut self, directory: &Path) -> Arc<Mutex<()>> {
        self.known
            .retain(|_, known| known.held.strong_count() > 0 || Arc::strong_count(&known.reading) > 1);
        let known = self.known.entry(directory.to_owned()).or_default();
        known.reading.clone()
    }

    /// Holds it as the most recently thawed. Returns those that are let go.
    fn keep(&mut self, registered: &Arc<Registered>, budget: u64) -> Vec<Arc<Registered>> {
        self.kept
            .retain(|kept| kept.directory != registered.directory && kept.directory.exists());
        self.kept.push_front(registered.clone());
        let mut sum = 0_u64;
        let within = |kept: &&Arc<Registered>| {
            sum = sum.saturating_add(kept.held_bytes);
            sum <= budget
        };
        let most = self.kept.iter().take(MOST_HELD).take_while(within).count();
        self.kept.split_off(most).into()
    }
}

impl Snapshots {
    /// Holds at most so many bytes without use.
    pub(super) fn within(budget: u64) -> Snapshots {
        Snapshots(Arc::new(Held {
            budget,
            ..Held::default()
        }))
    }

    /// None held yet, with the same limit.
    pub(super) fn others(&self) -> Snapshots {
        Snapshots::within(self.0.budget)
    }

    /// Verifies and holds a snapshot, unless it is held already. Blocks while it is read.
    pub(super) fn register(&self, node: &Node, directory: &Path) -> Result<Arc<Registered>, Error> {
        let registry = node.templates.registry();
        let directory = std::fs::canonicalize(directory).unwrap_or_else(|_| directory.to_owned());
        let found = registry.find(&directory)?.hash();
        let reading = self.table().reading(&directory);
        let _one = reading.locked();
        let held = self.table().get(&directory, found);
        let registered = match held {
            Some(held) => held,
            None => Arc::new(registry.register(&directory)?),
        };
        self.hold(node, &registered);
        Ok(registered)
    }

    /// From now on, thaws of this snapshot use this registration of it.
    pub(super) fn hold(&self, node: &Node, registered: &Arc<Registered>) {
        let mut table = self.table();
        let known = table.known.entry(registered.directory.clone()).or_default();
        known.held = Arc::downgrade(registered);
        let is_first = table.kept.front().is_some_and(|kept| Arc::ptr_eq(kept, registered));
        drop(table);
        // The snapshot of a fork is thawed once.
        if is_first || Scratch::holds(&node.paths.data, &registered.directory) {
            return;
        }
        let let_go = self.table().keep(registered, self.0.budget);
        for snapshot in let_go {
            parked::drop_snapshot(node, &snapshot);
        }
    }

    /// From now on, thaws use `again`, which is the same snapshot with a working set. Ends the machines parked without it.
    pub(super) fn replace(&self, node: &Node, registered: &Arc<Registered>, again: Registered) {
        parked::drop_snapshot(node, registered);
        self.hold(node, &Arc::new(again));
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.table.locked()
    }
}

#[cfg(test)]
#[path = "held_snapshots_test.rs"]
mod tests;
