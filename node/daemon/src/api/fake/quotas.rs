//! Fake quotas: the real admission, without a data directory.

use async_trait::async_trait;
use thaw_protocol::api::{NodeCapacity, Quota, TenantLimits};
use thaw_sandbox::admission::{Place, Shape};
use thaw_sandbox::error::Error;
use thaw_sandbox::state::Record;
use thaw_sandbox::tenant::Tenant;

use super::Fake;
use crate::api::factory::Quotas;

/// The machine that every fake has.
const SHAPE: Shape = Shape {
    vcpus: 1,
    memory_mib: 128,
};
const DISK_BYTES: u64 = 64 << 20;

impl Fake {
    /// Admits a fake machine of this tenant.
    pub(super) fn admit(&self, tenant: Option<&Tenant>) -> Result<Place, Error> {
        self.counts.admission.create(tenant, SHAPE, DISK_BYTES)
    }

    /// Admits a fake machine that continues a paused one.
    pub(super) fn admit_again(&self, paused: &Place) -> Result<Place, Error> {
        paused.resume(SHAPE)
    }
}

#[async_trait]
impl Quotas for Fake {
    async fn quota(&self, tenant: Option<Tenant>) -> Result<Quota, Error> {
        let limits = self.counts.admission.limits(tenant.as_ref());
        Ok(Quota {
            limits: limits.limits,
            is_set: limits.is_set,
            used: self.counts.admission.used(tenant.as_ref()),
            tenant: tenant.map(String::from),
            node: None,
        })
    }

    async fn quotas(&self) -> Result<Vec<Quota>, Error> {
        let mut all = Vec::new();
        for tenant in self.counts.admission.tenants() {
            all.push(self.quota(Some(tenant)).await?);
        }
        Ok(all)
    }

    async fn set_limits(&self, tenant: Tenant, limits: Option<TenantLimits>) -> Result<(), Error> {
        self.counts.admission.set_limits(&tenant, limits)
    }

    fn capacity(&self) -> NodeCapacity {
        self.counts.admission.node()
    }

    fn check_room(&self, original: &Record, count: u8) -> Result<(), Error> {
        let tenant = original.terms.tenant.as_ref();
        self.counts.admission.check(tenant, SHAPE, count)
    }
}
