//! The stored snapshots of the node, and of tenants with a stock of their own: finds one for a caller, and removes those that the
//! configuration does not keep.
//!
//! Invariant: a snapshot is thawed with the stock that it lies in, because that has its images.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use thaw_protocol::control::MemoryMode;
use thaw_sys::lock::Lock;

use super::tenants::{TENANTS, Tenants, data};
use super::{Node, Thawable};
use crate::blocking::blocking;
use crate::error::{Error, ErrorKind};
use crate::snapshot::store::{Making, NewSnapshot, Retention, Thawing, Viewer, find};
use crate::snapshot::{SnapshotStore, Stored};
use crate::state::{Record, RunDirectory};
use crate::tenant::Tenant;

/// The label of a stored snapshot with the namespace of Kubernetes whose pods may be thawed from it.
const POD_NAMESPACE: &str = "thaw.run/namespace";
/// Interval between two searches for snapshots that are not kept.
const EVERY: Duration = Duration::from_secs(24 * 60 * 60);

/// A stored snapshot, the store that it is in, and that store's tenant if it is one tenant's alone.
#[derive(Clone, Debug)]
pub struct FoundSnapshot {
    pub stored: Arc<Stored>,
    pub store: SnapshotStore,
    pub(super) stock: Option<Tenant>,
}

impl Tenants {
    /// The store of a tenant with a stock of its own, opened once. Blocks.
    pub(super) fn store_of(&self, tenant: &Tenant) -> Result<SnapshotStore, Error> {
        let mut stores = self.stores.locked();
        if let Some(store) = stores.get(tenant) {
            return Ok(store.clone());
        }
        let shared = self.shared();
        let store = shared.stored.below(&data(&shared.paths.data, tenant))?;
        store.sweep();
        stores.insert(tenant.clone(), store.clone());
        Ok(store)
    }

    /// The stores that may hold snapshots for this viewer: the node's first. Blocks.
    pub fn snapshot_stores(&self, viewer: &Viewer) -> Vec<(Option<Tenant>, SnapshotStore)> {
        let shared = self.shared();
        let tenants = match viewer.is_node {
            true => tenants_on_disk(&shared.paths.data),
            false => viewer.tenant.iter().cloned().collect(),
        };
        let has_one = |tenant: &Tenant| SnapshotStore::exists(&data(&shared.paths.data, tenant));
        let opened = tenants.into_iter().filter(has_one).filter_map(|tenant| {
            let store = self.store_of(&tenant);
            let store = store.inspect_err(|e| tracing::warn!("snapshots of tenant {tenant:?}: {e}"));
            Some((Some(tenant), store.ok()?))
        });
        [(None, shared.stored.clone())]
            .into_iter()
            .chain(opened)
            .collect()
    }

    /// Finds a stored snapshot for a viewer, by id, name, or an unambiguous beginning of an id. Blocks.
    ///
    /// # Errors
    /// [`crate::error::ErrorKind::SnapshotNotFound`].
    pub fn find_snapshot(&self, wanted: &str, viewer: &Viewer) -> Result<FoundSnapshot, Error> {
        let (stocks, stores): (Vec<_>, Vec<_>) = self.snapshot_stores(viewer).into_iter().unzip();
        let (at, stored) = find(&stores, wanted, viewer)?;
        Ok(FoundSnapshot {
            stored,
            store: stores[at].clone(),
            stock: stocks[at].clone(),
        })
    }

    /// Finds a snapshot to thaw: with a slash, in a registry ([`Tenants::remote_to_thaw`]); otherwise a stored one. The use of a stored one
    /// is noted. Returns the node to thaw it with, and what keeps a stored one until the sandbox has a record.
    ///
    /// # Errors
    /// [`ErrorKind::SnapshotNotFound`]; [`ErrorKind::Runtime`] for a mode that a snapshot in a registry cannot have; those of
    /// [`Tenants::with_stock`] and [`Tenants::remote_to_thaw`].
    pub async fn to_thaw(
        &self,
        wanted: &str,
        viewer: &Viewer,
        mode: MemoryMode,
    ) -> Result<(Node, Thawable, Option<Thawing>), Error> {
        if wanted.contains('/') {
            refuse_in_advance(wanted, mode)?;
            let (node, found) = self.remote_to_thaw(wanted, viewer).await?;
            let thawing = match &found {
                Thawable::Stored(directory) => Some(keep(&node, directory).await?),
                Thawable::Remote(_) => None,
            };
            return Ok((node, found, thawing));
        }
        let (node, directory, thawing) = self.stored_to_thaw(wanted, viewer).await?;
        Ok((node, Thawable::Stored(directory), Some(thawing)))
    }

    /// Finds a stored snapshot, as [`Tenants::to_thaw`].
    async fn stored_to_thaw(&self, wanted: &str, viewer: &Viewer) -> Result<(Node, PathBuf, Thawing), Error> {
        let (tenants, wanted, viewer) = (self.clone(), wanted.to_owned(), viewer.clone());
        let found = blocking(move || {
            let found = tenants.find_snapshot(&wanted, &viewer)?;
            let thawing = found.store.begin_thaw(&found.stored.object.id)?;
            Ok((found, thawing))
        });
        let (found, thawing) = found.await?;
        let node = self.with_stock(found.stock.as_ref()).await?;
        let directory = found.stored.directory.clone();
        // The thaw does not wait for the disk.
        tokio::task::spawn_blocking(move || found.store.note_use(&found.stored.object.id));
        Ok((node, directory, thawing))
    }

