//! thawd's state: the sandboxes it holds, and what is known of each.
//!
//! Invariants: a sandbox is in the cache exactly while it is in the table; what the cache says of it follows what happened to
//! it; no lock is held across a call to a guest, a VMM or a registry but a sandbox's own turn, which orders what is done to
//! it. Whatever attends a sandbox ends with it.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use thaw_failpoint::{Failpoint, reach};
use thaw_pools::share::Source;
use thaw_protocol::api::{
    CreateSandbox, CreatedSandbox, Drain, FreezeSandbox, FrozenSandbox, NetworkPolicy, NodeUsage, PoolUsage,
    Sandbox as Described, SandboxUsage, ThawSandbox, Usage,
};
use thaw_protocol::control::DeviceId;
use tokio::sync::watch;
use tokio::task::AbortHandle;

use super::idempotency::Answers;
use super::limits::Permit;
use super::maker::{Condition, CreatePod, Machine, Made, Maker, Microvm, ThawPod};
use super::problem::{ApiCode, Refusal};
use super::session::Session;
use super::watch::{Cache, Versions};
use crate::container::Options;
use crate::exit::{ExitCode, Failure};
use crate::journal::Journal;
use crate::metrics::{Families, How, Metrics};
use crate::readiness;
use crate::sandbox::{Asked, HostDisk, Node, Sandbox};
use crate::spans::{Creation, Spans};

mod fork;
mod orphans;
mod ready;

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

/// Whether sandboxes may be made, and how many are.
#[derive(Clone, Copy, Debug, Default)]
struct Makings {
    closed: bool,
    count: usize,
}

/// A sandbox is being made for as long as this is held.
struct Making<'a>(&'a watch::Sender<Makings>);

impl Drop for Making<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|makings| makings.count -= 1);
    }
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
    /// Shared by whatever is finished though nobody waits for it.
    finishing: Arc<tokio::sync::RwLock<()>>,
    /// Whether serving is at its end.
    closing: watch::Sender<bool>,
}

impl Daemon {
    /// Takes over every sandbox an earlier thawd left running. One whose VMM no longer answers is removed.
    ///
    /// # Errors
    /// The data directory cannot be written, or spans cannot be sent where the configuration says.
    pub async fn start(node: Node) -> Result<Arc<Daemon>, Failure> {
        let file = node.paths.data.join(VERSIONS);
        let fail = |e: io::Error| Failure::system(format!("cannot write {}", file.display()), &e);
        let daemon = Daemon::new(
            Some(Arc::new(node.clone())),
            Versions::open(file.clone()).map_err(fail)?,
        );
        *daemon.spans() = Spans::start(&node.images.config.tracing)?;
        daemon.adopt(&node).await;
        Ok(daemon)
    }

    /// What a process that owns one sandbox serves of the API.
    pub fn of_one(node: Node, sandbox: Arc<Sandbox>) -> Arc<Daemon> {
        let daemon = Daemon::new(None, Versions::of_clock());
        daemon.insert(Arc::new(Microvm::new(node, sandbox)), Condition::Running);
        daemon
    }

