//! Finds the nodes of an earlier process again, by their names.

use std::collections::{HashMap, HashSet};

use virtiofsd::filesystem::{Context, FileSystem, ROOT_ID};
use virtiofsd::fuse::InHeader;

use super::StableIds;
use super::nodes::PlaceKey;
use crate::ledger::Place;

/// Most directories between a node and the root.
const MAX_DEPTH: usize = 4096;

impl<F: FileSystem<Inode = u64, Handle = u64>> StableIds<F> {
    /// Finds the nodes of the process before this one. Those that no longer exist are then unknown.
    pub(super) fn recover(&self, places: &HashMap<u64, Place>) {
        let ctx = Context::from(InHeader::default());
        let (mut lost, mut found) = (HashSet::new(), 0);
        for id in places.keys() {
            // The node and its ancestors, up to one that is known.
            let (mut chain, mut at) = (Vec::new(), *id);
            let is_known = loop {
                if self.node(at).is_ok() {
                    break true;
                }
                match places.get(&at) {
                    Some(place) if chain.len() < MAX_DEPTH && !lost.contains(&at) => {
                        chain.push((at, place));
                        at = place.parent;
                    }
                    _ => break false,
                }
            };
            let mut is_there = is_known;
            for (id, place) in chain.into_iter().rev() {
                is_there = is_there && self.recover_node(ctx, id, place);
                match is_there {
                    true => found += 1,
                    false => drop(lost.insert(id)),
                }
            }
        }
        for id in &lost {
            let name = places.get(id).map_or(0, |place| place.name.to_bytes().len());
            self.write(|nodes| nodes.ledger.as_mut().map(|ledger| ledger.forget(*id, name)));
        }
        tracing::info!(found, lost = lost.len(), "took over from a process that ended");
    }

    fn recover_node(&self, ctx: Context, id: u64, place: &Place) -> bool {
        let there = self
            .node(place.parent)
            .and_then(|parent| self.inner.lookup(ctx, parent, &place.name));
        let Ok(there) = there else { return false };
        let is_it = there.attr.ino == place.ino && there.attr.mode & libc::S_IFMT == place.kind;
        let is_new = self.read(|nodes| !nodes.by_inner.contains_key(&there.inode));
        if is_it && is_new && there.inode != ROOT_ID {
            self.write(|nodes| nodes.insert(id, there.inode, PlaceKey::of(place.parent, &place.name)));
            return true;
        }
        self.inner.forget(ctx, there.inode, 1);
        false
    }
}
