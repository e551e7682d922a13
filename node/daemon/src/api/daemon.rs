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
use thaw_sandbox::state::{Record, TimeLimit};
use thaw_sandbox::{Node, Sandbox, Tenants};
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;

use super::factory::Factory;
use super::idempotency::Answers;
use super::machine::{Condition, Machine};
use super::microvm::Microvm;
use super::period::Period;
use super::problem::{ApiCode, Refusal};
use super::scope::Wanted;
use super::watch::{Cache, SnapshotCache, Versions};
use crate::metrics::Metrics;
use crate::spans::{Creation, Spans};

mod create;
mod describe;
mod fail;
mod fork;
mod idle;
mod interruption;
mod life;
mod lifetime;
mod operations;
mod orphans;
mod paused;
mod ready;
mod timeout;
mod turn;
mod usage;

use create::Creations;
use describe::describe;
pub use fail::Keep;
use fail::{Failing, Kept};
pub use idle::Connected;
use idle::Requests;
use paused::PausedSandbox;
use thaw_sys::lock::Lock;
use turn::memory_released;

/// Held by the operation that changes a sandbox.
type OneAtATime = Arc<tokio::sync::Mutex<()>>;

/// The file in the data directory with the reserved resource versions.
const VERSIONS: &str = "resource-version";
/// The same for stored snapshots.
const SNAPSHOT_VERSIONS: &str = "snapshot-resource-version";

/// A sandbox that this process owns.
#[derive(Debug)]
struct Held {
    body: Body,
    /// For operations that change it, one at a time.
    turn: OneAtATime,
    requests: Arc<Requests>,
    /// Over when it is paused, gets another machine, or ends.
    uninterrupted: Period,
    /// Watches for its end.
    lifetime: AbortHandle,
}

/// What a sandbox is.
#[derive(Clone, Debug)]
enum Body {
    Machine(Arc<dyn Machine>),
    /// Its memory is released.
    Paused(Arc<PausedSandbox>),
}

impl Body {
    /// Its machine, if it has one.
    fn machine(&self) -> Option<&Arc<dyn Machine>> {
        match self {
            Body::Machine(machine) => Some(machine),
            Body::Paused(_) => None,
        }
    }

    fn record(&self) -> &Record {
        match self {
            Body::Machine(machine) => machine.record(),
            Body::Paused(paused) => paused.files.record(),
        }
    }

    /// How long it may run, and every later limit.
    fn time_limit(&self) -> watch::Receiver<TimeLimit> {
        match self {
            Body::Machine(machine) => machine.time_limit(),
            Body::Paused(paused) => paused.time_limit.subscribe(),
        }
    }

