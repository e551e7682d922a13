//! The machine that a request needs, and what may be restored into it.
//!
//! Invariant: a guest that was weakened for a test, and memory that this process would have to serve after its end, are refused before
//! anything is made.

use std::sync::Arc;

use thaw_protocol::control::{CpuBaseline, MachineSpec, MemoryMode};

use super::fitted::Fitting;
use super::parked::ParkedWant;
use super::{Node, SandboxSpec};
use crate::error::{Error, ErrorKind};
use crate::snapshot::Registered;
use crate::template::Shape;
use crate::template::command_line::{command_line, has_test_hooks};

/// The machine of a new sandbox.
pub(super) struct WantedMachine {
    pub machine: MachineSpec,
    /// The template that is restored into it. `None` for a guest that is booted.
    pub template: Option<Known>,
}

impl WantedMachine {
    /// Finds out what a request needs. Uses another thread only if a file must be read.
    ///
    /// # Errors
    /// Those of [`Known::find`].
    pub(super) async fn of(node: &Node, spec: &SandboxSpec) -> Result<WantedMachine, Error> {
        let template = match spec.cold {
            true => None,
            false => Some(Known::find(node, spec).await?),
        };
        let machine = match &template {
            Some(known) => machine(known.shape, spec.tethered),
            None => own_size(spec),
        };
        Ok(WantedMachine { machine, template })
    }

    /// The parked machine that fits the request. `None` if it is booted, or if the template must be read first.
    pub(super) fn parked(&self, spec: &SandboxSpec) -> Option<ParkedWant> {
        Some(ParkedWant {
            machine: self.machine.clone(),
            origin: self.template.as_ref()?.template.clone()?,
            mode: spec.memory_mode,
            fitting: Fitting::of(spec),
        })
    }
}

/// A machine of the sandbox's own size, to be booted.
fn own_size(spec: &SandboxSpec) -> MachineSpec {
    MachineSpec {
        vcpus: spec.vcpus,
        memory_mib: spec.memory_mib,
        cpu: CpuBaseline::Host,
        tethered: spec.tethered,
    }
}

/// The template for a sandbox.
pub(super) struct Known {
    pub shape: Shape,
    /// `None` unless this process holds it.
    pub template: Option<Arc<Registered>>,
}

impl Known {
    /// Finds out what template a sandbox needs. Uses another thread only if a file must be read.
    ///
    /// # Errors
    /// The sandbox may not be thawed from a template as asked.
    async fn find(node: &Node, spec: &SandboxSpec) -> Result<Known, Error> {
        refuse_test_hooks(node, &command_line())?;
        refuse_untethered_pages(spec.memory_mode, spec.tethered)?;
        let (cpus, memory) = (spec.vcpus, spec.memory_mib);
        if let Some((shape, template)) = node.templates.at_hand(cpus, memory) {
            let template = Some(template);
            return Ok(Known { shape, template });
        }
        let store = node.templates.clone();
        crate::blocking::blocking(move || {
            let shape = store.shape_for(cpus, memory, &command_line());
            let template = store.held(shape);
            Ok(Known { shape, template })
        })
        .await
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
