//! Thaws a guest: from a template for a new sandbox, or from a snapshot of a running one.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use thaw_failpoint::{Failpoint, reach};
use thaw_pools::process::{ProcessRecord, Stat};
use thaw_pools::resource::SlowReason;
use thaw_protocol::control::{Command, DeviceId, MachineSpec, MappedRegion, MemoryMode, Response};

use super::create::Making;
use super::machine::{explain, spawn, unexpected_answer};
use super::parked::{self, ParkedWant};
use super::retry::with_end_reason;
use super::{Node, Origin, SandboxSpec};
use crate::control_client::{ControlClient, Pending};
use crate::error::{Error, ErrorKind};
use crate::page_server::{FileSource, PageServer};
use crate::slow::Slow;
use crate::snapshot::Registered;
use crate::template::command_line::{command_line, has_test_hooks};
use crate::template::{Progress, Shape, Step};
use crate::trace::Trace;

/// The device through which a process without the privilege watches page faults of the kernel.
const USERFAULTFD: &str = "/dev/userfaultfd";

/// Resources that a machine restored from a snapshot needs for as long as it runs.
pub(super) struct RestoredMemory {
    /// Serves its memory, if that is not mapped from a file.
    pub pages: Option<PageServer>,
}

impl Making<'_> {
    /// A machine with the template for this sandbox in it, parked.
    pub(super) async fn restore_template(
        &mut self,
        spec: &SandboxSpec,
        building: Progress,
    ) -> Result<(), Error> {
        refuse_test_hooks(self.node, &command_line())?;
        refuse_untethered_pages(spec.memory_mode, spec.tethered)?;
        let (node, trace) = (self.node, self.trace);
        let (shape, held) = find_template(node, spec).await?;
        let machine = machine(shape, spec.tethered);
        let why = match &held {
            Some(template) => self.take_parked(&machine, template.clone(), spec.memory_mode)?,
            None => Some(SlowReason::NoPool),
        };
        let Some(why) = why else { return Ok(()) };
        let text = format!("no machine was parked with this template in it ({why}): one was restored now");
        trace.reason(Slow::NoParkedVm, &text);
        let account = trace.clone();
        let building: Progress = Arc::new(move |step| {
            if let Step::Again(why) = &step {
                account.reason(Slow::MadeAgain, why);
            }
            building(step);
        });
        let template = async {
            let _stage = trace.stage("template");
            match held {
                Some(registered) => Ok((registered, false)),
                None => {
                    let template = node.templates.get(node, shape, None, &building).await?;
                    Ok((template.registered, template.built))
                }
            }
        };
        let spawned = spawn(
            node,
            &self.program,
            &self.files,
            machine,
            &mut self.resources,
            &mut self.record,
            trace,
        );
        let ((template, built), ()) = tokio::try_join!(template, spawned)?;
        if built {
            parked::drop_older(node, &template);
            trace.reason(Slow::TemplateBuilt, "the template was built this time");
        }
        self.restore(template, spec.memory_mode).await
    }

    /// Takes a machine that is parked with the template, or returns why there is none.
    fn take_parked(
        &mut self,
        machine: &MachineSpec,
        template: Arc<Registered>,
        mode: MemoryMode,
    ) -> Result<Option<SlowReason>, Error> {
        let want = ParkedWant {
            machine: machine.clone(),
            template,
            mode,
        };
        let spare = match parked::ready(self.node, &want) {
            Ok(spare) => spare,
            Err(why) => return Ok(Some(why)),
        };
        let _stage = self.trace.stage("claim");
        self.trace
            .note("claim", "a machine was parked with this template in it");
        if let Some(restored) = spare.assign_to(&mut self.resources, &mut self.record)? {
            self.trace.count("populated_pages", restored.populated_pages);
        }
        self.origin = Some(Origin::of(want.template));
        Ok(None)
    }

    /// Loads a snapshot into the machine.
    pub(super) async fn restore(&mut self, from: Arc<Registered>, mode: MemoryMode) -> Result<(), Error> {
        if from.files.working_set.is_none() && mode != MemoryMode::Populate {
            let text = "the snapshot has no working set: pages come one fault at a time";
            self.trace.reason(Slow::NoWorkingSet, text);
        }
        if from.take_just_read() {
            let text = "the snapshot was read and compared with its hashes this time";
            self.trace.reason(Slow::SnapshotVerified, text);
        }
        let parked = {
            let _stage = self.trace.stage("restore");
            restore(
                self.resources.control()?,
                &from,
                mode,
                self.record.vmm,
                self.trace,
            )
            .await
        };
        let parked = parked.map_err(|e| of_snapshot(explain(e, &self.resources), &from))?;
        reach(Failpoint::CreateRestored);
        self.resources.pages = parked.pages;
        self.origin = Some(Origin::of(from));
        Ok(())
    }

    /// Resumes it, without backends for the devices in `empty`.
    pub(super) async fn thaw(&mut self, memory_mib: u32, empty: Vec<DeviceId>) -> Result<(), Error> {
        let thaw = Command::Thaw { memory_mib, empty };
        match self.resources.control()?.request(thaw, &[]).await {
            Ok(thawing) => self.await_thaw(thawing).await,
            Err(e) => Err(explain(
                with_end_reason(e.into(), &self.resources).await,
                &self.resources,
            )),
        }
    }

    /// Waits until it is resumed.
    pub(super) async fn await_thaw(&mut self, thawing: Pending) -> Result<(), Error> {
        let thawed = {
            let _stage = self.trace.stage("thaw");
            thawing.answer().await
        };
        reach(Failpoint::CreateRunning);
        match thawed {
            Ok(_) => Ok(()),
            Err(e) => Err(explain(
                with_end_reason(e.into(), &self.resources).await,
                &self.resources,
            )),
        }
    }

    /// Runs after the acknowledgement: reads from the machine how its start went.
    pub(super) async fn thawed(&mut self) {
        let Ok(control) = self.resources.control() else {
            return;
        };
        // If the machine has ended meanwhile, the task that monitors it reports that.
        if let Ok(Response::Status { times, faults, .. }) = control.call(Command::Status, &[]).await {
            tracing::debug!(faults, "page faults of the vCPUs up to the acknowledgement");
            self.trace.add_monotonic("entry", times.thawed, times.entered);
            self.trace.count("faults", faults);
        }
        if let Some(pages) = self
            .record
            .vmm
            .and_then(|v| Stat::of(v.pid))
            .map(|s| s.major_faults)
            && pages > 0
        {
            let text =
                format!("{pages} page faults waited for the disk: the snapshot was not in the page cache");
            self.trace.reason(Slow::PagesNotResident, &text);
        }
    }
}

