//! Spares: machines made before it is known which sandbox will use them.
//!
//! Each spare has a directory under the run directory's `spares`, with a record, as a sandbox has. So the next start finds and removes what
//! a killed thawd left. A sandbox that takes a spare takes its directory, and its id too unless it continues a paused sandbox: the record
//! is replaced, then the directory moves.
//! Invariant: a thaw-vmm is in a record before it has a machine, and in one record from then on.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use thaw_failpoint::{Failpoint, reach};
use thaw_pools::cgroup::{Cgroup, Cgroups};
use thaw_pools::resource::{Kind, Unfit};
use thaw_pools::vmm;
use thaw_protocol::control::MachineSpec;
use tokio::runtime::Handle;

use super::files::{open_guest_image, open_kvm};
use super::fitted::{Fitted, Fitting};
use super::pools::Claimed;
use super::spec::new_record;
use super::vmm_log::LOG;
use super::{Node, Pools, Required, Resources, host_limits, kept_components, machine};
use crate::control_client::{ControlClient, Vmm};
use crate::error::{Error, ErrorKind};
use crate::images::Images;
use crate::paths::Paths;
use crate::snapshot::{Kind as SnapshotKind, Registered};
use crate::state::{NameHeld, Record, RunDirectory, SandboxDirectory};
use crate::template::Templates;
use crate::vm::{MachineError, Process, Restored, Shell, Vm, VmmOptions};

/// A machine that no sandbox has taken yet. Dropping it ends it.
pub struct Spare {
    // Fields drop in this order: the machine is killed and reaped before what it uses is removed.
    vm: Vm,
    /// What is attached to it already.
    fitted: Option<Fitted>,
    cgroup: Option<Claimed<Cgroups>>,
    directory: SandboxDirectory,
    record: Record,
}

/// Which id a sandbox has that takes a spare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Id {
    /// The spare's.
    OfSpare,
    /// The one in its record: it continues a paused sandbox.
    Kept,
}

/// A spare's machine, as the sandbox that took it has it.
pub(super) struct Taken {
    pub restored: Option<Restored>,
    pub fitted: Option<Fitted>,
}

impl Spare {
    /// Whether it is still usable.
    pub(super) fn check(&self, pools: &Pools) -> Result<(), Unfit> {
        self.vm.check()?;
        match self.fitted.as_ref().and_then(|fitted| fitted.network.as_ref()) {
            Some(slot) => pools.networks.kind().check(slot),
            None => Ok(()),
        }
    }

    /// It is complete: from now on its machine has the priority of others.
    pub(super) fn complete(self) -> Spare {
        self.vm.process().raise_priority();
        self
    }

    /// Whether devices are attached to it.
    pub(super) fn is_fitted(&self) -> bool {
        self.fitted.is_some()
    }

    /// Gives the machine and its directory to a sandbox, and the spare's id unless that is kept. If this fails, it ends all of them.
    pub(super) fn give_to(
        self,
        run: &RunDirectory,
        (record, id): (&mut Record, Id),
        name: NameHeld,
        required: Required,
    ) -> Result<(Resources, Taken), Error> {
        if id == Id::OfSpare {
            record.id = self.record.id;
        }
        record.control = self.vm.control_version();
        let (process, control, restored) = self.vm.into_parts();
        let vmm = Vmm(process.record().pid);
        record.vmm = Some(process.record());
        record.cgroup = self.cgroup.as_ref().map(|c| c.name().to_owned());
        let control = ControlClient::made(control, vmm, record.control)?;
        let directory = run.take(self.directory, record, name)?;
        let mut resources = Resources::new(directory, required.limits);
        resources.vmm = Some(process);
        resources.cgroup = self.cgroup;
        resources.control = Some(control.into());
        let fitted = self.fitted;
        Ok((resources, Taken { restored, fitted }))
    }
}

/// Makes spares.
#[derive(Debug)]
pub(super) struct Spares {
    run: RunDirectory,
    paths: Paths,
    templates: Templates,
    images: Images,
    pub pools: Arc<Pools>,
    require: Required,
    /// The runtime on which the host's ends of devices are served.
    runtime: Handle,
}

