//! thawd's state: the sandboxes it holds, and what is known of each.
//!
//! Invariants: a sandbox is in the cache exactly while it is in the table, or [fails](fail) or has failed; what the cache says of it follows what happened to
//! it; no lock is held across a call to a guest, a VMM or a registry but a sandbox's own turn, which orders what is done to
//! it. Whatever attends a sandbox ends with it.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use thaw_failpoint::{Failpoint, reach};
use thaw_pools::share::Source;
use thaw_protocol::api::{
    FreezeSandbox, FrozenSandbox, NetworkPolicy, NodeUsage, PoolUsage, RateLimits, Sandbox as Described,
    SandboxUsage, Usage,
};
use thaw_protocol::control::DeviceId;
use thaw_sandbox::config::SandboxConfig;
use thaw_sandbox::container::Options;
use thaw_sandbox::exit::{ExitCode, Failure};
use thaw_sandbox::journal::Journal;
use thaw_sandbox::sandbox::{Node, Sandbox, Tenants};
use thaw_sandbox::state::failed::Retention;
use thaw_sandbox::state::{HostDisk, Record};
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;

use super::idempotency::Answers;
use super::limits::Permit;
use super::machine::{Condition, Machine};
use super::maker::Maker;
use super::microvm::Microvm;
use super::problem::{ApiCode, Refusal};
use super::scope::{Scope, Wanted};
use super::session::Session;
use super::watch::{Cache, Versions};
use crate::metrics::{Families, Metrics};
use crate::spans::{Creation, Spans};

mod attend;
mod describe;
mod fail;
mod fork;
mod making;
mod orphans;
mod ready;

use attend::attend;
use describe::{describe, set};
use fail::{Failing, Kept};
use making::Makings;

/// Who changes a sandbox holds it.
type OneAtATime = Arc<tokio::sync::Mutex<()>>;

/// Where the resource versions that were reserved are written, in the data directory.
const VERSIONS: &str = "resource-version";

/// A sandbox that is held.
#[derive(Debug)]
struct Held {
    machine: Arc<dyn Machine>,
    /// Who changes it, one after the other.
    turn: Arc<tokio::sync::Mutex<()>>,
    attendant: AbortHandle,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.attendant.abort();
    }
}

/// The right to change a sandbox.
struct Turn {
    id: String,
    machine: Arc<dyn Machine>,
    _alone: tokio::sync::OwnedMutexGuard<()>,
}

/// thawd, or a process with a sandbox of its own.
#[derive(Debug)]
pub struct Daemon {
    /// None makes none: it owns one sandbox, a `thaw run` in its own process.
    maker: Option<Arc<dyn Maker>>,
    table: Mutex<BTreeMap<String, Held>>,
    pub cache: Arc<Cache>,
    pub answers: Answers,
    pub metrics: Metrics,
    /// Where creations are sent as spans, if anywhere.
    spans: Mutex<Option<Spans>>,
    makings: watch::Sender<Makings>,
    /// Taken before the table, where both are.
    failing: Mutex<Failing>,
    kept: Arc<Kept>,
    /// Shared by whatever is finished though nobody waits for it.
    finishing: Arc<tokio::sync::RwLock<()>>,
    /// Whether serving is at its end.
    closing: watch::Sender<bool>,
}

impl Daemon {
    /// Takes over every sandbox an earlier thawd left running. One that cannot be taken over runs on without an owner.
    ///
    /// # Errors
    /// The data directory cannot be written, or spans cannot be sent where the configuration says.
    pub async fn start(tenants: Tenants) -> Result<Arc<Daemon>, Failure> {
        let node = tenants.shared().clone();
        let file = node.paths.data.join(VERSIONS);
        let fail = |e: io::Error| Failure::system(format!("cannot write {}", file.display()), &e);
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
        daemon.keep_failed().await;
        Ok(daemon)
    }

    /// What a process that owns one sandbox serves of the API.
    pub fn of_one(node: Node, sandbox: Arc<Sandbox>) -> Arc<Daemon> {
        let daemon = Daemon::new(None, Versions::of_clock());
        daemon.insert(Arc::new(Microvm::new(node, sandbox)), Condition::Running);
        daemon
    }

    /// With no sandbox yet. What fails is kept in memory alone.
    pub fn new(maker: Option<Arc<dyn Maker>>, versions: Versions) -> Arc<Daemon> {
        let kept = Kept {
            run: None,
            retention: Retention::of(&SandboxConfig::default()),
            more: Notify::new(),
        };
        Daemon::keeping(kept, maker, versions)
    }