    /// With no sandbox yet.
    pub fn new(maker: Option<Arc<dyn Maker>>, versions: Versions) -> Arc<Daemon> {
        Arc::new(Daemon {
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

    /// Makes a sandbox of an image. Dropped, nothing is made.
    pub async fn create(
        self: &Arc<Daemon>,
        request: CreateSandbox,
        asked: Option<Asked>,
    ) -> Result<CreatedSandbox, Refusal> {
        let maker = self.maker()?;
        self.made(How::Create, maker.create(request, asked)).await
    }

    /// Makes a sandbox without an image, for a pod. Dropped, nothing is made.
    pub async fn create_pod(self: &Arc<Daemon>, request: CreatePod) -> Result<CreatedSandbox, Refusal> {
        let maker = self.maker()?;
        self.made(How::Create, maker.create_pod(request)).await
    }

    /// Makes one of a snapshot of a pod's. Dropped, nothing is made.
    pub async fn thaw_pod(self: &Arc<Daemon>, request: ThawPod) -> Result<CreatedSandbox, Refusal> {
        let maker = self.maker()?;
        self.made(How::Thaw, maker.thaw_pod(request)).await
    }

    /// Makes a sandbox of a snapshot. Dropped, nothing is made.
    pub async fn thaw(
        self: &Arc<Daemon>,
        request: ThawSandbox,
        asked: Option<Asked>,
    ) -> Result<CreatedSandbox, Refusal> {
        let maker = self.maker()?;
        self.made(How::Thaw, maker.thaw(request, asked)).await
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

    async fn made(
        self: &Arc<Daemon>,
        how: How,
        making: impl Future<Output = Result<Made, Refusal>>,
    ) -> Result<CreatedSandbox, Refusal> {
        // Until it is in the table, and ready: who drains us counts it.
        let _making = self.begin(how)?;
        let began = Instant::now();
        let made = async {
            let mut made = making.await?;
            let (took, readying) = (began.elapsed(), made.readying.take());
            let shown = self.show(made);
            match readying {
                None => Ok((took, shown)),
                // Not in the time it took: that is the container's.
                Some(readying) => Ok((took, self.until_ready(shown, readying).await?)),
            }
        };
        let (took, created) = made
            .await
            .inspect_err(|e: &Refusal| self.metrics.not_started(how, e.slug()))?;
        self.metrics.started(how, took, &created.account);
        Ok(created)
    }

    fn begin(&self, how: How) -> Result<Making<'_>, Refusal> {
        self.begin_making()
            .inspect_err(|e| self.metrics.not_started(how, e.slug()))
    }

    async fn timed(
        &self,
        how: How,
        making: impl Future<Output = Result<Made, Refusal>>,
    ) -> Result<Made, Refusal> {
        let began = Instant::now();
        let made = making
            .await
            .inspect_err(|e| self.metrics.not_started(how, e.slug()))?;
        self.metrics.started(how, began.elapsed(), &made.account);
        Ok(made)
    }

    fn show(self: &Arc<Daemon>, made: Made) -> CreatedSandbox {
        let shown = self.insert(made.machine, Condition::Running);
        reach(Failpoint::CreateShown);
        CreatedSandbox {
            sandbox: Described::clone(&shown),
            image_config: made.image_config,
            account: made.account,
        }
    }

    fn begin_making(&self) -> Result<Making<'_>, Refusal> {
        let begun = self.makings.send_if_modified(|makings| {
            makings.count += usize::from(!makings.closed);
            !makings.closed
        });
        match begun {
            true => Ok(Making(&self.makings)),
            false => Err(Refusal::new(ApiCode::Draining, "this thawd is being drained")),
        }
    }

    /// Refuses to make any more from now on.
    pub fn close(&self) {
        self.makings.send_modify(|makings| makings.closed = true);
    }

    /// The same, and waits until none is being made; or until they may be made again.
    pub async fn drain(&self) -> Result<Drain, Refusal> {
        self.maker()?;
        self.close();
        let mut makings = self.makings.subscribe();
        // The sender is ours.
        let _ = makings.wait_for(|m| m.count == 0 || !m.closed).await;
        Ok(self.drained())
    }

    /// Makes them again.
    pub fn undrain(&self) -> Result<Drain, Refusal> {
        self.maker()?;
        self.makings.send_modify(|makings| makings.closed = false);
        Ok(self.drained())
    }

    /// Whether any are made, and how many there are. Who is answered knows that no lock here is held for ever.
    pub fn drained(&self) -> Drain {
        let makings = *self.makings.borrow();
        Drain {
            draining: makings.closed,
            making: makings.count,
            sandboxes: self.table().len(),
        }
    }

    /// What one sandbox takes of its host. Blocks for as long as the kernel takes to say.
    pub fn usage(&self, wanted: &str) -> Result<Usage, Failure> {
        let id = self.id(wanted)?;
        Ok(self.find(&id)?.0.usage())
    }

    /// What all of them take, and the pools have. Blocks likewise.
    pub fn usages(&self) -> NodeUsage {
        let held: Vec<_> = {
            let table = self.table();
            table.values().map(|held| held.machine.clone()).collect()
        };
        let sandboxes = held.iter().filter_map(|machine| {
            let shown = self.cache.get(&machine.record().id)?;
            Some(SandboxUsage {
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
        let pools = self.maker.as_ref().map(|m| m.pools()).unwrap_or_default();
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

    /// Ends a sandbox and removes all it has.
    pub async fn delete(&self, wanted: &str) -> Result<(), Failure> {
        let id = self.id(wanted)?;
        if self.maker.is_none() {
            // Its owner sees it end, and removes it.
            self.find(&id)?.0.kill();
            return Ok(());
        }
        let machine = {
            let mut table = self.table();
            let held = table.remove(&id).ok_or_else(|| none(wanted))?;
            self.cache.remove(&id);
            held.machine.clone()
        };
        reach(Failpoint::DeleteForgotten);
        machine.destroy().await;
        Ok(())
    }

    /// Stops its CPUs.
    pub async fn pause(&self, wanted: &str) -> Result<(), Failure> {
        let turn = self.turn(wanted).await?;
        let done = turn.machine.pause().await;
        reach(Failpoint::PauseDone);
        self.settle(turn).await;
        done
    }

    /// Lets them run again.
    pub async fn resume(&self, wanted: &str) -> Result<(), Failure> {
        let turn = self.turn(wanted).await?;
        let done = turn.machine.resume().await;
        reach(Failpoint::ResumeDone);
        self.settle(turn).await;
        done
    }

    /// Writes it down.
    pub async fn freeze(&self, wanted: &str, request: FreezeSandbox) -> Result<FrozenSandbox, Failure> {
        let turn = self.turn(wanted).await?;
        let done = turn.machine.freeze(request).await;
        self.settle(turn).await;
        done
    }

    /// Shows it an image of the store; the image's directory in the guest's root device.
    pub async fn show_image(&self, wanted: &str, digest: &str) -> Result<String, Failure> {
        let turn = self.turn(wanted).await?;
        turn.machine.show(digest).await
    }

    /// Shares files of this host with it, by this name: those its client sees.
    pub async fn add_share(&self, wanted: &str, name: String, source: Source) -> Result<(), Failure> {
        // Not in turn: a file system of the host may take its time, and nothing else of the sandbox waits for it.
        let machine = self.find(&self.id(wanted)?)?.0;
        machine.add_share(name, source).await
    }

    /// Takes a share away.
    pub async fn remove_share(&self, wanted: &str, name: String) -> Result<(), Failure> {
        let machine = self.find(&self.id(wanted)?)?.0;
        machine.remove_share(name).await
    }

    /// Gives it a block device of this host; the slot of its machine.
    pub async fn add_disk(&self, wanted: &str, disk: HostDisk) -> Result<DeviceId, Failure> {
        // Not in turn: a device of the host may take its time to be opened.
        let machine = self.find(&self.id(wanted)?)?.0;
        machine.add_disk(disk).await
    }

    /// Takes it away.
    pub async fn remove_disk(&self, wanted: &str, slot: DeviceId) -> Result<(), Failure> {
        let machine = self.find(&self.id(wanted)?)?.0;
        machine.remove_disk(slot).await
    }

    /// Waits for its machine's end: why it ended.
    pub async fn end_of(&self, wanted: &str) -> Result<String, Failure> {
        let id = self.id(wanted)?;
        // Nobody may hold a machine that is waited for.
        let end = self.find(&id)?.0.end();
        Ok(end.await)
    }

    /// Says where a sandbox may connect to, from now on.
    pub async fn set_network_policy(
        &self,
        wanted: &str,
        policy: NetworkPolicy,
    ) -> Result<Arc<Described>, Failure> {
        let turn = self.turn(wanted).await?;
        let network = turn.machine.set_network_policy(policy).await?;
        self.cache
            .update(&turn.id, |described| described.network = Some(network));
        self.cache.get(&turn.id).ok_or_else(|| none(wanted))
    }

    /// The machine of a sandbox that runs.
    ///
    /// # Errors
    /// [`ApiCode::NotRunning`]: a paused guest answers nothing.
    pub fn running(&self, wanted: &str) -> Result<Arc<dyn Machine>, Refusal> {
        let shown = self.cache.get(wanted).ok_or_else(|| none(wanted))?;
        match shown.state.as_str() {
            "running" => Ok(self.find(&shown.id)?.0),
            state => Err(Refusal::new(
                ApiCode::NotRunning,
                format!("sandbox {} is {state}", shown.id),
            )),
        }
    }

    /// What a sandbox's container wrote.
    ///
    /// # Errors
    /// [`ApiCode::NoLogs`]: somebody else attends it.
    pub fn journal(&self, wanted: &str) -> Result<Arc<Journal>, Refusal> {
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
        wanted: &str,
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
    async fn turn(&self, wanted: &str) -> Result<Turn, Failure> {
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

    /// The id of the sandbox with this id or name.
    fn id(&self, wanted: &str) -> Result<String, Failure> {
        let found = self.cache.get(wanted).ok_or_else(|| none(wanted))?;
        Ok(found.id.clone())
    }

    fn find(&self, id: &str) -> Result<(Arc<dyn Machine>, OneAtATime), Failure> {
        let table = self.table();
        let held = table.get(id).ok_or_else(|| none(id))?;
        Ok((held.machine.clone(), held.turn.clone()))
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

/// Tells the cache of its machine's end, and of its container's; deletes it when its time is over, or the process it was made for has ended.
fn attend(daemon: Weak<Daemon>, machine: &dyn Machine) -> impl Future<Output = ()> + Send + use<> {
    let (record, end, exit) = (machine.record(), machine.end(), machine.exit());
    let (id, client, timeout) = (record.id.clone(), record.client, record.terms.timeout);
    let client_ends = async move {
        let Some(client) = client else {
            return std::future::pending().await;
        };
        if let Some(pidfd) = client.open()
            && let Ok(pidfd) = readiness::register(pidfd, tokio::io::Interest::READABLE)
        {
            let _ = pidfd.readable().await;
        }
        "the process it was made for has ended"
    };
    let time_ends = async move {
        let Some(timeout) = timeout else {
            return std::future::pending().await;
        };
        // The clock of the timeout goes on while the host sleeps, that of the timer may not.
        while !timeout.left().is_zero() {
            tokio::time::sleep(timeout.left()).await;
        }
        "its time is over"
    };
    let (marked, marking) = (id.clone(), daemon.clone());
    let delete_on_exit = record.terms.delete_on_exit;
    let note_exit = async move {
        let status = exit.await;
        if let Some(daemon) = marking.upgrade() {
            daemon
                .cache
                .update(&marked, |described| exited(described, status));
        }
        match delete_on_exit {
            true => "its container's process has ended",
            false => std::future::pending().await,
        }
    };
    let (marked, marking) = (id.clone(), daemon.clone());
    let mark = async move {
        let reason = end.await;
        if let Some(daemon) = marking.upgrade() {
            daemon
                .cache
                .update(&marked, |described| set(described, Condition::Ended(reason)));
        }
        std::future::pending().await
    };
    async move {
        let why = tokio::select! {
            why = client_ends => why,
            why = time_ends => why,
            why = mark => why,
            why = note_exit => why,
        };
        let Some(daemon) = daemon.upgrade() else { return };
        // On a task of its own: this one ends with the sandbox.
        tokio::spawn(async move {
            let _finishing = daemon.finishing.read().await;
            if daemon.delete(&id).await.is_ok() {
                tracing::info!(sandbox = id, "deleted: {why}");
            }
        });
    }
}

fn describe(machine: &dyn Machine, condition: Condition) -> Described {
    let record = machine.record();
    let mut described = Described {
        id: record.id.clone(),
        name: record.name.clone(),
        image: record.image.clone(),
        command: record.command.clone(),
        created: record.created,
        cpus: record.vcpus,
        memory_mib: record.memory_mib,
        state: String::new(),
        reason: None,
        exit_code: None,
        readiness: machine.readiness(),
        vsock: machine.vsock().display().to_string(),
        vmm_pid: record.vmm.map(|v| v.pid),
        network: record.network.clone(),
        labels: record.terms.labels.clone(),
        timeout_s: record.terms.timeout.map(|t| t.seconds),
        resource_version: 0,
    };
    set(&mut described, condition);
    described
}

/// Its container's process has ended.
fn exited(described: &mut Described, status: i32) {
    described.exit_code = Some(status);
    if described.state == "running" {
        described.state = "exited".into();
    }
}

fn set(described: &mut Described, condition: Condition) {
    let (state, reason) = match condition {
        Condition::Running if described.exit_code.is_some() => ("exited", None),
        Condition::Running => ("running", None),
        Condition::Paused => ("paused", None),
        Condition::Ended(reason) => ("ended", Some(reason)),
    };
    (described.state, described.reason) = (state.into(), reason);
}

#[cfg(test)]
#[path = "daemon_test.rs"]
mod tests;
