//! thawd's state: its sandboxes.
//!
//! Invariants: a sandbox is in the cache exactly while it is in the table, [is failing](fail) or has failed. The cache is updated after the
//! event that it describes. No lock is held across a call to a guest, a VMM or a registry, except a sandbox's turn, which orders the
//! operations that change it. The task that watches a sandbox ends with it.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use thaw_protocol::api::{Sandbox as Described, SandboxEvent};
use thaw_sandbox::config::SandboxConfig;
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::state::ended::Retention;
use thaw_sandbox::{Node, Sandbox, Tenants};
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;

use super::factory::Factory;
use super::idempotency::Answers;
use super::machine::{Condition, Machine};
use super::microvm::Microvm;
use super::problem::{ApiCode, Refusal};
use super::scope::Wanted;
use super::watch::{Cache, Versions};
use crate::metrics::Metrics;
use crate::spans::{Creation, Spans};

mod create;
mod describe;
mod fail;
mod fork;
mod life;
mod lifetime;
mod operations;
mod orphans;
mod ready;
mod timeout;
mod usage;

use create::Creations;
use describe::describe;
pub use fail::Keep;
use fail::{Failing, Kept};
use thaw_sys::lock::Lock;

/// Held by the operation that changes a sandbox.
type OneAtATime = Arc<tokio::sync::Mutex<()>>;

/// The file in the data directory with the reserved resource versions.
const VERSIONS: &str = "resource-version";

/// A sandbox that this process owns.
#[derive(Debug)]
struct Held {
    machine: Arc<dyn Machine>,
    /// For operations that change it, one at a time.
    turn: OneAtATime,
    /// Watches for its end.
    lifetime: AbortHandle,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.lifetime.abort();
    }
}

/// The state of thawd, or of a `thaw run` that owns one sandbox.
#[derive(Debug)]
pub struct Daemon {
    /// `None` in a `thaw run` that owns its sandbox: it creates no others.
    factory: Option<Arc<dyn Factory>>,
    table: Mutex<BTreeMap<String, Held>>,
    pub cache: Arc<Cache>,
    pub answers: Answers,
    pub metrics: Metrics,
    /// Sends creations as spans, if that is configured.
    spans: Mutex<Option<Spans>>,
    creations: watch::Sender<Creations>,
    /// Locked before the table, if both are locked.
    failing: Mutex<Failing>,
    kept: Arc<Kept>,
    /// Shared by work that must be finished even if its caller hangs up.
    finishing: Arc<tokio::sync::RwLock<()>>,
    /// Whether the server is shutting down.
    closing: watch::Sender<bool>,
}

impl Daemon {
    /// Adopts every sandbox that an earlier thawd left running. A sandbox that cannot be adopted runs on without an owner.
    ///
    /// # Errors
    /// The data directory cannot be written, or the configuration of spans is invalid.
    pub async fn start(tenants: Tenants) -> Result<Arc<Daemon>, Error> {
        let node = tenants.shared().clone();
        let file = node.paths.data.join(VERSIONS);
        let fail = |e: io::Error| Error::system(format!("cannot write {}", file.display()), &e);
        let kept = Kept {
            run: Some(node.run.clone()),
            retention: Retention::of(&node.images.config.sandbox),
            more: Notify::new(),
        };
        let daemon = Daemon::keeping(
            kept,
            Some(Arc::new(tenants.clone())),
            Versions::open(file.clone()).map_err(fail)?,
        );
        *daemon.spans() = Spans::start(&node.images.config.tracing)?;
        daemon.adopt(&tenants).await;
        daemon.keep_ended().await;
        Ok(daemon)
    }

    /// The state of a process that owns one sandbox and serves its API.
    pub fn of_one(node: Node, sandbox: Arc<Sandbox>) -> Arc<Daemon> {
        let daemon = Daemon::new(None, Versions::of_clock());
        daemon.insert(Arc::new(Microvm::new(node, sandbox)), Condition::Running, None);
        daemon
    }

    /// A state without sandboxes. Failed sandboxes are kept in memory only.
    pub fn new(factory: Option<Arc<dyn Factory>>, versions: Versions) -> Arc<Daemon> {
        let kept = Kept {
            run: None,
            retention: Retention::of(&SandboxConfig::default()),
            more: Notify::new(),
        };
        Daemon::keeping(kept, factory, versions)
    }

    fn keeping(kept: Kept, factory: Option<Arc<dyn Factory>>, versions: Versions) -> Arc<Daemon> {
        Arc::new(Daemon {
            failing: Mutex::default(),
            kept: Arc::new(kept),
            factory,
            table: Mutex::default(),
            cache: Arc::new(Cache::new(versions)),
            answers: Answers::default(),
            metrics: Metrics::default(),
            spans: Mutex::default(),
            creations: watch::Sender::default(),
            finishing: Arc::default(),
            closing: watch::Sender::new(false),
        })
    }

