//! The real factory: creates and thaws sandboxes and pods on this node, and starts their containers.

use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use serde::de::value::StrDeserializer;
use serde::de::{DeserializeOwned, IntoDeserializer};
use thaw_images::progress::Silent;
use thaw_images::store::Lease;
use thaw_pools::process::ProcessRecord;
use thaw_pools::statistics::PoolStatistics;
use thaw_protocol::api::{
    CreateSandbox, HealthCheck, ProcessIdentity, Readiness, StartContainer, ThawSandbox,
};
use thaw_protocol::control::MemoryMode;
use thaw_sandbox::agent_client::{self, AgentClient};
use thaw_sandbox::blocking::blocking;
use thaw_sandbox::container::{
    self, HealthOptions, LifeOptions, Options, RUNNING_FILE, RootServing, Running, ready,
};
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::image::record::{Recorded, Recording};
use thaw_sandbox::images::Pull;
use thaw_sandbox::slow::Slow;
use thaw_sandbox::snapshot::Scratch;
use thaw_sandbox::snapshot::store::Viewer;
use thaw_sandbox::state::{Behalf, Paused, Record, Terms, TimeLimit};
use thaw_sandbox::trace::{Reason, Trace};
use thaw_sandbox::{
    CopyPlace, NetworkMode, NetworkSource, Node, READY_LIMIT, Sandbox, SandboxSpec, Tenants, ThawSpec,
    Thawable, network,
};

use super::{
    CopyTurn, CreatePod, Factory, NewSandbox, PodContainer, PodSnapshot, SnapshotPlace, ThawPod, ThawedPod,
};
use crate::api::check;
use crate::api::container_monitor::ContainerMonitor;
use crate::api::microvm::Microvm;
use crate::api::problem::{ApiCode, Refusal};
use crate::api::readiness::ReadinessWait;
use crate::metrics::{self, Families, Names};

#[async_trait]
impl Factory for Tenants {
    async fn scratch(&self, original: &Record, signed: bool) -> Result<Box<dyn SnapshotPlace>, Refusal> {
        let node = self.with_stock(original.stock.as_ref()).await?;
        let make = move || Scratch::for_clones(&node.paths.data, node.templates.registry(), signed);
        Ok(Box::new(blocking(make).await?))
    }

    async fn create(&self, request: CreateSandbox, behalf: Behalf) -> Result<NewSandbox, Refusal> {
        let node = self.for_new(behalf.tenant.as_ref()).await?;
        create_sandbox(&node, request, behalf).await
    }

    async fn thaw(
        &self,
        request: ThawSandbox,
        behalf: Behalf,
        viewer: Viewer,
    ) -> Result<NewSandbox, Refusal> {
        let (node, thawable, _thawing) = match (&request.snapshot, &request.directory) {
            (Some(wanted), _) => self.to_thaw(wanted, &viewer, request.memory_mode).await?,
            (None, Some(directory)) => {
                let node = self.for_new(behalf.tenant.as_ref()).await?;
                (node, Thawable::Stored(directory.clone()), None)
            }
            (None, None) => return Err(check::no_snapshot()),
        };
        thaw_sandbox(&node, thawable, request, behalf).await
    }

    async fn thaw_clone(
        &self,
        original: &Record,
        request: ThawSandbox,
        behalf: Behalf,
    ) -> Result<NewSandbox, Refusal> {
        let node = self.with_stock(original.stock.as_ref()).await?;
        let directory = request.directory.clone().ok_or_else(check::no_snapshot)?;
        thaw_sandbox(&node, Thawable::Stored(directory), request, behalf).await
    }

    async fn copy_paused(&self, paused: &Paused, place: &CopyPlace, turn: CopyTurn) -> Result<(), Error> {
        Tenants::copy_paused(self, paused, place, turn).await
    }

    async fn take_paused(&self, place: &CopyPlace, viewer: &Viewer) -> Result<Paused, Error> {
        Tenants::take_paused(self, place, viewer).await
    }

