//! What the host has open in this guest, by the name it gave: transfers and watches.
//!
//! Invariants: the number of each kind is bounded, and a session that the host does not use for [`IDLE`] is forgotten.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use thaw_sys::lock::Lock;
use tokio::sync::{Mutex as AsyncMutex, MutexGuard};
use tokio::time::Instant;

use super::files::check_name;
use crate::error::{Error, Result};

/// How long a session waits for the host's next request.
pub const IDLE: Duration = Duration::from_secs(60);

/// The sessions of one kind. Clones share them.
pub struct Sessions<T> {
    /// What a session is called in errors.
    noun: &'static str,
    most: usize,
    open: Arc<Mutex<BTreeMap<String, Arc<Session<T>>>>>,
}

/// One session. Requests use its state one at a time.
pub struct Session<T> {
    state: AsyncMutex<T>,
    used: Mutex<Instant>,
}

impl<T> Clone for Sessions<T> {
    fn clone(&self) -> Sessions<T> {
        Sessions {
            noun: self.noun,
            most: self.most,
            open: self.open.clone(),
        }
    }
}

impl<T> fmt::Debug for Sessions<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} {}s", self.open.locked().len(), self.most, self.noun)
    }
}

impl<T: Send + 'static> Sessions<T> {
    /// At most `most` sessions, each called a `noun` in errors.
    pub fn new(noun: &'static str, most: usize) -> Sessions<T> {
        Sessions {
            noun,
            most,
            open: Arc::default(),
        }
    }

    /// Begins a session. `make` must not block for long. Must be called within the runtime.
    pub fn begin(&self, name: &str, make: impl FnOnce() -> Result<T>) -> Result<()> {
        check_name(name)?;
        let (noun, most) = (self.noun, self.most);
        let mut open = self.open.locked();
        if open.contains_key(name) {
            return Err(Error::State(format!("there is a {noun} {name:?} already")));
        }
        if open.len() >= most {
            return Err(Error::State(format!("{most} {noun}s are under way already")));
        }
        let session = Arc::new(Session {
            state: AsyncMutex::new(make()?),
            used: Mutex::new(Instant::now()),
        });
        open.insert(name.to_owned(), session.clone());
        tokio::spawn(
            self.clone()
                .forget_idle(name.to_owned(), Arc::downgrade(&session)),
        );
        Ok(())
    }

    pub fn find(&self, name: &str) -> Result<Arc<Session<T>>> {
        let unknown = || Error::State(format!("there is no {} {name:?}", self.noun));
        self.open.locked().get(name).cloned().ok_or_else(unknown)
    }

    /// Drops a session's state, unless a request uses it: then when that request ends.
    pub fn forget(&self, name: &str) {
        let forgotten = self.open.locked().remove(name);
        drop(forgotten);
    }

    /// Forgets a session when the host asks no more.
    async fn forget_idle(self, name: String, session: Weak<Session<T>>) {
        loop {
            tokio::time::sleep(IDLE).await;
            let Some(session) = session.upgrade() else {
                return;
            };
            // A request that is being answered holds the lock.
            let is_idle = session.state.try_lock().is_ok() && session.used.locked().elapsed() >= IDLE;
            if is_idle {
                return self.forget(&name);
            }
        }
    }

    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.open.locked().is_empty()
    }
}

impl<T> Session<T> {
    /// Uses the state, after the requests that use it already.
    pub async fn lock(&self) -> MutexGuard<'_, T> {
        self.state.lock().await
    }

    /// Records that the host uses it.
    pub fn touch(&self) {
        *self.used.locked() = Instant::now();
    }
}
