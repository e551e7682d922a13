//! One microVM with an image in it: made by a pipeline of timed stages, ended by dropping what it holds.
//!
//! Invariant: at every moment of the making, what exists already is held by [`Resources`], whose drop removes it; so a
//! failure, a cancellation and an end are one path. What no drop can reach (`kill -9`) is either anonymous or found
//! through the sandbox's directory by the next start ([`crate::state`]).

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use oci_spec::image::ImageConfiguration;
use serde::{Deserialize, Serialize};
use thaw_pools::cgroup::{Cgroup, Hierarchy};
use thaw_pools::process::ProcessRecord;
use thaw_pools::vmm::VmmProcess;
use thaw_protocol::control::{Command, ExitReason, MachineState, Response};
use thaw_rootfs::progress::Progress;
use thaw_rootfs::store::{Image, Lease};
use tokio::sync::watch;

use crate::console::Console;
use crate::control_client::{ControlClient, Life};
use crate::exit::{ExitCode, Failure};
use crate::images::{Images, Pull};
use crate::misses::MissServer;
use crate::paths::Paths;
use crate::state::{Record, RunDirectory, SandboxDirectory};
use crate::trace::Trace;

mod create;
mod files;

/// How long a guest may take to ring, and the agent to take its identity.
pub const READY_LIMIT: Duration = Duration::from_secs(60);
/// Lines of the console shown with a failure.
const CONSOLE_LINES: usize = 10;

/// Which network a sandbox has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum NetworkMode {
    /// Loopback only.
    None,
    /// A network of its own: the guest and its host end.
    #[default]
    Private,
}

/// What is asked for.
#[derive(Clone, Debug)]
pub struct SandboxSpec {
    pub image: String,
    pub pull: Pull,
    pub plain_http: bool,
    pub vcpus: u8,
    pub memory_mib: u32,
    pub hostname: Option<String>,
    pub name: Option<String>,
    pub network: NetworkMode,
    /// For `thaw ps`.
    pub command: Vec<String>,
    /// Ends with this process: for a sandbox made by the CLI itself.
    pub tethered: bool,
    /// For a sandbox thawd makes: the process it is made for, and ends with.
    pub client: Option<ProcessRecord>,
}

/// What sandboxes are made from and where.
#[derive(Clone, Debug)]
pub struct Node {
    pub paths: Paths,
    pub run: RunDirectory,
    pub images: Images,
    pub cgroups: Hierarchy,
}

impl Node {
    /// Opens the run directory and the image store, and removes what dead owners left.
    pub fn open(paths: Paths) -> Result<Node, Failure> {
        let run = RunDirectory::open(&paths.run)?;
        let cgroups = Hierarchy::detect();
        run.clean(&cgroups);
        let images = Images::open(&paths.images())?;
        Ok(Node {
            paths,
            run,
            images,
            cgroups,
        })
    }
}

/// Everything a sandbox has on the host. Dropping it removes all of it.
#[derive(Debug)]
struct Resources {
    // In the order they must go: the VMM holds descriptors of the others.
    control: Option<ControlClient>,
    vmm: Option<VmmProcess>,
    misses: Option<MissServer>,
    console: Option<Console>,
    cgroup: Option<Cgroup>,
    lease: Option<Lease>,
    directory: SandboxDirectory,
    keep: bool,
}

impl Drop for Resources {
    fn drop(&mut self) {
        if self.keep {
            return;
        }
        self.control = None;
        if let Some(mut vmm) = self.vmm.take() {
            vmm.kill();
            if let Err(e) = vmm.wait() {
                tracing::warn!("cannot reap thaw-vmm: {e}");
            }
        }
        if let Some(cgroup) = self.cgroup.take() {
            cgroup.destroy();
        }
    }
}

/// A running sandbox.
#[derive(Debug)]
pub struct Sandbox {
    record: Record,
    /// The image's configuration, where it is still known.
    pub config: Option<ImageConfiguration>,
    life: watch::Receiver<Life>,
    resources: Resources,
}

impl Sandbox {
    /// Makes a sandbox whose agent has taken its identity and waits for containers. Each stage is timed in `trace`.
    pub async fn create(
        node: &Node,
        spec: SandboxSpec,
        trace: &Trace,
        progress: Arc<dyn Progress>,
    ) -> Result<Sandbox, Failure> {
        create::create(node, spec, trace, progress).await
    }

