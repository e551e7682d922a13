//! A pod: its microVM, and containerd's tasks in it.
//!
//! Invariants: the table is locked to look something up or to change it, never while the guest, thawd or a client is waited
//! for; so what one container's guest does not answer holds up nobody but who asked. Every task that was told of as created
//! is told of once as ended, whoever ends it: itself, a signal, its machine.

mod create;
mod delete;
pub mod life;
mod restore;
mod sandbox;
mod shared;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use thaw_protocol::shim::task_events::{TaskExit, TaskOOM};
use thaw_protocol::shim::{MessageField, task_events};
use tokio::sync::{OnceCell, watch};

use crate::container::Container;
use crate::error::{Error, Result};
use crate::events::{Event, Publisher};
use crate::grouping::Role;
use crate::machine::Machine;
use crate::pidfd;
use crate::process::{Exit, KILLED, Phase, Process};
use crate::sandbox::Sandbox;
use crate::share::Shares;
use crate::thawd::Thawd;
use crate::{info, warning};
use shared::Shared;

/// How often containerd is told that a container ran out of memory, at most.
const OOM_PAUSE: Duration = Duration::from_secs(1);
/// How long after its agent a machine may end by itself.
const GONE_PAUSE: Duration = Duration::from_secs(5);

/// A task's place in the table.
#[derive(Debug)]
enum Slot {
    Making,
    Made(Arc<Container>),
}

/// The pod of this shim.
#[derive(Debug)]
pub struct Pod {
    pub namespace: String,
    pub events: Publisher,
    thawd: Thawd,
    machine: OnceCell<Arc<Machine>>,
    shares: Shares,
    /// What it is to containerd, if its sandbox API made it.
    sandbox: OnceLock<Arc<Sandbox>>,
    containers: Mutex<BTreeMap<String, Slot>>,
    shared: OnceLock<Shared>,
    /// What is being ended though nobody waits for it yet.
    ending: watch::Sender<usize>,
    /// Whether the guest was asked to give back what a last container holds.
    written_back: OnceCell<()>,
    /// Whether thawd has been asked to end the microVM, and has not failed to.
    is_ending: AtomicBool,
}

