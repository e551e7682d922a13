//! Pools of shells: machines without a snapshot, of the shapes in demand.

use thaw_pools::resource::{Kind, SlowReason, Unfit};
use thaw_protocol::control::MachineSpec;

use super::Node;
use super::recent_pools::RecentPools;
use super::spare::{Spare, Spares};
use crate::error::Error;
use crate::vm::Vm;

/// A pool for each recently used shape.
pub type ShellPools = RecentPools<Shells>;

/// The kind of resource: shells differ by their machine.
#[derive(Debug)]
pub struct Shells(Spares);

impl Kind for Shells {
    const NAME: &'static str = "shell";
    type Want = MachineSpec;
    type Resource = Spare;
    type Error = Error;

    fn make(&self, machine: &MachineSpec) -> Result<Spare, Error> {
        let made = self.0.make(machine, |shell| Ok(Vm::Shell(shell)));
        made.map(Spare::complete)
    }

    fn check(&self, spare: &Spare) -> Result<(), Unfit> {
        spare.check(&self.0.pools)
    }

    fn destroy(&self, spare: Spare) {
        drop(spare);
    }
}

/// Takes a shell for this machine, or returns why none is ready. Does not block.
pub(super) fn ready(node: &Node, machine: &MachineSpec) -> Result<Spare, SlowReason> {
    match machine.tethered {
        // A tethered shell is for a process that makes no second sandbox.
        true => Err(SlowReason::NoPool),
        false => node.shells.ready(machine, || Shells(Spares::of(node))),
    }
}
