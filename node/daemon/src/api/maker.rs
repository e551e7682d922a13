//! What the API asks of the node: to make sandboxes.
//!
//! The routes know this trait and [`Machine`] only, so a test can put something else behind them. Invariant: a making that is
//! dropped leaves nothing.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use serde::de::value::StrDeserializer;
use serde::de::{DeserializeOwned, IntoDeserializer};
use thaw_images::progress::Silent;
use thaw_pools::process::ProcessRecord;
use thaw_pools::statistics::PoolStatistics;
use thaw_protocol::api::{
    Account, CreateSandbox, OnExit, ProcessIdentity, RateLimits, Readiness, StartContainer, ThawSandbox,
};
use thaw_protocol::control::MemoryMode;
use thaw_sandbox::agent_client::AgentClient;
use thaw_sandbox::blocking::blocking;
use thaw_sandbox::container::{self, Options, RUNNING_FILE, RootServing, Running, ready};
use thaw_sandbox::exit::{ExitCode, Failure};
use thaw_sandbox::image::record::{Recorded, Recording};
use thaw_sandbox::images::Pull;
use thaw_sandbox::sandbox::{
    NetworkMode, NetworkSource, Node, READY_LIMIT, Sandbox, SandboxSpec, Tenants, ThawSpec, network,
};
use thaw_sandbox::slow::Slow;
use thaw_sandbox::snapshot::Scratch;
use thaw_sandbox::state::{Behalf, Record, Terms, Timeout};
use thaw_sandbox::trace::{Reason, Trace};

use super::attendance::Attendance;
use super::machine::Machine;
use super::microvm::Microvm;
use super::problem::{ApiCode, Refusal};
use super::readying::Readying;
use super::stock::Stock;
use crate::metrics::{self, Families, Names};

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
    pub rate_limits: RateLimits,
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
    /// A place for a snapshot of this sandbox that only its clones need.
    async fn scratch(&self, original: &Record, signed: bool) -> Result<Box<dyn Place>, Refusal>;
    /// Of an image, on somebody's behalf.
    async fn create(&self, request: CreateSandbox, behalf: Behalf) -> Result<Made, Refusal>;
    /// Of a snapshot, likewise.
    async fn thaw(&self, request: ThawSandbox, behalf: Behalf) -> Result<Made, Refusal>;
    /// Of a snapshot of this sandbox in such a place, with the images that sandbox was made from.
    async fn thaw_clone(
        &self,
        original: &Record,
        request: ThawSandbox,
        behalf: Behalf,
    ) -> Result<Made, Refusal>;
    /// Of no image, for a pod.
    async fn create_pod(&self, request: CreatePod) -> Result<Made, Refusal>;
    /// Of a snapshot of a pod's.
    async fn thaw_pod(&self, request: ThawPod) -> Result<Made, Refusal>;
    /// Ends a sandbox on this host that runs without an owner, by its id: one that could not be adopted. Says whether there was one.
    async fn end_unowned(&self, id: &str) -> bool;
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

#[async_trait]
impl Maker for Tenants {
    async fn scratch(&self, original: &Record, signed: bool) -> Result<Box<dyn Place>, Refusal> {
        let node = self.with_stock(original.stock.as_ref()).await?;
        let make = move || Scratch::for_clones(&node.paths.data, node.templates.registry(), signed);
        Ok(Box::new(blocking(make).await?))
    }

    async fn create(&self, request: CreateSandbox, behalf: Behalf) -> Result<Made, Refusal> {
        let node = self.for_new(behalf.tenant.as_ref()).await?;
        create_sandbox(&node, request, behalf).await
    }

    async fn thaw(&self, request: ThawSandbox, behalf: Behalf) -> Result<Made, Refusal> {
        let node = self.for_new(behalf.tenant.as_ref()).await?;
        thaw_sandbox(&node, request, behalf).await
    }

    async fn thaw_clone(
        &self,
        original: &Record,
        request: ThawSandbox,
        behalf: Behalf,
    ) -> Result<Made, Refusal> {
        let node = self.with_stock(original.stock.as_ref()).await?;
        thaw_sandbox(&node, request, behalf).await
    }

    async fn create_pod(&self, request: CreatePod) -> Result<Made, Refusal> {
        create_pod(self.shared(), request).await
    }

    async fn thaw_pod(&self, request: ThawPod) -> Result<Made, Refusal> {
        thaw_pod(self.shared(), request).await
    }

