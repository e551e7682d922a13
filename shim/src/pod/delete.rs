//! Deletes a task, or an exec of one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use thaw_protocol::shim::MessageField;
use thaw_protocol::shim::task_events::TaskDelete;
use ttrpc::Code;

use super::{Entry, Pod, ends_machine, hook_state};
use crate::agent::CHANGE_LIMIT;
use crate::container::Container;
use crate::error::{Error, Result};
use crate::events::Event;
use crate::hooks;
use crate::machine::{Machine, MachineRecord};
use crate::process::{Exit, KILLED, Phase, Process};
use crate::stdio::DRAIN_LIMIT;
use crate::thawd::END_LIMIT;
use crate::warning;

/// Limit for a guest to write back shared files before its machine is ended.
const WRITE_BACK_LIMIT: Duration = Duration::from_secs(10);
/// Total limit for a responsive guest to remove a container. It may have much to write back.
const REMOVED_LIMIT: Duration = Duration::from_secs(600);

impl Pod {
    /// Deletes a process that has ended or was never started, and with the init process the container.
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
            // An exec that was never started did not fail.
            return Ok(match process.phase() {
                Phase::Created => Exit::now(0),
                _ => ended_with(&process),
            });
        }
        self.deleting.send_modify(|deleting| *deleting += 1);
        let removed = container.removed.get_or_try_init(|| self.remove(&container));
        let exit = removed.await.cloned();
        self.deleting.send_modify(|deleting| *deleting -= 1);
        exit
    }

    /// Removes a deleted task from the table. To be called with the answer to its delete: a client that gave
    /// up before deletes the task again and gets the same answer.
    pub fn forget(&self, id: &str) {
        let mut table = self.table();
        if let Some(Entry::Created(container)) = table.get(id)
            && container.removed.initialized()
        {
            table.remove(id);
        }
    }

    async fn remove(self: &Arc<Pod>, container: &Arc<Container>) -> Result<Exit> {
        let machine = self.machine()?;
        for process in container.processes() {
            if matches!(process.phase(), Phase::Ended(_)) {
                drain(&process).await;
            }
        }
        // If it was not started, it cannot be any more, and no exit of it is published.
        let exit = ended_with(&container.init);
        // With the pod's own container, or the only one, the whole machine ends.
        if ends_machine(&container.role) {
            let has_of_the_host = !container.shares().is_empty();
            self.end_last(machine, container).await;
            // Wait for the end, so that a later removal of its root file system or detach of its device does
            // not find them in use.
            if has_of_the_host && tokio::time::timeout(END_LIMIT, self.ended()).await.is_err() {
                warning!("microVM {} has not ended yet; thawd will end it", machine.sandbox);
            }
        } else {
            self.remove_in_guest(machine, container).await?;
            let shares = std::mem::take(&mut *container.shares());
            self.release(machine, shares).await;
        }
        for process in container.processes() {
            process.end(Exit::now(KILLED));
            if let Some(mut streams) = process.streams().take() {
                streams.stop();
            }
        }
        let state = hook_state(container, machine, "stopped");
        hooks::run_each(&container.hooks.poststop, state).await;
        // containerd still runs the `delete` command, which then has nothing to do.
        MachineRecord::remove(&container.bundle);
        self.events.publish(&Event::Delete(TaskDelete {
            container_id: container.id.clone(),
            pid: self.pid(),
            exit_status: exit.status,
            exited_at: MessageField::some(exit.at.clone()),
            ..Default::default()
        }));
        Ok(exit)
    }
}

impl Pod {
    /// Removes the container in the guest. Ends the machine if the guest does not answer, or does not finish
    /// within [`REMOVED_LIMIT`].
    async fn remove_in_guest(self: &Arc<Pod>, machine: &Machine, container: &Container) -> Result<()> {
        let since = container.removing.get_or_init(Instant::now);
        match machine.agent.remove(container.guest_id(), CHANGE_LIMIT).await {
            Err(e @ Error::Silent { .. })
                if since.elapsed() >= REMOVED_LIMIT || !machine.agent.answers().await =>
            {
                warning!("ending microVM {}: {e}", machine.sandbox);
                self.end_machine();
                Ok(())
            }
            // An earlier call removed it after that call's time limit.
            Err(Error::Agent {
                code: Code::INVALID_ARGUMENT,
                ..
            }) => Ok(()),
            Err(e) if e.is_ended() => Ok(()),
            done => done,
        }
    }

    /// Removes the container in the guest before its machine is ended, so that the guest writes back the
    /// host's files: data written through mappings exists only in guest memory. Waits at most
    /// [`WRITE_BACK_LIMIT`].
    pub(super) async fn write_back(&self, machine: &Machine, container: &Container) {
        match machine.agent.remove(&container.id, WRITE_BACK_LIMIT).await {
            Err(e) if !e.is_ended() => warning!(
                "files shared with container {} may not be written back: {e}",
                container.id
            ),
            Ok(()) | Err(_) => {}
        }
    }
}

/// Waits until the client has read the remaining output, at most [`DRAIN_LIMIT`].
async fn drain(process: &Process) {
    let drained = process.streams().as_ref().map(|streams| streams.drained());
    if let Some(drained) = drained
        && tokio::time::timeout(DRAIN_LIMIT, drained).await.is_err()
    {
        warning!(
            "output of process {} is dropped: no client reads it",
            process.id.exec
        );
    }
    if let Some(mut streams) = process.streams().take() {
        streams.stop();
    }
}

/// Returns how the process ended. A process that never ran counts as killed.
fn ended_with(process: &Process) -> Exit {
    process.end(Exit::now(KILLED));
    match process.phase() {
        Phase::Ended(exit) => exit,
        Phase::Created | Phase::Starting | Phase::Running => Exit::now(KILLED),
    }
}
