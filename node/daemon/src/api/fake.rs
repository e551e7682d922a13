//! A maker without machines, for tests: it counts what lives.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use thaw_pools::share::Source;
use thaw_pools::statistics::PoolStatistics;
use thaw_pools::vmm::Ended;
use thaw_protocol::api::{
    Account, CreateSandbox, FreezeSandbox, FrozenSandbox, Image, ImageDetail, NetworkPolicy, OnExit,
    PullImage, RateLimits, Readiness, SandboxFailure, SandboxNetwork, Stage, Template, ThawSandbox, Usage,
};
use thaw_protocol::control::{DeviceId, HOST_DISKS};
use thaw_sandbox::container::Options;
use thaw_sandbox::exit::{ExitCode, Failure};
use thaw_sandbox::failure::{Evidence, VmmEnd};
use thaw_sandbox::journal::Journal;
use thaw_sandbox::sandbox::{NetworkMode, NetworkSource};
use thaw_sandbox::state::{Behalf, HostDisk, Record, Terms, Timeout};
use tokio::sync::watch;

use super::daemon::Daemon;
use super::files::Files;
use super::machine::{Condition, Machine};
use super::maker::{CreatePod, Made, Maker, Place, ThawPod};
use super::problem::Refusal;
use super::process::Process;
use super::readying::Readying;
use super::stock::Stock;
use super::watch::Versions;
use crate::metrics::{Families, Names};

mod files;
mod process;

pub use files::FakeFiles;
pub use process::FakeProcess;

/// What a fake maker has done.
#[derive(Debug, Default)]
pub struct Counts {
    pub living: AtomicUsize,
    pub made: AtomicUsize,
    /// What was done to processes, by those that lasted.
    pub heard: watch::Sender<Vec<String>>,
}

impl Counts {
    fn hear(&self, what: impl Into<String>) {
        self.heard.send_modify(|heard| heard.push(what.into()));
    }
}

/// Makes machines that are none, as soon as it may.
#[derive(Debug)]
pub struct Fake {
    pub counts: Arc<Counts>,
    /// How many are being made.
    pub making: watch::Sender<usize>,
    /// Whether a making may end.
    pub open: watch::Sender<bool>,
    /// What all containers ended with.
    pub exit: watch::Sender<Option<i32>>,
    /// Whether containers that are to be ready are.
    pub ready: watch::Sender<Option<bool>>,
    /// Those of all containers.
    pub files: Arc<FakeFiles>,
    pub images: Mutex<Vec<Image>>,
    /// How many may be made before thaws fail.
    pub most: AtomicUsize,
    /// The last place for a snapshot that was asked for.
    pub place: Mutex<Option<PathBuf>>,
}

impl Fake {
    /// A daemon of it.
    pub fn daemon(open: bool) -> (Arc<Fake>, Arc<Daemon>) {
        let fake = Arc::new(Fake {
            counts: Arc::default(),
            making: watch::Sender::new(0),
            open: watch::Sender::new(open),
            exit: watch::Sender::new(None),
            ready: watch::Sender::new(None),
            files: Arc::default(),
            images: Mutex::default(),
            most: AtomicUsize::new(usize::MAX),
            place: Mutex::default(),
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

    fn readying(&self) -> Readying {
        let mut ready = self.ready.subscribe();
        Readying(Box::pin(async move {
            let ready = *ready.wait_for(Option::is_some).await.unwrap();
            if ready == Some(false) {
                let what = "the container was not ready after 30 s: nothing listens on port 8080";
                return Err(Failure::new(ExitCode::NotReady, what));
            }
            let stage = Stage {
                name: "ready".into(),
                start_ns: 0,
                duration_ns: 1,
            };
            Ok(Account {
                stages: vec![stage],
                ..Account::default()
            })
        }))
    }
}

/// The id of a sandbox that runs without an owner.
pub const UNOWNED: &str = "unowned";

struct Making<'a>(&'a Fake);

impl Drop for Making<'_> {
    fn drop(&mut self) {
        self.0.making.send_modify(|making| *making -= 1);
    }
}

#[async_trait]
impl Maker for Fake {
    async fn end_unowned(&self, id: &str) -> bool {
        id == UNOWNED
    }

