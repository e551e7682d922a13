//! Starts the VMM of a sandbox for which none was made ahead.
//!
//! Invariant: the VMM is in the sandbox's record before it has a machine.

use thaw_failpoint::{Failpoint, reach};
use thaw_pools::vmm;
use thaw_protocol::control::MachineSpec;

use super::create::Making;
use super::host_limits;
use super::machine::{make, times};
use super::vmm_log::LOG;
use crate::error::Error;
use crate::trace::monotonic_ns;
use crate::vm::VmmOptions;

impl Making<'_> {
    /// Starts a VMM and makes its machine, unless the sandbox has one. Records the VMM in the sandbox's record.
    pub(super) async fn spawn(&mut self, machine: MachineSpec) -> Result<(), Error> {
        if self.resources.vmm.is_some() {
            return Ok(());
        }
        let (node, trace) = (self.node, self.trace);
        // Until the record names the cgroup, the cgroup's own name tells which sandbox it belongs to.
        self.resources.cgroup = host_limits::claim_cgroup(node, trace).await?;
        self.record.cgroup = self.resources.cgroup.as_ref().map(|c| c.name().to_owned());
        let stage = trace.stage("spawn");
        let began = monotonic_ns();
        let (directory, cgroup) = (&self.resources.directory, &self.resources.cgroup);
        let options = VmmOptions {
            control: directory.control_socket(),
            log: directory.path().join(LOG),
            tethered: machine.tethered,
            jail: node.require.jail(),
        };
        let (program, files) = (vmm::find()?, self.files()?);
        let mut record = self.record.clone();
        let made = make(&program, &options, files, machine, |process| {
            record.vmm = Some(process.record());
            directory.write(&record)?;
            reach(Failpoint::CreateVmmRecorded);
            host_limits::enter(node.require.limits, cgroup.as_deref(), process)?;
            reach(Failpoint::CreateInCgroup);
            Ok(())
        });
        let (control, process) = made.await?;
        reach(Failpoint::CreateMachineMade);
        drop(stage);
        self.record = record;
        self.resources.vmm = Some(process);
        if control.version() != self.record.control {
            self.record.control = control.version();
            self.resources.directory.write(&self.record)?;
        }
        self.resources.control = Some(control.into());
        let times = times(self.resources.control()?).await?;
        trace.add_monotonic("vmm start", began, times.jailed);
        trace.add_monotonic("machine", times.jailed, times.created);
        Ok(())
    }
}
