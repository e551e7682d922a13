//! Host directories, files, file systems and block devices that a pod's containers use. Each is shared with
//! the guest once, so that containers see each other's changes immediately; read-only and writable count as
//! two.
//!
//! Invariant: the table is locked only to look up an entry, never while waiting for thawd. One caller at a
//! time adds or removes the share of a source, and only callers for the same source wait.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use thaw_sys::lock::Lock;

use crate::error::{Error, Result};
use crate::host_resource::HostResource;
use crate::thawd::{RETRY_DELAY, Thawd};
use crate::warning;

/// The state of one share.
#[derive(Debug)]
enum State {
    /// thawd was not asked yet.
    New,
    Shared {
        name: String,
        users: usize,
    },
    /// Removed; a new entry replaces it.
    Gone,
}

#[derive(Debug)]
struct Share {
    wanted: HostResource,
    state: tokio::sync::Mutex<State>,
}

/// A container's use of a share.
#[derive(Clone, Debug)]
pub struct Used {
    /// Its entry in the shared device, or the slot of a disk.
    pub name: String,
    share: Arc<Share>,
}

/// The shares of a pod.
#[derive(Debug, Default)]
pub struct Shares {
    table: Mutex<BTreeMap<HostResource, Arc<Share>>>,
    /// Number of names so far. Names are not reused, because the guest may remember them.
    names: AtomicU64,
}

impl Shares {
    /// Shares the resource with the microVM, unless it is shared already.
    pub async fn acquire(&self, thawd: &Thawd, sandbox: &str, wanted: &HostResource) -> Result<Used> {
        loop {
            let share = self.entry(wanted);
            let mut state = share.state.lock().await;
            let name = match &mut *state {
                State::Gone => continue,
                State::Shared { name, users } => {
                    *users += 1;
                    name.clone()
                }
                State::New => match self.add(thawd, sandbox, wanted).await {
                    Ok(name) => {
                        *state = State::Shared {
                            name: name.clone(),
                            users: 1,
                        };
                        name
                    }
                    Err(e) => {
                        self.forget(&share, &mut state);
                        return Err(e);
                    }
                },
            };
            drop(state);
            return Ok(Used { name, share });
        }
    }

    async fn add(&self, thawd: &Thawd, sandbox: &str, wanted: &HostResource) -> Result<String> {
        match wanted {
            HostResource::Files(source) => {
                let name = self.names.fetch_add(1, Ordering::Relaxed).to_string();
                thawd.add_share(sandbox, &name, source).await.map(|()| name)
            }
            HostResource::Disk(disk) => thawd.add_disk(sandbox, *disk).await,
        }
    }

    /// Ends a use; the last use removes the share.
    pub async fn release(&self, thawd: &Thawd, sandbox: &str, used: Used) {
        let share = used.share;
        let mut state = share.state.lock().await;
        let State::Shared { name, users } = &mut *state else {
            return;
        };
        *users -= 1;
        if *users > 0 {
            return;
        }
        let name = std::mem::take(name);
        self.forget(&share, &mut state);
        drop(state);
        match remove(thawd, sandbox, &share.wanted, &name).await {
            Err(Error::NoThawd { .. }) => {
                let (thawd, sandbox) = (thawd.clone(), sandbox.to_owned());
                tokio::spawn(remove_later(thawd, sandbox, share.clone(), name));
            }
            done => log_failure(&share.wanted, &name, done),
        }
    }

    fn entry(&self, wanted: &HostResource) -> Arc<Share> {
        let new = || {
            Arc::new(Share {
                wanted: wanted.clone(),
                state: State::New.into(),
            })
        };
        self.table().entry(wanted.clone()).or_insert_with(new).clone()
    }

    fn forget(&self, share: &Arc<Share>, state: &mut State) {
        *state = State::Gone;
        let mut table = self.table();
        if table
            .get(&share.wanted)
            .is_some_and(|there| Arc::ptr_eq(there, share))
        {
            table.remove(&share.wanted);
        }
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<HostResource, Arc<Share>>> {
        self.table.locked()
    }
}

async fn remove(thawd: &Thawd, sandbox: &str, wanted: &HostResource, name: &str) -> Result<()> {
    match wanted {
        HostResource::Files(_) => thawd.remove_share(sandbox, name).await,
        HostResource::Disk(_) => thawd.remove_disk(sandbox, name).await,
    }
}

/// Retries until a thawd runs. Otherwise a container's root would occupy the disk, or a block device stay in
/// use, for the life of the pod.
async fn remove_later(thawd: Thawd, sandbox: String, share: Arc<Share>, name: String) {
    loop {
        tokio::time::sleep(RETRY_DELAY).await;
        match remove(&thawd, &sandbox, &share.wanted, &name).await {
            Err(Error::NoThawd { .. }) => {}
            done => return log_failure(&share.wanted, &name, done),
        }
    }
}

fn log_failure(wanted: &HostResource, name: &str, removed: Result<()>) {
    if let Err(e) = removed {
        // It is removed with the microVM at the latest.
        warning!("{wanted} of the host stays shared as {name}: {e}");
    }
}