    /// Finishes `work` even if the caller hangs up: a sandbox must not stay half frozen.
    pub async fn finish<T: Send + 'static, E: Into<Refusal> + Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, E>> + Send + 'static,
    ) -> Result<T, Refusal> {
        let finishing = self.finishing.clone().read_owned().await;
        let done = tokio::spawn(async move {
            let _finishing = finishing;
            work.await
        });
        let done = done.await.map_err(|e| Refusal::new(ApiCode::Broken, e))?;
        done.map_err(Into::into)
    }

    /// Stops creating sandboxes, and ends watches and processes: another thawd will take over.
    pub fn end(&self) {
        self.close();
        self.cache.close();
        self.closing.send_replace(true);
    }

    /// Sends a creation as spans, if that is configured.
    pub fn send_spans(&self, creation: impl FnOnce() -> Creation) {
        if let Some(spans) = &*self.spans() {
            spans.send(creation());
        }
    }

    /// Changes when the server shuts down.
    pub fn closing(&self) -> watch::Receiver<bool> {
        self.closing.subscribe()
    }

    fn spans(&self) -> MutexGuard<'_, Option<Spans>> {
        self.spans.locked()
    }

    /// Releases every sandbox once no operation changes any, so that they outlive this process.
    pub async fn release(&self) {
        let spans = self.spans().take();
        if let Some(spans) = spans {
            spans.close().await;
        }
        let _alone = self.finishing.write().await;
        for (id, held) in std::mem::take(&mut *self.table()) {
            let machine = held.machine.clone();
            drop(held);
            if !machine.release() {
                tracing::warn!(sandbox = id, "still in use while thawd ends");
            }
        }
    }

    /// Keeps the answer to a creation with an idempotency key, for a later thawd.
    pub fn note_answer(&self, id: &str, answer: &[u8]) {
        // A sandbox that no longer exists needs no answer.
        let Ok((machine, _)) = self.find(id) else { return };
        if let Err(e) = machine.note_answer(answer) {
            tracing::warn!(sandbox = id, "its key is not known to a later thawd: {e}");
        }
    }

    /// The factory: it creates sandboxes, and holds the images and templates.
    ///
    /// # Errors
    /// [`ApiCode::OneOnly`]: this process owns one sandbox.
    pub fn factory(&self) -> Result<&Arc<dyn Factory>, Refusal> {
        let one_only = || Refusal::new(ApiCode::OneOnly, "this is a thaw run of its own");
        self.factory.as_ref().ok_or_else(one_only)
    }

    fn insert(
        self: &Arc<Daemon>,
        machine: Arc<dyn Machine>,
        condition: Condition,
        event: Option<SandboxEvent>,
    ) -> Arc<Described> {
        let described = Described {
            event,
            ..describe(machine.as_ref(), condition)
        };
        let id = described.id.clone();
        let lifetime = lifetime::watch(Arc::downgrade(self), machine.as_ref());
        // Locked until the sandbox is in both the table and the cache, because it may end at once.
        let mut table = self.table();
        let shown = self.cache.put(described);
        let held = Held {
            lifetime: tokio::spawn(lifetime).abort_handle(),
            turn: Arc::default(),
            machine,
        };
        table.insert(id, held);
        shown
    }

    /// The id of the sandbox with this id or name.
    fn id(&self, wanted: &Wanted) -> Result<String, Error> {
        let found = self
            .cache
            .find(wanted)
            .ok_or_else(|| no_such_sandbox(&wanted.text))?;
        Ok(found.id.clone())
    }

    fn find(&self, id: &str) -> Result<(Arc<dyn Machine>, OneAtATime), Error> {
        let found = self
            .table()
            .get(id)
            .map(|held| (held.machine.clone(), held.turn.clone()));
        found.ok_or_else(|| self.absent(id))
    }

    /// The error for a sandbox without a machine: it failed, or never existed.
    fn absent(&self, id: &str) -> Error {
        let shown = self.cache.get(id);
        let what = match shown.as_ref().map(|shown| (&shown.failure, shown.ended_at())) {
            Some((Some(failure), _)) => format!("sandbox {id} has failed: {}", failure.message),
            Some((None, Some(_))) => format!("sandbox {id} has ended"),
            _ => return no_such_sandbox(id),
        };
        Error::new(ErrorKind::SandboxNotFound, what).remedy("see `thaw ps -a`; `thaw rm` removes it")
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<String, Held>> {
        self.table.locked()
    }
}

/// The error for a sandbox that does not exist.
pub fn no_such_sandbox(wanted: &str) -> Error {
    Error::new(
        ErrorKind::SandboxNotFound,
        format!("no running sandbox is {wanted}"),
    )
}

#[cfg(test)]
#[path = "daemon_test.rs"]
mod tests;
