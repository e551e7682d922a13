//! Begins a sandbox with a machine that was made ahead, if one waits: parked, or else a shell.
//!
//! Invariant: a request that is refused for its name costs no spare.

use thaw_protocol::control::MachineSpec;

use super::create::Making;
use super::files::MachineFiles;
use super::parked::{self, ParkedWant};
use super::spare::{Id, Spare, Taken};
use super::{Node, Origin, Resources, shells};
use crate::error::Error;
use crate::slow::Slow;
use crate::state::{NameHeld, Record};
use crate::trace::Trace;

impl<'a> Making<'a> {
    /// Begins a sandbox. `parked` is given for a sandbox that this node holds a template or a snapshot for. Notes in the trace what was
    /// ready.
    pub(super) fn claim(
        node: &'a Node,
        (record, id): (Record, Id),
        machine: &MachineSpec,
        parked: Option<ParkedWant>,
        trace: &'a Trace,
    ) -> Result<Making<'a>, Error> {
        let name = node.run.hold_name(&record)?;
        node.paused.refuse_used_name(&record)?;
        let why = match parked {
            Some(want) => match parked::ready(node, &want) {
                Ok(spare) => {
                    let _stage = trace.stage("claim");
                    let kind = want.origin.manifest.subject.kind.noun();
                    trace.note("claim", &format!("a machine was parked with this {kind} in it"));
                    let mut making = Making::of_spare(node, (record, id), spare, name, trace)?;
                    making.origin = Some(Origin::of(want.origin));
                    return Ok(making);
                }
                Err(why) => Some((why, want.origin.manifest.subject.kind.noun())),
            },
            None => None,
        };
        if let Some((why, kind)) = why {
            let text = format!("no machine was parked with this {kind} in it ({why}): one was restored now");
            trace.reason(Slow::NoParkedVm, &text);
        }
        match shells::ready(node, machine) {
            Ok(shell) => {
                let _stage = trace.stage("spawn");
                trace.note("spawn", "a thaw-vmm was waiting in its pool");
                Making::of_spare(node, (record, id), shell, name, trace)
            }
            Err(why) => {
                let text = format!("no thaw-vmm was waiting ({why}): one was started now");
                trace.reason(Slow::NoShell, &text);
                drop(name);
                Making::begin(&node.run, node, record, trace)
            }
        }
    }

    fn of_spare(
        node: &'a Node,
        (record, id): (Record, Id),
        spare: Spare,
        name: NameHeld,
        trace: &'a Trace,
    ) -> Result<Making<'a>, Error> {
        let mut record = Record {
            stock: node.stock.clone(),
            ..record
        };
        let files = match spare.is_fitted() {
            true => None,
            false => Some(MachineFiles::open(&node.paths)?),
        };
        let (resources, taken) = spare.give_to(&node.run, (&mut record, id), name, node.require)?;
        let Taken { restored, fitted } = taken;
        if let Some(restored) = restored {
            trace.count("populated_pages", restored.populated_pages);
        }
        let mut making = Making::over(node, trace, files, record, resources);
        if let Some(fitted) = &fitted {
            making.resources.given = fitted.given.clone();
        }
        making.fitted = fitted;
        Ok(making)
    }

    /// A sandbox of these resources, in whose machine nothing is yet.
    pub(super) fn over(
        node: &'a Node,
        trace: &'a Trace,
        files: Option<MachineFiles>,
        record: Record,
        resources: Resources,
    ) -> Making<'a> {
        Making {
            node,
            trace,
            files,
            record,
            resources,
            origin: None,
            fitted: None,
            unasked: None,
        }
    }
}