    fn keeping(kept: Kept, maker: Option<Arc<dyn Maker>>, versions: Versions) -> Arc<Daemon> {
        Arc::new(Daemon {
            failing: Mutex::default(),
            kept: Arc::new(kept),
            maker,
            table: Mutex::default(),
            cache: Arc::new(Cache::new(versions)),
            answers: Answers::default(),
            metrics: Metrics::default(),
            spans: Mutex::default(),
            makings: watch::Sender::default(),
            finishing: Arc::default(),
            closing: watch::Sender::new(false),
        })
    }

    /// Work that is finished though its caller hangs up: a sandbox must not stay half frozen.
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

    /// Makes no more, and ends what lasts for as long as its caller listens: another thawd will take over.
    pub fn end(&self) {
        self.close();
        self.cache.close();
        self.closing.send_replace(true);
    }

    /// Has a creation sent, where there is somebody to take it.
    pub fn tell(&self, creation: impl FnOnce() -> Creation) {
        if let Some(spans) = &*self.spans() {
            spans.tell(creation());
        }
    }

    fn spans(&self) -> MutexGuard<'_, Option<Spans>> {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets go of every sandbox, so that they outlive us, once nothing is done to any of them.
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

    /// Keeps the answer to who asked for a sandbox with a key, for a later thawd.
    pub fn note_answer(&self, id: &str, answer: &[u8]) {
        // One that is gone already is nobody's to answer for.
        let Ok((machine, _)) = self.find(id) else { return };
        if let Err(e) = machine.note_answer(answer) {
            tracing::warn!(sandbox = id, "its key is not known to a later thawd: {e}");
        }
    }

    /// Who makes sandboxes, and has what they are made of.
    pub fn maker(&self) -> Result<&Arc<dyn Maker>, Refusal> {
        let one_only = || Refusal::new(ApiCode::OneOnly, "this is a thaw run of its own");
        self.maker.as_ref().ok_or_else(one_only)
    }

    /// What one sandbox takes of its host. Blocks for as long as the kernel takes to say.
    pub fn usage(&self, wanted: &Wanted) -> Result<Usage, Failure> {
        let id = self.id(wanted)?;
        Ok(self.find(&id)?.0.usage())
    }

    /// What all of a scope take; of the node also what the pools have. Blocks likewise.
    pub fn usages(&self, scope: &Scope) -> NodeUsage {
        let held: Vec<_> = {
            let table = self.table();
            table.values().map(|held| held.machine.clone()).collect()
        };
        let sandboxes = held.iter().filter_map(|machine| {
            let shown = self.cache.get(&machine.record().id)?;
            scope.reaches(&shown).then(|| SandboxUsage {
                id: shown.id.clone(),
                name: shown.name.clone(),
                image: shown.image.clone(),
                state: shown.state.clone(),
                created: shown.created,
                cpus: shown.cpus,
                memory_mib: shown.memory_mib,
                usage: machine.usage(),
            })
        });
        let sandboxes = sandboxes.collect();
        let maker = self.maker.as_ref().filter(|_| scope.is_node());
        let pools = maker.map(|m| m.pools()).unwrap_or_default();
        let pools = pools.into_iter().map(|pool| PoolUsage {
            pool: pool.kind.into(),
            ready: pool.ready,
            high: pool.high,
            claims: pool.claims,
            hits: pool.hits,
        });
        NodeUsage {
            pools: pools.collect(),
            sandboxes,
        }
    }

    /// What it has and did.
    pub fn count(&self, families: &mut Families) {
        self.metrics.collect(families);
        if let Some(spans) = &*self.spans() {
            spans.count(families);
        }
        if let Some(maker) = &self.maker {
            maker.count(self.metrics.endpoint_names(), families);
        }
    }

    fn insert(self: &Arc<Daemon>, machine: Arc<dyn Machine>, condition: Condition) -> Arc<Described> {
        let described = describe(machine.as_ref(), condition);
        let id = described.id.clone();
        let attending = attend(Arc::downgrade(self), machine.as_ref());
        // Held until it is in both: its attendant may find it over at once.
        let mut table = self.table();
        let shown = self.cache.put(described);
        let held = Held {
            attendant: tokio::spawn(attending).abort_handle(),
            turn: Arc::default(),
            machine,
        };
        table.insert(id, held);
        shown
    }