    async fn end_unowned(&self, id: &str) -> bool {
        let node = self.shared();
        let (run, cgroups, id) = (node.run.clone(), node.cgroups.clone(), id.to_owned());
        blocking(move || Ok(run.end(&id, &cgroups)))
            .await
            .unwrap_or(false)
    }

    fn pools(&self) -> Vec<PoolStatistics> {
        self.pool_statistics()
    }

    fn count(&self, endpoints: &Names, families: &mut Families) {
        metrics::node::collect(self, endpoints, families);
    }
}

async fn create_sandbox(node: &Node, request: CreateSandbox, behalf: Behalf) -> Result<Made, Refusal> {
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
            tenant: behalf.tenant,
            labels: request.labels,
            timeout: request.timeout_s.map(Timeout::after),
            delete_on_exit: request
                .container
                .as_ref()
                .is_some_and(|c| c.on_exit == OnExit::Delete),
            asked: behalf.asked,
            rate_limits: Some(request.rate_limits),
        },
        volumes: request.volumes,
        cpu_limit_millis: request.cpu_limit_millis,
    };
    let (trace, root) = (Trace::new(), spec.root);
    let building = Arc::new(|step| tracing::info!("template: {step:?}"));
    let sandbox = Sandbox::create(node, spec, &trace, Arc::new(Silent), building).await?;
    if let (Some(mut recording), Some(image)) = (recording, sandbox.image()) {
        recording.keep_journal(&node.images, &image);
        let (images, file) = (node.images.clone(), request.record_to);
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
        return made(node, sandbox, None, None, &trace);
    };
    // Before its readiness is waited for: it may write more than a pipe holds until then.
    let attendance = Attendance::start(&sandbox, running, Some(agent.clone()))?;
    let readying = probe.map(|probe| Readying::begin(&sandbox, &attendance, agent, probe, &trace));
    made(node, sandbox, Some(attendance), readying, &trace)
}

async fn create_pod(node: &Node, request: CreatePod) -> Result<Made, Refusal> {
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
            rate_limits: Some(request.rate_limits),
            ..Terms::default()
        },
        volumes: Vec::new(),
        // Kubernetes limits the pod's cgroup.
        cpu_limit_millis: None,
    };
    let trace = Trace::new();
    let building = Arc::new(|step| tracing::info!("template: {step:?}"));
    let sandbox = Sandbox::create(node, spec, &trace, Arc::new(Silent), building).await?;
    let built = |reason: &Reason| reason.code == Slow::TemplateBuilt.code();
    trace.count(
        "template_hit",
        u64::from(!trace.account().reasons.iter().any(built)),
    );
    of_pod(node, sandbox, request.cgroup, &trace).await
}

async fn thaw_pod(node: &Node, request: ThawPod) -> Result<Made, Refusal> {
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
    let sandbox = Sandbox::thaw(node, spec, &trace).await?;
    of_pod(node, sandbox, request.cgroup, &trace).await
}

async fn thaw_sandbox(node: &Node, request: ThawSandbox, behalf: Behalf) -> Result<Made, Refusal> {
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
            tenant: behalf.tenant,
            labels: request.labels,
            timeout: request.timeout_s.map(Timeout::after),
            asked: behalf.asked,
            rate_limits: Some(request.rate_limits),
            ..Terms::default()
        },
    };
    // Who has a process of its own for the sandbox attends what runs in it.
    let attended = spec.client.is_none();
    let trace = Trace::new();
    let sandbox = Sandbox::thaw(node, spec, &trace).await?;
    let attendance = match attended && sandbox.directory().join(RUNNING_FILE).exists() {
        true => Some(Attendance::again(&sandbox)?),
        false => None,
    };
    made(node, sandbox, attendance, None, &trace)
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
        seccomp: asked.seccomp,
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

fn made(
    node: &Node,
    sandbox: Sandbox,
    attendance: Option<Attendance>,
    readying: Option<Readying>,
    trace: &Trace,
) -> Result<Made, Refusal> {
    let image_config = serde_json::to_string(&sandbox.config)
        .map_err(|e| Failure::new(ExitCode::ImageMalformed, e.to_string()))?;
    let readiness = readying.as_ref().map(|_| Readiness::Waiting);
    Ok(Made {
        machine: Arc::new(Microvm::made(node.clone(), sandbox, attendance, readiness)),
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

/// One of an enumeration's words, as its record has them.
fn parse<T: DeserializeOwned>(field: &str, value: &str) -> Result<T, Refusal> {
    let word: StrDeserializer<'_, serde::de::value::Error> = value.into_deserializer();
    T::deserialize(word).map_err(|_| Refusal::new(ApiCode::Invalid, format!("bad {field}: {value:?}")))
}