    async fn create(&self, request: CreateSandbox, behalf: Behalf) -> Result<Made, Refusal> {
        self.making.send_modify(|making| *making += 1);
        let _making = Making(self);
        self.open.subscribe().wait_for(|open| *open).await.unwrap();
        if request.image == "missing" {
            return Err(Failure::new(ExitCode::ImageNotFound, "no image: missing").into());
        }
        let number = self.counts.made.fetch_add(1, Ordering::SeqCst);
        let terms = Terms {
            tenant: behalf.tenant,
            labels: request.labels,
            timeout: request.timeout_s.map(Timeout::after),
            delete_on_exit: request
                .container
                .as_ref()
                .is_some_and(|c| c.on_exit == OnExit::Delete),
            asked: behalf.asked,
            rate_limits: Some(request.rate_limits),
        };
        let mut machine = FakeMachine::new(number, request.name, terms, self.counts.clone());
        if request.container.is_some() {
            let directory = tempfile::tempdir().unwrap();
            let journal = Arc::new(Journal::open(directory.path()).unwrap());
            machine.output = Some((journal, directory));
            machine.exit = self.exit.subscribe();
        }
        machine.files = self.files.clone();
        let probe = request.container.and_then(|c| c.readiness);
        machine.readiness = probe.as_ref().map(|_| Readiness::Waiting);
        Ok(Made {
            machine: Arc::new(machine),
            image_config: "null".into(),
            account: Account::default(),
            readying: probe.map(|_| self.readying()),
        })
    }

    async fn create_pod(&self, request: CreatePod) -> Result<Made, Refusal> {
        let number = self.counts.made.fetch_add(1, Ordering::SeqCst);
        let terms = Terms {
            labels: request.labels,
            rate_limits: Some(request.rate_limits),
            ..Terms::default()
        };
        Ok(Made {
            machine: Arc::new(FakeMachine::new(number, None, terms, self.counts.clone())),
            image_config: "null".into(),
            account: Account::default(),
            readying: None,
        })
    }

    async fn thaw_pod(&self, request: ThawPod) -> Result<Made, Refusal> {
        if !request.directory.is_dir() {
            return Err(Failure::new(ExitCode::SnapshotNotFound, "no snapshot").into());
        }
        let pod = CreatePod {
            hostname: request.hostname,
            network: NetworkSource::Ours(NetworkMode::None),
            cpus: 1,
            memory_mib: 128,
            disk_mib: 1,
            labels: request.labels,
            cgroup: request.cgroup,
            client: request.client,
            rate_limits: RateLimits::default(),
        };
        self.create_pod(pod).await
    }

    async fn thaw(&self, request: ThawSandbox, behalf: Behalf) -> Result<Made, Refusal> {
        if !request.directory.is_dir() {
            return Err(Failure::new(ExitCode::SnapshotNotFound, "no snapshot").into());
        }
        let number = self.counts.made.fetch_add(1, Ordering::SeqCst);
        let terms = Terms {
            tenant: behalf.tenant,
            labels: request.labels,
            timeout: request.timeout_s.map(Timeout::after),
            asked: behalf.asked,
            rate_limits: Some(request.rate_limits),
            ..Terms::default()
        };
        let machine = Arc::new(FakeMachine::new(number, request.name, terms, self.counts.clone()));
        if number >= self.most.load(Ordering::SeqCst) {
            return Err(Failure::new(ExitCode::DiskFull, "no room").into());
        }
        Ok(Made {
            machine,
            image_config: "null".into(),
            account: Account::default(),
            readying: None,
        })
    }

    fn pools(&self) -> Vec<PoolStatistics> {
        vec![PoolStatistics::none("disk")]
    }

    fn count(&self, _: &Names, _: &mut Families) {}

    async fn thaw_clone(&self, _: &Record, request: ThawSandbox, behalf: Behalf) -> Result<Made, Refusal> {
        self.thaw(request, behalf).await
    }

    async fn scratch(&self, _: &Record, _: bool) -> Result<Box<dyn Place>, Refusal> {
        let place = tempfile::tempdir().unwrap();
        *self.place.lock().unwrap() = Some(place.path().to_owned());
        Ok(Box::new(place))
    }
}

impl Place for tempfile::TempDir {
    fn snapshot(&self) -> PathBuf {
        self.path().join("snapshot")
    }
}

#[async_trait]
impl Stock for Fake {
    async fn images(&self) -> Result<Vec<Image>, Failure> {
        Ok(self.images.lock().unwrap().clone())
    }

