//! The quotas of this node's tenants.

use async_trait::async_trait;
use thaw_protocol::api::{NodeCapacity, Quota, TenantLimits};
use thaw_sandbox::Tenants;
use thaw_sandbox::admission::Shape;
use thaw_sandbox::blocking::blocking;
use thaw_sandbox::error::Error;
use thaw_sandbox::state::Record;
use thaw_sandbox::tenant::Tenant;

use super::Quotas;

#[async_trait]
impl Quotas for Tenants {
    async fn quota(&self, tenant: Option<Tenant>) -> Result<Quota, Error> {
        let tenants = self.clone();
        blocking(move || Ok(Tenants::quota(&tenants, tenant.as_ref()))).await
    }

    async fn quotas(&self) -> Result<Vec<Quota>, Error> {
        let tenants = self.clone();
        blocking(move || Ok(Tenants::quotas(&tenants))).await
    }

    async fn set_limits(&self, tenant: Tenant, limits: Option<TenantLimits>) -> Result<(), Error> {
        let admission = self.shared().admission.clone();
        blocking(move || admission.set_limits(&tenant, limits)).await
    }

    fn capacity(&self) -> NodeCapacity {
        self.shared().admission.node()
    }

    fn check_room(&self, original: &Record, count: u8) -> Result<(), Error> {
        let shape = Shape {
            vcpus: original.vcpus,
            memory_mib: original.memory_mib,
        };
        let tenant = original.terms.tenant.as_ref();
        self.shared().admission.check(tenant, shape, count)
    }
}
