//! The nodes that the guest knows: its ids and those of the file system below.

use std::collections::HashMap;
use std::ffi::CStr;

use virtiofsd::filesystem::Entry;

use crate::ledger::{Ledger, Place};

/// A node that the guest knows.
pub(super) struct Node {
    pub inner: u64,
    /// Number of times that this process returned it to the guest.
    lookups: u64,
    place: PlaceKey,
}

/// Identifies a place well enough to notice that it changed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct PlaceKey {
    parent: u64,
    name_hash: u64,
    name_length: usize,
}

#[derive(Default)]
pub(super) struct Nodes {
    pub by_id: HashMap<u64, Node>,
    pub by_inner: HashMap<u64, u64>,
    pub next: u64,
    pub ledger: Option<Ledger>,
}

impl PlaceKey {
    pub fn of(parent: u64, name: &CStr) -> PlaceKey {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut hasher = DefaultHasher::new();
        name.hash(&mut hasher);
        PlaceKey {
            parent,
            name_hash: hasher.finish(),
            name_length: name.to_bytes().len(),
        }
    }
}

impl Nodes {
    /// Returns the id of a node that was looked up, and counts the lookup.
    pub fn id_of(&mut self, parent: u64, name: &CStr, entry: &Entry) -> u64 {
        let place = PlaceKey::of(parent, name);
        // These names are not entries of their own.
        let is_place = !matches!(name.to_bytes(), b"." | b"..");
        let id = match self.by_inner.get(&entry.inode) {
            Some(id) => *id,
            None => {
                let id = self.next;
                self.next += 1;
                self.insert(id, entry.inode, place);
                if is_place {
                    self.record(id, parent, name, entry, None);
                }
                return id;
            }
        };
        if let Some(node) = self.by_id.get_mut(&id) {
            node.lookups = node.lookups.saturating_add(1);
            if is_place && node.place != place {
                let was = std::mem::replace(&mut node.place, place);
                self.record(id, parent, name, entry, Some(was.name_length));
            }
        }
        id
    }

    pub fn insert(&mut self, id: u64, inner: u64, place: PlaceKey) {
        self.by_inner.insert(inner, id);
        let node = Node {
            inner,
            lookups: 1,
            place,
        };
        self.by_id.insert(id, node);
    }

    fn record(&mut self, id: u64, parent: u64, name: &CStr, entry: &Entry, before: Option<usize>) {
        if let Some(ledger) = &mut self.ledger {
            let place = Place::new(parent, name, entry.attr.ino, entry.attr.mode);
            ledger.put(id, &place, before);
        }
    }

    /// Subtracts `count` lookups of the guest. Returns the node below, and how many of the lookups were of this
    /// process.
    pub fn forget(&mut self, id: u64, count: u64) -> Option<(u64, u64)> {
        let node = self.by_id.get_mut(&id)?;
        // The guest also counts lookups in earlier processes.
        let ours = count.min(node.lookups);
        node.lookups -= ours;
        let (inner, is_last, name) = (node.inner, node.lookups == 0, node.place.name_length);
        if is_last {
            self.by_id.remove(&id);
            self.by_inner.remove(&inner);
            if let Some(ledger) = &mut self.ledger {
                ledger.forget(id, name);
            }
        }
        Some((inner, ours))
    }
}