/// The shape of the template for this sandbox, and the template if this process holds it. Uses another thread only if a file must be
/// read.
async fn find_template(node: &Node, spec: &SandboxSpec) -> Result<(Shape, Option<Arc<Registered>>), Error> {
    let (cpus, memory) = (spec.vcpus, spec.memory_mib);
    if let Some((shape, template)) = node.templates.at_hand(cpus, memory) {
        return Ok((shape, Some(template)));
    }
    let store = node.templates.clone();
    crate::blocking::blocking(move || {
        let shape = store.shape_for(cpus, memory, &command_line());
        Ok((shape, store.held(shape)))
    })
    .await
}

/// Adds the snapshot's path to a refusal of the VMM, which knows the snapshot only by its descriptors.
fn of_snapshot(refusal: Error, from: &Registered) -> Error {
    match refusal.kind {
        ErrorKind::SnapshotDamaged | ErrorKind::SnapshotIncompatible => {
            let what = format!("the snapshot at {}: {}", from.directory.display(), refusal.what);
            Error { what, ..refusal }
        }
        _ => refusal,
    }
}

/// The machine into which a template of this shape is restored.
pub(super) fn machine(shape: Shape, tethered: bool) -> MachineSpec {
    MachineSpec {
        vcpus: shape.vcpus,
        memory_mib: shape.memory_mib,
        cpu: shape.cpu,
        tethered,
    }
}

