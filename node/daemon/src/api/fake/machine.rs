//! Fake machines: they have no VMM.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use thaw_pools::process::ProcessRecord;
use thaw_pools::share::Source;
use thaw_pools::vmm::Ended;
use thaw_protocol::api::{
    ContainerHealth, FreezeSandbox, FrozenSandbox, HookResult, NetworkPolicy, OnExit, RateLimits, Readiness,
    SandboxFailure, SandboxNetwork, StopContainer, Usage,
};
use thaw_protocol::control::{DeviceId, HOST_DISKS};
use thaw_sandbox::admission::Place;
use thaw_sandbox::container::Options;
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::failure::{Evidence, VmmEnd};
use thaw_sandbox::journal::Journal;
use thaw_sandbox::state::{Ending, HostDisk, Paused, Record, Terms, TimeLimit};
use tokio::sync::watch;

use super::catalog::not_stored;
use super::{Counts, FakeFiles, FakeProcess, FakeProcesses, Guest};
use crate::api::container_monitor::ContainerLife;
use crate::api::files::Files;
use crate::api::kept::Processes;
use crate::api::machine::{Condition, Machine};
use crate::api::problem::Refusal;
use crate::api::process::Process;

/// A machine without a VMM.
#[derive(Debug)]
pub struct FakeMachine {
    record: Record,
    counts: Arc<Counts>,
    paused: AtomicBool,
    ended: watch::Sender<bool>,
    released: AtomicBool,
    pub(super) files: Arc<FakeFiles>,
    pub(super) guest: Option<Arc<dyn Guest>>,
    /// The output of its container, if it has one.
    pub(super) output: Option<(Arc<Journal>, tempfile::TempDir)>,
    pub(super) exit: watch::Receiver<Option<i32>>,
    pub(super) life: watch::Receiver<ContainerLife>,
    pub(super) health: watch::Receiver<Option<ContainerHealth>>,
    pub(super) readiness: Option<Readiness>,
    /// What it counts with.
    pub(super) place: Option<Place>,
    /// The files of the host shared with it.
    shares: Mutex<BTreeMap<String, Source>>,
    rate_limits: Mutex<RateLimits>,
    time_limit: watch::Sender<TimeLimit>,
    ending: watch::Sender<Ending>,
}

impl FakeMachine {
    pub fn new(number: usize, name: Option<String>, terms: Terms, counts: Arc<Counts>) -> FakeMachine {
        let record = serde_json::json!({
            "id": format!("{number:012x}"), "name": name, "image": "fake", "image_digest": null, "command": [],
            "created": 1, "owner": null, "client": null, "vmm": null, "tethered": false, "ready": true, "vcpus": 1,
            "memory_mib": 128, "terms": terms,
        });
        FakeMachine::of(serde_json::from_value(record).unwrap(), counts)
    }

    pub fn of(record: Record, counts: Arc<Counts>) -> FakeMachine {
        counts.living.fetch_add(1, Ordering::SeqCst);
        FakeMachine {
            time_limit: watch::Sender::new(record.terms.time_limit()),
            ending: watch::Sender::new(record.ending()),
            rate_limits: Mutex::new(record.terms.rate_limits.unwrap_or_default()),
            record,
            counts,
            paused: AtomicBool::new(false),
            ended: watch::Sender::new(false),
            released: AtomicBool::new(false),
            files: Arc::default(),
            guest: None,
            output: None,
            exit: watch::Sender::new(None).subscribe(),
            life: watch::Sender::default().subscribe(),
            health: watch::Sender::default().subscribe(),
            readiness: None,
            place: None,
            shares: Mutex::default(),
        }
    }

    /// The same, made for this process.
    pub(super) fn made_for(self, client: Option<ProcessRecord>) -> FakeMachine {
        self.ending.send_modify(|ending| ending.client = client);
        self
    }

