//! What the API asks of the node: to make sandboxes, and what each that was made can do.
//!
//! The routes know these two traits only, so a test can put something else behind them. Invariant: a making that is dropped
//! leaves nothing, and a [`Machine`] that is dropped unreleased ends.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use thaw_pools::process::ProcessRecord;
use thaw_pools::share::Source;
use thaw_pools::statistics::PoolStatistics;
use thaw_protocol::api::{
    Account, CreateSandbox, FreezeSandbox, FrozenSandbox, NetworkPolicy, OnExit, ProcessIdentity, Readiness,
    SandboxNetwork, StartContainer, ThawSandbox, Usage,
};
use thaw_protocol::control::{DeviceId, MachineState, MemoryMode};
use thaw_rootfs::progress::Silent;

use super::attendance::Attendance;
use super::files::{Files, GuestFiles};
use super::idempotency;
use super::problem::{ApiCode, Refusal};
use super::process::{GuestProcess, Process};
use super::readying::Readying;
use super::stock::Stock;
use crate::agent_client::AgentClient;
use crate::container::{self, Options, RUNNING_FILE, Running, ready};
use crate::exit::{ExitCode, Failure};
use crate::image::record::{Recorded, Recording};
use crate::images::Pull;
use crate::journal::Journal;
use crate::metrics::{self, Families, Names};
use crate::sandbox::{
    Asked, FreezeOptions, HostDisk, NetworkMode, NetworkSource, Node, READY_LIMIT, RootServing, Sandbox,
    SandboxSpec, Terms, ThawSpec, Timeout, blocking, network, usage,
};
use crate::slow::Slow;
use crate::snapshot::Scratch;
use crate::state::Record;
use crate::trace::{Reason, Trace};

/// A place for one snapshot. Dropped, it is gone.
pub trait Place: std::fmt::Debug + Send + Sync {
    /// Where the snapshot is to be. Nothing is there yet.
    fn snapshot(&self) -> PathBuf;
}

impl Place for Scratch {
    fn snapshot(&self) -> PathBuf {
        self.snapshot()
    }
}

/// A pod's sandbox, for containerd's shim: without an image yet, and with nothing in it.
#[derive(Clone, Debug)]
pub struct CreatePod {
    pub hostname: Option<String>,
    pub network: NetworkSource,
    pub cpus: u8,
    pub memory_mib: u32,
    pub disk_mib: u32,
    pub labels: BTreeMap<String, String>,
    /// Where its VMM is to live, below the roots of the host's cgroups.
    pub cgroup: Option<String>,
    /// The shim: the pod ends with it.
    pub client: Option<ProcessRecord>,
}

/// A pod's sandbox out of a snapshot of one, likewise.
#[derive(Clone, Debug)]
pub struct ThawPod {
    /// The snapshot.
    pub directory: PathBuf,
    pub hostname: Option<String>,
    pub labels: BTreeMap<String, String>,
    /// As of [`CreatePod`].
    pub cgroup: Option<String>,
    pub client: Option<ProcessRecord>,
}

/// Makes sandboxes.
#[async_trait]
pub trait Maker: Stock {
    /// A place for a snapshot only its clones need.
    async fn scratch(&self, signed: bool) -> Result<Box<dyn Place>, Refusal>;
    /// Of an image; `asked` with a key, if it was.
    async fn create(&self, request: CreateSandbox, asked: Option<Asked>) -> Result<Made, Refusal>;
    /// Of a snapshot, likewise.
    async fn thaw(&self, request: ThawSandbox, asked: Option<Asked>) -> Result<Made, Refusal>;
    /// Of no image, for a pod.
    async fn create_pod(&self, request: CreatePod) -> Result<Made, Refusal>;
    /// Of a snapshot of a pod's.
    async fn thaw_pod(&self, request: ThawPod) -> Result<Made, Refusal>;
    /// What its pools have and did.
    fn pools(&self) -> Vec<PoolStatistics>;
    /// What it has and did; `endpoints` are the names its registries have.
    fn count(&self, endpoints: &Names, families: &mut Families);
}