    async fn image(&self, wanted: String) -> Result<ImageDetail, Failure> {
        let images = self.images.lock().unwrap();
        let image = images
            .iter()
            .find(|i| i.reference == wanted)
            .ok_or_else(not_stored)?;
        let detail = serde_json::json!({
            "digest": image.digest, "reference": image.reference, "for_snapshot": false, "form": "full",
            "in_use": false, "metadata_bytes": 1, "present_bytes": 2, "total_bytes": 2, "layers": [],
            "load_order": null, "image_config": "null",
        });
        Ok(serde_json::from_value(detail).unwrap())
    }

    async fn pull(&self, request: PullImage) -> Result<Image, Failure> {
        if request.image == "missing" {
            return Err(Failure::new(ExitCode::ImageNotFound, "no image: missing"));
        }
        let image = Image {
            digest: "sha256:0".into(),
            reference: request.image,
            for_snapshot: false,
            bytes: 3,
            layers: 1,
            form: "full".into(),
            present_bytes: 2,
            total_bytes: 2,
            in_use: false,
        };
        self.images.lock().unwrap().push(image.clone());
        Ok(image)
    }

    async fn remove_image(&self, wanted: String) -> Result<(), Failure> {
        let mut images = self.images.lock().unwrap();
        let before = images.len();
        images.retain(|image| image.reference != wanted);
        if images.len() == before {
            Err(not_stored())
        } else {
            Ok(())
        }
    }

    async fn templates(&self) -> Result<Vec<Template>, Failure> {
        Ok(Vec::new())
    }

