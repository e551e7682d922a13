//! Stored snapshots as callers see them.

use std::collections::HashMap;
use std::sync::Arc;

use thaw_protocol::api::Snapshot;

use super::SnapshotStore;
use super::index::{Said, Stored};
use crate::snapshot::hash::Hash;

impl SnapshotStore {
    /// Describes snapshots of this store. Blocks.
    pub fn describe(&self, wanted: &[Arc<Stored>]) -> Vec<Snapshot> {
        let all = match wanted.iter().any(|stored| stored.base().is_some()) {
            true => self.list(),
            false => Vec::new(),
        };
        let by_hash: HashMap<Hash, &str> = all
            .iter()
            .filter_map(|stored| Some((stored.hash()?, stored.object.id.as_str())))
            .collect();
        wanted.iter().map(|stored| shown(stored, &by_hash)).collect()
    }

    /// Describes one snapshot of this store. Blocks.
    pub fn describe_one(&self, stored: &Arc<Stored>) -> Snapshot {
        let described = self.describe(std::slice::from_ref(stored));
        described.into_iter().next().unwrap_or_default()
    }
}

fn shown(stored: &Stored, by_hash: &HashMap<Hash, &str>) -> Snapshot {
    let (object, facts) = (&stored.object, &stored.facts);
    let manifest = |said: &Said| {
        let mut shown = said.shown.clone();
        if let (Some(base), Some(hash)) = (&mut shown.base, &said.base) {
            base.snapshot = by_hash.get(hash).map(|id| (*id).to_owned());
        }
        shown
    };
    Snapshot {
        id: object.id.clone(),
        tenant: object.tenant.as_ref().map(|tenant| tenant.as_str().to_owned()),
        name: object.name.clone(),
        labels: object.labels.clone(),
        sandbox: object.sandbox.clone(),
        parent: object.parent.clone(),
        created: object.created,
        last_used: object.last_used,
        disk_bytes: facts.bytes,
        manifest: facts.said.as_ref().ok().map(manifest),
        error: facts.said.as_ref().err().cloned(),
        resource_version: None,
    }
}