/// A sandbox that was made, and what is to be said of the making.
#[derive(Debug)]
pub struct Made {
    pub machine: Arc<dyn Machine>,
    /// The image's, JSON.
    pub image_config: String,
    pub account: Account,
    /// Where its container is to become ready first.
    pub readying: Option<Readying>,
}

/// How a machine is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Condition {
    Running,
    Paused,
    /// And why.
    Ended(String),
}

/// A sandbox that was made.
#[async_trait]
pub trait Machine: std::fmt::Debug + Send + Sync {
    fn record(&self) -> &Record;
    /// Its vsock socket.
    fn vsock(&self) -> PathBuf;
    /// What it takes of its host. Blocks for as long as the kernel takes to say.
    fn usage(&self) -> Usage;
    /// Whether its container was ready when this was made or adopted, where somebody asked for that.
    fn readiness(&self) -> Option<Readiness>;
    /// Keeps the answer to who asked for it with a key, for a later owner.
    fn note_answer(&self, answer: &[u8]) -> io::Result<()>;
    /// Asks its VMM.
    async fn condition(&self) -> Condition;
    /// Waits for its end, and says why it ended. It may wait longer than the machine is held.
    fn end(&self) -> BoxFuture<'static, String>;
    async fn pause(&self) -> Result<(), Failure>;
    async fn resume(&self) -> Result<(), Failure>;
    async fn freeze(&self, request: FreezeSandbox) -> Result<FrozenSandbox, Failure>;
    /// What its container's process wrote, where thawd attends that.
    fn journal(&self) -> Option<Arc<Journal>>;
    /// Waits for the end of its container's process: what it ended with. It may wait longer than the machine is held, and does
    /// so for ever where nobody here attends that.
    fn exit(&self) -> BoxFuture<'static, i32>;
    /// Shows it an image of the store, by its manifest's digest; its directory in the root device.
    async fn show(&self, digest: &str) -> Result<String, Failure>;
    /// Shares files of this host with it, by this name: those its client sees.
    async fn add_share(&self, name: String, source: Source) -> Result<(), Failure>;
    /// Takes a share away.
    async fn remove_share(&self, name: String) -> Result<(), Failure>;
    /// Gives it a block device of this host; the slot of its machine.
    async fn add_disk(&self, disk: HostDisk) -> Result<DeviceId, Failure>;
    /// Takes it away.
    async fn remove_disk(&self, slot: DeviceId) -> Result<(), Failure>;
    /// Starts a process in its container.
    async fn exec(&self, options: Options) -> Result<Arc<dyn Process>, Failure>;
    /// The files of its container.
    async fn files(&self) -> Result<Arc<dyn Files>, Failure>;
    /// Says where it may connect to, from now on: its network as it is then.
    async fn set_network_policy(&self, policy: NetworkPolicy) -> Result<SandboxNetwork, Failure>;
    /// Ends it; who holds it removes it.
    fn kill(&self);
    /// Ends it and removes all it has.
    async fn destroy(self: Arc<Self>);
    /// Lets go of it without ending it. Says whether nobody else held it.
    fn release(self: Arc<Self>) -> bool;
}

#[async_trait]
impl Maker for Node {
    async fn scratch(&self, signed: bool) -> Result<Box<dyn Place>, Refusal> {
        let node = self.clone();
        let make = move || Scratch::for_clones(&node.paths.data, node.templates.registry(), signed);
        Ok(Box::new(blocking(make).await?))
    }