    async fn set_time_limit(&self, limit: TimeLimit) -> Result<(), Error> {
        match self {
            Body::Machine(machine) => machine.set_time_limit(limit).await,
            Body::Paused(paused) => paused.set_time_limit(limit).await,
        }
    }
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
    /// The stored snapshots.
    pub snapshots: Arc<SnapshotCache>,
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
        let versions = |name: &str| {
            let file = node.paths.data.join(name);
            let fail = |e: io::Error| Error::system(format!("cannot write {}", file.display()), &e);
            Versions::open(file.clone()).map_err(fail)
        };
        let kept = Kept {
            run: Some(node.run.clone()),
            retention: Retention::of(&node.images.config.sandbox),
            more: Notify::new(),
        };
        let daemon = Daemon::keeping(
            kept,
            Some(Arc::new(tenants.clone())),
            versions(VERSIONS)?,
            versions(SNAPSHOT_VERSIONS)?,
        );
        *daemon.spans() = Spans::start(&node.images.config.tracing)?;
        let mut paused = paused::on_disk(&tenants).await;
        daemon.adopt(&tenants, &mut paused).await;
        daemon.list_paused(&node, paused).await;
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
        Daemon::keeping(kept, factory, versions, Versions::of_clock())
    }

    fn keeping(
        kept: Kept,
        factory: Option<Arc<dyn Factory>>,
        versions: Versions,
        of_snapshots: Versions,
    ) -> Arc<Daemon> {
        let snapshots = Arc::new(SnapshotCache::new(of_snapshots));
        if let Some(factory) = &factory {
            factory.observe_snapshots(snapshots.clone());
        }
        Arc::new(Daemon {
            failing: Mutex::default(),
            kept: Arc::new(kept),
            factory,
            table: Mutex::default(),
            cache: Arc::new(Cache::new(versions)),
            snapshots,
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
        self.snapshots.close();
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
            let machine = held.body.machine().cloned();
            drop(held);
            if machine.is_some_and(|machine| !machine.release()) {
                tracing::warn!(sandbox = id, "still in use while thawd ends");
            }
        }
    }

    /// Keeps the answer to a creation with an idempotency key, for a later thawd.
    pub fn note_answer(&self, id: &str, answer: &[u8]) {
        // A sandbox that no longer exists needs no answer.
        let Ok(machine) = self.find(id) else { return };
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
        self.insert_body(Body::Machine(machine), described)
    }

    fn insert_body(self: &Arc<Daemon>, body: Body, described: Described) -> Arc<Described> {
        let id = described.id.clone();
        // Locked until the sandbox is in both the table and the cache, because it may end at once.
        let mut table = self.table();
        let shown = self.cache.put(described);
        let held = Held {
            lifetime: self.watch(&id, &body),
            turn: Arc::default(),
            requests: Arc::default(),
            uninterrupted: Period::default(),
            body,
        };
        table.insert(id, held);
        shown
    }

    /// Replaces what a sandbox is, with this change of its description, and watches that from now on. Returns false if the sandbox is gone.
    fn replace(self: &Arc<Daemon>, id: &str, body: Body, change: impl FnOnce(&mut Described)) -> bool {
        let mut table = self.table();
        let Some(held) = table.get_mut(id) else {
            return false;
        };
        held.lifetime.abort();
        // Before its end can be shown.
        self.cache.update(id, change);
        held.lifetime = self.watch(id, &body);
        held.uninterrupted = Period::default();
        held.body = body;
        true
    }

    /// Watches for the end of a sandbox.
    fn watch(self: &Arc<Daemon>, id: &str, body: &Body) -> AbortHandle {
        let daemon = Arc::downgrade(self);
        let watching = match body {
            Body::Machine(machine) => tokio::spawn(lifetime::watch(daemon, machine.as_ref())),
            Body::Paused(paused) => {
                let limit = paused.time_limit.subscribe();
                tokio::spawn(lifetime::watch_paused(daemon, id.to_owned(), limit))
            }
        };
        watching.abort_handle()
    }

    /// The id of the sandbox with this id or name.
    fn id(&self, wanted: &Wanted) -> Result<String, Error> {
        let found = self
            .cache
            .find(wanted)
            .ok_or_else(|| no_such_sandbox(&wanted.text))?;
        Ok(found.id.clone())
    }

    /// The machine of a sandbox, for a request.
    ///
    /// # Errors
    /// It has none: it has ended, or its memory is released.
    fn find(&self, id: &str) -> Result<Arc<dyn Machine>, Error> {
        self.count_request(id);
        self.look_up(id)
    }

    /// The same for a request after which a sandbox may still be idle.
    fn look_up(&self, id: &str) -> Result<Arc<dyn Machine>, Error> {
        let (body, _) = self.held(id)?;
        body.machine().cloned().ok_or_else(|| memory_released(id))
    }

    fn count_request(&self, id: &str) {
        if let Some(held) = self.table().get(id) {
            held.requests.count();
        }
    }

    fn held(&self, id: &str) -> Result<(Body, OneAtATime), Error> {
        let held = self
            .table()
            .get(id)
            .map(|held| (held.body.clone(), held.turn.clone()));
        held.ok_or_else(|| self.absent(id))
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
