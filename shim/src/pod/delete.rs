//! Removing a task, or a process of one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use thaw_protocol::shim::MessageField;
use thaw_protocol::shim::task_events::TaskDelete;
use ttrpc::Code;

use super::create::hook_state;
use super::{Pod, Slot, is_the_last};
use crate::agent::CHANGE_LIMIT;
use crate::container::Container;
use crate::delete::END_LIMIT;
use crate::error::{Error, Result};
use crate::events::Event;
use crate::hooks;
use crate::machine::{Machine, Note};
use crate::process::{Exit, KILLED, Phase, Process};
use crate::stdio::DRAIN_LIMIT;
use crate::warning;

/// How long a guest may take to write back what it shares, when it is to be ended.
const WRITE_BACK_LIMIT: Duration = Duration::from_secs(10);
/// How long a guest that answers may take to remove a container in all: it may have much to write back.
const REMOVED_LIMIT: Duration = Duration::from_secs(600);

impl Pod {
    /// Removes a process that has ended, or was never started; with the container's own, the container.
    pub async fn delete(self: &Arc<Pod>, id: &str, exec_id: &str) -> Result<Exit> {
        let container = self.container(id)?;
        let process = container.process(exec_id)?;
        match process.phase() {
            Phase::Ended(_) | Phase::Created => {}
            Phase::Starting | Phase::Running => {
                let what = format!("process {} is running: kill it first", process.id.exec);
                return Err(Error::State(what));
            }
        }
        if !exec_id.is_empty() {
            container.forget(exec_id);
            drain(&process).await;
            // What was added and never started has not failed.
            return Ok(match process.phase() {
                Phase::Created => Exit::now(0),
                _ => ended_with(&process),
            });
        }
        self.take(id)?;
        if let Err(e) = self.remove(&container).await {
            self.table().insert(id.to_owned(), Slot::Made(container));
            return Err(e);
        }
        let exit = ended_with(&process);
        self.events.publish(&Event::Delete(TaskDelete {
            container_id: id.into(),
            pid: self.pid(),
            exit_status: exit.status,
            exited_at: MessageField::some(exit.at.clone()),
            ..Default::default()
        }));
        Ok(exit)
    }

    /// Takes a container out of the table: of two who delete it, one does.
    fn take(&self, id: &str) -> Result<()> {
        let mut table = self.table();
        match table.get(id) {
            Some(Slot::Made(_)) => {
                table.remove(id);
                Ok(())
            }
            Some(Slot::Making) | None => Err(Error::NotFound(format!("container {id}"))),
        }
    }

    async fn remove(self: &Arc<Pod>, container: &Arc<Container>) -> Result<()> {
        let machine = self.machine()?;
        for process in container.processes() {
            if matches!(process.phase(), Phase::Ended(_)) {
                drain(&process).await;
            }
        }
        // With the pod's own, or the only one, the whole machine goes.
        if is_the_last(&container.role) {
            let has_of_the_host = !container.shares().is_empty();
            self.end_last(machine, container).await;
            // Whoever removes its root or detaches its device next would find them in use.
            if has_of_the_host && tokio::time::timeout(END_LIMIT, self.ended()).await.is_err() {
                warning!(
                    "microVM {} is left to thawd: it has not ended yet",
                    machine.sandbox
                );
            }
        } else {
            self.remove_in_guest(machine, container).await?;
            let shares = std::mem::take(&mut *container.shares());
            self.let_go(machine, shares).await;
        }
        for process in container.processes() {
            process.end(Exit::now(KILLED));
            if let Some(mut streams) = process.streams().take() {
                streams.let_go();
            }
        }
        let state = hook_state(container, machine, "stopped");
        hooks::run_each(&container.hooks.poststop, state).await;
        // The `delete` command is run all the same, and has nothing left to do.
        Note::remove(&container.bundle);
        Ok(())
    }
}

impl Pod {
    /// Has the guest remove it. A guest that answers nothing is ended, and so is one that does not remove it for all its time.
    async fn remove_in_guest(self: &Arc<Pod>, machine: &Machine, container: &Container) -> Result<()> {
        let since = container.removing.get_or_init(Instant::now);
        match machine.agent.remove(container.guest_id(), CHANGE_LIMIT).await {
            Err(e @ Error::Silent { .. })
                if since.elapsed() >= REMOVED_LIMIT || !machine.agent.answers().await =>
            {
                warning!("microVM {} is ended: {e}", machine.sandbox);
                self.end_machine();
                Ok(())
            }
            // It was removed before, when we had given up.
            Err(Error::Agent {
                code: Code::INVALID_ARGUMENT,
                ..
            }) => Ok(()),
            Err(e) if e.is_ended() => Ok(()),
            done => done,
        }
    }

    /// Has the guest give back what it holds of the host's files before its machine is ended: what was written through mappings is nowhere
    /// else. A guest that does not is not waited for long.
    pub(super) async fn write_back(&self, machine: &Machine, container: &Container) {
        match machine.agent.remove(&container.id, WRITE_BACK_LIMIT).await {
            Err(e) if !e.is_ended() => warning!(
                "what container {} shares may not be written back: {e}",
                container.id
            ),
            Ok(()) | Err(_) => {}
        }
    }
}

/// Lets a client take what is left of the output; one that does not take it is not waited for.
async fn drain(process: &Process) {
    let drained = process.streams().as_ref().map(|streams| streams.drained());
    if let Some(drained) = drained
        && tokio::time::timeout(DRAIN_LIMIT, drained).await.is_err()
    {
        warning!(
            "output of process {} is dropped: nobody takes it",
            process.id.exec
        );
    }
    if let Some(mut streams) = process.streams().take() {
        streams.let_go();
    }
}

/// What never ran was killed.
fn ended_with(process: &Process) -> Exit {
    process.end(Exit::now(KILLED));
    match process.phase() {
        Phase::Ended(exit) => exit,
        Phase::Created | Phase::Starting | Phase::Running => Exit::now(KILLED),
    }
}