    /// Ends a sandbox and removes all it has; also one that runs here without an owner. Of one that failed, what is left.
    pub async fn delete(&self, wanted: &Wanted) -> Result<(), Failure> {
        let id = match (self.id(wanted), &self.maker) {
            (Ok(id), _) => id,
            // Whose it is, is not known of each that has no owner: it is the node's to end.
            (Err(_), Some(maker)) if wanted.scope.is_node() && maker.end_unowned(&wanted.text).await => {
                return Ok(());
            }
            (Err(none), _) => return Err(none),
        };
        if self.maker.is_none() {
            // Its owner sees it end, and removes it.
            self.find(&id)?.0.kill();
            return Ok(());
        }
        let machine = {
            let mut table = self.table();
            table.remove(&id).map(|held| {
                self.cache.remove(&id);
                held.machine.clone()
            })
        };
        let Some(machine) = machine else {
            return match self.delete_failed(&id).await {
                true => Ok(()),
                false => Err(none(&wanted.text)),
            };
        };
        reach(Failpoint::DeleteForgotten);
        machine.destroy().await;
        Ok(())
    }

    /// Stops its CPUs.
    pub async fn pause(&self, wanted: &Wanted) -> Result<(), Failure> {
        let turn = self.turn(wanted).await?;
        let done = turn.machine.pause().await;
        reach(Failpoint::PauseDone);
        self.settle(turn).await;
        done
    }

    /// Lets them run again.
    pub async fn resume(&self, wanted: &Wanted) -> Result<(), Failure> {
        let turn = self.turn(wanted).await?;
        let done = turn.machine.resume().await;
        reach(Failpoint::ResumeDone);
        self.settle(turn).await;
        done
    }

    /// Writes it down.
    pub async fn freeze(&self, wanted: &Wanted, request: FreezeSandbox) -> Result<FrozenSandbox, Failure> {
        let turn = self.turn(wanted).await?;
        let done = turn.machine.freeze(request).await;
        self.settle(turn).await;
        done
    }

    /// Shows it an image of the store; the image's directory in the guest's root device.
    pub async fn show_image(&self, wanted: &Wanted, digest: &str) -> Result<String, Failure> {
        let turn = self.turn(wanted).await?;
        turn.machine.show(digest).await
    }

    /// Shares files of this host with it, by this name: those its client sees.
    pub async fn add_share(&self, wanted: &Wanted, name: String, source: Source) -> Result<(), Failure> {
        // Not in turn: a file system of the host may take its time, and nothing else of the sandbox waits for it.
        let machine = self.find(&self.id(wanted)?)?.0;
        machine.add_share(name, source).await
    }

    /// Takes a share away.
    pub async fn remove_share(&self, wanted: &Wanted, name: String) -> Result<(), Failure> {
        let machine = self.find(&self.id(wanted)?)?.0;
        machine.remove_share(name).await
    }

    /// Gives it a block device of this host; the slot of its machine.
    pub async fn add_disk(&self, wanted: &Wanted, disk: HostDisk) -> Result<DeviceId, Failure> {
        // Not in turn: a device of the host may take its time to be opened.
        let machine = self.find(&self.id(wanted)?)?.0;
        machine.add_disk(disk).await
    }

    /// Takes it away.
    pub async fn remove_disk(&self, wanted: &Wanted, slot: DeviceId) -> Result<(), Failure> {
        let machine = self.find(&self.id(wanted)?)?.0;
        machine.remove_disk(slot).await
    }

    /// Waits for its machine's end: why it ended.
    pub async fn end_of(&self, wanted: &Wanted) -> Result<String, Failure> {
        let id = self.id(wanted)?;
        if let Some(reason) = self.cache.get(&id).and_then(|shown| shown.reason.clone()) {
            return Ok(reason);
        }
        // Nobody may hold a machine that is waited for.
        let end = self.find(&id)?.0.end();
        Ok(end.await)
    }

    /// Says where a sandbox may connect to, from now on.
    pub async fn set_network_policy(
        &self,
        wanted: &Wanted,
        policy: NetworkPolicy,
    ) -> Result<Arc<Described>, Failure> {
        let turn = self.turn(wanted).await?;
        let network = turn.machine.set_network_policy(policy).await?;
        self.cache
            .update(&turn.id, |described| described.network = Some(network));
        self.cache.get(&turn.id).ok_or_else(|| none(&wanted.text))
    }

