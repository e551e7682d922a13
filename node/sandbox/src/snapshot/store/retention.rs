//! Which stored snapshots are removed by themselves.
//!
//! Invariant: each tenant's snapshots count alone, so that no tenant can have another's removed. The most recently used one stays.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::index::Stored;
use super::{SnapshotStore, User, UserOf, object};
use crate::config::SnapshotsConfig;
use crate::error::ErrorKind;
use crate::tenant::Tenant;

const DAY: u64 = 24 * 60 * 60;

/// What is kept at most of one tenant's snapshots. `None`: everything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retention {
    /// Seconds since the last use.
    pub age: Option<u64>,
    pub count: Option<usize>,
    /// Bytes on disk.
    pub bytes: Option<u64>,
}

impl Retention {
    /// As the configuration has it.
    pub fn of(config: &SnapshotsConfig) -> Retention {
        Retention {
            age: config.keep_days.map(|days| u64::from(days.get()) * DAY),
            count: config.keep_count.map(|count| count.get() as usize),
            bytes: config.keep_bytes.map(|size| size.0),
        }
    }

    fn is_unlimited(&self) -> bool {
        *self == Retention::default()
    }

    /// Why the least recently used of so many snapshots goes; `None` if it stays.
    fn reason(&self, stored: &Stored, now: u64, count: usize, bytes: u64) -> Option<String> {
        let unused = now.saturating_sub(stored.object.last_used);
        if self.age.is_some_and(|age| unused > age) {
            return Some(format!("unused for {} days", unused / DAY));
        }
        if self.count.is_some_and(|most| count > most) {
            return Some(format!("{count} snapshots are stored"));
        }
        let most = self.bytes.filter(|most| bytes > *most)?;
        Some(format!("{bytes} bytes are stored, more than {most}"))
    }
}

impl SnapshotStore {
    /// Removes what is not to be kept, least recently used first. Leaves snapshots that are in use. Returns how many are removed. Blocks.
    pub fn retire(&self, keep: &Retention, user_of: UserOf<'_>) -> usize {
        if keep.is_unlimited() {
            return 0;
        }
        let mut by_tenant: BTreeMap<Option<Tenant>, Vec<Arc<Stored>>> = BTreeMap::new();
        for stored in self.list() {
            by_tenant
                .entry(stored.object.tenant.clone())
                .or_default()
                .push(stored);
        }
        // All paused sandboxes are read for each answer, and one in use is looked at again after each removal.
        let known: RefCell<HashMap<String, User>> = RefCell::default();
        let user_of = |stored: &Stored| {
            let id = &stored.object.id;
            let user = known.borrow().get(id).cloned();
            let user = user.or_else(|| user_of(stored))?;
            known.borrow_mut().insert(id.clone(), user.clone());
            Some(user)
        };
        let retired = by_tenant
            .into_values()
            .map(|all| self.retire_of_one(all, keep, &user_of));
        retired.sum()
    }

    fn retire_of_one(&self, mut all: Vec<Arc<Stored>>, keep: &Retention, user_of: UserOf<'_>) -> usize {
        all.sort_by(|a, b| (a.object.last_used, &a.object.id).cmp(&(b.object.last_used, &b.object.id)));
        let before = all.len();
        // A delta that is removed may have been the last on its base.
        while let Some(at) = self.retire_first(&all, keep, user_of) {
            all.remove(at);
        }
        before - all.len()
    }

    /// Removes the first one that goes, and returns its place.
    fn retire_first(&self, all: &[Arc<Stored>], keep: &Retention, user_of: UserOf<'_>) -> Option<usize> {
        let bytes = all
            .iter()
            .map(|stored| stored.facts.bytes)
            .fold(0, u64::saturating_add);
        let old = all.len().saturating_sub(1);
        all[..old].iter().position(|stored| {
            let Some(why) = keep.reason(stored, object::now(), all.len(), bytes) else {
                return false;
            };
            let id = &stored.object.id;
            match self.remove(id, user_of, false) {
                Ok(()) => {
                    let name = stored.object.name.as_deref().unwrap_or_default();
                    tracing::info!(snapshot = %id, name, "removed a stored snapshot: {why}");
                    true
                }
                // It went another way.
                Err(e) if e.kind == ErrorKind::SnapshotNotFound => true,
                Err(e) if e.kind == ErrorKind::SnapshotInUse => false,
                Err(e) => {
                    tracing::warn!("cannot remove stored snapshot {id}: {e}");
                    false
                }
            }
        })
    }
}

#[cfg(test)]
#[path = "retention_test.rs"]
mod tests;
