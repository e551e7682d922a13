//! Fake stored snapshots: a list in memory.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use thaw_protocol::api::{
    ChangeSnapshot, PullSnapshot, PushSnapshot, PushedSnapshot, Snapshot, VerifiedSnapshot,
};
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::snapshot::store::{Observer, Viewer};
use thaw_sandbox::state::Record;

use super::{Counts, Fake};
use crate::api::factory::StoredSnapshots;

impl Counts {
    /// Stores a snapshot of a sandbox, and returns its id.
    pub(super) fn store(
        &self,
        of: &Record,
        name: Option<String>,
        labels: BTreeMap<String, String>,
    ) -> String {
        let mut stored = self.stored.lock().unwrap();
        let id = format!("{:012x}", 0xf000 + stored.len());
        let new = Snapshot {
            id: id.clone(),
            tenant: of.terms.tenant.as_ref().map(|tenant| tenant.as_str().to_owned()),
            name,
            labels,
            sandbox: of.id.clone(),
            ..Snapshot::default()
        };
        stored.push(new.clone());
        self.tell(|observer| observer.stored(new));
        id
    }

    /// The caller holds the lock of the snapshots.
    fn tell(&self, what: impl FnOnce(&dyn Observer)) {
        if let Some(observer) = self.observer.get() {
            what(observer.as_ref());
        }
    }
}

impl Fake {
    fn at(&self, wanted: &str, viewer: &Viewer) -> Result<usize, Error> {
        let stored = self.counts.stored.lock().unwrap();
        let tenant = viewer.tenant.as_ref().map(|tenant| tenant.as_str());
        let at = stored.iter().position(|snapshot| {
            let is_mine = snapshot.tenant.as_deref() == tenant;
            (snapshot.id == wanted && (is_mine || viewer.is_node))
                || (snapshot.name.as_deref() == Some(wanted) && is_mine)
        });
        at.ok_or_else(|| Error::new(ErrorKind::SnapshotNotFound, "no snapshot"))
    }
}

#[async_trait]
impl StoredSnapshots for Fake {
    async fn snapshots(&self, viewer: Viewer) -> Result<Vec<Snapshot>, Error> {
        let mut stored = self.counts.stored.lock().unwrap().clone();
        let tenant = viewer.tenant.map(String::from);
        stored.retain(|snapshot| viewer.is_node || snapshot.tenant == tenant);
        Ok(stored)
    }

    async fn snapshot(&self, wanted: String, viewer: Viewer) -> Result<Snapshot, Error> {
        let at = self.at(&wanted, &viewer)?;
        Ok(self.counts.stored.lock().unwrap()[at].clone())
    }

    async fn change_snapshot(
        &self,
        wanted: String,
        viewer: Viewer,
        change: ChangeSnapshot,
    ) -> Result<Snapshot, Error> {
        let at = self.at(&wanted, &viewer)?;
        let mut stored = self.counts.stored.lock().unwrap();
        if let Some(name) = change.name {
            stored[at].name = name;
        }
        let changed = stored[at].clone();
        self.counts.tell(|observer| observer.stored(changed.clone()));
        Ok(changed)
    }

    async fn verify_snapshot(&self, wanted: String, viewer: Viewer) -> Result<VerifiedSnapshot, Error> {
        let id = self.snapshot(wanted, viewer).await?.id;
        Ok(VerifiedSnapshot {
            id,
            damaged: Vec::new(),
        })
    }

    async fn remove_snapshot(&self, wanted: String, viewer: Viewer, force: bool) -> Result<(), Error> {
        let at = self.at(&wanted, &viewer)?;
        let mut stored = self.counts.stored.lock().unwrap();
        match stored[at].labels.contains_key("in-use") && !force {
            true => Err(Error::new(
                ErrorKind::SnapshotInUse,
                "a sandbox was thawed from it",
            )),
            false => {
                let removed = stored.remove(at);
                self.counts.tell(|observer| observer.removed(&removed.id));
                Ok(())
            }
        }
    }

    async fn push_snapshot(
        &self,
        wanted: String,
        viewer: Viewer,
        request: PushSnapshot,
    ) -> Result<PushedSnapshot, Error> {
        self.at(&wanted, &viewer)?;
        Ok(PushedSnapshot {
            reference: request.reference,
            digest: "sha256:0".into(),
            sent_bytes: 1,
            present_bytes: 0,
        })
    }

    async fn pull_snapshot(&self, viewer: Viewer, request: PullSnapshot) -> Result<Snapshot, Error> {
        let mut stored = self.counts.stored.lock().unwrap();
        let pulled = Snapshot {
            id: format!("{:012x}", 0xe000 + stored.len()),
            tenant: viewer.tenant.map(String::from),
            name: request.name,
            labels: request.labels,
            ..Snapshot::default()
        };
        stored.push(pulled.clone());
        self.counts.tell(|observer| observer.stored(pulled.clone()));
        Ok(pulled)
    }

    async fn retire_snapshots(&self) {}

    fn observe_snapshots(&self, observer: Arc<dyn Observer>) {
        let _ = self.counts.observer.set(observer);
    }
}
