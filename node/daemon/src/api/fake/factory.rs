//! A fake factory: its sandboxes need no node.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use async_trait::async_trait;
use thaw_images::store::Lease;
use thaw_pools::process::ProcessRecord;
use thaw_pools::statistics::PoolStatistics;
use thaw_protocol::api::{Account, CreateSandbox, HookResult, RateLimits, Readiness, Stage, ThawSandbox};
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::journal::Journal;
use thaw_sandbox::snapshot::store::Viewer;
use thaw_sandbox::state::{Behalf, Paused, Record, Terms, TimeLimit};
use thaw_sandbox::{CopyPlace, NetworkMode, NetworkSource};

use super::{Fake, FakeMachine, UNOWNED};
use crate::api::factory::{
    CopyTurn, CreatePod, Factory, NewSandbox, PodContainer, PodSnapshot, SnapshotPlace, StoredSnapshots as _,
    ThawPod, ThawedPod,
};
use crate::api::problem::Refusal;
use crate::api::readiness::ReadinessWait;
use crate::metrics::{Families, Names};

impl Fake {
    /// Gives a machine a container, whose output is kept in this directory.
    fn give_container(&self, machine: &mut FakeMachine, directory: tempfile::TempDir) {
        let journal = Arc::new(Journal::open(directory.path()).unwrap());
        machine.output = Some((journal, directory));
        machine.exit = self.exit.subscribe();
        machine.life = self.life.subscribe();
        machine.health = self.health.subscribe();
    }

