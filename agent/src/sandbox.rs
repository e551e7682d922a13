//! Everything that exists in this guest: its containers, what is mounted for them, and who waits for what.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

use thaw_sys::lock::Lock;
use tokio::sync::{OwnedRwLockReadGuard, RwLock};

use crate::container::Container;
use crate::container::pod_pids::PodPids;
use crate::disks::Disks;
use crate::error::{Error, Result};
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
    /// Mounted by CreateSandbox.
    pub own_mounts: Mutex<Vec<PathBuf>>,
    pub reaper: Arc<Reaper>,
    /// Shared by the containers that ask for it.
    pub pids: PodPids,
    pub ooms: OomEvents,
    /// Read by each call that makes, starts, pauses or removes something, from its beginning to its end, also when its
    /// caller is gone; written while everything stands still ([`crate::quiesce`]).
    pub motion: Arc<RwLock<()>>,
}

#[derive(Debug)]
enum Slot {
    /// Being made or taken away.
    Busy,
    There(Arc<Container>),
}

impl Sandbox {
    /// Leave to set something in motion: waits while everything stands still.
    pub async fn motion(&self) -> OwnedRwLockReadGuard<()> {
        self.motion.clone().read_owned().await
    }

    fn slots(&self) -> MutexGuard<'_, BTreeMap<String, Slot>> {
        self.containers.locked()
    }

    /// A container by id.
    pub fn container(&self, id: &str) -> Result<Arc<Container>> {
        match self.slots().get(id) {
            Some(Slot::There(container)) => Ok(container.clone()),
            Some(Slot::Busy) => Err(Error::State(format!(
                "container {id:?} is being created or removed"
            ))),
            None => Err(Error::Invalid(format!("there is no container {id:?}"))),
        }
    }

    /// Every container.
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

    /// Takes a name for a container that is about to be made.
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

    /// The container whose name was reserved is there, or will not be. Within the runtime.
    pub fn settle(self: &Arc<Self>, id: &str, container: Option<Container>) {
        let mut slots = self.slots();
        match container {
            Some(container) => {
                let container = Arc::new(container);
                self.watch_memory(&container);
                attend_end(&container);
                slots.insert(id.to_owned(), Slot::There(container));
            }
            None => drop(slots.remove(id)),
        }
    }

    /// Takes a container out of the list, its name still reserved; [`Sandbox::settle`] gives the name back.
    pub fn take(&self, id: &str) -> Result<Arc<Container>> {
        let container = self.container(id)?;
        self.slots().insert(id.to_owned(), Slot::Busy);
        Ok(container)
    }

    /// Puts back what [`Sandbox::take`] took.
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
                container.look_for_oom(&sandbox.ooms);
            }
        });
        let mut watch = container.memory_watch.locked();
        *watch = Some(task.abort_handle());
    }
}

/// With the first process of a PID namespace the kernel ends all others; where a container's namespace is not its own, that is
/// done here, as container engines do.
fn attend_end(container: &Arc<Container>) {
    if container.spec.has_own_pids() {
        return;
    }
    let (init, cgroup) = (container.init.clone(), container.cgroup.clone());
    tokio::spawn(async move {
        init.wait().await;
        // One that has been removed meanwhile has none left.
        let _ = cgroup.kill();
    });
}
