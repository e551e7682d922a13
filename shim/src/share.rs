//! What of the host a pod's containers have: each directory, file and file system is shared once, whoever of them has it, so that
//! they see each other's changes at once; read-only and writable are two.
//!
//! Invariant: the table is locked to look something up, never while thawd is waited for. Of one source a share is being added or
//! removed by one caller at a time, and those alone wait who want the same.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::Result;
use crate::thawd::Thawd;
use crate::warning;

/// A mount that thawd makes, as containerd has it.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Source {
    /// `bind`, or a file system's type.
    pub kind: String,
    pub source: String,
    pub options: Vec<String>,
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
    source: Source,
    state: tokio::sync::Mutex<State>,
}

/// A container's share.
#[derive(Clone, Debug)]
pub struct Used {
    /// Its entry in the shared device.
    pub name: String,
    share: Arc<Share>,
}

/// Those of a pod.
#[derive(Debug, Default)]
pub struct Shares {
    table: Mutex<BTreeMap<Source, Arc<Share>>>,
    /// Names so far. None is used again: the guest may remember it.
    names: AtomicU64,
}

impl Shares {
    /// Has a source shared with the microVM, or finds that it is.
    pub async fn take(&self, thawd: &Thawd, sandbox: &str, source: &Source) -> Result<Used> {
        loop {
            let share = self.entry(source);
            let mut state = share.state.lock().await;
            match &mut *state {
                State::Gone => continue,
                State::There { name, users } => {
                    *users += 1;
                    let name = name.clone();
                    drop(state);
                    return Ok(Used { name, share });
                }
                State::New => {
                    let name = self.names.fetch_add(1, Ordering::Relaxed).to_string();
                    if let Err(e) = thawd.add_share(sandbox, &name, source).await {
                        self.forget(&share, &mut state);
                        return Err(e);
                    }
                    *state = State::There {
                        name: name.clone(),
                        users: 1,
                    };
                    drop(state);
                    return Ok(Used { name, share });
                }
            }
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
        if let Err(e) = thawd.remove_share(sandbox, &name).await {
            // It goes with the microVM.
            warning!("share {name} of {} stays: {e}", share.source.source);
        }
    }

    fn entry(&self, source: &Source) -> Arc<Share> {
        let new = || {
            Arc::new(Share {
                source: source.clone(),
                state: State::New.into(),
            })
        };
        self.table().entry(source.clone()).or_insert_with(new).clone()
    }

    fn forget(&self, share: &Arc<Share>, state: &mut State) {
        *state = State::Gone;
        let mut table = self.table();
        if table
            .get(&share.source)
            .is_some_and(|there| Arc::ptr_eq(there, share))
        {
            table.remove(&share.source);
        }
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<Source, Arc<Share>>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
