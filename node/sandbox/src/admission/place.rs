//! Places: what a sandbox or a snapshot counts with. Dropping the last holder of one frees it at once.

use std::sync::Arc;

use thaw_protocol::api::TenantUse;

use super::{Admission, Shape, plus};
use crate::error::Error;
use crate::tenant::Tenant;

/// Amounts that count until this is dropped.
#[derive(Debug)]
struct Part {
    admission: Arc<Admission>,
    tenant: Option<Tenant>,
    amounts: TenantUse,
}

impl Part {
    /// A part whose amounts were added already.
    fn counted(admission: &Arc<Admission>, tenant: Option<&Tenant>, amounts: TenantUse) -> Part {
        Part {
            admission: admission.clone(),
            tenant: tenant.cloned(),
            amounts,
        }
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        self.admission.subtract(self.tenant.as_ref(), &self.amounts);
    }
}

/// The place of a sandbox: its machine, or that it is paused without one; and its disk, which counts once while it is paused or resumed.
#[derive(Debug)]
pub struct Place {
    now: Part,
    disk: Arc<Part>,
}

impl Place {
    pub(super) fn amounts(shape: Shape, disk_bytes: u64) -> TenantUse {
        plus(&shape.amounts(), &disk(disk_bytes))
    }

    pub(super) fn paused_amounts(disk_bytes: u64) -> TenantUse {
        plus(&paused(), &disk(disk_bytes))
    }

    /// The place of a machine that was counted already.
    pub(super) fn counted(
        admission: &Arc<Admission>,
        tenant: Option<&Tenant>,
        shape: Shape,
        disk_bytes: u64,
    ) -> Place {
        Place {
            now: Part::counted(admission, tenant, shape.amounts()),
            disk: Arc::new(Part::counted(admission, tenant, disk(disk_bytes))),
        }
    }

    /// The place of a paused sandbox that was counted already.
    pub(super) fn counted_paused(
        admission: &Arc<Admission>,
        tenant: Option<&Tenant>,
        disk_bytes: u64,
    ) -> Place {
        Place {
            now: Part::counted(admission, tenant, paused()),
            disk: Arc::new(Part::counted(admission, tenant, disk(disk_bytes))),
        }
    }

    /// A place for the same sandbox once its memory is released. Both count until one is dropped.
    ///
    /// # Errors
    /// [`ErrorKind::TenantQuota`](crate::error::ErrorKind::TenantQuota).
    pub fn pause(&self) -> Result<Place, Error> {
        self.beside(paused(), false)
    }

    /// A place for the same sandbox once it has a machine again. Both count until one is dropped.
    ///
    /// # Errors
    /// Those of [`Admission::create`].
    pub fn resume(&self, shape: Shape) -> Result<Place, Error> {
        self.beside(shape.amounts(), true)
    }

    fn beside(&self, amounts: TenantUse, is_creation: bool) -> Result<Place, Error> {
        let (admission, tenant) = (&self.now.admission, self.now.tenant.as_ref());
        admission.admit(tenant, &amounts, is_creation)?;
        Ok(Place {
            now: Part::counted(admission, tenant, amounts),
            disk: self.disk.clone(),
        })
    }
}

/// The place of a snapshot that is being written.
#[derive(Debug)]
pub struct SnapshotPlace {
    _part: Part,
}

impl SnapshotPlace {
    pub(super) fn counted(
        admission: &Arc<Admission>,
        tenant: Option<&Tenant>,
        amounts: TenantUse,
    ) -> SnapshotPlace {
        SnapshotPlace {
            _part: Part::counted(admission, tenant, amounts),
        }
    }
}

fn paused() -> TenantUse {
    TenantUse {
        paused: 1,
        ..TenantUse::default()
    }
}

fn disk(bytes: u64) -> TenantUse {
    TenantUse {
        disk_mib: bytes.div_ceil(1 << 20),
        ..TenantUse::default()
    }
}