    /// Says how much a sandbox's disks and network may do, from now on.
    pub async fn set_rate_limits(
        &self,
        wanted: &Wanted,
        change: RateLimits,
    ) -> Result<Arc<Described>, Failure> {
        let turn = self.turn(wanted).await?;
        let limits = turn.machine.set_rate_limits(change).await?;
        self.cache
            .update(&turn.id, |described| described.rate_limits = limits);
        self.cache.get(&turn.id).ok_or_else(|| none(&wanted.text))
    }

    /// The machine of a sandbox that runs.
    ///
    /// # Errors
    /// [`ApiCode::NotRunning`]: a paused guest answers nothing.
    pub fn running(&self, wanted: &Wanted) -> Result<Arc<dyn Machine>, Refusal> {
        let shown = self.cache.find(wanted).ok_or_else(|| none(&wanted.text))?;
        match shown.state.as_str() {
            "running" => Ok(self.find(&shown.id)?.0),
            state => Err(Refusal::new(
                ApiCode::NotRunning,
                match &shown.failure {
                    Some(failure) => format!("sandbox {} has failed: {}", shown.id, failure.message),
                    None => format!("sandbox {} is {state}", shown.id),
                },
            )),
        }
    }

    /// What a sandbox's container wrote.
    ///
    /// # Errors
    /// [`ApiCode::NoLogs`]: somebody else attends it.
    pub fn journal(&self, wanted: &Wanted) -> Result<Arc<Journal>, Refusal> {
        let id = self.id(wanted)?;
        let not_kept = || {
            let what = format!("sandbox {id}: thawd started no container in it");
            Refusal::new(ApiCode::NoLogs, what)
        };
        self.find(&id)?.0.journal().ok_or_else(not_kept)
    }

    /// Tells when serving is at its end.
    pub fn closing(&self) -> watch::Receiver<bool> {
        self.closing.subscribe()
    }

    /// Starts a process in a sandbox's container, and attends it with a permit in hand. It is attended to its end, or hung up
    /// on, whoever stops waiting for this.
    pub async fn exec(
        &self,
        wanted: &Wanted,
        options: Options,
        permit: Arc<Permit>,
    ) -> Result<Session, Refusal> {
        let machine = self.running(wanted)?;
        let held = (self.finishing.clone().read_owned().await, permit);
        let (tty, closing) = (options.tty, self.closing());
        let started = tokio::spawn(async move {
            let process = machine.exec(options).await?;
            Ok::<_, Failure>(Session::start(process, tty, closing, held))
        });
        let started = started.await.map_err(|e| Refusal::new(ApiCode::Broken, e))?;
        Ok(started?)
    }

    /// Waits until nobody else changes a sandbox.
    async fn turn(&self, wanted: &Wanted) -> Result<Turn, Failure> {
        let id = self.id(wanted)?;
        let (machine, turn) = self.find(&id)?;
        Ok(Turn {
            id,
            machine,
            _alone: turn.lock_owned().await,
        })
    }

    /// Looks at what became of a sandbox, whatever was done to it.
    async fn settle(&self, turn: Turn) {
        let condition = turn.machine.condition().await;
        self.cache.update(&turn.id, |described| set(described, condition));
    }

    /// The record of a sandbox that has a machine.
    fn record_of(&self, wanted: &Wanted) -> Result<Record, Failure> {
        let machine = self.find(&self.id(wanted)?)?.0;
        Ok(machine.record().clone())
    }

    /// The id of the sandbox with this id or name.
    fn id(&self, wanted: &Wanted) -> Result<String, Failure> {
        let found = self.cache.find(wanted).ok_or_else(|| none(&wanted.text))?;
        Ok(found.id.clone())
    }

    fn find(&self, id: &str) -> Result<(Arc<dyn Machine>, OneAtATime), Failure> {
        let found = self
            .table()
            .get(id)
            .map(|held| (held.machine.clone(), held.turn.clone()));
        found.ok_or_else(|| self.absent(id))
    }

    /// There is no such machine: it failed, or never was.
    fn absent(&self, id: &str) -> Failure {
        match self.cache.get(id).and_then(|shown| shown.failure.clone()) {
            Some(failure) => {
                let what = format!("sandbox {id} has failed: {}", failure.message);
                Failure::new(ExitCode::SandboxNotFound, what).remedy("see `thaw ps -a`; `thaw rm` removes it")
            }
            None => none(id),
        }
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<String, Held>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// There is no such sandbox.
pub fn none(wanted: &str) -> Failure {
    Failure::new(
        ExitCode::SandboxNotFound,
        format!("no running sandbox is {wanted}"),
    )
}

#[cfg(test)]
#[path = "daemon_test.rs"]
mod tests;
