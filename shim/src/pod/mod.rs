//! A pod: its microVM, and containerd's tasks in it.
//!
//! Invariants: the table of tasks is locked only to look up or change an entry, never while waiting for the
//! guest, thawd or a client. A guest that does not answer for one container therefore delays only the callers
//! of that container. Each task that was published as created is published exactly once as exited, whether it
//! ended by itself, by a signal or with its machine, unless it is deleted before it starts.
//!
//! containerd publishes the exit itself, a second time, if a delete is answered with "not found" or its
//! connection closes before the answer (`shimTask.delete` and `cleanupAfterDeadShim` in its runtime/v2). So a
//! task stays in the table until a client has the answer to its delete, and the shim does not end before that.

mod create;
mod delete;
pub mod life;
mod restore;
mod sandbox;
mod shared;
mod supply;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::{Duration, Instant};

use thaw_protocol::shim::task_events::{TaskExit, TaskOOM};
use thaw_protocol::shim::{MessageField, task_events};
use thaw_sys::lock::Lock;
use tokio::sync::{OnceCell, watch};

use crate::container::Container;
use crate::error::{Error, Result};
use crate::events::{Event, Publisher};
use crate::hooks::State;
use crate::machine::Machine;
use crate::pidfd;
use crate::process::{Exit, KILLED, Phase, Process};
use crate::role::Role;
use crate::sandbox::Sandbox;
use crate::share::Shares;
use crate::thawd::Thawd;
use crate::{info, warning};
use shared::Shared;

/// Least interval between OOM events of a container.
const OOM_PAUSE: Duration = Duration::from_secs(1);
/// How long a machine has to end by itself after its agent is gone.
const AGENT_GONE_PAUSE: Duration = Duration::from_secs(5);

/// An entry of the task table.
#[derive(Debug)]
enum Entry {
    Creating,
    Created(Arc<Container>),
}

/// The pod of this shim.
#[derive(Debug)]
pub struct Pod {
    pub namespace: String,
    pub events: Publisher,
    thawd: Thawd,
    machine: OnceCell<Arc<Machine>>,
    shares: Shares,
    /// The sandbox, if the pod was created through containerd's sandbox API.
    sandbox: OnceLock<Arc<Sandbox>>,
    containers: Mutex<BTreeMap<String, Entry>>,
    shared: OnceLock<Shared>,
    /// Number of operations in progress that end the machine.
    ending: watch::Sender<usize>,
    /// Number of deletes in progress.
    deleting: watch::Sender<usize>,
    /// Set once the guest was asked to write back the files of the last container.
    written_back: OnceCell<()>,
    /// Whether thawd was asked to end the machine. Reset if that failed.
    is_ending: AtomicBool,
}

/// An id that is reserved while its task is created.
struct Reservation<'a> {
    pod: &'a Pod,
    id: &'a str,
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        let mut table = self.pod.table();
        if matches!(table.get(self.id), Some(Entry::Creating)) {
            table.remove(self.id);
        }
    }
}

impl Pod {
    pub fn new(namespace: &str, thawd: Thawd, events: Publisher) -> Arc<Pod> {
        Arc::new(Pod {
            namespace: namespace.into(),
            events,
            thawd,
            machine: OnceCell::new(),
            shares: Shares::default(),
            sandbox: OnceLock::new(),
            containers: Mutex::default(),
            shared: OnceLock::new(),
            ending: watch::Sender::new(0),
            deleting: watch::Sender::new(0),
            written_back: OnceCell::new(),
            is_ending: AtomicBool::new(false),
        })
    }

    /// Returns a task.
    pub fn container(&self, id: &str) -> Result<Arc<Container>> {
        match self.table().get(id) {
            Some(Entry::Created(container)) => Ok(container.clone()),
            Some(Entry::Creating) | None => Err(Error::NotFound(format!("container {id}"))),
        }
    }

    /// Returns the microVM, which exists as long as any task is in the table.
    pub fn machine(&self) -> Result<&Arc<Machine>> {
        let none = || Error::State("the pod has no microVM yet".into());
        self.machine.get().ok_or_else(none)
    }

    /// The process id that containerd shows for tasks.
    pub fn pid(&self) -> u32 {
        self.machine.get().map_or(0, |machine| machine.vmm.unsigned_abs())
    }

