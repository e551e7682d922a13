//! One microVM with an image in it. A pipeline of timed stages makes it; dropping its resources ends it.
//!
//! Invariant: at every moment of a creation, [`Resources`] owns what exists already, and its drop removes it. So a failure, a cancellation
//! and an end take the same path. A drop does not run after `kill -9`: what then remains has no name, or the next start finds it through
//! the sandbox's directory ([`crate::state`]).

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oci_spec::image::ImageConfiguration;
use thaw_failpoint::{Failpoint, reach};
use thaw_images::prefetch::{Ahead, Prefetch};
use thaw_images::progress::Progress;
use thaw_images::store::Image;
use thaw_network::{FastPathSetting, Setup};
use thaw_pools::cgroup::Hierarchy;
use thaw_protocol::api::RateLimits;
use thaw_protocol::control::{Command, MachineState, Response};
use tokio::sync::watch;

use crate::admission::Admission;
use crate::config::Config;
use crate::console::Console;
use crate::control_client::Life;
use crate::error::Error;
use crate::human_bytes::HumanBytes;
use crate::images::Images;
use crate::paths::Paths;
use crate::snapshot::{Hash, Hold, Registered, Scratch, Signatures, SnapshotStore, Subject};
use crate::state::{Ending, PausedSandboxes, Record, RunDirectory, SandboxDirectory, TimeLimit};
use crate::template::Templates;
use crate::template::command_line::{command_line, has_test_hooks};
use crate::tenant::Tenant;
use crate::trace::Trace;

mod adoption;
mod artifact_source;
mod backends;
mod bare;
mod base;
mod budget;
mod claim;
mod cold;
mod create;
mod disk;
mod ending;
mod failed;
#[cfg(test)]
#[path = "fake_agent_test.rs"]
mod fake_agent;
mod files;
mod first_thaw;
mod fitted;
pub mod freeze;
mod freeze_note;
mod frozen_disk;
mod held_snapshots;
mod hooks;
mod host_cpu;
mod host_disk;
mod host_limits;
mod kept_components;
mod larger_template;
mod live_freeze;
mod loopback;
mod machine;
pub mod network;
mod pagemap;
mod parked;
mod pause;
mod paused_copy;
mod pod_cgroup;
mod pools;
mod provenance;
mod quota;
mod rate_limits;
mod recent_pools;
mod remote_ahead;
mod remote_demands;
mod remote_files;
mod remote_memory;
mod remote_snapshot;
mod remote_thaw;
mod required;
mod resources;
mod retry;
mod share;
mod shells;
mod show;
mod snapshot;
mod snapshot_pull;
mod snapshot_push;
mod spare;
mod spawn;
mod spec;
mod start_report;
mod stored;
mod tenants;
mod thaw;
mod time_limit;
mod usage;
mod userfaultfd;
mod vmm_log;
mod wanted_machine;

pub use adoption::NotAdopted;
pub use base::BaseUsers;
pub use budget::{Budget, BudgetStatistics};
pub use freeze::{FreezeOptions, Frozen};
pub use held_snapshots::Snapshots;
use larger_template::LargerTemplates;
use machine::{describe, explain, unexpected_answer};
pub use parked::ParkedPools;
pub use paused_copy::CopyPlace;
pub use pools::Pools;
pub use recent_pools::RecentPlan;
pub use remote_snapshot::{RemoteSnapshot, RemoteSnapshots, Thawable};
use required::Required;
use resources::Resources;
use retry::with_end_reason;
pub use shells::ShellPools;
pub use snapshot::ThawSpec;
pub use spec::{NetworkMode, NetworkSource, SandboxSpec};
pub use stored::FoundSnapshot;
pub use tenants::Tenants;
use thaw_sys::lock::Lock;
pub use usage::usage;

/// How long a guest may take to ring the doorbell, and the agent to take its identity.
pub const READY_LIMIT: Duration = Duration::from_secs(60);
/// Lines of the console shown with a failure.
const CONSOLE_LINES: usize = 10;
/// How long the end of a sandbox waits for other holders of it.
const LOOKERS_LINGER: Duration = Duration::from_secs(5);

