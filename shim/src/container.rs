//! A container of the pod, as containerd's task: its own process, and those that were executed in it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use thaw_protocol::agent::oci;

use crate::agent::ProcessId;
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::grouping::Role;
use crate::process::Process;
use crate::share::Used;
use crate::spec::config::{Hooks, Spec};
use crate::stdio::Stdio;

/// A process that was added, and what it is to be when it is started.
#[derive(Clone, Debug)]
pub struct Exec {
    pub process: Arc<Process>,
    pub spec: oci::Process,
}

/// A task.
#[derive(Debug)]
pub struct Container {
    pub id: String,
    pub bundle: PathBuf,
    pub role: Role,
    pub hooks: Hooks,
    pub oci_version: String,
    pub annotations: BTreeMap<String, String>,
    pub init: Arc<Process>,
    pub paused: AtomicBool,
    /// Whether it was told to end at once.
    pub is_killed: AtomicBool,
    /// Since when it is being removed.
    pub removing: OnceLock<Instant>,
    /// What of the host it has in the guest.
    shares: Mutex<Vec<Used>>,
    /// Whether it shares its processes with nobody.
    pub has_own_pids: bool,
    /// Whether it came with its machine, out of a checkpoint: its program runs already, or would if it were let.
    pub restored: bool,
    execs: Mutex<BTreeMap<String, Exec>>,
    /// Execs so far. The guest remembers those that ended, so none gets a name that was used.
    numbers: AtomicU64,
}

impl Container {
    /// As `spec` has it; `from` is what its checkpoint says, if it comes out of one.
    pub fn new(
        id: &str,
        bundle: PathBuf,
        role: Role,
        spec: &Spec,
        stdio: Stdio,
        from: Option<&Checkpoint>,
    ) -> Container {
        let in_guest = from.map_or(id, |from| &from.container);
        let init = ProcessId {
            container: in_guest.into(),
            exec: in_guest.into(),
        };
        let pids = spec.linux.namespace("pid");
        Container {
            id: id.into(),
            bundle,
            role,
            hooks: spec.hooks.clone(),
            oci_version: spec.oci_version.clone(),
            annotations: spec.annotations.clone(),
            init: Arc::new(Process::new(init, "", stdio)),
            paused: AtomicBool::new(false),
            is_killed: AtomicBool::new(false),
            removing: OnceLock::new(),
            shares: Mutex::default(),
            has_own_pids: pids.is_some_and(|namespace| namespace.path.is_empty()),
            restored: from.is_some(),
            execs: Mutex::default(),
            numbers: AtomicU64::new(from.map_or(0, |from| from.execs)),
        }
    }

    /// What the guest calls it: what it was called when it was made.
    pub fn guest_id(&self) -> &String {
        &self.init.id.container
    }

    /// What its checkpoint is to say of it.
    pub fn checkpoint(&self) -> Checkpoint {
        Checkpoint {
            container: self.guest_id().clone(),
            execs: self.numbers.load(Ordering::Relaxed),
        }
    }

    /// Whether there is anything of it in the guest: the pod's own container is the microVM itself.
    pub fn is_in_guest(&self) -> bool {
        self.role != Role::Pod
    }

    /// Adds a process that may be started.
    pub fn add(&self, exec_id: &str, stdio: Stdio, spec: oci::Process) -> Result<()> {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let mut execs = self.execs();
        if execs.contains_key(exec_id) {
            return Err(Error::AlreadyExists(format!(
                "process {exec_id} of container {}",
                self.id
            )));
        }
        let id = ProcessId {
            container: self.guest_id().clone(),
            exec: format!("{exec_id}.{number}"),
        };
        let process = Arc::new(Process::new(id, exec_id, stdio));
        execs.insert(exec_id.to_owned(), Exec { process, spec });
        Ok(())
    }

    /// A process that was added.
    pub fn exec(&self, exec_id: &str) -> Result<Exec> {
        let none = || Error::NotFound(format!("process {exec_id} of container {}", self.id));
        self.execs().get(exec_id).cloned().ok_or_else(none)
    }

    /// The container's own process, or one that was added.
    pub fn process(&self, exec_id: &str) -> Result<Arc<Process>> {
        match exec_id.is_empty() {
            true => Ok(self.init.clone()),
            false => self.exec(exec_id).map(|exec| exec.process),
        }
    }

    /// Forgets a process.
    pub fn forget(&self, exec_id: &str) {
        self.execs().remove(exec_id);
    }

    /// All its processes, its own first.
    pub fn processes(&self) -> Vec<Arc<Process>> {
        let added: Vec<_> = self.execs().values().map(|exec| exec.process.clone()).collect();
        std::iter::once(self.init.clone()).chain(added).collect()
    }

    /// What of the host it has in the guest.
    pub fn shares(&self) -> MutexGuard<'_, Vec<Used>> {
        self.shares.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn execs(&self) -> MutexGuard<'_, BTreeMap<String, Exec>> {
        self.execs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
