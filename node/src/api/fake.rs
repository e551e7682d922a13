//! A maker without machines, for tests: it counts what lives.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use thaw_pools::statistics::PoolStatistics;
use thaw_protocol::api::{
    Account, CreateSandbox, FreezeSandbox, FrozenSandbox, NetworkPolicy, SandboxNetwork, ThawSandbox, Usage,
};
use tokio::sync::watch;

use super::daemon::Daemon;
use super::maker::{Condition, Machine, Made, Maker};
use super::problem::Refusal;
use super::watch::Versions;
use crate::exit::{ExitCode, Failure};
use crate::metrics::{Families, Names};
use crate::sandbox::{Terms, Timeout};
use crate::state::Record;

/// What a fake maker has done.
#[derive(Debug, Default)]
pub struct Counts {
    pub living: AtomicUsize,
    pub made: AtomicUsize,
}

/// Makes machines that are none, as soon as it may.
#[derive(Debug)]
pub struct Fake {
    pub counts: Arc<Counts>,
    /// How many are being made.
    pub making: watch::Sender<usize>,
    /// Whether a making may end.
    pub open: watch::Sender<bool>,
}

impl Fake {
    /// A daemon of it.
    pub fn daemon(open: bool) -> (Arc<Fake>, Arc<Daemon>) {
        let fake = Arc::new(Fake {
            counts: Arc::default(),
            making: watch::Sender::new(0),
            open: watch::Sender::new(open),
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

struct Making<'a>(&'a Fake);

impl Drop for Making<'_> {
    fn drop(&mut self) {
        self.0.making.send_modify(|making| *making -= 1);
    }
}

#[async_trait]
impl Maker for Fake {
    async fn create(&self, request: CreateSandbox) -> Result<Made, Refusal> {
        self.making.send_modify(|making| *making += 1);
        let _making = Making(self);
        self.open.subscribe().wait_for(|open| *open).await.unwrap();
        if request.image == "missing" {
            return Err(Failure::new(ExitCode::ImageNotFound, "no image: missing").into());
        }
        let number = self.counts.made.fetch_add(1, Ordering::SeqCst);
        let terms = Terms {
            labels: request.labels,
            timeout: request.timeout_s.map(Timeout::after),
        };
        let machine = FakeMachine::new(number, request.name, terms, self.counts.clone());
        Ok(Made {
            machine: Arc::new(machine),
            image_config: "null".into(),
            account: Account::default(),
        })
    }

    async fn thaw(&self, _: ThawSandbox) -> Result<Made, Refusal> {
        Err(Failure::new(ExitCode::SnapshotNotFound, "no snapshot").into())
    }

    fn pools(&self) -> Vec<PoolStatistics> {
        vec![PoolStatistics::none("disk")]
    }

    fn count(&self, _: &Names, _: &mut Families) {}
}

/// A machine that is none.
#[derive(Debug)]
pub struct FakeMachine {
    record: Record,
    counts: Arc<Counts>,
    paused: AtomicBool,
    ended: watch::Sender<bool>,
    released: AtomicBool,
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
            record: serde_json::from_value(record).unwrap(),
            counts,
            paused: AtomicBool::new(false),
            ended: watch::Sender::new(false),
            released: AtomicBool::new(false),
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

    async fn pause(&self) -> Result<(), Failure> {
        self.paused.store(true, Ordering::SeqCst);
        Ok(())
    }

    async fn resume(&self) -> Result<(), Failure> {
        self.paused.store(false, Ordering::SeqCst);
        Ok(())
    }

    async fn freeze(&self, _: FreezeSandbox) -> Result<FrozenSandbox, Failure> {
        Ok(FrozenSandbox {
            memory_bytes: 1,
            paused_ns: 2,
        })
    }

    async fn set_network_policy(&self, policy: NetworkPolicy) -> Result<SandboxNetwork, Failure> {
        Ok(SandboxNetwork {
            policy,
            ..SandboxNetwork::default()
        })
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