    /// Whether there are tasks, not counting those in creation and those that are removed.
    pub fn has_tasks(&self) -> bool {
        !self.created().is_empty()
    }

    /// Whether deletes are in progress.
    pub fn is_deleting(&self) -> bool {
        *self.deleting.borrow() > 0
    }

    /// Waits until no delete is in progress.
    pub async fn deleted(&self) {
        let mut deleting = self.deleting.subscribe();
        let _ = deleting.wait_for(|deleting| *deleting == 0).await;
    }

    /// Waits until no end of the machine is in progress.
    pub async fn ended(&self) {
        let mut ending = self.ending.subscribe();
        let _ = ending.wait_for(|ending| *ending == 0).await;
    }

    /// Ends the microVM in the background. Repeated calls have no effect.
    pub(crate) fn end_machine(self: &Arc<Pod>) {
        let Some(machine) = self.machine.get().cloned() else {
            return;
        };
        if self.is_ending.swap(true, Ordering::AcqRel) {
            return;
        }
        self.ending.send_modify(|ending| *ending += 1);
        let pod = self.clone();
        tokio::spawn(async move {
            if let Err(e) = pod.thawd.end(&machine.sandbox).await {
                // It ends with this process at the latest: thawd watches it.
                warning!(
                    "microVM {} could not be ended; thawd will end it: {e}",
                    machine.sandbox
                );
                pod.is_ending.store(false, Ordering::Release);
            }
            pod.ending.send_modify(|ending| *ending -= 1);
        });
    }

    fn reserve<'a>(&'a self, id: &'a str) -> Result<Reservation<'a>> {
        let mut table = self.table();
        if table.contains_key(id) {
            return Err(Error::AlreadyExists(format!("container {id}")));
        }
        table.insert(id.to_owned(), Entry::Creating);
        Ok(Reservation { pod: self, id })
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        self.containers.locked()
    }

    /// The tasks that are created and not removed.
    fn created(&self) -> Vec<Arc<Container>> {
        let created = |entry: &Entry| match entry {
            Entry::Created(container) if !container.removed.initialized() => Some(container.clone()),
            Entry::Created(_) | Entry::Creating => None,
        };
        self.table().values().filter_map(created).collect()
    }

    /// The task whose container the guest calls `guest_id`. The guest may send any id, so it is looked up
    /// rather than passed on: containerd would match an id prefix of another pod's container.
    fn task_of(&self, guest_id: &str) -> Option<String> {
        let containers = self.created();
        let found = containers
            .iter()
            .find(|container| *container.guest_id() == guest_id);
        found.map(|container| container.id.clone())
    }

    /// Records the end of a process, and publishes it if it was not published before.
    async fn record_exit(&self, container: &str, process: &Process, exit: Exit) {
        process.settled().await;
        if process.end(exit.clone()) {
            let id = match process.exec_id.as_str() {
                "" => container,
                exec => exec,
            };
            self.events.publish(&Event::Exit(TaskExit {
                container_id: container.into(),
                id: id.into(),
                pid: self.pid(),
                exit_status: exit.status,
                exited_at: MessageField::some(exit.at),
                ..Default::default()
            }));
        }
    }

    /// Ends the microVM of the pod's only container, after clients have read the remaining output, which is
    /// still in the guest.
    fn end_after_output(self: &Arc<Pod>, machine: &Arc<Machine>, container: Arc<Container>) {
        let (pod, machine) = (self.clone(), machine.clone());
        tokio::spawn(async move {
            for process in container.processes() {
                let drained = process.streams().as_ref().map(|streams| streams.drained());
                if let Some(drained) = drained {
                    drained.await;
                }
            }
            pod.end_last(&machine, &container).await;
        });
    }

    /// Ends the microVM with its last container. If it has shares, the guest first writes them back, once;
    /// concurrent callers wait for that.
    async fn end_last(self: &Arc<Pod>, machine: &Machine, container: &Container) {
        if !container.shares().is_empty() {
            let write_back = || self.write_back(machine, container);
            self.written_back.get_or_init(write_back).await;
        }
        self.end_machine();
    }

