//! Fakes of the machines behind the API, for tests. They count the living machines.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use async_trait::async_trait;
use thaw_protocol::api::{ContainerHealth, CreateSandbox, HookResult, Image, Snapshot};
use thaw_sandbox::admission::Admission;
use thaw_sandbox::container::Options;
use thaw_sandbox::error::Error;
use thaw_sandbox::snapshot::Stamps;
use thaw_sandbox::snapshot::store::Observer;
use thaw_sandbox::state::PausedSandboxes;
use tokio::sync::watch;

use super::container_monitor::ContainerLife;
use super::daemon::Daemon;
use super::files::Files;
use super::kept::Processes;
use super::process::Process;
use super::watch::Versions;

mod catalog;
pub mod copies;
mod factory;
mod files;
mod machine;
mod process;
mod quotas;
mod snapshots;

pub use copies::Copies;
pub use files::FakeFiles;
pub use machine::FakeMachine;
pub use process::{FakeProcess, FakeProcesses};

/// Counts of a fake's actions.
#[derive(Debug)]
pub struct Counts {
    pub living: AtomicUsize,
    pub made: AtomicUsize,
    /// The actions on running processes.
    pub heard: watch::Sender<Vec<String>>,
    /// The stored snapshots.
    pub stored: Mutex<Vec<Snapshot>>,
    /// Is told of their changes.
    pub observer: OnceLock<Arc<dyn Observer>>,
    /// The sandboxes whose memory is released.
    pub paused: PausedSandboxes,
    pub stamps: Stamps,
    /// What the fakes count with.
    pub admission: Arc<Admission>,
    /// How the hook after a thaw of all containers ends. `None`: they have none.
    pub hook: Mutex<Option<HookResult>>,
    _data: tempfile::TempDir,
}

impl Default for Counts {
    fn default() -> Counts {
        let data = tempfile::tempdir().unwrap();
        Counts {
            living: AtomicUsize::default(),
            made: AtomicUsize::default(),
            heard: watch::Sender::default(),
            stored: Mutex::default(),
            observer: OnceLock::new(),
            paused: PausedSandboxes::under(data.path()),
            stamps: Stamps::open(&data.path().join("verified")).unwrap(),
            admission: Arc::default(),
            hook: Mutex::default(),
            _data: data,
        }
    }
}

impl Counts {
    fn hear(&self, what: impl Into<String>) {
        self.heard.send_modify(|heard| heard.push(what.into()));
    }
}

/// What runs processes and has files in the place of the fakes, for tests that need more.
#[async_trait]
pub trait Guest: std::fmt::Debug + Send + Sync {
    async fn exec(&self, options: Options) -> Result<Arc<dyn Process>, Error>;
    fn processes(&self) -> Arc<dyn Processes>;
    fn files(&self) -> Arc<dyn Files>;
}

/// Creates fake machines.
#[derive(Debug)]
pub struct Fake {
    pub counts: Arc<Counts>,
    /// How many sandboxes are being created.
    pub making: watch::Sender<usize>,
    /// Whether a creation may complete.
    pub open: watch::Sender<bool>,
    /// The exit status of all containers.
    pub exit: watch::Sender<Option<i32>>,
    /// The life of all containers.
    pub life: watch::Sender<ContainerLife>,
    /// The health of all containers.
    pub health: watch::Sender<Option<ContainerHealth>>,
    /// Whether containers with a readiness probe are ready.
    pub ready: watch::Sender<Option<bool>>,
    /// The files of all containers.
    pub files: Arc<FakeFiles>,
    /// What the machines have in place of fake processes and files.
    pub guest: Mutex<Option<Arc<dyn Guest>>>,
    pub images: Mutex<Vec<Image>>,
    /// Number of creations after which thaws fail.
    pub most: AtomicUsize,
    /// The last directory that was requested for a snapshot.
    pub place: Mutex<Option<PathBuf>>,
    /// The registry of paused sandboxes.
    pub copies: Mutex<Arc<Copies>>,
}

impl Fake {
    /// A daemon that uses a new fake.
    pub fn daemon(open: bool) -> (Arc<Fake>, Arc<Daemon>) {
        Fake::daemon_within(open, Admission::default())
    }

    /// The same with limits.
    pub fn daemon_within(open: bool, admission: Admission) -> (Arc<Fake>, Arc<Daemon>) {
        let fake = Arc::new(Fake {
            counts: Arc::new(Counts {
                admission: Arc::new(admission),
                ..Counts::default()
            }),
            making: watch::Sender::new(0),
            open: watch::Sender::new(open),
            exit: watch::Sender::new(None),
            life: watch::Sender::default(),
            health: watch::Sender::default(),
            ready: watch::Sender::new(None),
            files: Arc::default(),
            guest: Mutex::default(),
            images: Mutex::default(),
            most: AtomicUsize::new(usize::MAX),
            place: Mutex::default(),
            copies: Mutex::default(),
        });
        let daemon = Daemon::new(Some(fake.clone()), Versions::of_clock());
        (fake, daemon)
    }

    pub fn living(&self) -> usize {
        self.counts.living.load(Ordering::SeqCst)
    }

    pub fn made(&self) -> usize {
        self.counts.made.load(Ordering::SeqCst)
    }
}

/// The id of a sandbox that runs without an owner.
pub const UNOWNED: &str = "unowned";

/// A request for a sandbox of this image.
pub fn request(image: &str) -> CreateSandbox {
    serde_json::from_value(serde_json::json!({"image": image, "cpus": 1, "memory_mib": 128})).unwrap()
}
