//! Boots a guest: for a sandbox created with `--cold`, and once for each template.

use std::fs::File;
use std::io::Seek;
use std::os::fd::AsFd;

use rustix::net::SocketType;
use thaw_failpoint::{Failpoint, reach};
use thaw_pools::vmm;
use thaw_protocol::control::{Backend, Command, DeviceId, FreezeKind, MemoryMode, Response};

use super::Node;
use super::backends::{Backends, Ends};
use super::create::Making;
use super::machine::{doorbell, explain, times, unexpected_answer};
use super::pagemap::pagemap;
use super::retry::retry_once;
use super::spec::new_record;
use crate::error::Error;
use crate::handshake::Performed;
use crate::snapshot::SigningKey;
use crate::state::Record;
use crate::template::command_line::cold_command_line;
use crate::template::{FrozenInto, Progress, Recipe, Shape, Step, Template, Templates};
use crate::trace::{Trace, monotonic_ns};

impl Making<'_> {
    /// Boots it and waits until its agent rings the doorbell. Returns when it rang, CLOCK_MONOTONIC nanoseconds.
    pub(super) async fn boot(&mut self) -> Result<u64, Error> {
        self.boot_with(cold_command_line()).await
    }

    async fn boot_with(&mut self, cmdline: String) -> Result<u64, Error> {
        let control = self.resources.control()?;
        let kernel = [self.files()?.kernel.as_fd()];
        let rang = match control.call(Command::Boot { cmdline }, &kernel).await {
            Ok(_) if !self.node.has_agents() => return self.bare_is_ready().await.map(|()| monotonic_ns()),
            Ok(_) => doorbell(control).await,
            Err(e) => Err(e.into()),
        };
        rang.map_err(|e| explain(e, &self.resources))
    }

    /// The stages of a boot, as the VMM and the guest timed them.
    pub(super) async fn trace_boot(&self, performed: &Performed) -> Result<(), Error> {
        let control = self.resources.control()?;
        let times = times(control).await?;
        let rang = control.life().borrow().doorbell.unwrap_or(times.entered);
        // The guest's clock and the host's tick alike but began at different times, so only the agent's own span is taken from the guest.
        let said = &performed.acknowledgement;
        let agent = said.agent_ready.saturating_sub(said.agent_started);
        let started = rang.saturating_sub(agent).max(times.entered);
        self.trace.add_monotonic("kernel", times.entered, started);
        self.trace.add_monotonic("agent", started, rang);
        Ok(())
    }
}

impl Templates {
    /// Returns the template of this shape. Builds it if it is missing, and then signs it if there is a key.
    ///
    /// A damaged template is removed and built again, once.
    ///
    /// # Errors
    /// [`ErrorKind::SnapshotDamaged`] if the template is damaged and cannot be built again, or the new one is damaged too.
    /// [`ErrorKind::SnapshotSignature`] if signatures are required and no trusted key has signed the template or can sign it.
    pub async fn get(
        &self,
        node: &Node,
        shape: Shape,
        key: Option<SigningKey>,
        progress: &Progress,
    ) -> Result<Template, Error> {
        let recipe = Recipe::of(shape);
        let freeze = async |files| freeze_template(node, &recipe, files, progress).await;
        self.get_by(recipe.clone(), key, progress, freeze).await
    }
}

/// Boots a guest from `recipe`, freezes it once its agent listens, and thaws it once. The thaw proves that the template works, and records
/// which pages a guest touches until it has its identity. The guest has only what every clone needs: the guest image, a vsock and a
/// console. Its directory is a spare's, so no user sees it, and the next start removes what a killed builder leaves.
async fn freeze_template(
    node: &Node,
    recipe: &Recipe,
    into: FrozenInto,
    progress: &Progress,
) -> Result<(), Error> {
    let again = |text: &str| progress(Step::Again(text.to_owned()));
    retry_once(again, || boot_and_freeze(node, recipe, &into, progress)).await?;
    retry_once(again, || rehearse(node, recipe, &into)).await
}

/// Empties files that a lost machine may have begun to write.
fn empty<const N: usize>(files: [&File; N]) -> Result<(), Error> {
    let emptied = files
        .into_iter()
        .try_for_each(|mut file| file.set_len(0).and_then(|()| file.rewind()));
    emptied.map_err(|e| Error::system("cannot empty a snapshot's file", &e))
}