/// Refuses a guest that was weakened for a test, unless this node accepts those.
pub(super) fn refuse_test_hooks(node: &Node, command_line: &str) -> Result<(), Error> {
    if !node.test_templates && has_test_hooks(command_line) {
        let what = "this guest was weakened for a test by a thaw.test= word on its kernel's command line";
        return Err(
            Error::new(ErrorKind::SnapshotIncompatible, what).remedy("start thawd with --test-templates")
        );
    }
    Ok(())
}

/// Refuses to serve the memory of a machine that may outlive this process: its faults would then wait for ever.
pub(super) fn refuse_untethered_pages(mode: MemoryMode, tethered: bool) -> Result<(), Error> {
    if mode == MemoryMode::Uffd && !tethered {
        let what = "a sandbox that outlives this process cannot have its memory served by it page by page";
        return Err(Error::new(ErrorKind::Runtime, what).remedy("choose memory mode cow or populate"));
    }
    Ok(())
}

/// Loads a snapshot into a created machine.
pub(super) async fn restore(
    control: &ControlClient,
    from: &Arc<Registered>,
    mode: MemoryMode,
    vmm: Option<ProcessRecord>,
    trace: &Trace,
) -> Result<RestoredMemory, Error> {
    let watched = match mode {
        MemoryMode::Uffd => Some(open_userfaultfd(from)?),
        MemoryMode::Cow | MemoryMode::Populate => None,
    };
    let (restore, fds) = from
        .files
        .restore(mode, watched.as_ref().map(|device| device.as_fd()));
    let (regions, descriptors) = match control.call_for_descriptors(restore, &fds).await? {
        (
            Response::Restored {
                regions,
                populated_pages,
                populate_ns,
            },
            descriptors,
        ) => {
            tracing::debug!(populated_pages, populate_us = populate_ns / 1000, "restored");
            trace.count("populated_pages", populated_pages);
            (regions, descriptors)
        }
        (other, _) => return Err(unexpected_answer(&other)),
    };
    let pages = match (watched, descriptors.into_iter().next()) {
        (None, _) => None,
        (Some(_), None) => return Err(Error::new(ErrorKind::VmmFailed, "thaw-vmm made no userfaultfd")),
        (Some(_), Some(userfaultfd)) => Some(page_server(from, userfaultfd, &regions, vmm)?),
    };
    Ok(RestoredMemory { pages })
}

fn page_server(
    from: &Registered,
    userfaultfd: OwnedFd,
    regions: &[MappedRegion],
    vmm: Option<ProcessRecord>,
) -> Result<PageServer, Error> {
    let fail = |e: std::io::Error| Error::system("cannot serve the machine's memory", &e);
    let memory = from.files.memory[0].try_clone().map_err(fail)?;
    let source = FileSource::new(memory.into(), &from.manifest.files.memory);
    // The machine waits for a page that cannot be served. Its log and thawd's name the page.
    let broken = move |_| {
        vmm.map(|v| v.kill());
    };
    PageServer::start(userfaultfd, regions, source, broken).map_err(fail)
}

fn open_userfaultfd(from: &Registered) -> Result<OwnedFd, Error> {
    if from.files.memory.len() != 1 {
        let what = format!(
            "{} is a delta: its memory cannot be served page by page",
            from.directory.display()
        );
        return Err(
            Error::new(ErrorKind::SnapshotIncompatible, what).remedy("choose --memory-mode cow or populate")
        );
    }
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(USERFAULTFD);
    let fail = |e: std::io::Error| {
        Error::system(format!("cannot open {USERFAULTFD}"), &e).remedy(
            "this needs Linux 6.1 with CONFIG_USERFAULTFD and the right to open it; or --memory-mode cow",
        )
    };
    Ok(file.map_err(fail)?.into())
}
