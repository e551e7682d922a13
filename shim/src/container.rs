//! A container of the pod, which is a task to containerd: its init process and its execs.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Instant;

use thaw_protocol::agent::oci;
use thaw_sys::lock::Lock;
use tokio::sync::OnceCell;

use crate::agent::ProcessId;
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::process::{Exit, Process};
use crate::role::Role;
use crate::share::Used;
use crate::spec::config::{Hooks, Spec};
use crate::stdio::Stdio;

/// A process that was added, and its specification for when it is started.
#[derive(Clone, Debug)]
pub struct Exec {
    pub process: Arc<Process>,
    pub spec: oci::Process,
}

/// A container of the pod.
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
    /// Whether a client has sent SIGKILL to it.
    pub is_killed: AtomicBool,
    /// When its removal started.
    pub removing: OnceLock<Instant>,
    /// How it ended, once it is removed. Concurrent deletes wait for the one that removes it.
    pub removed: OnceCell<Exit>,
    /// Host directories and devices that the guest has for it.
    shares: Mutex<Vec<Used>>,
    /// Whether it has a PID namespace of its own.
    pub has_own_pids: bool,
    /// Whether it was restored from a checkpoint with its machine. Its processes then exist already, paused.
    pub restored: bool,
    execs: Mutex<BTreeMap<String, Exec>>,
    /// Number of execs so far. The guest remembers execs that ended, so names are never reused.
    numbers: AtomicU64,
}

impl Container {
    /// A container of `spec`, which is in the state `from` if it is restored from a checkpoint.
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
            removed: OnceCell::new(),
            shares: Mutex::default(),
            has_own_pids: pids.is_some_and(|namespace| namespace.path.is_empty()),
            restored: from.is_some(),
            execs: Mutex::default(),
            numbers: AtomicU64::new(from.map_or(0, |from| from.execs)),
        }
    }

    /// Its id in the guest: the one it was created with.
    pub fn guest_id(&self) -> &String {
        &self.init.id.container
    }

    /// The state that its checkpoint records.
    pub fn checkpoint(&self) -> Checkpoint {
        Checkpoint {
            container: self.guest_id().clone(),
            execs: self.numbers.load(Ordering::Relaxed),
        }
    }

    /// Whether the guest has this container. It has none for the pod's own container, which stands for the
    /// microVM.
    pub fn is_in_guest(&self) -> bool {
        self.role != Role::Pod
    }

    /// Adds an exec, to be started later.
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

    /// Returns an exec.
    pub fn exec(&self, exec_id: &str) -> Result<Exec> {
        let none = || Error::NotFound(format!("process {exec_id} of container {}", self.id));
        self.execs().get(exec_id).cloned().ok_or_else(none)
    }

    /// Returns the init process, or an exec.
    pub fn process(&self, exec_id: &str) -> Result<Arc<Process>> {
        match exec_id.is_empty() {
            true => Ok(self.init.clone()),
            false => self.exec(exec_id).map(|exec| exec.process),
        }
    }

    /// Removes an exec from the table.
    pub fn forget(&self, exec_id: &str) {
        self.execs().remove(exec_id);
    }

    /// All its processes, the init process first.
    pub fn processes(&self) -> Vec<Arc<Process>> {
        let added: Vec<_> = self.execs().values().map(|exec| exec.process.clone()).collect();
        std::iter::once(self.init.clone()).chain(added).collect()
    }

    /// Host directories and devices that the guest has for it.
    pub fn shares(&self) -> MutexGuard<'_, Vec<Used>> {
        self.shares.locked()
    }

    fn execs(&self) -> MutexGuard<'_, BTreeMap<String, Exec>> {
        self.execs.locked()
    }
}
