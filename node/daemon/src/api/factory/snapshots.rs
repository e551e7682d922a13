//! The stored snapshots of this node.

use std::sync::Arc;

use async_trait::async_trait;
use thaw_images::progress::Silent;
use thaw_protocol::api::{
    ChangeSnapshot, PullSnapshot, PushSnapshot, PushedSnapshot, Snapshot, VerifiedSnapshot,
};
use thaw_sandbox::blocking::blocking;
use thaw_sandbox::error::Error;
use thaw_sandbox::snapshot::store::{Change, Observer, Viewer};
use thaw_sandbox::{FoundSnapshot, Tenants};

use super::StoredSnapshots;

/// Finds a snapshot, and does something with it on a thread of its own.
async fn with<T: Send + 'static>(
    tenants: &Tenants,
    (wanted, viewer): (String, Viewer),
    work: impl FnOnce(&FoundSnapshot) -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let tenants = tenants.clone();
    blocking(move || work(&tenants.find_snapshot(&wanted, &viewer)?)).await
}

#[async_trait]
impl StoredSnapshots for Tenants {
    async fn snapshots(&self, viewer: Viewer) -> Result<Vec<Snapshot>, Error> {
        let tenants = self.clone();
        blocking(move || {
            let stores = tenants.snapshot_stores(&viewer).into_iter();
            let described = stores.flat_map(|(_, store)| {
                let mut all = store.list();
                all.retain(|stored| viewer.reaches(&stored.object));
                store.describe(&all)
            });
            let mut all: Vec<Snapshot> = described.collect();
            all.sort_by(|a, b| a.id.cmp(&b.id));
            Ok(all)
        })
        .await
    }

    async fn snapshot(&self, wanted: String, viewer: Viewer) -> Result<Snapshot, Error> {
        let describe = |found: &FoundSnapshot| Ok(found.store.describe_one(&found.stored));
        with(self, (wanted, viewer), describe).await
    }

    async fn change_snapshot(
        &self,
        wanted: String,
        viewer: Viewer,
        change: ChangeSnapshot,
    ) -> Result<Snapshot, Error> {
        let change = Change::from(change);
        with(self, (wanted, viewer), move |found| {
            let changed = found.store.change(&found.stored.object.id, &change)?;
            Ok(found.store.describe_one(&changed))
        })
        .await
    }

    async fn verify_snapshot(&self, wanted: String, viewer: Viewer) -> Result<VerifiedSnapshot, Error> {
        with(self, (wanted, viewer), |found| {
            Ok(VerifiedSnapshot {
                id: found.stored.object.id.clone(),
                damaged: found.store.verify(&found.stored)?,
            })
        })
        .await
    }

    async fn remove_snapshot(&self, wanted: String, viewer: Viewer, force: bool) -> Result<(), Error> {
        let tenants = self.clone();
        with(self, (wanted, viewer), move |found| {
            let id = &found.stored.object.id;
            found
                .store
                .remove(id, &|stored| tenants.shared().user_of(stored), force)?;
            tenants.let_go_of_removed_snapshots();
            Ok(())
        })
        .await
    }

    async fn push_snapshot(
        &self,
        wanted: String,
        viewer: Viewer,
        request: PushSnapshot,
    ) -> Result<PushedSnapshot, Error> {
        Tenants::push_snapshot(self, &wanted, &viewer, &request, Arc::new(Silent)).await
    }

    async fn pull_snapshot(&self, viewer: Viewer, request: PullSnapshot) -> Result<Snapshot, Error> {
        let (store, stored) = Tenants::pull_snapshot(self, &viewer, &request, Arc::new(Silent)).await?;
        blocking(move || Ok(store.describe_one(&stored))).await
    }

    async fn retire_snapshots(&self) {
        let tenants = self.clone();
        let retired = blocking(move || {
            tenants.retire_snapshots();
            Ok(())
        });
        if let Err(e) = retired.await {
            tracing::warn!("stored snapshots are all kept: {e}");
        }
    }

    fn observe_snapshots(&self, observer: Arc<dyn Observer>) {
        self.shared().stored.observe(observer);
    }
}