/// A name that is taken while its task is made.
struct Reservation<'a> {
    pod: &'a Pod,
    id: &'a str,
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        let mut table = self.pod.table();
        if matches!(table.get(self.id), Some(Slot::Making)) {
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
            written_back: OnceCell::new(),
            is_ending: AtomicBool::new(false),
        })
    }

    /// A task.
    pub fn container(&self, id: &str) -> Result<Arc<Container>> {
        match self.table().get(id) {
            Some(Slot::Made(container)) => Ok(container.clone()),
            Some(Slot::Making) | None => Err(Error::NotFound(format!("container {id}"))),
        }
    }

    /// The microVM, which every task has that is in the table.
    pub fn machine(&self) -> Result<&Arc<Machine>> {
        let none = || Error::State("the pod has no microVM yet".into());
        self.machine.get().ok_or_else(none)
    }

    /// What containerd has for the tasks' process.
    pub fn pid(&self) -> u32 {
        self.machine.get().map_or(0, |machine| machine.vmm.unsigned_abs())
    }

    /// Whether there are tasks, those that are being made aside.
    pub fn has_tasks(&self) -> bool {
        self.table().values().any(|slot| matches!(slot, Slot::Made(_)))
    }

    /// Waits until nothing is being ended.
    pub async fn ended(&self) {
        let mut ending = self.ending.subscribe();
        let _ = ending.wait_for(|ending| *ending == 0).await;
    }

    /// Ends the microVM, whoever waits for it. Asked for again, it is ended once.
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
                // It ends with us at the latest: thawd watches who it was made for.
                warning!("microVM {} is left to thawd: {e}", machine.sandbox);
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
        table.insert(id.to_owned(), Slot::Making);
        Ok(Reservation { pod: self, id })
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<String, Slot>> {
        self.containers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn made(&self) -> Vec<Arc<Container>> {
        let made = |slot: &Slot| match slot {
            Slot::Made(container) => Some(container.clone()),
            Slot::Making => None,
        };
        self.table().values().filter_map(made).collect()
    }

    /// The task of a container the guest calls by this name: it may say any, and containerd takes the beginning of another pod's
    /// for that.
    fn task_of(&self, guest_id: &str) -> Option<String> {
        let made = self.made();
        let found = made.iter().find(|container| *container.guest_id() == guest_id);
        found.map(|container| container.id.clone())
    }

    /// Notes the end of a process, and tells of it if nobody has.
    async fn note_end(&self, container: &str, process: &Process, exit: Exit) {
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

    /// Ends the microVM with the only container it has: what is left of that needs none. Output that a client has yet to take
    /// is still in the guest, and comes first.
    fn end_with(self: &Arc<Pod>, machine: &Arc<Machine>, container: Arc<Container>) {
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

    /// Ends the microVM of a container that was its last, which gives back before what it holds of the host's files: once, and
    /// whoever asks beside waits for that.
    async fn end_last(self: &Arc<Pod>, machine: &Machine, container: &Container) {
        if !container.shares().is_empty() {
            let write_back = || self.write_back(machine, container);
            self.written_back.get_or_init(write_back).await;
        }
        self.end_machine();
    }

    /// Attends a process of the guest's to its end. With a container's own, if that is the last, the microVM ends.
    fn attend(self: &Arc<Pod>, machine: &Arc<Machine>, of: &Arc<Container>, process: &Arc<Process>) {
        let (pod, machine) = (self.clone(), machine.clone());
        let (of, process) = (of.clone(), process.clone());
        tokio::spawn(async move {
            let status = match machine.agent.wait(&process.id).await {
                Ok(status) => status.unsigned_abs(),
                Err(e) => {
                    info!(
                        "process {} of {} is taken for killed: {e}",
                        process.id.exec, of.id
                    );
                    KILLED
                }
            };
            pod.note_end(&of.id, &process, Exit::now(status)).await;
            // After: with the machine every process is noted to have been killed.
            if process.exec_id.is_empty() && is_the_last(&of.role) {
                pod.end_with(&machine, of);
            }
        });
    }

    /// Attends the microVM: what it runs out of, and its end.
    fn attend_machine(self: &Arc<Pod>, machine: &Arc<Machine>) {
        tokio::spawn(attend_memory(Arc::downgrade(self), machine.clone()));
        let (pod, of, thawd) = (Arc::downgrade(self), machine.clone(), self.thawd.clone());
        tokio::spawn(async move {
            let reason = tokio::select! {
                reason = thawd.wait(&of.sandbox) => reason,
                () = pidfd::ended(of.vmm) => "its VMM was killed".into(),
            };
            let Some(pod) = pod.upgrade() else { return };
            if let Some(sandbox) = pod.sandbox.get() {
                sandbox.life.settled().await;
                sandbox.life.end(Exit::now(KILLED));
            }
            for container in pod.made() {
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
                    tokio::spawn(async move { pod.note_end(&id, &process, Exit::now(KILLED)).await });
                }
            }
        });
    }
}

/// Tells of what runs out of memory in a guest, for as long as that answers. One whose agent has gone is no pod any more.
async fn attend_memory(pod: Weak<Pod>, of: Arc<Machine>) {
    let mut told: BTreeMap<String, Instant> = BTreeMap::new();
    loop {
        let said = of.agent.out_of_memory().await;
        let Some(now) = pod.upgrade() else { return };
        match said.map(|guest_id| now.task_of(&guest_id)) {
            Ok(Some(id)) if told.get(&id).is_none_or(|at| at.elapsed() >= OOM_PAUSE) => {
                told.retain(|id, _| now.container(id).is_ok());
                told.insert(id.clone(), Instant::now());
                now.events.publish(&Event::Oom(TaskOOM {
                    container_id: id,
                    ..Default::default()
                }));
            }
            // It says what cannot be, or the same again and again.
            Ok(_) => {
                drop(now);
                tokio::time::sleep(OOM_PAUSE).await;
            }
            Err(Error::Gone(why)) => {
                drop(now);
                // It may be the machine that has ended, and thawd will say why.
                tokio::time::sleep(GONE_PAUSE).await;
                if let Some(pod) = pod.upgrade() {
                    info!("microVM {} is ended with its agent: {why}", of.sandbox);
                    pod.end_machine();
                }
                return;
            }
            Err(_) => return,
        }
    }
}

/// Of a task, as its creation is told.
fn task_io(process: &Process) -> task_events::TaskIO {
    task_events::TaskIO {
        stdin: process.stdio.stdin.clone(),
        stdout: process.stdio.stdout.clone(),
        stderr: process.stdio.stderr.clone(),
        terminal: process.stdio.terminal,
        ..Default::default()
    }
}

/// Whether the microVM ends with this task.
fn is_the_last(role: &Role) -> bool {
    !matches!(role, Role::Member { .. })
}
