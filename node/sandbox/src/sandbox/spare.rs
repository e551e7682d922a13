//! Spares: machines made before it is known which sandbox will use them.
//!
//! Each spare has a directory under the run directory's `spares`, with a record, as a sandbox has. So the next start finds and removes what
//! a killed thawd left. Invariant: a thaw-vmm is in a record before it has a machine, and in at least one record from then on. A sandbox
//! that takes a spare writes it into its own record before it takes anything else.

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;

use thaw_failpoint::{Failpoint, reach};
use thaw_pools::cgroup::{Cgroup, Cgroups};
use thaw_pools::resource::Unfit;
use thaw_pools::vmm;
use thaw_protocol::control::MachineSpec;

use super::files::open_kvm;
use super::pools::Claimed;
use super::spec::new_record;
use super::vmm_log::LOG;
use super::{Node, Pools, Required, Resources, limits};
use crate::control_client::{CallError, ControlClient, Vmm};
use crate::error::{Error, ErrorKind};
use crate::state::{Record, RunDirectory, SandboxDirectory};
use crate::vm::{MachineError, Process, Restored, Shell, Vm, VmmOptions};

/// A machine that no sandbox has taken yet. Dropping it ends it.
pub struct Spare {
    // Fields drop in this order: the machine is killed and reaped before its cgroup and directory are removed.
    vm: Vm,
    cgroup: Option<Claimed<Cgroups>>,
    directory: SandboxDirectory,
}

impl Spare {
    /// Whether it is still usable.
    pub(super) fn check(&self) -> Result<(), Unfit> {
        self.vm.check()
    }

    /// Gives the machine to a sandbox. Returns the result of the restore, if a snapshot was restored into it. If this fails, it ends
    /// whatever the sandbox does not own by then.
    pub(super) fn assign_to(
        self,
        resources: &mut Resources,
        record: &mut Record,
    ) -> Result<Option<Restored>, Error> {
        record.control = self.vm.control_version();
        let (process, control, restored) = self.vm.into_parts();
        let vmm = Vmm(process.record().pid);
        record.vmm = Some(process.record());
        record.cgroup = self.cgroup.as_ref().map(|c| c.name().to_owned());
        (resources.vmm, resources.cgroup) = (Some(process), self.cgroup);
        resources.directory.write(record)?;
        reach(Failpoint::SpareTaken);
        resources.control = Some(ControlClient::made(control, vmm, record.control)?.into());
        let moves = [
            (
                self.directory.control_socket(),
                resources.directory.control_socket(),
                Failpoint::SpareSocketMoved,
            ),
            (
                self.directory.path().join(LOG),
                resources.directory.path().join(LOG),
                Failpoint::SpareLogMoved,
            ),
        ];
        for (from, to, moved) in moves {
            std::fs::rename(&from, &to)
                .map_err(|e| Error::system(format!("cannot move {}", from.display()), &e))?;
            reach(moved);
        }
        drop(self.directory);
        reach(Failpoint::SpareLeft);
        Ok(restored)
    }
}

/// Makes spares.
#[derive(Debug)]
pub(super) struct Spares {
    run: RunDirectory,
    pools: Arc<Pools>,
    require: Required,
}

impl Spares {
    pub(super) fn of(node: &Node) -> Spares {
        Spares {
            run: node.run.spares(),
            pools: node.pools.clone(),
            require: node.require,
        }
    }

    /// Makes a shell, and passes it to `on`.
    pub(super) fn make(
        &self,
        machine: &MachineSpec,
        on: impl FnOnce(Shell) -> Result<Vm, MachineError>,
    ) -> Result<Spare, Error> {
        let cgroup = match self.pools.cgroups.claim(&()) {
            Ok(claim) => Some(Claimed::new(claim.resource, &self.pools, |p| &p.cgroups)),
            Err(e) if self.require.limits => return Err(limits::unlimited(e)),
            // The process runs in the cgroup of this process.
            Err(_) => None,
        };
        let (vm, directory) = self.begin(machine, cgroup.as_deref(), on)?;
        Ok(Spare {
            vm,
            cgroup,
            directory,
        })
    }

    fn begin(
        &self,
        machine: &MachineSpec,
        cgroup: Option<&Cgroup>,
        on: impl FnOnce(Shell) -> Result<Vm, MachineError>,
    ) -> Result<(Vm, SandboxDirectory), Error> {
        let (program, kvm) = (vmm::find()?, open_kvm(Path::new("/dev/kvm"))?);
        let mut record = Record {
            image: "(spare)".into(),
            cgroup: cgroup.map(|c| c.name().to_owned()),
            tethered: machine.tethered,
            vcpus: machine.vcpus,
            memory_mib: machine.memory_mib,
            ..new_record()?
        };
        let directory = self.run.create(&record)?;
        reach(Failpoint::SpareDirectoryMade);
        let options = VmmOptions {
            control: directory.control_socket(),
            log: directory.path().join(LOG),
            tethered: machine.tethered,
            jail: self.require.jail(),
        };
        let process = Process::start(&program, &options).map_err(failure)?;
        record.vmm = Some(process.process().record());
        directory.write(&record)?;
        reach(Failpoint::SpareRecorded);
        limits::enter(self.require.limits, cgroup, process.process())?;
        reach(Failpoint::SpareInCgroup);
        let shell = process.create(kvm.as_fd(), machine.clone()).map_err(failure)?;
        reach(Failpoint::SpareMachineMade);
        Ok((on(shell).map_err(failure)?, directory))
    }
}

fn failure(error: MachineError) -> Error {
    match error {
        MachineError::Start(e) => e.into(),
        MachineError::Refused(e) => CallError::Refused(e).into(),
        other => Error::new(ErrorKind::VmmFailed, other.to_string()),
    }
}