/// An image that the guest sees.
#[derive(Clone, Debug)]
struct Shown {
    /// The slot of the root device. [`IMAGE_DISK_SLOT`] for an image that is a disk: no image is in that slot.
    slot: u16,
    /// Directory name under the root device's root; unused for a disk.
    name: String,
    image: Image,
}

/// The snapshot that a sandbox was thawed from.
#[derive(Clone, Debug)]
struct Origin {
    subject: Subject,
    /// Hash of the manifest.
    manifest: Hash,
    directory: PathBuf,
    /// Clones of one snapshot share it. `None` for an adopted sandbox.
    _held: Option<Arc<Registered>>,
}

impl Origin {
    fn of(registered: Arc<Registered>) -> Origin {
        Origin {
            subject: registered.manifest.subject.clone(),
            manifest: registered.hash,
            directory: registered.directory.clone(),
            _held: Some(registered),
        }
    }
}

/// What a node makes sandboxes from: its stores, pools and configuration.
#[derive(Clone, Debug)]
pub struct Node {
    pub paths: Paths,
    pub run: RunDirectory,
    pub images: Images,
    pub cgroups: Hierarchy,
    pub pools: Arc<Pools>,
    pub shells: Arc<ShellPools>,
    /// Machines parked with a template in them.
    pub parked: Arc<ParkedPools>,
    /// Machines parked with a user's snapshot in them.
    pub parked_snapshots: Arc<ParkedPools>,
    pub templates: Templates,
    larger: Arc<LargerTemplates>,
    pub snapshots: Snapshots,
    /// The snapshots that it keeps.
    pub stored: SnapshotStore,
    /// The snapshots that are being fetched while sandboxes run from them.
    pub remote: RemoteSnapshots,
    /// The sandboxes whose memory is released.
    pub paused: PausedSandboxes,
    /// Whether guests weakened for a test are accepted.
    pub test_templates: bool,
    /// Host features without which a creation fails.
    require: Required,
    /// The disk budget of sandboxes and snapshots.
    pub budget: Arc<Budget>,
    /// The limits of tenants and of the node.
    pub admission: Arc<Admission>,
    /// Whether guests have no agent.
    bare: bool,
    /// The tenant that its images, templates and parked machines belong to, if they are one tenant's alone: [`Tenants`].
    stock: Option<Tenant>,
}

impl Node {
    /// Opens a node for a process that makes one sandbox, or runs a few commands. The process's environment decides whether guests weakened
    /// for a test are accepted.
    pub fn open(paths: Paths) -> Result<Node, Error> {
        let test_templates = has_test_hooks(&command_line());
        Node::open_as(paths, Hold::Files, test_templates)
    }

    /// Opens the run directory and the image store, and removes what dead owners left, including the snapshots of forks. A long-lived
    /// process holds templates in its own sealed memory.
    pub fn open_as(paths: Paths, hold: Hold, test_templates: bool) -> Result<Node, Error> {
        let run = RunDirectory::open(&paths.run)?;
        let cgroups = Hierarchy::detect();
        run.clean(&cgroups);
        run.index_names();
        Scratch::sweep(&paths.data);
        let config = Config::from_env()?;
        let held = config.snapshots.held.0;
        let templates = Templates::open(&paths, hold, Signatures::of(&config.snapshots))?;
        templates.sweep();
        let paused = PausedSandboxes::under(&paths.data);
        let stored = SnapshotStore::open(&paths.data, templates.registry().clone());
        stored.sweep();
        let images = Images::open_with(&paths.images(), config)?;
        let require = Required::of(&images.config.sandbox, false);
        Ok(Node {
            templates,
            larger: Arc::default(),
            snapshots: Snapshots::within(held),
            stored,
            remote: RemoteSnapshots::default(),
            paused,
            // A fast path takes longer to set up than a slot, so it is worth it only if slots are made ahead.
            pools: Arc::new(Pools::empty(
                &paths,
                cgroups.clone(),
                Setup {
                    fast_path: FastPathSetting::Off,
                    ..images.config.network.clone()
                },
            )),
            shells: Arc::default(),
            parked: Arc::default(),
            parked_snapshots: Arc::default(),
            paths,
            run,
            images,
            cgroups,
            test_templates,
            require,
            budget: Arc::default(),
            admission: Arc::default(),
            bare: test_templates && bare::expected(),
            stock: None,
        })
    }

