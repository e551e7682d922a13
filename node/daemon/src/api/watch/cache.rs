//! The sandboxes and their changes, behind one lock that is held for memory accesses only.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use thaw_protocol::api::{FAILED, Sandbox};
use thaw_sandbox::state::ended::ended_at;
use thaw_sys::lock::Share;
use tokio::sync::watch;

use super::index::Index;
use super::ring::{Change, Extent, Gone, Ring};
use super::source::{Newest, Source};
use super::version::Versions;
use crate::api::scope::Wanted;

/// The values of [`Sandbox::state`].
const STATES: [&str; 6] = ["running", "paused", "restarting", "exited", "ended", FAILED];

/// The size of a cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counts {
    /// Sandboxes in each state.
    pub states: [(&'static str, usize); STATES.len()],
    pub ring: Extent,
    pub watchers: usize,
}

/// All sandboxes in their current state.
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
    /// Ids by name. If an ended sandbox and a living one have the same name, it leads to the living one.
    names: HashMap<Name, String>,
    /// The ids of ended sandboxes: those that failed, and those that exited and of which only the record is left.
    over: BTreeSet<String>,
    pub index: Index,
    pub ring: Ring,
}

/// A name within a tenant.
type Name = (Option<String>, String);

/// The name of a sandbox, if it has one.
fn name_of(sandbox: &Sandbox) -> Option<Name> {
    Some((sandbox.tenant.clone(), sandbox.name.clone()?))
}

impl State {
    /// The last change's version.
    pub fn version(&self) -> u64 {
        self.versions.last()
    }

    /// Adds a sandbox to the names and to the ended ones.
    fn enter(&mut self, sandbox: &Sandbox) {
        let is_over = sandbox.ended_at().is_some();
        if is_over {
            self.over.insert(sandbox.id.clone());
        }
        let Some(name) = name_of(sandbox) else { return };
        let other = self.names.get(&name).and_then(|id| self.objects.get(id));
        let is_taken = other.is_some_and(|other| other.id != sandbox.id && other.ended_at().is_none());
        if !(is_over && is_taken) {
            self.names.insert(name, sandbox.id.clone());
        }
    }

    /// Removes a sandbox from these. Its name may then lead to an ended sandbox.
    fn leave(&mut self, sandbox: &Sandbox) {
        self.over.remove(&sandbox.id);
        let Some(name) = name_of(sandbox) else { return };
        if self.names.get(&name) != Some(&sandbox.id) {
            return;
        }
        self.names.remove(&name);
        let of_that_name = self.over.iter().filter_map(|id| self.objects.get(id));
        let last = of_that_name
            .filter(|s| s.id != sandbox.id && name_of(s).as_ref() == Some(&name))
            .max_by_key(|s| ended_at(s));
        if let Some(last) = last {
            self.names.insert(name, last.id.clone());
        }
    }

    /// Fails if not all changes after this version are known.
    pub fn known(&self, asked: u64) -> Result<(), Gone> {
        self.ring.known(asked, self.version())
    }
}

impl Cache {
    /// An empty cache.
    pub fn new(versions: Versions) -> Cache {
        let version = versions.last();
        Cache {
            state: RwLock::new(State {
                versions,
                objects: BTreeMap::new(),
                names: HashMap::new(),
                over: BTreeSet::new(),
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

    /// Changes the sandbox with this id, and returns whether it exists. A change without effect is not recorded.
    pub fn update(&self, id: &str, change: impl FnOnce(&mut Sandbox)) -> bool {
        let mut state = self.write();
        let Some(before) = state.objects.get(id) else {
            return false;
        };
        let unchanged = Sandbox {
            event: None,
            ..Sandbox::clone(before)
        };
        let mut after = unchanged.clone();
        change(&mut after);
        if after != unchanged {
            self.replace(&mut state, after);
        }
        true
    }

    /// Removes the sandbox with this id, and returns whether it existed.
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

    /// The ended sandboxes, in the order in which they ended.
    pub fn ended(&self) -> Vec<Arc<Sandbox>> {
        let state = self.read();
        let over = state.over.iter().filter_map(|id| state.objects.get(id));
        let mut over: Vec<_> = over.cloned().collect();
        over.sort_by_key(|s| (ended_at(s), s.resource_version));
        over
    }

    /// The sandbox with this id.
    pub fn get(&self, id: &str) -> Option<Arc<Sandbox>> {
        self.read().objects.get(id).cloned()
    }

    /// The sandbox that a caller wants, if it is in its scope: by id, or else by a name in its tenant.
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

    /// The changes after a version, oldest first, at most `most`.
    pub fn changes(&self, after: u64, most: usize) -> Result<Vec<Arc<Change>>, Gone> {
        let state = self.read();
        state.known(after)?;
        Ok(state.ring.after(after).take(most).cloned().collect())
    }

    /// Its size.
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

    pub(super) fn read(&self) -> RwLockReadGuard<'_, State> {
        self.state.reading()
    }

    fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.writing()
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

    /// Records the change of the last version, and wakes the watchers.
    fn keep(&self, state: &mut State, before: Option<Arc<Sandbox>>, after: Option<Arc<Sandbox>>) {
        let version = state.version();
        let change = Arc::new(Change::new(version, before, after));
        state.ring.push(change, self.began.elapsed());
        // Under the lock, so that it never decreases.
        self.newest.send_modify(|newest| newest.version = version);
    }
}

impl Source for Cache {
    type Object = Sandbox;

    fn version(&self) -> u64 {
        Cache::version(self)
    }

    fn version_before(&self, age: Duration) -> u64 {
        let state = self.read();
        state.ring.version_at(self.began.elapsed().saturating_sub(age))
    }

    fn changes(&self, after: u64, most: usize) -> Result<Vec<Arc<Change>>, Gone> {
        Cache::changes(self, after, most)
    }

    fn follow(&self) -> watch::Receiver<Newest> {
        self.newest.subscribe()
    }
}

#[cfg(test)]
#[path = "cache_test.rs"]
mod tests;