impl Spares {
    /// The maker of a node's spares. Must be called within a tokio runtime.
    pub(super) fn of(node: &Node) -> Spares {
        Spares {
            run: node.run.spares(),
            paths: node.paths.clone(),
            templates: node.templates.clone(),
            images: node.images.clone(),
            pools: node.pools.clone(),
            require: node.require,
            runtime: Handle::current(),
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
            Err(e) if self.require.limits => return Err(host_limits::unlimited(e)),
            // The process runs in the cgroup of this process.
            Err(_) => None,
        };
        let mut record = Record {
            image: "(spare)".into(),
            cgroup: cgroup.as_ref().map(|c| c.name().to_owned()),
            tethered: machine.tethered,
            vcpus: machine.vcpus,
            memory_mib: machine.memory_mib,
            ..new_record()?
        };
        let (vm, directory) = self.begin(machine, &mut record, cgroup.as_deref(), on)?;
        Ok(Spare {
            vm,
            fitted: None,
            cgroup,
            directory,
            record,
        })
    }

    /// Attaches to a machine that is parked with `origin` in it what every sandbox of its pool has, and sets the limits of a sandbox of
    /// the machine's size.
    ///
    /// # Errors
    /// The guest image that `origin` was made with is not here.
    pub(super) fn fit(&self, spare: &mut Spare, origin: &Registered, fitting: Fitting) -> Result<(), Error> {
        let _runtime = self.runtime.enter();
        let vsock = spare.directory.vsock_socket();
        let guest_image = self.guest_image(origin)?;
        let (pools, images, vm) = (&self.pools, &self.images, &mut spare.vm);
        let mut fitted = Fitted::make(pools, images, &guest_image, (origin, fitting), &vsock, vm)?;
        if let Some(disk) = &fitted.disk {
            let (record, cgroup) = (&spare.record, spare.cgroup.as_deref());
            host_limits::set_now(self.require.limits, cgroup, record, &disk.file, 0)?;
            host_limits::set_files(spare.vm.process(), record, &disk.file)?;
            fitted.attached.limited_to_mib = Some(record.memory_mib);
        }
        reach(Failpoint::SpareFitted);
        spare.fitted = Some(fitted);
        Ok(())
    }

    /// The guest image that the guest has mapped.
    fn guest_image(&self, origin: &Registered) -> Result<OwnedFd, Error> {
        let subject = &origin.manifest.subject;
        if subject.kind == SnapshotKind::Sandbox
            && let Some(kept) =
                kept_components::guest_image(&self.templates, &self.paths, subject.guest_image)?
        {
            return Ok(kept.into());
        }
        let guest_image = open_guest_image(&self.paths)?;
        // Looked at after it was opened: a file that is replaced meanwhile does not pass.
        if subject
            .guest_image
            .is_some_and(|image| !self.templates.has_guest_image(image))
        {
            let what = "the guest image is not the one that this snapshot or template was made with";
            return Err(Error::new(ErrorKind::SnapshotIncompatible, what));
        }
        Ok(guest_image)
    }

    fn begin(
        &self,
        machine: &MachineSpec,
        record: &mut Record,
        cgroup: Option<&Cgroup>,
        on: impl FnOnce(Shell) -> Result<Vm, MachineError>,
    ) -> Result<(Vm, SandboxDirectory), Error> {
        let (program, kvm) = (vmm::find()?, open_kvm(Path::new("/dev/kvm"))?);
        let directory = self.run.create(record)?;
        reach(Failpoint::SpareDirectoryMade);
        let options = VmmOptions {
            control: directory.control_socket(),
            log: directory.path().join(LOG),
            tethered: machine.tethered,
            jail: self.require.jail(),
        };
        let process = Process::start(&program, &options).map_err(machine::failure)?;
        record.vmm = Some(process.process().record());
        directory.write(record)?;
        reach(Failpoint::SpareRecorded);
        host_limits::enter(self.require.limits, cgroup, process.process())?;
        reach(Failpoint::SpareInCgroup);
        let shell = process
            .create(kvm.as_fd(), machine.clone())
            .map_err(machine::failure)?;
        reach(Failpoint::SpareMachineMade);
        Ok((on(shell).map_err(machine::failure)?, directory))
    }
}