    /// Watches a guest process until it ends. With the init process of the last container, the microVM ends.
    fn watch_process(self: &Arc<Pod>, machine: &Arc<Machine>, of: &Arc<Container>, process: &Arc<Process>) {
        let (pod, machine) = (self.clone(), machine.clone());
        let (of, process) = (of.clone(), process.clone());
        tokio::spawn(async move {
            let status = match machine.agent.wait(&process.id).await {
                Ok(status) => status.unsigned_abs(),
                Err(e) => {
                    info!("process {} of {} counts as killed: {e}", process.id.exec, of.id);
                    KILLED
                }
            };
            pod.record_exit(&of.id, &process, Exit::now(status)).await;
            // After `record_exit`: ending the machine records every other process as killed.
            if process.exec_id.is_empty() && ends_machine(&of.role) {
                pod.end_after_output(&machine, of);
            }
        });
    }

    /// Watches the microVM for OOM kills and for its end.
    fn watch_machine(self: &Arc<Pod>, machine: &Arc<Machine>) {
        tokio::spawn(watch_oom(Arc::downgrade(self), machine.clone()));
        let (pod, of, thawd) = (Arc::downgrade(self), machine.clone(), self.thawd.clone());
        tokio::spawn(async move {
            let reason = tokio::select! {
                reason = thawd.wait(&of.sandbox) => reason,
                () = pidfd::wait_exit(of.vmm) => "its VMM was killed".into(),
            };
            let Some(pod) = pod.upgrade() else { return };
            if let Some(sandbox) = pod.sandbox.get() {
                sandbox.life.settled().await;
                sandbox.life.end(Exit::now(KILLED));
            }
            for container in pod.created() {
                let processes = container.processes();
                let has_ended = |process: &Arc<Process>| matches!(process.phase(), Phase::Ended(_));
                if !processes.iter().all(has_ended) {
                    warning!(
                        "container {} ends: microVM {}: {reason}",
                        container.id,
                        of.sandbox
                    );
                }
                for process in processes {
                    let (pod, id) = (pod.clone(), container.id.clone());
                    tokio::spawn(async move { pod.record_exit(&id, &process, Exit::now(KILLED)).await });
                }
            }
        });
    }
}

/// Publishes OOM kills of a guest until its agent is gone; then ends the machine.
async fn watch_oom(pod: Weak<Pod>, of: Arc<Machine>) {
    let mut published: BTreeMap<String, Instant> = BTreeMap::new();
    loop {
        let event = of.agent.out_of_memory().await;
        let Some(now) = pod.upgrade() else { return };
        match event.map(|guest_id| now.task_of(&guest_id)) {
            Ok(Some(id)) if published.get(&id).is_none_or(|at| at.elapsed() >= OOM_PAUSE) => {
                published.retain(|id, _| now.container(id).is_ok());
                published.insert(id.clone(), Instant::now());
                now.events.publish(&Event::Oom(TaskOOM {
                    container_id: id,
                    ..Default::default()
                }));
            }
            // The guest named an unknown container, or repeats itself.
            Ok(_) => {
                drop(now);
                tokio::time::sleep(OOM_PAUSE).await;
            }
            Err(Error::Gone(why)) => {
                drop(now);
                // Perhaps the machine has ended; then thawd reports why.
                tokio::time::sleep(AGENT_GONE_PAUSE).await;
                if let Some(pod) = pod.upgrade() {
                    info!("ending microVM {}, as its agent is gone: {why}", of.sandbox);
                    pod.end_machine();
                }
                return;
            }
            Err(_) => return,
        }
    }
}

/// The state that a hook of a container receives.
fn hook_state<'a>(container: &'a Container, machine: &Machine, status: &'a str) -> State<'a> {
    State {
        oci_version: &container.oci_version,
        id: &container.id,
        status,
        pid: machine.vmm,
        bundle: &container.bundle,
        annotations: &container.annotations,
    }
}

/// The streams of a task, for its creation event.
fn task_io(process: &Process) -> task_events::TaskIO {
    task_events::TaskIO {
        stdin: process.stdio.stdin.clone(),
        stdout: process.stdio.stdout.clone(),
        stderr: process.stdio.stderr.clone(),
        terminal: process.stdio.terminal,
        ..Default::default()
    }
}

/// Whether the microVM ends with a task of this role.
fn ends_machine(role: &Role) -> bool {
    !matches!(role, Role::Member { .. })
}
