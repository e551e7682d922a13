//! Everything that exists in this guest: its containers, their mounts, and pending events.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

use thaw_sys::lock::Lock;
use tokio::sync::{OwnedRwLockReadGuard, RwLock};

use crate::container::Container;
use crate::container::archive::Transfers;
use crate::container::pod_pids::PodPids;
use crate::container::watch::Watches;
use crate::disks::Disks;
use crate::error::{Error, Result};
use crate::names::Names;
use crate::oom::{ChangeWatch, OomEvents};
use crate::reaper::Reaper;
use crate::storage::Storages;
use crate::warning;

/// The one sandbox of this guest.
#[derive(Debug, Default)]
pub struct Sandbox {
    containers: Mutex<BTreeMap<String, Slot>>,
    pub storages: Storages,
    pub disks: Disks,
    /// Mount points of CreateSandbox.
    pub own_mounts: Mutex<Vec<PathBuf>>,
    /// What its container adds to `hosts` and `resolv.conf`.
    pub names: Mutex<Names>,
    pub reaper: Arc<Reaper>,
    /// The PID namespace that containers can share.
    pub pids: PodPids,
    pub ooms: OomEvents,
    pub transfers: Transfers,
    pub watches: Watches,
    /// Read-locked by each call that creates, starts, pauses or removes something, until it completes, even if
    /// its caller is gone. Write-locked while everything is stopped ([`crate::quiesce`]).
    pub activity: Arc<RwLock<()>>,
}

#[derive(Debug)]
enum Slot {
    /// It is being created or removed.
    Busy,
    There(Arc<Container>),
}

impl Sandbox {
    /// Permission to create, start, pause or remove something. Waits while everything is stopped.
    pub async fn activity(&self) -> OwnedRwLockReadGuard<()> {
        self.activity.clone().read_owned().await
    }

    fn slots(&self) -> MutexGuard<'_, BTreeMap<String, Slot>> {
        self.containers.locked()
    }

    /// Returns a container by its id.
    pub fn container(&self, id: &str) -> Result<Arc<Container>> {
        match self.slots().get(id) {
            Some(Slot::There(container)) => Ok(container.clone()),
            Some(Slot::Busy) => Err(Error::State(format!(
                "container {id:?} is being created or removed"
            ))),
            None => Err(Error::Invalid(format!("there is no container {id:?}"))),
        }
    }

    /// Returns all containers.
    pub fn all(&self) -> Vec<Arc<Container>> {
        let slots = self.slots();
        slots
            .values()
            .filter_map(|s| {
                if let Slot::There(c) = s {
                    Some(c.clone())
                } else {
                    None
                }
            })
            .collect()
    }

    /// The namespaces that the processes of all containers are in, of one kind: a name in `/proc/PID/ns`.
    pub fn namespaces(&self, kind: &str) -> Vec<File> {
        let mut namespaces = BTreeMap::new();
        for container in self.all() {
            for pid in container.cgroup.processes() {
                // A process that has just ended has no namespace.
                if let Ok(namespace) = File::open(format!("/proc/{pid}/ns/{kind}"))
                    && let Ok(metadata) = namespace.metadata()
                {
                    namespaces.insert(metadata.ino(), namespace);
                }
            }
        }
        namespaces.into_values().collect()
    }

    /// Reserves the id of a container that will be created.
    pub fn reserve(&self, id: &str) -> Result<()> {
        let plain = id
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
        if id.is_empty() || id.len() > 128 || !plain || id.starts_with('.') {
            return Err(Error::Invalid(format!(
                "{id:?} is not a container id: letters, digits, '-', '_' and '.' are"
            )));
        }
        let mut slots = self.slots();
        if slots.contains_key(id) {
            return Err(Error::State(format!("there is a container {id:?} already")));
        }
        slots.insert(id.to_owned(), Slot::Busy);
        Ok(())
    }

    /// Completes a reservation: the container was created, or will not be. Must be called within the runtime.
    pub fn settle(self: &Arc<Self>, id: &str, container: Option<Container>) {
        let mut slots = self.slots();
        match container {
            Some(container) => {
                let container = Arc::new(container);
                self.watch_memory(&container);
                kill_rest_at_end(&container);
                slots.insert(id.to_owned(), Slot::There(container));
            }
            None => drop(slots.remove(id)),
        }
    }

    /// Takes a container out of the list and keeps its id reserved; [`Sandbox::settle`] releases the id.
    pub fn take(&self, id: &str) -> Result<Arc<Container>> {
        let container = self.container(id)?;
        self.slots().insert(id.to_owned(), Slot::Busy);
        Ok(container)
    }

    /// Puts back a container that [`Sandbox::take`] took out.
    pub fn put_back(&self, container: Arc<Container>) {
        self.slots().insert(container.id.clone(), Slot::There(container));
    }

    fn watch_memory(self: &Arc<Self>, container: &Arc<Container>) {
        let Ok(file) = container.cgroup.open_events("memory.events") else {
            return;
        };
        let (sandbox, watched) = (Arc::downgrade(self), Arc::downgrade(container));
        let task = tokio::spawn(async move {
            let watch = match ChangeWatch::new(file) {
                Ok(watch) => watch,
                Err(e) => return warning!("{e}"),
            };
            while watch.changed().await.is_ok() {
                let (Some(sandbox), Some(container)) = (sandbox.upgrade(), watched.upgrade()) else {
                    return;
                };
                container.check_for_oom(&sandbox.ooms);
            }
        });
        let mut watch = container.memory_watch.locked();
        *watch = Some(task.abort_handle());
    }
}

/// When the first process of a PID namespace ends, the kernel ends all others. For a container without its own
/// PID namespace, the agent does so, as container engines do.
fn kill_rest_at_end(container: &Arc<Container>) {
    if container.spec.has_own_pids() {
        return;
    }
    let (init, cgroup) = (container.init.clone(), container.cgroup.clone());
    tokio::spawn(async move {
        init.wait().await;
        // A cgroup that was removed meanwhile has no processes.
        let _ = cgroup.kill();
    });
}
