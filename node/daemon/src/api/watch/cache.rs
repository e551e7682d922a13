//! The objects and what became of them, behind one lock that is held for memory alone.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Instant;

use thaw_protocol::api::{FAILED, Sandbox};
use thaw_sandbox::state::failed::failed_at;
use tokio::sync::watch;

use super::index::Index;
use super::ring::{Change, Extent, Ring};
use super::version::Versions;
use crate::api::scope::Wanted;

/// Changes after a version are not known any more, or it was never given: list again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("resource version {asked} is too old or unknown: changes are kept from {floor} to {newest}")]
pub struct Gone {
    pub asked: u64,
    pub floor: u64,
    pub newest: u64,
}

/// What watchers wait for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Newest {
    pub version: u64,
    /// Nothing comes any more: thawd ends.
    pub closed: bool,
}

/// What [`Sandbox::state`] may be.
const STATES: [&str; 5] = ["running", "paused", "exited", "ended", FAILED];

/// How much a cache holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counts {
    /// Sandboxes in each state.
    pub states: [(&'static str, usize); STATES.len()],
    pub ring: Extent,
    pub watchers: usize,
}

/// Every sandbox, as it is now.
#[derive(Debug)]
pub struct Cache {
    state: RwLock<State>,
    newest: watch::Sender<Newest>,
    began: Instant,
}

#[derive(Debug)]
pub(super) struct State {
    versions: Versions,
    pub objects: BTreeMap<String, Arc<Sandbox>>,
    /// Ids by name. A failed sandbox's name leads to another, if another has it that did not fail.
    names: HashMap<Name, String>,
    /// The ids of those that failed.
    failed: BTreeSet<String>,
    pub index: Index,
    pub ring: Ring,
}

/// A name, within the tenant whose it is.
type Name = (Option<String>, String);

/// What one is called, if it has a name.
fn name_of(sandbox: &Sandbox) -> Option<Name> {
    Some((sandbox.tenant.clone(), sandbox.name.clone()?))
}

impl State {
    /// The last change's version.
    pub fn version(&self) -> u64 {
        self.versions.last()
    }

    /// Adds one to what is found by name and by state.
    fn enter(&mut self, sandbox: &Sandbox) {
        let has_failed = sandbox.state == FAILED;
        if has_failed {
            self.failed.insert(sandbox.id.clone());
        }
        let Some(name) = name_of(sandbox) else { return };
        let other = self.names.get(&name).and_then(|id| self.objects.get(id));
        let is_taken = other.is_some_and(|other| other.id != sandbox.id && other.state != FAILED);
        if !(has_failed && is_taken) {
            self.names.insert(name, sandbox.id.clone());
        }
    }

    /// Takes one out of it; its name may lead to one that failed before.
    fn leave(&mut self, sandbox: &Sandbox) {
        self.failed.remove(&sandbox.id);
        let Some(name) = name_of(sandbox) else { return };
        if self.names.get(&name) != Some(&sandbox.id) {
            return;
        }
        self.names.remove(&name);
        let of_that_name = self.failed.iter().filter_map(|id| self.objects.get(id));
        let last = of_that_name
            .filter(|s| s.id != sandbox.id && name_of(s).as_ref() == Some(&name))
            .max_by_key(|s| failed_at(s));
        if let Some(last) = last {
            self.names.insert(name, last.id.clone());
        }
    }

    /// Refuses a version after which not all changes are known.
    pub fn known(&self, asked: u64) -> Result<(), Gone> {
        let (floor, newest) = (self.ring.floor(), self.version());
        match (floor..=newest).contains(&asked) {
            true => Ok(()),
            false => Err(Gone { asked, floor, newest }),
        }
    }
}

impl Cache {
    /// With nothing in it.
    pub fn new(versions: Versions) -> Cache {
        let version = versions.last();
        Cache {
            state: RwLock::new(State {
                versions,
                objects: BTreeMap::new(),
                names: HashMap::new(),
                failed: BTreeSet::new(),
                index: Index::default(),
                ring: Ring::new(version),
            }),
            newest: watch::Sender::new(Newest {
                version,
                closed: false,
            }),
            began: Instant::now(),
        }
    }

    /// Adds a sandbox, or replaces it.
    pub fn put(&self, sandbox: Sandbox) -> Arc<Sandbox> {
        self.replace(&mut self.write(), sandbox)
    }

    /// Changes the one with this id, if it is there; what changes nothing is no change. Says whether it is there.
    pub fn update(&self, id: &str, change: impl FnOnce(&mut Sandbox)) -> bool {
        let mut state = self.write();
        let Some(before) = state.objects.get(id) else {
            return false;
        };
        let mut after = Sandbox::clone(before);
        change(&mut after);
        if after != **before {
            self.replace(&mut state, after);
        }
        true
    }

    /// Takes the one with this id out. Says whether it was there.
    pub fn remove(&self, id: &str) -> bool {
        let mut state = self.write();
        let Some(before) = state.objects.remove(id) else {
            return false;
        };
        state.index.remove(&before);
        state.leave(&before);
        state.versions.advance();
        self.keep(&mut state, Some(before), None);
        true
    }

    /// Those that failed, the one that failed first before the others.
    pub fn failed(&self) -> Vec<Arc<Sandbox>> {
        let state = self.read();
        let failed = state.failed.iter().filter_map(|id| state.objects.get(id));
        let mut failed: Vec<_> = failed.cloned().collect();
        failed.sort_by_key(|s| (failed_at(s), s.resource_version));
        failed
    }

    /// The one with this id.
    pub fn get(&self, id: &str) -> Option<Arc<Sandbox>> {
        self.read().objects.get(id).cloned()
    }

    /// The one a caller means: with this id, or else with this name of its tenant's, if it may reach that.
    pub fn find(&self, wanted: &Wanted) -> Option<Arc<Sandbox>> {
        let Wanted { scope, text } = wanted;
        let state = self.read();
        let by_id = state.objects.get(text).filter(|sandbox| scope.reaches(sandbox));
        let name = (scope.tenant_name().map(str::to_owned), text.clone());
        let by_name = || state.objects.get(state.names.get(&name)?);
        let found = by_id.or_else(by_name);
        found.filter(|sandbox| scope.reaches(sandbox)).cloned()
    }

    /// The last change's version.
    pub fn version(&self) -> u64 {
        self.read().version()
    }

    /// Changes after a version, oldest first, at most so many.
    pub fn changes(&self, after: u64, most: usize) -> Result<Vec<Arc<Change>>, Gone> {
        let state = self.read();
        state.known(after)?;
        Ok(state.ring.after(after).take(most).cloned().collect())
    }

    /// How much it holds.
    pub fn counts(&self) -> Counts {
        let state = self.read();
        let mut states = STATES.map(|name| (name, 0));
        for sandbox in state.objects.values() {
            if let Some((_, count)) = states.iter_mut().find(|(name, _)| *name == sandbox.state) {
                *count += 1;
            }
        }
        Counts {
            states,
            ring: state.ring.extent(),
            watchers: self.newest.receiver_count(),
        }
    }

    /// Ends every watch.
    pub fn close(&self) {
        self.newest.send_modify(|newest| newest.closed = true);
    }

    pub(super) fn follow(&self) -> watch::Receiver<Newest> {
        self.newest.subscribe()
    }

    pub(super) fn read(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn replace(&self, state: &mut State, sandbox: Sandbox) -> Arc<Sandbox> {
        let after = Arc::new(Sandbox {
            resource_version: state.versions.advance(),
            ..sandbox
        });
        let before = state.objects.insert(after.id.clone(), after.clone());
        if let Some(before) = &before {
            state.index.remove(before);
            state.leave(before);
        }
        state.index.add(&after);
        state.enter(&after);
        self.keep(state, before, Some(after.clone()));
        after
    }

    /// Keeps the change that has the last version, and tells the watchers.
    fn keep(&self, state: &mut State, before: Option<Arc<Sandbox>>, after: Option<Arc<Sandbox>>) {
        let version = state.version();
        let change = Arc::new(Change::new(version, before, after));
        state.ring.push(change, self.began.elapsed());
        // Under the lock, so that it never goes back.
        self.newest.send_modify(|newest| newest.version = version);
    }
}

#[cfg(test)]
#[path = "cache_test.rs"]
mod tests;