    async fn create(&self, request: CreateSandbox, asked: Option<Asked>) -> Result<Made, Refusal> {
        let (recording, record) = match request.record {
            true => Recording::start().map(|(recording, fd)| (Some(recording), Some(fd)))?,
            false => (None, None),
        };
        let spec = SandboxSpec {
            image: Some(request.image),
            pull: parse::<Pull>("pull", &request.pull)?,
            plain_http: request.plain_http,
            vcpus: request.cpus,
            memory_mib: request.memory_mib,
            disk_mib: request.disk_mib,
            hostname: request.hostname.clone(),
            name: request.name,
            network: NetworkSource::Ours(parse::<NetworkMode>("network", &request.network)?),
            network_terms: network::read(request.network_policy.as_ref(), &request.publish)?,
            command: match &request.container {
                Some(container) => container.command.clone(),
                None => request.command,
            },
            tethered: false,
            client: request.client.map(process),
            cold: request.cold,
            memory_mode: request.memory_mode,
            root: parse::<RootServing>("root", &request.root)?,
            record,
            prefetch: request.prefetch,
            terms: Terms {
                labels: request.labels,
                timeout: request.timeout_s.map(Timeout::after),
                delete_on_exit: request
                    .container
                    .as_ref()
                    .is_some_and(|c| c.on_exit == OnExit::Delete),
                asked,
            },
            volumes: request.volumes,
        };
        let (trace, root) = (Trace::new(), spec.root);
        let building = Arc::new(|step| tracing::info!("template: {step:?}"));
        let sandbox = Sandbox::create(self, spec, &trace, Arc::new(Silent), building).await?;
        if let (Some(mut recording), Some(image)) = (recording, sandbox.image()) {
            recording.keep_journal(&self.images, &image);
            let (images, file) = (self.images.clone(), request.record_to);
            tokio::spawn(async move { tell(recording.finish(&images, &image, file).await) });
        }
        let probe = request.container.as_ref().and_then(|c| c.readiness.clone());
        let started = match request.container {
            Some(container) => Some(tokio::select! {
                started = start(&sandbox, container, request.hostname, root, &trace) => started?,
                // The agent's answer would never come: the VMM and its sockets stay until they are told to go.
                reason = sandbox.wait_end() => return Err(Failure::new(ExitCode::GuestEnded, reason).into()),
            }),
            None => None,
        };
        sandbox.note_fetched(&trace, "the sandbox was there");
        sandbox.note_read_ahead(&trace);
        let Some((agent, running)) = started else {
            return made(self, sandbox, None, None, &trace);
        };
        // Before its readiness is waited for: it may write more than a pipe holds until then.
        let attendance = Attendance::start(&sandbox, running, Some(agent.clone()))?;
        let readying = probe.map(|probe| Readying::begin(&sandbox, &attendance, agent, probe, &trace));
        made(self, sandbox, Some(attendance), readying, &trace)
    }

    async fn create_pod(&self, request: CreatePod) -> Result<Made, Refusal> {
        let spec = SandboxSpec {
            image: None,
            pull: Pull::Never,
            plain_http: false,
            vcpus: request.cpus,
            memory_mib: request.memory_mib,
            disk_mib: request.disk_mib,
            hostname: request.hostname,
            name: None,
            network: request.network,
            network_terms: network::read(None, &[])?,
            command: Vec::new(),
            tethered: false,
            client: request.client,
            cold: false,
            memory_mode: MemoryMode::default(),
            root: RootServing::Virtiofs,
            record: None,
            prefetch: true,
            terms: Terms {
                labels: request.labels,
                ..Terms::default()
            },
            volumes: Vec::new(),
        };
        let trace = Trace::new();
        let building = Arc::new(|step| tracing::info!("template: {step:?}"));
        let sandbox = Sandbox::create(self, spec, &trace, Arc::new(Silent), building).await?;
        let built = |reason: &Reason| reason.code == Slow::TemplateBuilt.code();
        trace.count(
            "template_hit",
            u64::from(!trace.account().reasons.iter().any(built)),
        );
        of_pod(self, sandbox, request.cgroup, &trace).await
    }