    /// Whether guests have agents: only bare test guests have none.
    fn has_agents(&self) -> bool {
        !self.bare
    }

    /// Applies the configuration for a process that makes many sandboxes: resources are made ahead from now on, the disk has a budget,
    /// tenants and the node have their limits, and sandboxes without limits or without a complete jail are refused.
    pub fn fill_pools(&mut self) -> Result<(), Error> {
        let network = self.images.config.network.clone();
        let config = &self.images.config.pools;
        self.require = Required::of(&self.images.config.sandbox, true);
        self.budget = Arc::new(Budget::open(&self.images.config.disk, &self.paths.data)?);
        let of = &self.images.config;
        self.admission = Arc::new(Admission::open(&of.quotas, &of.capacity, &self.paths.data)?);
        self.pools = Arc::new(Pools::filled(&self.paths, self.cgroups.clone(), network, config)?);
        if let Err(e) = self.pools.networks.kind().listen() {
            tracing::warn!("ports of sandboxes that are killed stay published until the next start: {e}");
        }
        let makers = config.makers.get().into();
        let awaited = &self.pools.awaited;
        self.shells = Arc::new(ShellPools::new(RecentPlan::of_shells(
            &config.shells,
            makers,
            awaited,
        )));
        if config.larger_templates {
            self.larger = Arc::new(LargerTemplates::enabled());
        }
        let parked = |wants| {
            let plan = RecentPlan::of_parked(&config.parked, wants, makers, awaited);
            Arc::new(ParkedPools::new(plan))
        };
        self.parked = parked(config.parked.templates);
        self.parked_snapshots = parked(config.parked.snapshots);
        Ok(())
    }
}

/// A running sandbox.
#[derive(Debug)]
pub struct Sandbox {
    record: Record,
    /// The image's configuration, if the image is still in the store.
    pub config: Option<ImageConfiguration>,
    life: watch::Receiver<Life>,
    origin: Option<Origin>,
    resources: Resources,
    /// The lock of its resources. Held while it is frozen.
    freezing: Arc<tokio::sync::Mutex<()>>,
    /// The current limits; `None` if its VMM does not support them.
    rate_limits: Mutex<Option<RateLimits>>,
    time_limit: watch::Sender<TimeLimit>,
    ending: watch::Sender<Ending>,
    /// The trace of its start, if its machine was not asked yet about that.
    unasked: Mutex<Option<Trace>>,
}

impl Sandbox {
    fn new(
        record: Record,
        config: Option<ImageConfiguration>,
        origin: Option<Origin>,
        resources: Resources,
    ) -> Result<Sandbox, Error> {
        let life = resources.control()?.life();
        Ok(Sandbox::of(record, config, origin, life, resources))
    }

    fn of(
        record: Record,
        config: Option<ImageConfiguration>,
        origin: Option<Origin>,
        life: watch::Receiver<Life>,
        resources: Resources,
    ) -> Sandbox {
        Sandbox {
            life,
            rate_limits: Mutex::new(record.terms.rate_limits),
            time_limit: watch::Sender::new(record.terms.time_limit()),
            ending: watch::Sender::new(record.ending()),
            unasked: Mutex::default(),
            record,
            config,
            origin,
            freezing: resources.changing.clone(),
            resources,
        }
    }

    /// Creates a sandbox whose agent has taken its identity and waits for containers. Each stage is timed in `trace`;
    /// `building` is called while a template is built, if there is none yet.
    pub async fn create(
        node: &Node,
        spec: SandboxSpec,
        trace: &Trace,
        progress: Arc<dyn Progress>,
        building: crate::template::Progress,
    ) -> Result<Sandbox, Error> {
        let _awaited = node.pools.begin_awaited();
        create::create(node, spec, trace, progress, building).await
    }

    /// Creates a sandbox from a snapshot of a running one: its workloads go on with a new identity. Timed like a creation.
    pub async fn thaw(node: &Node, spec: ThawSpec, trace: &Trace) -> Result<Sandbox, Error> {
        let _awaited = node.pools.begin_awaited();
        snapshot::thaw(node, spec, trace).await
    }

