//! What thawd keeps for a sandbox whose protocol is in use: its relayed processes, its watchers, and its bounds.
//!
//! Invariants: nothing of it is needed after a restart of thawd, which finds the processes in the guest; the state of a sandbox that no
//! longer exists is dropped when the next sandbox is opened; a sandbox has at most [`MAX_REQUESTS`] requests at once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use thaw_protocol::connect::Code;
use thaw_sys::lock::Lock;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::failure::Failure;
use super::relay::Relays;
use super::watcher::Watchers;
use crate::api::daemon::Daemon;
use crate::api::scope::Wanted;
use crate::e2b::context::Context;
use crate::e2b::notes::Notes;

/// Most requests of one sandbox at once, streams included. Each holds a message of [`MAX_MESSAGE`](super::connect::MAX_MESSAGE) bytes at
/// most, or a piece of a file.
const MAX_REQUESTS: usize = 128;

/// The state of one sandbox.
#[derive(Debug)]
pub struct OpenSandbox {
    pub id: String,
    /// What its template says of processes.
    pub context: Context,
    pub relays: Arc<Relays>,
    pub watchers: Watchers,
    /// The time and the CPU time, in nanoseconds, when its metrics were last read.
    pub last_cpu: Mutex<Option<(u64, u64)>>,
    requests: Arc<Semaphore>,
}

/// All of them, by id.
#[derive(Debug)]
pub struct OpenSandboxes {
    pub daemon: Arc<Daemon>,
    by_id: Mutex<HashMap<String, Arc<OpenSandbox>>>,
}

impl OpenSandboxes {
    pub fn new(daemon: Arc<Daemon>) -> OpenSandboxes {
        OpenSandboxes {
            daemon,
            by_id: Mutex::default(),
        }
    }

    /// The state of a running sandbox.
    ///
    /// # Errors
    /// It does not exist, or does not run.
    pub fn open(&self, wanted: &Wanted) -> Result<Arc<OpenSandbox>, Failure> {
        let machine = self.daemon.running(wanted);
        let machine = machine.map_err(|why| Failure::not_running(&wanted.text, why))?;
        let id = machine.record().id.clone();
        let mut by_id = self.by_id.locked();
        if let Some(open) = by_id.get(&id) {
            return Ok(open.clone());
        }
        let exists = |id: &String| {
            let shown = self.daemon.cache.get(id);
            shown.is_some_and(|shown| shown.ended_at().is_none())
        };
        by_id.retain(|id, _| exists(id));
        let open = Arc::new(OpenSandbox {
            id: id.clone(),
            context: Notes::of(&machine.record().terms)
                .map(|notes| notes.context)
                .unwrap_or_default(),
            relays: Arc::default(),
            watchers: Watchers::default(),
            last_cpu: Mutex::default(),
            requests: Arc::new(Semaphore::new(MAX_REQUESTS)),
        });
        by_id.insert(id, open.clone());
        Ok(open)
    }
}

impl OpenSandbox {
    /// Admits a request, until the permit is dropped.
    ///
    /// # Errors
    /// There are too many.
    pub fn enter(&self) -> Result<OwnedSemaphorePermit, Failure> {
        self.requests.clone().try_acquire_owned().map_err(|_| {
            let what = format!(
                "the sandbox has {MAX_REQUESTS} requests at once already, which is the most; retry when one has ended"
            );
            Failure::new(Code::ResourceExhausted, what)
        })
    }
}