    async fn thaw_pod(&self, request: ThawPod) -> Result<Made, Refusal> {
        let spec = ThawSpec {
            directory: request.directory,
            hostname: request.hostname,
            name: None,
            tethered: false,
            client: request.client,
            memory_mode: MemoryMode::default(),
            network_policy: None,
            publish: Vec::new(),
            terms: Terms {
                labels: request.labels,
                ..Terms::default()
            },
        };
        let trace = Trace::new();
        let sandbox = Sandbox::thaw(self, spec, &trace).await?;
        of_pod(self, sandbox, request.cgroup, &trace).await
    }

    async fn thaw(&self, request: ThawSandbox, asked: Option<Asked>) -> Result<Made, Refusal> {
        let spec = ThawSpec {
            directory: request.directory,
            hostname: request.hostname,
            name: request.name,
            tethered: false,
            client: request.client.map(process),
            memory_mode: request.memory_mode,
            network_policy: request.network_policy,
            publish: request.publish,
            terms: Terms {
                labels: request.labels,
                timeout: request.timeout_s.map(Timeout::after),
                asked,
                ..Terms::default()
            },
        };
        // Who has a process of its own for the sandbox attends what runs in it.
        let attended = spec.client.is_none();
        let trace = Trace::new();
        let sandbox = Sandbox::thaw(self, spec, &trace).await?;
        let attendance = match attended && sandbox.directory().join(RUNNING_FILE).exists() {
            true => Some(attend_again(&sandbox)?),
            false => None,
        };
        made(self, sandbox, attendance, None, &trace)
    }

    fn pools(&self) -> Vec<PoolStatistics> {
        let mut all = Vec::from(self.pools.statistics());
        all.extend([self.shells.statistics(), self.parked.statistics()]);
        all
    }

    fn count(&self, endpoints: &Names, families: &mut Families) {
        metrics::node::collect(self, endpoints, families);
    }
}

/// A pod's sandbox, in the cgroup it brings. Its containers are the shim's to attend.
async fn of_pod(
    node: &Node,
    sandbox: Sandbox,
    cgroup: Option<String>,
    trace: &Trace,
) -> Result<Made, Refusal> {
    let sandbox = match cgroup {
        Some(path) => {
            let node = node.clone();
            let _stage = trace.stage("cgroup_attach");
            blocking(move || sandbox.enter(&node, &path)).await?
        }
        None => sandbox,
    };
    made(node, sandbox, None, None, trace)
}

/// Starts the container of a new sandbox.
async fn start(
    sandbox: &Sandbox,
    asked: StartContainer,
    hostname: Option<String>,
    root: RootServing,
    trace: &Trace,
) -> Result<(AgentClient, Running), Failure> {
    let id = &sandbox.record().id;
    let options = Options {
        entrypoint: asked.entrypoint,
        command: asked.command,
        env: asked.env,
        workdir: asked.workdir,
        user: asked.user,
        tty: asked.tty,
        read_only: asked.read_only,
        hostname: hostname.unwrap_or_else(|| id.clone()),
        size: None,
        volumes: sandbox.record().volumes.clone(),
    };
    let unread = || {
        Failure::new(
            ExitCode::ImageMalformed,
            "the image's configuration cannot be read",
        )
    };
    let config = sandbox.config.as_ref().ok_or_else(unread)?;
    let agent = {
        let _stage = trace.stage("connect");
        AgentClient::connect(&sandbox.vsock(), READY_LIMIT).await?
    };
    let running = {
        let _stage = trace.stage("container");
        container::create(&agent, id, config, &options, root).await?
    };
    if let Some(probe) = &asked.readiness {
        ready::note(&sandbox.directory(), Readiness::Waiting)?;
        ready::expect(&agent, id, probe).await?;
    }
    let _stage = trace.stage("start");
    container::start(&agent, &running, &sandbox.directory()).await?;
    if !running.tty {
        // Nobody will write to it.
        let closed = agent.close_stdin(&running.process()).await;
        closed.map_err(|e| Failure::new(ExitCode::AgentFailed, format!("cannot end its input: {e}")))?;
    }
    Ok((agent, running))
}

/// Attends the container a sandbox came with, over a connection that is still to be made.
fn attend_again(sandbox: &Sandbox) -> Result<Attendance, Failure> {
    Attendance::start(sandbox, Running::read(&sandbox.directory())?, None)
}