    /// Adopts a sandbox whose thawd is gone.
    ///
    /// # Errors
    /// Whether the sandbox has ended or runs on without an owner, and why.
    pub async fn adopt(
        node: &Node,
        record: Record,
        directory: SandboxDirectory,
    ) -> Result<Sandbox, NotAdopted> {
        adoption::adopt(node, record, directory).await
    }

    /// Its record.
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// Path of its vsock socket.
    pub fn vsock(&self) -> PathBuf {
        self.resources.directory.vsock_socket()
    }

    /// Its directory.
    pub fn directory(&self) -> PathBuf {
        self.resources.directory.path().to_owned()
    }

    /// Why its machine ended. `None` while it runs.
    pub fn ended(&self) -> Option<String> {
        let life = self.life.borrow();
        life.exited
            .as_ref()
            .map(describe)
            .or(life.closed.then(|| life.closed_because()))
    }

    /// Waits until its machine has ended, and returns why. The future does not borrow the sandbox.
    pub fn wait_end(&self) -> impl Future<Output = String> + Send + use<> {
        machine::ended(self.life.clone())
    }

    /// Adds to an error why its machine ended, if it has, and the last lines of its console and its VMM's log.
    pub async fn explain(&self, failure: Error) -> Error {
        let failure = with_end_reason(failure.lost(), &self.resources).await;
        explain(failure.for_good(), &self.resources)
    }

    /// The state of its machine, as the VMM reports it.
    pub async fn machine(&self) -> Result<MachineState, Error> {
        match self.resources.control()?.call(Command::Status, &[]).await? {
            Response::Status { state, .. } => Ok(state),
            other => Err(unexpected_answer(&other)),
        }
    }

    /// Adds to the trace the bytes fetched for it so far; `until` names the moment. Does nothing for an adopted sandbox.
    pub fn note_fetched(&self, trace: &Trace, until: &str) {
        if let Some(bytes) = self.fetched() {
            trace.count("fetched_bytes", bytes);
            trace.note("start", &format!("{} fetched until {until}", HumanBytes(bytes)));
        }
    }

    /// Bytes fetched for it so far. `None` for an adopted sandbox.
    pub fn fetched(&self) -> Option<u64> {
        self.resources.supply.as_ref().map(|s| s.filler().fetched())
    }

    /// Adds to the trace how far its image is read ahead, if it is.
    pub fn note_read_ahead(&self, trace: &Trace) {
        let prefetch = self.resources.prefetch.locked().first().map(Prefetch::status);
        if let Some(Ahead { done, total, .. }) = prefetch {
            let text = format!("{} of {} read ahead", HumanBytes(done), HumanBytes(total));
            trace.note("prefetch", &text);
            trace.count("prefetched_bytes", done);
        }
    }

    /// Its image, if the store still has it.
    pub fn image(&self) -> Option<Image> {
        self.resources
            .images
            .locked()
            .first()
            .map(|shown| shown.image.clone())
    }

    /// Ends its machine. Every holder of this sandbox sees it end.
    pub fn kill(&self) {
        self.resources.directory.note_end();
        reach(Failpoint::DeleteNoted);
        if let Some(vmm) = &self.resources.vmm {
            vmm.kill();
        }
    }

    /// Ends it and removes its resources. Returns when they are removed, even if another task still used it.
    pub async fn destroy(self: Arc<Sandbox>) {
        let (id, mut gone) = (self.record.id.clone(), self.resources.gone.subscribe());
        let dropped = tokio::task::spawn_blocking(move || {
            // Other holders find it ended, and the last of them removes it.
            self.kill();
            drop(self);
        })
        .await;
        if let Err(e) = dropped {
            tracing::warn!("tearing a sandbox down failed: {e}");
        }
        // The channel carries no values: it changes only when it closes.
        if tokio::time::timeout(LOOKERS_LINGER, gone.changed())
            .await
            .is_err()
        {
            tracing::warn!(sandbox = id, "ended, but somebody still looks at it");
        }
    }

    /// Releases it without ending it: a later thawd adopts it.
    pub fn release(mut self) {
        self.resources.keep();
    }
}

/// Adds the console's last lines to an error.
fn with_console(failure: Error, console: Option<&Console>) -> Error {
    let lines = console.map(|c| c.tail(CONSOLE_LINES)).unwrap_or_default();
    Error {
        context: lines,
        ..failure
    }
}
