//! The snapshots that this process has thawed sandboxes from: verified, and ready to be restored.
//!
//! Invariants: a snapshot is read and compared once, however many thaws ask for it at once. Snapshots that no sandbox uses stay held
//! within [`SnapshotsConfig::held`](crate::config::SnapshotsConfig), and the least recently thawed are let go first. Machines are parked
//! only with snapshots that are held.

use std::collections::{HashMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use thaw_sys::lock::Lock;

use super::{Node, parked};
use crate::error::Error;
use crate::snapshot::{Hash, Registered, Scratch, SnapshotDir};

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
    /// Held by the thread that reads a new snapshot in the background.
    reading_ahead: Mutex<()>,
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

    /// Holds it as the most recently thawed. Returns those that are let go: removed ones, and those beyond the budget.
    fn keep(&mut self, registered: &Arc<Registered>, budget: u64) -> Vec<Arc<Registered>> {
        let mut let_go = self.let_go(|kept| {
            !Arc::ptr_eq(kept, registered)
                && (kept.directory == registered.directory || !kept.directory.exists())
        });
        self.kept.retain(|kept| !Arc::ptr_eq(kept, registered));
        self.kept.push_front(registered.clone());
        let mut sum = 0_u64;
        let within = |kept: &&Arc<Registered>| {
            sum = sum.saturating_add(kept.held_bytes);
            sum <= budget
        };
        let most = self.kept.iter().take(MOST_HELD).take_while(within).count();
        let_go.extend(self.kept.split_off(most));
        let_go
    }

    /// Stops keeping some of them, and returns these.
    fn let_go(&mut self, is_due: impl Fn(&Arc<Registered>) -> bool) -> Vec<Arc<Registered>> {
        let kept = std::mem::take(&mut self.kept);
        let (due, kept): (VecDeque<_>, VecDeque<_>) = kept.into_iter().partition(is_due);
        self.kept = kept;
        due.into()
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
        let found = registry.find(&directory);
        let found = found.inspect_err(|_| self.let_go_of_removed(node))?;
        let is_held = self.table().get(&directory, found.hash()).is_some();
        // Before it is locked: a manifest may name anything as the base, also the snapshot itself.
        let base = match is_held {
            true => None,
            false => self.base(node, &found),
        };
        let reading = self.table().reading(&directory);
        let _one = reading.locked();
        let held = self.table().get(&directory, found.hash());
        let registered = match held {
            Some(held) => held,
            None => {
                let is_it = |hash: Hash| base.clone().filter(|base| base.hash == hash);
                Arc::new(registry.register_with(&directory, &is_it)?)
            }
        };
        self.hold(node, &registered);
        Ok(registered)
    }

    /// What a snapshot lies on, held as long as any sandbox uses it, so that all over it share its memory. `None` if it lies on nothing, if this
    /// process holds no memory of snapshots, or if it cannot be read, which the registration of the snapshot will report.
    fn base(&self, node: &Node, of: &SnapshotDir) -> Option<Arc<Registered>> {
        let base = of.manifest().subject.base.as_ref()?;
        let registry = node.templates.registry();
        if !registry.holds_memory() {
            return None;
        }
        let template = node.templates.held_by_hash(base.manifest);
        template.or_else(|| {
            // They are few, and none lies on itself.
            registry.chain(of.path()).ok()?;
            self.register(node, &of.path().join(&base.place)).ok()
        })
    }

    /// From now on, thaws of this snapshot use this registration of it.
    pub(super) fn hold(&self, node: &Node, registered: &Arc<Registered>) {
        let mut table = self.table();
        let known = table.known.entry(registered.directory.clone()).or_default();
        known.held = Arc::downgrade(registered);
        let is_first = table
            .kept
            .front()
            .is_some_and(|kept| Arc::ptr_eq(kept, registered));
        drop(table);
        if is_first || is_thawed_once(node, &registered.directory) {
            return;
        }
        let let_go = self.table().keep(registered, self.0.budget);
        drop_parked(node, let_go);
    }

    /// Reads and holds a new snapshot in the background, so that its first thaw need not. Does nothing if another is being read, or in a
    /// process that holds no snapshot's memory. Does not block.
    pub(super) fn hold_ahead(&self, node: &Node, made: &SnapshotDir) {
        let bytes = made.manifest().files.memory.data_bytes;
        let is_held = node.templates.registry().holds_memory() && bytes <= self.0.budget;
        if !is_held || is_thawed_once(node, made.path()) {
            return;
        }
        let (snapshots, node, directory) = (self.clone(), node.clone(), made.path().to_owned());
        let reader = std::thread::Builder::new().name("hold snapshot".into());
        let read = reader.spawn(move || {
            let Ok(_one) = snapshots.0.reading_ahead.try_lock() else {
                return;
            };
            match snapshots.register(&node, &directory) {
                // Not by the thaw that would report it.
                Ok(held) => drop(held.take_just_read()),
                Err(e) => tracing::warn!("a new snapshot is read again at its first thaw: {e}"),
            }
        });
        if let Err(e) = read {
            tracing::warn!("a new snapshot is read at its first thaw: {e}");
        }
    }

    /// Lets go of snapshots whose directories were removed.
    pub(super) fn let_go_of_removed(&self, node: &Node) {
        let let_go = self.table().let_go(|kept| !kept.directory.exists());
        drop_parked(node, let_go);
    }

    /// From now on, thaws use `again`, which is the same snapshot with a working set. Ends the machines parked without it.
    pub(super) fn replace(&self, node: &Node, registered: &Arc<Registered>, again: Registered) {
        self.hold(node, &Arc::new(again));
        parked::drop_snapshot(node, registered);
    }

    /// How many are kept, used or not, and bytes of memory that they hold.
    pub fn kept(&self) -> (usize, u64) {
        let table = self.table();
        (
            table.kept.len(),
            table.kept.iter().map(|kept| kept.held_bytes).sum(),
        )
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.table.locked()
    }
}

/// Whether a snapshot is that of a fork, or of a sandbox whose memory is released.
pub(super) fn is_thawed_once(node: &Node, snapshot: &Path) -> bool {
    Scratch::holds(&node.paths.data, snapshot) || node.paused.holds(snapshot)
}

fn drop_parked(node: &Node, let_go: Vec<Arc<Registered>>) {
    for snapshot in let_go {
        parked::drop_snapshot(node, &snapshot);
    }
}

#[cfg(test)]
#[path = "held_snapshots_test.rs"]
mod tests;