fn made(
    node: &Node,
    sandbox: Sandbox,
    attendance: Option<Attendance>,
    readying: Option<Readying>,
    trace: &Trace,
) -> Result<Made, Refusal> {
    let image_config = serde_json::to_string(&sandbox.config)
        .map_err(|e| Failure::new(ExitCode::ImageMalformed, e.to_string()))?;
    Ok(Made {
        machine: Arc::new(Microvm {
            node: node.clone(),
            sandbox: Arc::new(sandbox),
            attendance,
            readiness: readying.as_ref().map(|_| Readiness::Waiting),
        }),
        image_config,
        account: trace.account(),
        readying,
    })
}

/// Nobody waits for a recording: what became of it is logged.
fn tell(recorded: Result<Option<Recorded>, Failure>) {
    match recorded {
        Ok(Some(recorded)) => tracing::info!("{recorded}"),
        Ok(None) => tracing::info!("nothing was recorded: the run read nothing"),
        Err(e) => tracing::warn!("the recording is lost: {e}"),
    }
}

fn process(identity: ProcessIdentity) -> ProcessRecord {
    ProcessRecord {
        pid: identity.pid,
        start_time: identity.start_time,
    }
}

fn parse<T: clap::ValueEnum>(field: &str, value: &str) -> Result<T, Refusal> {
    T::from_str(value, false).map_err(|_| Refusal::new(ApiCode::Invalid, format!("bad {field}: {value:?}")))
}

/// A sandbox of this node.
#[derive(Debug)]
pub struct Microvm {
    node: Node,
    sandbox: Arc<Sandbox>,
    /// Of its container, where that is ours.
    attendance: Option<Attendance>,
    readiness: Option<Readiness>,
}

impl Microvm {
    /// Whoever else holds the sandbox keeps it from being removed, and attends its container.
    pub fn new(node: Node, sandbox: Arc<Sandbox>) -> Microvm {
        Microvm {
            node,
            sandbox,
            attendance: None,
            readiness: None,
        }
    }

    /// Of a sandbox an earlier thawd left running. Its container is attended where that thawd did.
    pub fn adopted(node: Node, sandbox: Sandbox) -> Microvm {
        let again = Journal::exists(&sandbox.directory()).then(|| attend_again(&sandbox));
        let attendance = match again.transpose() {
            Ok(attendance) => attendance,
            Err(e) => {
                tracing::warn!(
                    sandbox = sandbox.record().id,
                    "adopted, but its output is not kept: {e}"
                );
                None
            }
        };
        Microvm {
            node,
            readiness: ready::noted(&sandbox.directory()),
            sandbox: Arc::new(sandbox),
            attendance,
        }
    }

    /// Why it ended, or what is known of it until that is told.
    fn ended(&self, seen: String) -> String {
        self.sandbox.ended().unwrap_or(seen)
    }
}

#[async_trait]
impl Machine for Microvm {
    fn record(&self) -> &Record {
        self.sandbox.record()
    }

    fn vsock(&self) -> PathBuf {
        self.sandbox.vsock()
    }

    fn usage(&self) -> Usage {
        let traffic = self.sandbox.traffic();
        Usage {
            received_bytes: traffic.map(|t| t.received_bytes),
            received_packets: traffic.map(|t| t.received_packets),
            sent_bytes: traffic.map(|t| t.sent_bytes),
            sent_packets: traffic.map(|t| t.sent_packets),
            fetched_bytes: self.sandbox.fetched(),
            ..usage(self.sandbox.record(), &self.node.cgroups)
        }
    }

    fn readiness(&self) -> Option<Readiness> {
        self.readiness
    }

    fn note_answer(&self, answer: &[u8]) -> io::Result<()> {
        idempotency::note(&self.sandbox.directory(), answer)
    }

