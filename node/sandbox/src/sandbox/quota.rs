//! What tenants have and may have, with their stored snapshots; and the places of snapshots and of paused sandboxes.

use std::collections::BTreeMap;
use std::sync::Arc;

use thaw_protocol::api::{DEFAULT_DISK_MIB, Quota};

use super::frozen_disk::DISK_ID;
use super::{Node, SandboxSpec, Tenants};
use crate::admission::{Place, Shape, SnapshotPlace};
use crate::blocking::blocking;
use crate::error::Error;
use crate::snapshot::store::Viewer;
use crate::snapshot::{self, SnapshotStore};
use crate::state::Paused;
use crate::tenant::Tenant;

impl Tenants {
    /// The limits of a tenant, or of sandboxes without a tenant, and what is used of them. Blocks.
    pub fn quota(&self, tenant: Option<&Tenant>) -> Quota {
        let viewer = Viewer {
            tenant: tenant.cloned(),
            is_node: false,
        };
        let stores = self.snapshot_stores(&viewer);
        let stored = stores.iter().map(|(_, store)| store.bytes_of(tenant)).sum();
        self.quota_with(tenant, stored)
    }

    /// The same of all tenants that have something or have limits of their own, ordered by name. Blocks.
    pub fn quotas(&self) -> Vec<Quota> {
        let mut stored: BTreeMap<Tenant, u64> = BTreeMap::new();
        for (_, store) in self.snapshot_stores(&Viewer::node()) {
            for snapshot in store.list() {
                if let Some(tenant) = &snapshot.object.tenant {
                    *stored.entry(tenant.clone()).or_default() += snapshot.bytes();
                }
            }
        }
        for tenant in self.shared().admission.tenants() {
            stored.entry(tenant).or_default();
        }
        let quotas = stored.iter();
        quotas
            .map(|(tenant, bytes)| self.quota_with(Some(tenant), *bytes))
            .collect()
    }

    fn quota_with(&self, tenant: Option<&Tenant>, stored: u64) -> Quota {
        let admission = &self.shared().admission;
        let limits = admission.limits(tenant);
        let mut used = admission.used(tenant);
        used.snapshot_bytes = used.snapshot_bytes.saturating_add(stored);
        Quota {
            tenant: tenant.map(|tenant| tenant.as_str().to_owned()),
            limits: limits.limits,
            is_set: limits.is_set,
            used,
            node: None,
        }
    }
}

impl Node {
    /// The place of a new sandbox among those of its tenant and of the node.
    ///
    /// # Errors
    /// Those of [`Admission::create`](crate::admission::Admission::create).
    pub(super) fn admit(&self, spec: &SandboxSpec) -> Result<Place, Error> {
        let shape = Shape {
            vcpus: spec.vcpus,
            memory_mib: spec.memory_mib,
        };
        let (tenant, disk_bytes) = (spec.terms.tenant.as_ref(), u64::from(spec.disk_mib) << 20);
        match spec.image {
            // Kubernetes has admitted the pod.
            None => Ok(self.admission.adopt(tenant, shape, disk_bytes)),
            Some(_) => self.admission.create(tenant, shape, disk_bytes),
        }
    }

    /// Admits a snapshot of at most this many bytes to the store, against the quota of a tenant.
    ///
    /// # Errors
    /// [`ErrorKind::TenantQuota`](crate::error::ErrorKind::TenantQuota).
    pub(super) async fn admit_snapshot(
        &self,
        tenant: Option<Tenant>,
        bytes: u64,
    ) -> Result<SnapshotPlace, Error> {
        let (admission, store) = (self.admission.clone(), self.stored.clone());
        blocking(move || {
            let tenant = tenant.as_ref();
            admission.snapshot(tenant, bytes, || store.bytes_of(tenant))
        })
        .await
    }

    /// Counts a sandbox that an earlier thawd has paused. A disk that cannot be read counts with the default size. Blocks.
    pub fn count_paused(&self, paused: Paused) -> Paused {
        let disk = std::fs::metadata(snapshot::disk_path(&paused.snapshot(), DISK_ID));
        let bytes = disk.map_or(u64::from(DEFAULT_DISK_MIB) << 20, |disk| disk.len());
        let tenant = paused.record().terms.tenant.clone();
        let place = self.admission.adopt_paused(tenant.as_ref(), bytes);
        paused.holding(Some(Arc::new(place)))
    }
}

impl SnapshotStore {
    /// Bytes on disk of the snapshots of a tenant. Blocks.
    pub fn bytes_of(&self, tenant: Option<&Tenant>) -> u64 {
        let all = self.list();
        let own = all
            .iter()
            .filter(|stored| stored.object.tenant.as_ref() == tenant);
        own.map(|stored| stored.bytes()).fold(0, u64::saturating_add)
    }
}