    async fn discard_copy(&self, place: &CopyPlace, viewer: &Viewer) -> Result<(), Error> {
        Tenants::discard_copy(self, place, viewer).await
    }

    async fn thaw_paused(&self, paused: &Paused, limit: TimeLimit) -> Result<NewSandbox, Refusal> {
        self.claim_paused(paused).await?;
        let node = self.with_stock(paused.record().stock.as_ref()).await?;
        let trace = Trace::new();
        let sandbox = Sandbox::thaw_paused(&node, paused, limit, &trace).await?;
        Ok(NewSandbox {
            image_config: String::new(),
            // It has the output and the readiness that it had.
            machine: Arc::new(Microvm::adopted(node, sandbox)),
            account: trace.account(),
            readiness_wait: None,
        })
    }

    async fn lease_paused(&self, paused: &Paused) -> Vec<Lease> {
        let leased = async {
            let node = self.with_stock(paused.record().stock.as_ref()).await?;
            let paused = paused.clone();
            blocking(move || Ok(node.lease_paused(&paused))).await
        };
        leased.await.unwrap_or_else(|e: Error| {
            tracing::warn!(sandbox = paused.record().id, "its images are not leased: {e}");
            Vec::new()
        })
    }

    async fn forget_paused(&self, paused: &Paused) -> Result<(), Error> {
        Tenants::forget_paused(self, paused).await
    }

    async fn create_pod(&self, request: CreatePod) -> Result<NewSandbox, Refusal> {
        create_pod(self.shared(), request).await
    }

    async fn thaw_pod(&self, request: ThawPod) -> Result<ThawedPod, Refusal> {
        let (node, directory, _thawing) = match &request.snapshot {
            PodSnapshot::Directory(directory) => (self.shared().clone(), directory.clone(), None),
            PodSnapshot::Stored { wanted, namespace } => {
                let (node, directory, thawing) = self.snapshot_for_pod(wanted, namespace).await?;
                (node, directory, Some(thawing))
            }
        };
        thaw_pod(&node, directory, request).await
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

async fn create_sandbox(node: &Node, request: CreateSandbox, behalf: Behalf) -> Result<NewSandbox, Refusal> {
    let (recording, record) = match request.record {
        true => Recording::start().map(|(recording, fd)| (Some(recording), Some(fd)))?,
        false => (None, None),
    };
    let limit = TimeLimit::from_now(request.timeout_s, request.idle_timeout_s, request.on_timeout);
    let on_exit = request.container.as_ref().map(|c| c.on_exit).unwrap_or_default();
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
            rate_limits: Some(request.rate_limits),
            ..behalf.terms().within(limit).with_exit(on_exit)
        },
        volumes: request.volumes,
        cpu_limit_millis: request.cpu_limit_millis,
    };
    let (trace, root) = (Trace::asked(request.timings), spec.root);
    let building = Arc::new(|step| tracing::info!("template: {step:?}"));
    let sandbox = Sandbox::create(node, spec, &trace, Arc::new(Silent), building).await?;
    if let (Some(mut recording), Some(image)) = (recording, sandbox.image()) {
        recording.keep_journal(&node.images, &image);
        let (images, file) = (node.images.clone(), request.record_to);
        tokio::spawn(async move { log_recording(recording.finish(&images, &image, file).await) });
    }
    let probe = request.container.as_ref().and_then(|c| c.readiness.clone());
    let started = match request.container {
        Some(container) => Some(tokio::select! {
            started = start(&sandbox, container, request.hostname, root, &trace) => started?,
            // The agent would never answer: a VMM whose guest has ended keeps its sockets open until it is asked to exit.
            reason = sandbox.wait_end() => return Err(Error::new(ErrorKind::GuestEnded, reason).into()),
        }),
        None => None,
    };
    sandbox.note_fetched(&trace, "the sandbox was there");
    sandbox.note_read_ahead(&trace);
    let Some((agent, running)) = started else {
        return new_sandbox(node, sandbox, None, None, &trace);
    };
    // Started before the wait for readiness, in which the container may write more than a pipe holds.
    let monitor = ContainerMonitor::start(&sandbox, running, Some(agent.clone()))?;
    let readiness_wait = probe.map(|probe| ReadinessWait::begin(&sandbox, &monitor, agent, probe, &trace));
    new_sandbox(node, sandbox, Some(monitor), readiness_wait, &trace)
}