    /// Takes over a sandbox whose thawd is gone: connects to its VMM, and gives it a new miss socket and console.
    pub async fn adopt(node: &Node, record: Record, directory: SandboxDirectory) -> Result<Sandbox, Failure> {
        let lost = |what: &str| Failure::new(ExitCode::VmmFailed, format!("sandbox {}: {what}", record.id));
        let vmm = record
            .vmm
            .and_then(VmmProcess::adopt)
            .ok_or_else(|| lost("its VMM has ended"))?;
        let mut resources = Resources {
            control: None,
            vmm: Some(vmm),
            misses: None,
            console: None,
            cgroup: Some(node.cgroups.adopt(&record.id)),
            lease: None,
            directory,
            keep: false,
        };
        let control = ControlClient::connect(&resources.directory.control_socket())?;
        create::attach_misses(&control, node, &mut resources).await?;
        create::attach_console(&control, &mut resources).await?;
        let image: Option<Image> = match &record.image_digest {
            Some(digest) => node.images.by_digest(digest)?,
            None => None,
        };
        resources.lease = match &image {
            Some(image) => Some(image.lease().map_err(crate::images::failure)?),
            None => None,
        };
        let life = control.life();
        resources.control = Some(control);
        let record = Record {
            owner: ProcessRecord::myself(),
            ..record
        };
        resources.directory.write(&record)?;
        Ok(Sandbox {
            record,
            config: image.map(|i| i.config),
            life,
            resources,
        })
    }

    /// What is known of it.
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// Where its vsock is reached.
    pub fn vsock(&self) -> PathBuf {
        self.resources.directory.vsock_socket()
    }

    /// Its directory.
    pub fn directory(&self) -> PathBuf {
        self.resources.directory.path().to_owned()
    }

    /// Why its machine ended, if it has.
    pub fn ended(&self) -> Option<String> {
        let life = self.life.borrow();
        life.exited
            .as_ref()
            .map(describe)
            .or(life.closed.then(|| "thaw-vmm ended".to_owned()))
    }

    /// Waits until its machine has ended, and says why.
    pub async fn wait_end(&self) -> String {
        let mut life = self.life.clone();
        let ended = life.wait_for(|l| l.exited.is_some() || l.closed).await;
        match ended.as_ref().ok().and_then(|l| l.exited.as_ref()) {
            Some(reason) => describe(reason),
            None => "thaw-vmm ended".into(),
        }
    }

    /// The last lines its console wrote.
    pub fn console_tail(&self) -> Vec<String> {
        self.resources
            .console
            .as_ref()
            .map(|c| c.tail(CONSOLE_LINES))
            .unwrap_or_default()
    }

    /// What the VMM says of its machine.
    pub async fn machine(&self) -> Result<MachineState, Failure> {
        let control = self.resources.control.as_ref();
        let control =
            control.ok_or_else(|| Failure::new(ExitCode::VmmFailed, "no connection to thaw-vmm"))?;
        match control.call(Command::Status, &[]).await? {
            Response::Status { state, .. } => Ok(state),
            _ => Err(Failure::new(
                ExitCode::VmmFailed,
                "thaw-vmm answered another question",
            )),
        }
    }

    /// Ends it and removes all it has. Blocks for as long as the kernel takes.
    pub async fn destroy(self) {
        let gone = tokio::task::spawn_blocking(move || drop(self)).await;
        if let Err(e) = gone {
            tracing::warn!("tearing a sandbox down failed: {e}");
        }
    }

    /// Lets go of it without ending it: a later thawd adopts it.
    pub fn release(mut self) {
        self.resources.keep = true;
        self.resources.directory.keep();
        if let Some(vmm) = &mut self.resources.vmm {
            vmm.release();
        }
    }
}

/// A machine's end in words.
fn describe(reason: &ExitReason) -> String {
    match reason {
        ExitReason::PowerOff => "the guest powered off".into(),
        ExitReason::Reset => "the guest's kernel panicked or its agent died".into(),
        ExitReason::Fault(what) => format!("the guest's CPU could not go on: {what}"),
    }
}

/// A failure with the console's last lines before it.
fn with_console(failure: Failure, console: Option<&Console>) -> Failure {
    let lines = console.map(|c| c.tail(CONSOLE_LINES)).unwrap_or_default();
    Failure {
        context: lines,
        ..failure
    }
}