    /// The same, thawed with a hook that ended so.
    pub(super) fn thawed(mut self, hook: Option<HookResult>) -> FakeMachine {
        self.record.after_thaw = hook;
        self
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

    async fn pause(&self) -> Result<(), Error> {
        self.paused.store(true, Ordering::SeqCst);
        Ok(())
    }

    async fn resume(&self) -> Result<(), Error> {
        self.paused.store(false, Ordering::SeqCst);
        Ok(())
    }

    async fn release_memory(&self) -> Result<Paused, Error> {
        let name = self.record.name.as_deref().unwrap_or_default();
        let ending = *self.ending.borrow();
        if name == "fixed" || ending.client.is_some() {
            return Err(Error::new(ErrorKind::MemoryKept, "it is fixed"));
        }
        let place = self.place.as_ref().map(Place::pause).transpose()?.map(Arc::new);
        let draft = self.counts.paused.begin(&self.record.id)?;
        std::fs::create_dir(draft.snapshot()).unwrap();
        let terms = self.record.terms.clone().within(*self.time_limit.borrow());
        let record = Record {
            terms: terms.with_exit(ending.on_exit),
            ..self.record.clone()
        };
        let kept = self.output.as_ref().map(|(_, directory)| directory.path());
        let paused = draft.finish(record, kept.unwrap_or(Path::new("/nowhere")))?;
        Ok(paused.holding(place))
    }

    async fn freeze(&self, request: FreezeSandbox) -> Result<FrozenSandbox, Error> {
        if request.require_hook && self.counts.hook.lock().unwrap().is_none() {
            return Err(Error::new(ErrorKind::HookMissing, "it has no hook"));
        }
        let snapshot = match request.directory {
            Some(directory) => {
                // Fails without effect if the parent directory is missing.
                let _ = std::fs::create_dir(&directory);
                None
            }
            None => Some(self.counts.store(&self.record, request.name, request.labels)),
        };
        Ok(FrozenSandbox {
            memory_bytes: 1,
            paused_ns: 2,
            stopped_ns: 3,
            snapshot,
        })
    }

    fn monitor(&self) -> Result<(), Error> {
        Ok(())
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

    fn life(&self) -> Option<watch::Receiver<ContainerLife>> {
        self.output.as_ref().map(|_| self.life.clone())
    }

    fn health(&self) -> Option<watch::Receiver<Option<ContainerHealth>>> {
        self.output.as_ref().map(|_| self.health.clone())
    }

    async fn stop(&self, how: StopContainer) -> Result<(), Error> {
        self.counts.hear(format!("stop {how:?}"));
        Ok(())
    }

    async fn restart(&self, how: StopContainer) -> Result<(), Refusal> {
        self.counts.hear(format!("restart {how:?}"));
        Ok(())
    }

    async fn show(&self, digest: &str) -> Result<String, Error> {
        match digest {
            "missing" => Err(not_stored()),
            digest => Ok(format!("shown-{digest}")),
        }
    }

    async fn add_share(&self, name: String, source: Source) -> Result<(), Error> {
        let mut shares = self.shares.lock().unwrap();
        match shares.insert(name.clone(), source) {
            None => Ok(()),
            Some(_) => Err(Error::new(
                ErrorKind::VolumeUnavailable,
                format!("{name} is another's"),
            )),
        }
    }

    async fn remove_share(&self, name: String) -> Result<(), Error> {
        self.shares.lock().unwrap().remove(&name);
        Ok(())
    }

    async fn add_disk(&self, disk: HostDisk) -> Result<DeviceId, Error> {
        match disk.major {
            0 => Err(Error::new(ErrorKind::VolumeUnavailable, "no such device")),
            _ => Ok(HOST_DISKS[0]),
        }
    }

    async fn remove_disk(&self, _: DeviceId) -> Result<(), Error> {
        Ok(())
    }

    async fn exec(&self, options: Options) -> Result<Arc<dyn Process>, Error> {
        if let Some(guest) = &self.guest {
            return guest.exec(options).await;
        }
        match options.command[0].as_str() {
            "missing" => Err(Error::new(ErrorKind::NotFound, "exec: \"missing\": not found")),
            program => Ok(Arc::new(FakeProcess::start(program, self.counts.clone()))),
        }
    }

    async fn processes(&self) -> Result<Arc<dyn Processes>, Error> {
        Ok(match &self.guest {
            Some(guest) => guest.processes(),
            None => Arc::new(FakeProcesses),
        })
    }

    async fn signal(&self, number: u8) -> Result<(), Error> {
        self.counts.hear(format!("signal {number} to the container"));
        Ok(())
    }

    async fn files(&self) -> Result<Arc<dyn Files>, Error> {
        Ok(match &self.guest {
            Some(guest) => guest.files(),
            None => self.files.clone(),
        })
    }

    async fn set_network_policy(&self, policy: NetworkPolicy) -> Result<SandboxNetwork, Error> {
        Ok(SandboxNetwork {
            policy,
            ..SandboxNetwork::default()
        })
    }

    async fn set_rate_limits(&self, change: RateLimits) -> Result<RateLimits, Error> {
        let mut limits = self.rate_limits.lock().unwrap();
        *limits = limits.changed(change);
        Ok(*limits)
    }

    fn time_limit(&self) -> watch::Receiver<TimeLimit> {
        self.time_limit.subscribe()
    }

    async fn set_time_limit(&self, limit: TimeLimit) -> Result<(), Error> {
        self.time_limit.send_replace(limit);
        Ok(())
    }

    fn ending(&self) -> watch::Receiver<Ending> {
        self.ending.subscribe()
    }

    async fn set_on_exit(&self, on_exit: OnExit) -> Result<(), Error> {
        self.ending.send_replace(Ending {
            client: None,
            on_exit,
        });
        Ok(())
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