    async fn remove_template(&self, _: String) -> Result<(), Failure> {
        Err(Failure::new(ExitCode::SnapshotNotFound, "no template"))
    }
}

fn not_stored() -> Failure {
    Failure::new(ExitCode::ImageNotStored, "no such image")
}

/// A machine that is none.
#[derive(Debug)]
pub struct FakeMachine {
    record: Record,
    counts: Arc<Counts>,
    paused: AtomicBool,
    ended: watch::Sender<bool>,
    released: AtomicBool,
    files: Arc<FakeFiles>,
    /// Of its container, where it has one.
    output: Option<(Arc<Journal>, tempfile::TempDir)>,
    exit: watch::Receiver<Option<i32>>,
    readiness: Option<Readiness>,
    /// What of the host it has.
    shares: Mutex<BTreeMap<String, Source>>,
    rate_limits: Mutex<RateLimits>,
}

impl FakeMachine {
    pub fn new(number: usize, name: Option<String>, terms: Terms, counts: Arc<Counts>) -> FakeMachine {
        counts.living.fetch_add(1, Ordering::SeqCst);
        let record = serde_json::json!({
            "id": format!("{number:012x}"), "name": name, "image": "fake", "image_digest": null, "command": [],
            "created": 1, "owner": null, "client": null, "vmm": null, "tethered": false, "ready": true, "vcpus": 1,
            "memory_mib": 128, "terms": terms,
        });
        FakeMachine {
            rate_limits: Mutex::new(terms.rate_limits.unwrap_or_default()),
            record: serde_json::from_value(record).unwrap(),
            counts,
            paused: AtomicBool::new(false),
            ended: watch::Sender::new(false),
            released: AtomicBool::new(false),
            files: Arc::default(),
            output: None,
            exit: watch::Sender::new(None).subscribe(),
            readiness: None,
            shares: Mutex::default(),
        }
    }
}

impl Drop for FakeMachine {
    fn drop(&mut self) {
        if !self.released.load(Ordering::SeqCst) {
            self.counts.living.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

#[async_trait]
impl Machine for FakeMachine {
    fn record(&self) -> &Record {
        &self.record
    }

    fn vsock(&self) -> PathBuf {
        "/fake".into()
    }

    fn usage(&self) -> Usage {
        Usage {
            at_ns: 2,
            cpu_ns: Some(1),
            ..Usage::default()
        }
    }

    fn readiness(&self) -> Option<Readiness> {
        self.readiness
    }

    fn note_answer(&self, _: &[u8]) -> std::io::Result<()> {
        Ok(())
    }

    async fn condition(&self) -> Condition {
        match (*self.ended.borrow(), self.paused.load(Ordering::SeqCst)) {
            (true, _) => Condition::Ended("it was killed".into()),
            (false, true) => Condition::Paused,
            (false, false) => Condition::Running,
        }
    }

    fn end(&self) -> BoxFuture<'static, String> {
        let mut ended = self.ended.subscribe();
        Box::pin(async move {
            let _ = ended.wait_for(|ended| *ended).await;
            "it was killed".into()
        })
    }

    async fn failure(&self) -> SandboxFailure {
        let killed = VmmEnd::Known(Ended::Signal(9));
        let evidence = Evidence {
            vmm: killed,
            console: vec!["last words".into()],
            ..Evidence::default()
        };
        evidence.failure()
    }

    async fn pause(&self) -> Result<(), Failure> {
        self.paused.store(true, Ordering::SeqCst);
        Ok(())
    }

    async fn resume(&self) -> Result<(), Failure> {
        self.paused.store(false, Ordering::SeqCst);
        Ok(())
    }

    async fn freeze(&self, request: FreezeSandbox) -> Result<FrozenSandbox, Failure> {
        // Only where there is a place for it.
        let _ = std::fs::create_dir(&request.directory);
        Ok(FrozenSandbox {
            memory_bytes: 1,
            paused_ns: 2,
        })
    }

    fn journal(&self) -> Option<Arc<Journal>> {
        self.output.as_ref().map(|(journal, _)| journal.clone())
    }

    fn exit(&self) -> BoxFuture<'static, i32> {
        let mut exit = self.exit.clone();
        Box::pin(async move {
            let status = exit.wait_for(Option::is_some).await.map(|status| *status);
            match status {
                Ok(Some(status)) => status,
                _ => std::future::pending().await,
            }
        })
    }

    async fn show(&self, digest: &str) -> Result<String, Failure> {
        match digest {
            "missing" => Err(not_stored()),
            digest => Ok(format!("shown-{digest}")),
        }
    }

    async fn add_share(&self, name: String, source: Source) -> Result<(), Failure> {
        let mut shares = self.shares.lock().unwrap();
        match shares.insert(name.clone(), source) {
            None => Ok(()),
            Some(_) => Err(Failure::new(
                ExitCode::VolumeUnavailable,
                format!("{name} is another's"),
            )),
        }
    }

    async fn remove_share(&self, name: String) -> Result<(), Failure> {
        self.shares.lock().unwrap().remove(&name);
        Ok(())
    }

    async fn add_disk(&self, disk: HostDisk) -> Result<DeviceId, Failure> {
        match disk.major {
            0 => Err(Failure::new(ExitCode::VolumeUnavailable, "no such device")),
            _ => Ok(HOST_DISKS[0]),
        }
    }

    async fn remove_disk(&self, _: DeviceId) -> Result<(), Failure> {
        Ok(())
    }

    async fn exec(&self, options: Options) -> Result<Arc<dyn Process>, Failure> {
        match options.command[0].as_str() {
            "missing" => Err(Failure::new(ExitCode::NotFound, "exec: \"missing\": not found")),
            program => Ok(Arc::new(FakeProcess::start(program, self.counts.clone()))),
        }
    }

    async fn files(&self) -> Result<Arc<dyn Files>, Failure> {
        Ok(self.files.clone())
    }

    async fn set_network_policy(&self, policy: NetworkPolicy) -> Result<SandboxNetwork, Failure> {
        Ok(SandboxNetwork {
            policy,
            ..SandboxNetwork::default()
        })
    }

    async fn set_rate_limits(&self, change: RateLimits) -> Result<RateLimits, Failure> {
        let mut limits = self.rate_limits.lock().unwrap();
        *limits = limits.changed(change);
        Ok(*limits)
    }

    fn kill(&self) {
        self.ended.send_replace(true);
    }

    async fn destroy(self: Arc<Self>) {}

    fn release(self: Arc<Self>) -> bool {
        self.released.store(true, Ordering::SeqCst);
        Arc::into_inner(self).is_some()
    }
}

/// A request for one.
pub fn request(image: &str) -> CreateSandbox {
    serde_json::from_value(serde_json::json!({"image": image, "cpus": 1, "memory_mib": 128})).unwrap()
}