    /// Finds a stored snapshot to thaw as a pod of this namespace of Kubernetes, and notes its use. Its owner has given it to the namespace
    /// by its label: who may make pods there gets what was in its memory. Returns the node, its directory, and what keeps it until the
    /// pod has a record.
    ///
    /// # Errors
    /// [`ErrorKind::SnapshotNotFound`]: there is none, or it is for another namespace.
    pub async fn snapshot_for_pod(
        &self,
        wanted: &str,
        namespace: &str,
    ) -> Result<(Node, PathBuf, Thawing), Error> {
        let (tenants, name, viewer) = (self.clone(), wanted.to_owned(), Viewer::node());
        let found = blocking(move || tenants.find_snapshot(&name, &viewer)).await?;
        let object = &found.stored.object;
        if object.labels.get(POD_NAMESPACE).map(String::as_str) != Some(namespace) {
            let what = format!("snapshot {wanted} is not for pods of namespace {namespace}");
            let remedy =
                format!("give it to them: thaw snapshot tag {wanted} --label {POD_NAMESPACE}={namespace}");
            return Err(Error::new(ErrorKind::SnapshotNotFound, what).remedy(remedy));
        }
        self.stored_to_thaw(&object.id, &Viewer::node()).await
    }

    /// Removes the stored snapshots that the configuration does not keep. Blocks.
    pub fn retire_snapshots(&self) {
        let shared = self.shared();
        let keep = Retention::of(&shared.images.config.snapshots);
        for (_, store) in self.snapshot_stores(&Viewer::node()) {
            store.retire(&keep, &|stored| shared.user_of(stored));
        }
        self.let_go_of_removed_snapshots();
    }

    /// Stops holding removed snapshots, and ends the machines parked with them.
    pub fn let_go_of_removed_snapshots(&self) {
        for node in self.all() {
            node.snapshots.let_go_of_removed(&node);
        }
    }

    /// The same now and once a day. Reads the stored snapshots, so that the first request finds them in memory. Never returns.
    pub async fn keep_snapshots_retired(self) {
        loop {
            let tenants = self.clone();
            let retired = blocking(move || {
                let stores = tenants.snapshot_stores(&Viewer::node());
                stores.iter().for_each(|(_, store)| drop(store.list()));
                tenants.retire_snapshots();
                Ok(())
            });
            if let Err(e) = retired.await {
                tracing::warn!("stored snapshots are all kept: {e}");
            }
            tokio::time::sleep(EVERY).await;
        }
    }
}

impl SnapshotStore {
    /// Makes the place for a snapshot of the sandbox with this record. Blocks.
    ///
    /// # Errors
    /// Those of [`SnapshotStore::begin`].
    pub fn begin_for(
        &self,
        sandbox: &Record,
        name: Option<String>,
        labels: BTreeMap<String, String>,
    ) -> Result<Making, Error> {
        let thawed_from = sandbox
            .provenance
            .as_ref()
            .map(|provenance| provenance.snapshot());
        self.begin(NewSnapshot {
            name,
            labels,
            tenant: sandbox.terms.tenant.clone(),
            sandbox: sandbox.id.clone(),
            parent: thawed_from.and_then(|snapshot| self.id_of(snapshot)),
        })
    }
}

/// Refuses to map memory in advance that comes from a registry while the sandbox runs.
fn refuse_in_advance(reference: &str, mode: MemoryMode) -> Result<(), Error> {
    match mode {
        MemoryMode::Populate => {
            let what = format!(
                "memory mode populate loads all memory in advance, and that of {reference} comes from its registry while the sandbox runs"
            );
            let remedy = "choose memory mode cow; or pull it with thaw snapshot pull, and thaw the stored snapshot by its id";
            Err(Error::new(ErrorKind::Runtime, what).remedy(remedy))
        }
        // Either way, parts come as they are touched.
        MemoryMode::Cow | MemoryMode::Uffd => Ok(()),
    }
}

/// Keeps the stored snapshot in this directory for a thaw, and notes its use.
async fn keep(node: &Node, directory: &Path) -> Result<Thawing, Error> {
    let (store, directory) = (node.stored.clone(), directory.to_owned());
    let kept = blocking(move || {
        let removed = || {
            let what = format!("the snapshot at {} was removed", directory.display());
            Error::new(ErrorKind::SnapshotNotFound, what).remedy("thaw it again")
        };
        let id = store.id_of(&directory).ok_or_else(removed)?;
        let thawing = store.begin_thaw(&id)?;
        Ok((store, id, thawing))
    });
    let (store, id, thawing) = kept.await?;
    // The thaw does not wait for the disk.
    tokio::task::spawn_blocking(move || store.note_use(&id));
    Ok(thawing)
}

/// A sandbox of this host that was thawed from the snapshot in a directory.
pub(super) fn thawed_from(run: &RunDirectory, snapshot: &Path) -> Option<String> {
    let place = |path: &Path| fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let wanted = place(snapshot);
    let thawed = run.list().into_iter().find(|record| {
        let from = record.provenance.as_ref().map(|provenance| provenance.snapshot());
        from.is_some_and(|from| from == wanted || place(from) == wanted)
    });
    thawed.map(|record| record.id)
}

fn tenants_on_disk(shared: &Path) -> Vec<Tenant> {
    let entries = fs::read_dir(shared.join(TENANTS)).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter_map(|name| name.parse().ok()).collect()
}

#[cfg(test)]
#[path = "stored_test.rs"]
mod tests;