async fn create_pod(node: &Node, request: CreatePod) -> Result<NewSandbox, Refusal> {
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

async fn thaw_pod(node: &Node, directory: PathBuf, request: ThawPod) -> Result<ThawedPod, Refusal> {
    let spec = ThawSpec {
        directory,
        hostname: request.hostname,
        name: None,
        tethered: false,
        client: request.client,
        memory_mode: MemoryMode::default(),
        require_hook: false,
        network: request.network,
        network_policy: None,
        publish: Vec::new(),
        terms: Terms {
            labels: request.labels,
            ..Terms::default()
        },
        remote: None,
        paused: None,
        is_pod: true,
    };
    let trace = Trace::new();
    let sandbox = Sandbox::thaw(node, spec, &trace).await?;
    let container = match request.snapshot {
        PodSnapshot::Directory(_) => None,
        PodSnapshot::Stored { wanted, .. } => Some(pod_container(&sandbox, &wanted)?),
    };
    let sandbox = of_pod(node, sandbox, request.cgroup, &trace).await?;
    Ok(ThawedPod { sandbox, container })
}

/// The container of a sandbox that was thawed as a pod.
fn pod_container(sandbox: &Sandbox, wanted: &str) -> Result<PodContainer, Error> {
    let refuse = |why: &str| {
        let what = format!("snapshot {wanted} cannot be a pod: {why}");
        Error::new(ErrorKind::SnapshotIncompatible, what)
    };
    let record = sandbox.record();
    let running = Running::read(&sandbox.directory())
        .map_err(|_| refuse("it has no container that thaw run or the API has started"))?;
    if running.args.is_empty() {
        return Err(refuse("a release that did not keep its command has made it")
            .remedy("run its image again, and freeze that"));
    }
    Ok(PodContainer {
        id: running.container_id,
        image_digest: record.image_digest.clone().unwrap_or_default(),
        args: running.args,
        terminal: running.tty,
        memory_mib: record.memory_mib,
    })
}

async fn thaw_sandbox(
    node: &Node,
    from: Thawable,
    request: ThawSandbox,
    behalf: Behalf,
) -> Result<NewSandbox, Refusal> {
    let (directory, remote) = from.into_parts();
    let limit = TimeLimit::from_now(request.timeout_s, request.idle_timeout_s, request.on_timeout);
    let spec = ThawSpec {
        directory,
        hostname: request.hostname,
        name: request.name,
        tethered: false,
        client: request.client.map(process),
        memory_mode: request.memory_mode,
        require_hook: request.require_hook,
        network: None,
        network_policy: request.network_policy,
        publish: request.publish,
        terms: Terms {
            labels: request.labels,
            rate_limits: Some(request.rate_limits),
            ..behalf.terms().within(limit)
        },
        remote,
        paused: None,
        is_pod: false,
    };
    // If the caller has a process for the sandbox, that process attaches to the container.
    let is_monitored = spec.client.is_none();
    let trace = Trace::asked(request.timings);
    let sandbox = Sandbox::thaw(node, spec, &trace).await?;
    let monitor = match is_monitored && sandbox.directory().join(RUNNING_FILE).exists() {
        true => Some(ContainerMonitor::resume(&sandbox)?),
        false => None,
    };
    new_sandbox(node, sandbox, monitor, None, &trace)
}

/// Moves a pod's sandbox into the pod's cgroup. The shim, not thawd, attaches to its containers.
async fn of_pod(
    node: &Node,
    sandbox: Sandbox,
    cgroup: Option<String>,
    trace: &Trace,
) -> Result<NewSandbox, Refusal> {
    let sandbox = match cgroup {
        Some(path) => {
            let node = node.clone();
            let _stage = trace.stage("cgroup_attach");
            blocking(move || sandbox.enter(&node, &path)).await?
        }
        None => sandbox,
    };
    new_sandbox(node, sandbox, None, None, trace)
}

/// Starts the container of a new sandbox.
async fn start(
    sandbox: &Sandbox,
    asked: StartContainer,
    hostname: Option<String>,
    root: RootServing,
    trace: &Trace,
) -> Result<(AgentClient, Running), Error> {
    let id = &sandbox.record().id;
    let requested = container::requested(&asked).map_err(|why| Error::new(ErrorKind::Runtime, why))?;
    let options = Options {
        hostname: hostname.unwrap_or_else(|| id.clone()),
        volumes: sandbox.record().volumes.clone(),
        life: LifeOptions {
            restart: asked.restart,
            stop_signal: asked.stop_signal,
            stop_timeout_s: asked.stop_timeout_s,
            open_stdin: false,
        },
        health: health_check(sandbox, asked.health_check, asked.no_health_check).await?,
        ..requested
    };
    let unread = || {
        Error::new(
            ErrorKind::ImageMalformed,
            "the image's configuration cannot be read",
        )
    };
    let config = sandbox.config.as_ref().ok_or_else(unread)?;
    let agent = {
        let _stage = trace.stage("connect");
        agent_client::connect(&sandbox.vsock(), READY_LIMIT).await?
    };
    let running = {
        let _stage = trace.stage("container");
        container::create(&agent, id, config, &options, root, &sandbox.directory()).await?
    };
    if let Some(probe) = &asked.readiness {
        ready::note(&sandbox.directory(), Readiness::Waiting)?;
        ready::expect(&agent, id, probe).await?;
    }
    let _stage = trace.stage("start");
    container::start(&agent, &running, &sandbox.directory()).await?;
    if !running.tty {
        // No caller can write to it.
        let closed = agent.close_stdin(&running.process()).await;
        closed.map_err(|e| Error::new(ErrorKind::AgentFailed, format!("cannot end its input: {e}")))?;
    }
    Ok((agent, running))
}

/// The health check of a container: the caller's, or its image's.
async fn health_check(
    sandbox: &Sandbox,
    asked: Option<HealthCheck>,
    disabled: bool,
) -> Result<Option<HealthCheck>, Error> {
    let options = HealthOptions {
        disabled,
        ..asked.map(HealthOptions::from).unwrap_or_default()
    };
    let image = sandbox.image();
    let json = blocking(move || Ok(image.and_then(|image| image.config_json().ok()))).await?;
    container::health_check(json.as_deref(), &options).map_err(|e| Error::new(ErrorKind::Runtime, e))
}

fn new_sandbox(
    node: &Node,
    sandbox: Sandbox,
    monitor: Option<ContainerMonitor>,
    readiness_wait: Option<ReadinessWait>,
    trace: &Trace,
) -> Result<NewSandbox, Refusal> {
    let image_config = serde_json::to_string(&sandbox.config)
        .map_err(|e| Error::new(ErrorKind::ImageMalformed, e.to_string()))?;
    let readiness = readiness_wait.as_ref().map(|_| Readiness::Waiting);
    Ok(NewSandbox {
        machine: Arc::new(Microvm::created(node.clone(), sandbox, monitor, readiness)),
        image_config,
        account: trace.account(),
        readiness_wait,
    })
}

/// Logs the result of a recording: no caller waits for it.
fn log_recording(recorded: Result<Option<Recorded>, Error>) {
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

/// A value of an enumeration by its name on the wire.
fn parse<T: DeserializeOwned>(field: &str, value: &str) -> Result<T, Refusal> {
    let word: StrDeserializer<'_, serde::de::value::Error> = value.into_deserializer();
    T::deserialize(word).map_err(|_| Refusal::new(ApiCode::Invalid, format!("bad {field}: {value:?}")))
}