    async fn condition(&self) -> Condition {
        if let Some(reason) = self.sandbox.ended() {
            return Condition::Ended(reason);
        }
        match self.sandbox.machine().await {
            Ok(MachineState::Paused) => Condition::Paused,
            Ok(MachineState::Exited(_)) => Condition::Ended(self.ended("its machine has ended".into())),
            Err(e) => Condition::Ended(self.ended(e.what)),
            Ok(_) => Condition::Running,
        }
    }

    fn end(&self) -> BoxFuture<'static, String> {
        Box::pin(self.sandbox.wait_end())
    }

    async fn pause(&self) -> Result<(), Failure> {
        self.sandbox.pause().await
    }

    async fn resume(&self) -> Result<(), Failure> {
        self.sandbox.resume().await
    }

    async fn freeze(&self, request: FreezeSandbox) -> Result<FrozenSandbox, Failure> {
        let options = FreezeOptions {
            delta: request.delta,
            stop: request.stop,
            sign: request.sign,
        };
        let frozen = self
            .sandbox
            .freeze(&self.node, &request.directory, options)
            .await?;
        Ok(FrozenSandbox {
            memory_bytes: frozen.memory_bytes,
            paused_ns: frozen.paused_ns,
        })
    }

    async fn set_network_policy(&self, policy: NetworkPolicy) -> Result<SandboxNetwork, Failure> {
        self.sandbox.set_network_policy(policy).await
    }

    fn journal(&self) -> Option<Arc<Journal>> {
        self.attendance.as_ref().map(|a| a.journal.clone())
    }

    fn exit(&self) -> BoxFuture<'static, i32> {
        let exit = self.attendance.as_ref().map(|a| a.exit.clone());
        Box::pin(async move {
            if let Some(mut exit) = exit
                && let Ok(status) = exit.wait_for(Option::is_some).await
                && let Some(status) = *status
            {
                return status;
            }
            std::future::pending().await
        })
    }

    async fn show(&self, digest: &str) -> Result<String, Failure> {
        self.sandbox.show(&self.node, digest).await
    }

    async fn add_share(&self, name: String, source: Source) -> Result<(), Failure> {
        self.sandbox.add_share(name, source).await
    }

    async fn remove_share(&self, name: String) -> Result<(), Failure> {
        self.sandbox.remove_share(name).await
    }

    async fn add_disk(&self, disk: HostDisk) -> Result<DeviceId, Failure> {
        self.sandbox.add_disk(disk).await
    }

    async fn remove_disk(&self, slot: DeviceId) -> Result<(), Failure> {
        self.sandbox.remove_disk(slot).await
    }

    async fn exec(&self, options: Options) -> Result<Arc<dyn Process>, Failure> {
        let running = Running::read(&self.sandbox.directory())?;
        let agent = AgentClient::connect(&self.sandbox.vsock(), READY_LIMIT).await?;
        let started = container::exec(&agent, &running, &options);
        let id = match tokio::time::timeout(READY_LIMIT, started).await {
            Ok(started) => started?,
            Err(_) => {
                let what = format!(
                    "the guest's agent did not answer within {} s",
                    READY_LIMIT.as_secs()
                );
                return Err(Failure::new(ExitCode::AgentFailed, what));
            }
        };
        Ok(Arc::new(GuestProcess { agent, id }))
    }

    async fn files(&self) -> Result<Arc<dyn Files>, Failure> {
        let container = Running::read(&self.sandbox.directory())?.container_id;
        let agent = AgentClient::connect(&self.sandbox.vsock(), READY_LIMIT).await?;
        Ok(Arc::new(GuestFiles { agent, container }))
    }

    fn kill(&self) {
        self.sandbox.kill();
    }

    async fn destroy(self: Arc<Self>) {
        let sandbox = self.sandbox.clone();
        drop(self);
        sandbox.destroy().await;
    }

    fn release(self: Arc<Self>) -> bool {
        let sandbox = Arc::into_inner(self).and_then(|microvm| Arc::into_inner(microvm.sandbox));
        sandbox.map(Sandbox::release).is_some()
    }
}