async fn boot_and_freeze(
    node: &Node,
    recipe: &Recipe,
    into: &FrozenInto,
    progress: &Progress,
) -> Result<(), Error> {
    empty([&into.state, &into.memory])?;
    let trace = Trace::new();
    let mut making = Making::begin(&node.run.spares(), node, template_record(recipe)?, &trace)?;
    progress(Step::Booting);
    let machine = super::wanted_machine::machine(recipe.shape, true);
    making.spawn(machine).await?;
    making.attach_to_template().await?;
    making.boot_with(recipe.command_line.clone()).await?;
    reach(Failpoint::TemplateBooted);
    progress(Step::Freezing);
    let frozen = freeze(&making, into).await;
    frozen.map_err(|e| explain(e, &making.resources))?;
    reach(Failpoint::TemplateFrozen);
    drop(tokio::task::spawn_blocking(move || drop(making.resources)).await);
    Ok(())
}

fn template_record(recipe: &Recipe) -> Result<Record, Error> {
    Ok(Record {
        image: "(template)".into(),
        vcpus: recipe.shape.vcpus,
        memory_mib: recipe.shape.memory_mib,
        ..new_record()?
    })
}

impl Making<'_> {
    /// Attaches the backends for the boot of a template and for its test thaw. Returns the devices without a backend.
    async fn attach_to_template(&mut self) -> Result<Vec<DeviceId>, Error> {
        let vsock = vmm::listen(&self.resources.directory.vsock_socket(), SocketType::STREAM)?;
        let ends = Ends::make(self.node.images.clone(), &self.resources.given, false)?;
        let mut backends = Backends::default();
        backends.attach(DeviceId::Vsock, Backend::Vsock, &vsock);
        backends.attach(DeviceId::Pmem0, Backend::Pmem, &self.files()?.guest_image);
        backends.attach(DeviceId::Console, Backend::Console, &ends.console_pipe);
        let empty = backends.send(self.resources.control()?).await?;
        self.resources.console = Some(ends.console);
        Ok(empty)
    }
}

async fn freeze(making: &Making<'_>, into: &FrozenInto) -> Result<(), Error> {
    let control = making.resources.control()?;
    let pagemap = pagemap(making.record.vmm)?;
    control.call(Command::Pause, &[]).await?;
    let fds = [into.state.as_fd(), into.memory.as_fd(), pagemap.as_fd()];
    let kind = FreezeKind::Full;
    match control.call(Command::Freeze { kind }, &fds).await? {
        Response::Frozen { memory_bytes } => {
            tracing::info!(memory_bytes, "frozen");
            Ok(())
        }
        other => Err(unexpected_answer(&other)),
    }
}

/// Thaws the new template once under a throw-away identity, and records which pages this touched.
async fn rehearse(node: &Node, recipe: &Recipe, into: &FrozenInto) -> Result<(), Error> {
    empty([&into.working_set])?;
    let trace = Trace::new();
    let record = Record {
        vcpus: 1,
        ..template_record(recipe)?
    };
    let memory_mib = record.memory_mib;
    let mut making = Making::begin(&node.run.spares(), node, record, &trace)?;
    let machine = super::wanted_machine::machine(recipe.shape, true);
    making.spawn(machine).await?;
    let restore = Command::Restore {
        layers: 1,
        working_set: false,
        mode: MemoryMode::Cow,
    };
    let control = making.resources.control()?;
    let restored = control
        .call(restore, &[into.state.as_fd(), into.memory.as_fd()])
        .await;
    restored.map_err(|e| explain(e.into(), &making.resources))?;
    let empty = making.attach_to_template().await?;
    making.thaw(memory_mib, empty).await?;
    making.give_identity(None, true).await?;
    let pagemap = pagemap(making.record.vmm)?;
    let control = making.resources.control()?;
    let recorded = control
        .call(Command::WorkingSet, &[into.working_set.as_fd(), pagemap.as_fd()])
        .await;
    recorded.map_err(|e| explain(e.into(), &making.resources))?;
    reach(Failpoint::TemplateRehearsed);
    drop(tokio::task::spawn_blocking(move || drop(making.resources)).await);
    Ok(())
}
