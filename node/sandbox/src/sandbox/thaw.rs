//! Thaws a guest: from a template for a new sandbox, or from a snapshot of a running one.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use thaw_failpoint::{Failpoint, reach};
use thaw_pools::process::ProcessRecord;
use thaw_protocol::control::{Command, DeviceId, MachineSpec, MappedRegion, MemoryMode, Response};

use super::Origin;
use super::create::Making;
use super::machine::{explain, unexpected_answer};
use super::retry::with_end_reason;
use super::wanted_machine::Known;
use super::{parked, start_report, userfaultfd};
use crate::control_client::{ControlClient, Pending};
use crate::error::{Error, ErrorKind};
use crate::page_server::{FileSource, PageServer};
use crate::slow::Slow;
use crate::snapshot::Registered;
use crate::template::{Progress, Step};
use crate::trace::Trace;

/// Resources that a machine restored from a snapshot needs for as long as it runs.
pub(super) struct RestoredMemory {
    /// Serves its memory, if that is not mapped from a file.
    pub pages: Option<PageServer>,
}

impl Making<'_> {
    /// A machine with the template for this sandbox in it, parked.
    pub(super) async fn restore_template(
        &mut self,
        known: Known,
        machine: MachineSpec,
        mode: MemoryMode,
        building: Progress,
    ) -> Result<(), Error> {
        if self.origin.is_some() {
            return Ok(());
        }
        let (node, trace) = (self.node, self.trace);
        if known.template.is_none() {
            let text =
                "no machine was parked, for this process did not have the template: one was restored now";
            trace.reason(Slow::NoParkedVm, text);
        }
        let account = trace.clone();
        let building: Progress = Arc::new(move |step| {
            if let Step::Again(why) = &step {
                account.reason(Slow::MadeAgain, why);
            }
            building(step);
        });
        let template = async {
            let _stage = trace.stage("template");
            match known.template {
                Some(registered) => Ok((registered, false)),
                None => {
                    let template = node.templates.get(node, known.shape, None, &building).await?;
                    Ok((template.registered, template.built))
                }
            }
        };
        let ((template, built), ()) = tokio::try_join!(template, self.spawn(machine))?;
        if built {
            parked::drop_older(node, &template);
            trace.reason(Slow::TemplateBuilt, "the template was built this time");
        }
        self.restore(template, mode).await
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

    /// Runs after the acknowledgement: records that the sandbox is ready, and meanwhile asks the machine how its start went, if the trace is
    /// to have that.
    pub(super) async fn note_thawed(&mut self) -> Result<(), Error> {
        let trace = self.trace;
        let _stage = trace.stage("record");
        if !trace.is_detailed() {
            self.unasked = Some(trace.anew());
            return self.note_ready();
        }
        let (control, vmm) = (self.resources.control()?.clone(), self.record.vmm);
        // The request is sent first, so that the machine answers while this thread does the rest.
        let asked = start_report::ask(&control, vmm, trace);
        let ((), noted) = tokio::join!(asked, async { self.note_ready() });
        noted
    }
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

/// Loads a snapshot into a created machine.
pub(super) async fn restore(
    control: &ControlClient,
    from: &Arc<Registered>,
    mode: MemoryMode,
    vmm: Option<ProcessRecord>,
    trace: &Trace,
) -> Result<RestoredMemory, Error> {
    let watched = match mode {
        MemoryMode::Uffd => Some(userfaultfd_for(from)?),
        MemoryMode::Cow | MemoryMode::Populate => None,
    };
    let device = watched.as_ref().map(|device| device.as_fd());
    let (regions, userfaultfd) = load(control, from, mode, device, trace).await?;
    let pages = match (watched, userfaultfd) {
        (None, _) => None,
        (Some(_), None) => return Err(Error::new(ErrorKind::VmmFailed, "thaw-vmm made no userfaultfd")),
        (Some(_), Some(userfaultfd)) => Some(page_server(from, userfaultfd, &regions, vmm)?),
    };
    Ok(RestoredMemory { pages })
}

/// Loads a snapshot into a created machine. With [`MemoryMode::Uffd`], `device` is /dev/userfaultfd, and the VMM's mappings and its
/// userfaultfd are returned.
pub(super) async fn load(
    control: &ControlClient,
    from: &Registered,
    mode: MemoryMode,
    device: Option<BorrowedFd<'_>>,
    trace: &Trace,
) -> Result<(Vec<MappedRegion>, Option<OwnedFd>), Error> {
    let (restore, fds) = from.files.restore(mode, device);
    match control.call_for_descriptors(restore, &fds).await? {
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
            Ok((regions, descriptors.into_iter().next()))
        }
        (other, _) => Err(unexpected_answer(&other)),
    }
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

fn userfaultfd_for(from: &Registered) -> Result<OwnedFd, Error> {
    if from.files.memory.len() != 1 {
        let what = format!(
            "{} is a delta: its memory cannot be served page by page",
            from.directory.display()
        );
        return Err(
            Error::new(ErrorKind::SnapshotIncompatible, what).remedy("choose --memory-mode cow or populate")
        );
    }
    userfaultfd::open().map_err(|e| {
        e.remedy(
            "this needs Linux 6.1 with CONFIG_USERFAULTFD and the right to open it; or --memory-mode cow",
        )
    })
}
