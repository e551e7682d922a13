//! The watchers of a sandbox, whose events callers ask for.
//!
//! Invariants: a sandbox has at most [`MOST`] watchers; a watcher holds at most [`MOST_EVENTS`] events and one answer of the guest, where
//! the others wait; a watcher whose events no caller has fetched for [`FORGOTTEN`] makes room for a new one.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use thaw_protocol::connect::Code;
use thaw_protocol::e2b::filesystem::FilesystemEvent;
use thaw_sandbox::error::Error;
use thaw_sandbox::id::new_id;
use thaw_sys::lock::Lock;
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::failure::Failure;

/// Most watchers of one sandbox. The guest has room for as many watches.
const MOST: usize = 16;
/// Most events that wait for a caller.
pub const MOST_EVENTS: usize = 1024;
/// After so long without a question, a watcher may be removed.
const FORGOTTEN: Duration = Duration::from_secs(3600);

/// Events that wait for a caller.
#[derive(Debug, Default)]
pub struct Waiting {
    state: Mutex<State>,
    taken: Notify,
}

#[derive(Debug, Default)]
struct State {
    events: VecDeque<FilesystemEvent>,
    end: Option<Failure>,
}

impl Waiting {
    /// Adds an event. Waits until there is room.
    pub async fn push(&self, event: FilesystemEvent) {
        loop {
            let taken = self.taken.notified();
            {
                let mut state = self.state.locked();
                if state.events.len() < MOST_EVENTS {
                    return state.events.push_back(event);
                }
            }
            taken.await;
        }
    }

    /// There are no more events.
    pub fn end(&self, why: Failure) {
        self.state.locked().end = Some(why);
    }

    /// Takes all events.
    ///
    /// # Errors
    /// There are none, and there will be no more.
    fn take(&self) -> Result<Vec<FilesystemEvent>, Failure> {
        let mut state = self.state.locked();
        let events: Vec<_> = state.events.drain(..).collect();
        self.taken.notify_one();
        match &state.end {
            Some(why) if events.is_empty() => Err(why.clone()),
            _ => Ok(events),
        }
    }
}

/// A watcher. Its task ends with it.
#[derive(Debug)]
struct Watcher {
    waiting: Arc<Waiting>,
    asked: Instant,
    collecting: AbortHandle,
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.collecting.abort();
    }
}

/// The watchers of one sandbox, by id.
#[derive(Debug, Default)]
pub struct Watchers(Mutex<BTreeMap<String, Watcher>>);

impl Watchers {
    /// Adds a watcher, whose events `collect` collects. Returns its id.
    ///
    /// # Errors
    /// There are too many.
    pub fn add<F: Future<Output = ()> + Send + 'static>(
        &self,
        collect: impl FnOnce(Arc<Waiting>) -> F,
    ) -> Result<String, Failure> {
        let id = new_id().map_err(|e| Error::system("cannot read random bytes", &e))?;
        let mut watchers = self.0.locked();
        watchers.retain(|_, watcher| watcher.asked.elapsed() < FORGOTTEN);
        if watchers.len() >= MOST {
            let what = format!("the sandbox has {MOST} watchers already, which is the most; remove one");
            return Err(Failure::new(Code::ResourceExhausted, what));
        }
        let waiting = Arc::new(Waiting::default());
        let watcher = Watcher {
            asked: Instant::now(),
            collecting: tokio::spawn(collect(waiting.clone())).abort_handle(),
            waiting,
        };
        watchers.insert(id.clone(), watcher);
        Ok(id)
    }

    /// The events of a watcher since it was last asked.
    ///
    /// # Errors
    /// There is no such watcher, or it has ended.
    pub fn take(&self, id: &str) -> Result<Vec<FilesystemEvent>, Failure> {
        let mut watchers = self.0.locked();
        let watcher = watchers.get_mut(id).ok_or_else(|| no_watcher(id))?;
        watcher.asked = Instant::now();
        watcher.waiting.take()
    }

    /// Removes a watcher.
    ///
    /// # Errors
    /// There is no such watcher.
    pub fn remove(&self, id: &str) -> Result<(), Failure> {
        let removed = self.0.locked().remove(id);
        removed.map(drop).ok_or_else(|| no_watcher(id))
    }
}

fn no_watcher(id: &str) -> Failure {
    let shown: String = id.chars().take(64).collect();
    Failure::new(Code::NotFound, format!("there is no watcher {shown:?}"))
}
