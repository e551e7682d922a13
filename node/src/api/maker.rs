//! What the API asks of the node: to make sandboxes, and what each that was made can do.
//!
//! The routes know these two traits only, so a test can put something else behind them. Invariant: a making that is dropped
//! leaves nothing, and a [`Machine`] that is dropped unreleased ends.

use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use thaw_pools::process::ProcessRecord;
use thaw_pools::statistics::PoolStatistics;
use thaw_protocol::api::{
    Account, CreateSandbox, FreezeSandbox, FrozenSandbox, NetworkPolicy, ProcessIdentity, SandboxNetwork,
    ThawSandbox, Usage,
};
use thaw_protocol::control::MachineState;
use thaw_rootfs::progress::Silent;

use super::problem::{ApiCode, Refusal};
use crate::exit::{ExitCode, Failure};
use crate::image::record::{Recorded, Recording};
use crate::images::Pull;
use crate::metrics::{self, Families, Names};
use crate::sandbox::{
    FreezeOptions, NetworkMode, Node, RootServing, Sandbox, SandboxSpec, Terms, ThawSpec, Timeout, network,
    usage,
};
use crate::state::Record;
use crate::trace::Trace;

/// Makes sandboxes.
#[async_trait]
pub trait Maker: std::fmt::Debug + Send + Sync {
    /// Of an image.
    async fn create(&self, request: CreateSandbox) -> Result<Made, Refusal>;
    /// Of a snapshot.
    async fn thaw(&self, request: ThawSandbox) -> Result<Made, Refusal>;
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
    /// Asks its VMM.
    async fn condition(&self) -> Condition;
    /// Waits for its end, and says why it ended. It may wait longer than the machine is held.
    fn end(&self) -> BoxFuture<'static, String>;
    async fn pause(&self) -> Result<(), Failure>;
    async fn resume(&self) -> Result<(), Failure>;
    async fn freeze(&self, request: FreezeSandbox) -> Result<FrozenSandbox, Failure>;
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
    async fn create(&self, request: CreateSandbox) -> Result<Made, Refusal> {
        let (recording, record) = match request.record {
            true => Recording::start().map(|(recording, fd)| (Some(recording), Some(fd)))?,
            false => (None, None),
        };
        let spec = SandboxSpec {
            image: request.image,
            pull: parse::<Pull>("pull", &request.pull)?,
            plain_http: request.plain_http,
            vcpus: request.cpus,
            memory_mib: request.memory_mib,
            disk_mib: request.disk_mib,
            hostname: request.hostname,
            name: request.name,
            network: parse::<NetworkMode>("network", &request.network)?,
            network_terms: network::read(request.network_policy.as_ref(), &request.publish)?,
            command: request.command,
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
            },
        };
        let trace = Trace::new();
        let building = Arc::new(|step| tracing::info!("template: {step:?}"));
        let sandbox = Sandbox::create(self, spec, &trace, Arc::new(Silent), building).await?;
        if let (Some(mut recording), Some(image)) = (recording, sandbox.image()) {
            recording.keep_journal(&self.images, image);
            let (images, image, file) = (self.images.clone(), image.clone(), request.record_to);
            tokio::spawn(async move { tell(recording.finish(&images, &image, file).await) });
        }
        sandbox.note_fetched(&trace, "the sandbox was there");
        sandbox.note_read_ahead(&trace);
        made(self, sandbox, &trace)
    }

    async fn thaw(&self, request: ThawSandbox) -> Result<Made, Refusal> {
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
            },
        };
        let trace = Trace::new();
        let sandbox = Sandbox::thaw(self, spec, &trace).await?;
        made(self, sandbox, &trace)
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

fn made(node: &Node, sandbox: Sandbox, trace: &Trace) -> Result<Made, Refusal> {
    let image_config = serde_json::to_string(&sandbox.config)
        .map_err(|e| Failure::new(ExitCode::ImageMalformed, e.to_string()))?;
    Ok(Made {
        machine: Arc::new(Microvm::new(node.clone(), Arc::new(sandbox))),
        image_config,
        account: trace.account(),
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
}

impl Microvm {
    /// Whoever else holds the sandbox keeps it from being removed.
    pub fn new(node: Node, sandbox: Arc<Sandbox>) -> Microvm {
        Microvm { node, sandbox }
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
        Usage {
            fetched_bytes: self.sandbox.fetched(),
            ..usage(self.sandbox.record(), &self.node.cgroups)
        }
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
