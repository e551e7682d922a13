//! Parked machines: each has a recently used template or snapshot in it, and what its sandbox has on the host, and waits only for an
//! image and a name.
//!
//! Their number follows the demand of the last minutes. Nothing has run in them, so they cost only the pages that the restore
//! wrote, and their parts of the other pools.

use std::sync::Arc;

use thaw_failpoint::{Failpoint, reach};
use thaw_pools::resource::{Kind as ResourceKind, SlowReason, Unfit};
use thaw_protocol::control::{MachineSpec, MemoryMode};

use super::Node;
use super::fitted::Fitting;
use super::recent_pools::RecentPools;
use super::spare::{Spare, Spares};
use crate::error::Error;
use crate::snapshot::{Kind, Registered};
use crate::vm::Vm;

/// One pool for each recently used template, or for each recently thawed snapshot.
pub type ParkedPools = RecentPools<ParkedVms>;

/// The kind of resource: parked machines differ by their template or snapshot.
#[derive(Debug)]
pub struct ParkedVms(Spares);

/// Identifies what is in a parked machine.
#[derive(Clone, Debug)]
pub struct ParkedWant {
    pub machine: MachineSpec,
    /// The template or snapshot.
    pub origin: Arc<Registered>,
    /// How its memory is mapped. Never page by page, because nothing would serve the pages.
    pub mode: MemoryMode,
    pub fitting: Fitting,
}

impl PartialEq for ParkedWant {
    fn eq(&self, other: &ParkedWant) -> bool {
        self.machine == other.machine
            && self.mode == other.mode
            && self.fitting == other.fitting
            && self.origin.hash == other.origin.hash
    }
}

impl ResourceKind for ParkedVms {
    const NAME: &'static str = "parked";
    type Want = ParkedWant;
    type Resource = Spare;
    type Error = Error;

    fn make(&self, want: &ParkedWant) -> Result<Spare, Error> {
        let mut spare = self.0.make(&want.machine, |shell| {
            let parked = shell.restore(&want.origin.files, want.mode, None)?;
            reach(Failpoint::SpareRestored);
            Ok(Vm::Parked(parked))
        })?;
        self.0.fit(&mut spare, &want.origin, want.fitting)?;
        Ok(spare.complete())
    }

    fn check(&self, spare: &Spare) -> Result<(), Unfit> {
        spare.check(&self.0.pools)
    }

    fn destroy(&self, spare: Spare) {
        drop(spare);
    }
}

/// Takes a parked machine, or returns why none is ready. Does not block.
pub(super) fn ready(node: &Node, want: &ParkedWant) -> Result<Spare, SlowReason> {
    let pools = match want.origin.manifest.subject.kind {
        Kind::Sandbox => &node.parked_snapshots,
        Kind::Template | Kind::Bare => &node.parked,
    };
    match want.machine.tethered || want.mode == MemoryMode::Uffd {
        true => Err(SlowReason::NoPool),
        false => pools.ready(want, || ParkedVms(Spares::of(node))),
    }
}

/// Ends the machines parked with an older template of the same key, which was damaged or removed.
pub(super) fn drop_older(node: &Node, template: &Registered) {
    node.parked
        .retire(|want| want.origin.directory == template.directory && want.origin.hash != template.hash);
}

/// Ends the machines parked with this registration of a snapshot.
pub(super) fn drop_snapshot(node: &Node, snapshot: &Arc<Registered>) {
    node.parked_snapshots
        .retire(|want| Arc::ptr_eq(&want.origin, snapshot));
}