    fn readiness_wait(&self) -> ReadinessWait {
        let mut ready = self.ready.subscribe();
        ReadinessWait(Box::pin(async move {
            let ready = *ready.wait_for(Option::is_some).await.unwrap();
            if ready == Some(false) {
                let what = "the container was not ready after 30 s: nothing listens on port 8080";
                return Err(Error::new(ErrorKind::NotReady, what));
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

struct Making<'a>(&'a Fake);

impl Drop for Making<'_> {
    fn drop(&mut self) {
        self.0.making.send_modify(|making| *making -= 1);
    }
}

#[async_trait]
impl Factory for Fake {
    async fn end_unowned(&self, id: &str) -> bool {
        id == UNOWNED
    }

    async fn create(&self, request: CreateSandbox, behalf: Behalf) -> Result<NewSandbox, Refusal> {
        self.making.send_modify(|making| *making += 1);
        let _making = Making(self);
        self.open.subscribe().wait_for(|open| *open).await.unwrap();
        if request.image == "missing" {
            return Err(Error::new(ErrorKind::ImageNotFound, "no image: missing").into());
        }
        let place = self.admit(behalf.tenant.as_ref())?;
        let number = self.counts.made.fetch_add(1, Ordering::SeqCst);
        let limit = TimeLimit::from_now(request.timeout_s, request.idle_timeout_s, request.on_timeout);
        let on_exit = request.container.as_ref().map(|c| c.on_exit).unwrap_or_default();
        let terms = Terms {
            labels: request.labels,
            rate_limits: Some(request.rate_limits),
            ..behalf.terms().within(limit).with_exit(on_exit)
        };
        let client = request.client.map(|client| ProcessRecord {
            pid: client.pid,
            start_time: client.start_time,
        });
        let machine = FakeMachine::new(number, request.name, terms, self.counts.clone());
        let mut machine = machine.made_for(client);
        if request.container.is_some() {
            self.give_container(&mut machine, tempfile::tempdir().unwrap());
        }
        machine.place = Some(place);
        machine.files = self.files.clone();
        machine.guest = self.guest.lock().unwrap().clone();
        let probe = request.container.and_then(|c| c.readiness);
        machine.readiness = probe.as_ref().map(|_| Readiness::Waiting);
        Ok(NewSandbox {
            machine: Arc::new(machine),
            image_config: "null".into(),
            account: Account::default(),
            readiness_wait: probe.map(|_| self.readiness_wait()),
        })
    }

    async fn copy_paused(&self, paused: &Paused, place: &CopyPlace, turn: CopyTurn) -> Result<(), Error> {
        self.copy(paused, place, turn).await
    }

    async fn take_paused(&self, place: &CopyPlace, viewer: &Viewer) -> Result<Paused, Error> {
        self.take(place, viewer)
    }

    async fn discard_copy(&self, place: &CopyPlace, viewer: &Viewer) -> Result<(), Error> {
        self.discard(place, viewer)
    }

    async fn thaw_paused(&self, paused: &Paused, limit: TimeLimit) -> Result<NewSandbox, Refusal> {
        self.claim(paused)?;
        self.making.send_modify(|making| *making += 1);
        let _making = Making(self);
        self.open.subscribe().wait_for(|open| *open).await.unwrap();
        if !paused.snapshot().is_dir() {
            return Err(Error::new(ErrorKind::SnapshotNotFound, "no snapshot").into());
        }
        let place = paused.place().map(|place| self.admit_again(place)).transpose()?;
        let record = paused.record().clone();
        let terms = record.terms.clone().within(limit);
        let mut machine = FakeMachine::of(Record { terms, ..record }, self.counts.clone());
        machine.place = place;
        if paused.output().exists() {
            let directory = tempfile::tempdir().unwrap();
            paused.restore(directory.path())?;
            self.give_container(&mut machine, directory);
        }
        Ok(NewSandbox {
            machine: Arc::new(machine),
            image_config: "null".into(),
            account: Account::default(),
            readiness_wait: None,
        })
    }

    async fn lease_paused(&self, _: &Paused) -> Vec<Lease> {
        Vec::new()
    }

    async fn forget_paused(&self, paused: &Paused) -> Result<(), Error> {
        let _ = self.claim(paused);
        paused.remove(&self.counts.stamps)
    }

    async fn create_pod(&self, request: CreatePod) -> Result<NewSandbox, Refusal> {
        let number = self.counts.made.fetch_add(1, Ordering::SeqCst);
        let terms = Terms {
            labels: request.labels,
            rate_limits: Some(request.rate_limits),
            ..Terms::default()
        };
        Ok(NewSandbox {
            machine: Arc::new(FakeMachine::new(number, None, terms, self.counts.clone())),
            image_config: "null".into(),
            account: Account::default(),
            readiness_wait: None,
        })
    }

    async fn thaw_pod(&self, request: ThawPod) -> Result<ThawedPod, Refusal> {
        let none = || Error::new(ErrorKind::SnapshotNotFound, "no snapshot");
        let container = match &request.snapshot {
            PodSnapshot::Directory(directory) if directory.is_dir() => None,
            PodSnapshot::Stored { wanted, namespace } if wanted == "web" && namespace == "shop" => {
                let args = vec!["serve".into()];
                Some(PodContainer {
                    args,
                    ..PodContainer::default()
                })
            }
            _ => return Err(none().into()),
        };
        let pod = CreatePod {
            hostname: request.hostname,
            network: request.network.unwrap_or(NetworkSource::Ours(NetworkMode::None)),
            cpus: 1,
            memory_mib: 128,
            disk_mib: 1,
            labels: request.labels,
            cgroup: request.cgroup,
            client: request.client,
            rate_limits: RateLimits::default(),
        };
        let sandbox = self.create_pod(pod).await?;
        Ok(ThawedPod { sandbox, container })
    }

    async fn thaw(
        &self,
        request: ThawSandbox,
        behalf: Behalf,
        viewer: Viewer,
    ) -> Result<NewSandbox, Refusal> {
        if let Some(wanted) = request.snapshot {
            self.snapshot(wanted, viewer).await?;
        } else if !request.directory.is_some_and(|directory| directory.is_dir()) {
            return Err(Error::new(ErrorKind::SnapshotNotFound, "no snapshot").into());
        }
        let place = self.admit(behalf.tenant.as_ref())?;
        let number = self.counts.made.fetch_add(1, Ordering::SeqCst);
        let limit = TimeLimit::from_now(request.timeout_s, request.idle_timeout_s, request.on_timeout);
        let terms = Terms {
            labels: request.labels,
            rate_limits: Some(request.rate_limits),
            ..behalf.terms().within(limit)
        };
        let hook = self.counts.hook.lock().unwrap().clone();
        match &hook {
            None if request.require_hook => {
                return Err(Error::new(ErrorKind::HookMissing, "it has no hook").into());
            }
            Some(HookResult { failure: Some(_), .. }) if request.require_hook => {
                return Err(Error::new(ErrorKind::HookFailed, "its hook failed").into());
            }
            _ => {}
        }
        let mut machine = FakeMachine::new(number, request.name, terms, self.counts.clone());
        machine.place = Some(place);
        machine.guest = self.guest.lock().unwrap().clone();
        let machine = Arc::new(machine.thawed(hook));
        if number >= self.most.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::DiskFull, "no room").into());
        }
        Ok(NewSandbox {
            machine,
            image_config: "null".into(),
            account: Account::default(),
            readiness_wait: None,
        })
    }

    fn pools(&self) -> Vec<PoolStatistics> {
        vec![PoolStatistics::none("disk")]
    }

    fn count(&self, _: &Names, _: &mut Families) {}

    async fn thaw_clone(
        &self,
        _: &Record,
        request: ThawSandbox,
        behalf: Behalf,
    ) -> Result<NewSandbox, Refusal> {
        self.thaw(request, behalf, Viewer::node()).await
    }

    async fn scratch(&self, _: &Record, _: bool) -> Result<Box<dyn SnapshotPlace>, Refusal> {
        let place = tempfile::tempdir().unwrap();
        *self.place.lock().unwrap() = Some(place.path().to_owned());
        Ok(Box::new(place))
    }
}

impl SnapshotPlace for tempfile::TempDir {
    fn snapshot(&self) -> PathBuf {
        self.path().join("snapshot")
    }
}
