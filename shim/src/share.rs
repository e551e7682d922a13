//! What of the host a pod's containers have: each directory, file, file system and block device is shared once, whoever of them has
//! it, so that they see each other's changes at once; read-only and writable are two.
//!
//! Invariant: the table is locked to look something up, never while thawd is waited for. Of one source a share is being added or
//! removed by one caller at a time, and those alone wait who want the same.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Result};
use crate::thawd::{AGAIN, Thawd};
use crate::warning;

/// A mount that thawd makes, as containerd has it.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Source {
    /// `bind`, or a file system's type.
    pub kind: String,
    pub source: String,
    pub options: Vec<String>,
}

/// A block device, which thawd gives the microVM as a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BlockDevice {
    pub major: u32,
    pub minor: u32,
    pub read_only: bool,
}

/// Something of the host.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum OfTheHost {
    Files(Source),
    Disk(BlockDevice),
}

impl fmt::Display for OfTheHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OfTheHost::Files(source) => f.write_str(&source.source),
            OfTheHost::Disk(disk) => write!(f, "block device {}:{}", disk.major, disk.minor),
        }
    }
}

/// Whether a source is shared.
#[derive(Debug)]
enum State {
    /// Nobody has asked thawd yet.
    New,
    There {
        name: String,
        users: usize,
    },
    /// Another takes its place.
    Gone,
}

#[derive(Debug)]
struct Share {
    wanted: OfTheHost,
    state: tokio::sync::Mutex<State>,
}

/// A container's share.
#[derive(Clone, Debug)]
pub struct Used {
    /// Its entry in the shared device; the slot of a disk.
    pub name: String,
    share: Arc<Share>,
}

/// Those of a pod.
#[derive(Debug, Default)]
pub struct Shares {
    table: Mutex<BTreeMap<OfTheHost, Arc<Share>>>,
    /// Names so far. None is used again: the guest may remember it.
    names: AtomicU64,
}

impl Shares {
    /// Has it shared with the microVM, or finds that it is.
    pub async fn take(&self, thawd: &Thawd, sandbox: &str, wanted: &OfTheHost) -> Result<Used> {
        loop {
            let share = self.entry(wanted);
            let mut state = share.state.lock().await;
            let name = match &mut *state {
                State::Gone => continue,
                State::There { name, users } => {
                    *users += 1;
                    name.clone()
                }
                State::New => match self.add(thawd, sandbox, wanted).await {
                    Ok(name) => {
                        *state = State::There {
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

    async fn add(&self, thawd: &Thawd, sandbox: &str, wanted: &OfTheHost) -> Result<String> {
        match wanted {
            OfTheHost::Files(source) => {
                let name = self.names.fetch_add(1, Ordering::Relaxed).to_string();
                thawd.add_share(sandbox, &name, source).await.map(|()| name)
            }
            OfTheHost::Disk(disk) => thawd.add_disk(sandbox, *disk).await,
        }
    }

    /// Lets go of it: the last who does takes it away.
    pub async fn let_go(&self, thawd: &Thawd, sandbox: &str, used: Used) {
        let share = used.share;
        let mut state = share.state.lock().await;
        let State::There { name, users } = &mut *state else {
            return;
        };
        *users -= 1;
        if *users > 0 {
            return;
        }
        let name = std::mem::take(name);
        self.forget(&share, &mut state);
        drop(state);
        match take_away(thawd, sandbox, &share.wanted, &name).await {
            Err(Error::NoThawd { .. }) => {
                let (thawd, sandbox) = (thawd.clone(), sandbox.to_owned());
                tokio::spawn(take_away_later(thawd, sandbox, share.clone(), name));
            }
            done => tell(&share.wanted, &name, done),
        }
    }

    fn entry(&self, wanted: &OfTheHost) -> Arc<Share> {
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

    fn table(&self) -> MutexGuard<'_, BTreeMap<OfTheHost, Arc<Share>>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn take_away(thawd: &Thawd, sandbox: &str, wanted: &OfTheHost, name: &str) -> Result<()> {
    match wanted {
        OfTheHost::Files(_) => thawd.remove_share(sandbox, name).await,
        OfTheHost::Disk(_) => thawd.remove_disk(sandbox, name).await,
    }
}

/// Has the next thawd take it away: a container's root would take its place on the disk, and a block device be in use, for as
/// long as the pod lives.
async fn take_away_later(thawd: Thawd, sandbox: String, share: Arc<Share>, name: String) {
    loop {
        tokio::time::sleep(AGAIN).await;
        match take_away(&thawd, &sandbox, &share.wanted, &name).await {
            Err(Error::NoThawd { .. }) => {}
            done => return tell(&share.wanted, &name, done),
        }
    }
}

fn tell(wanted: &OfTheHost, name: &str, taken_away: Result<()>) {
    if let Err(e) = taken_away {
        // It goes with the microVM.
        warning!("{wanted} of the host stays shared, as {name}: {e}");
    }
}
