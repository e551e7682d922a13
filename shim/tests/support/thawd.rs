//! A thawd without microVMs.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use thaw_protocol::agent::Empty;
use thaw_protocol::shim::MessageField;
use thaw_protocol::shim::pods::*;
use thaw_protocol::shim::pods_ttrpc::Pods;
use thaw_protocol::versions::PODS;
use tokio::sync::watch;
use ttrpc::Code;
use ttrpc::r#async::TtrpcContext;

use super::{Answer, refuse};

/// A thawd without microVMs.
#[derive(Default)]
pub struct FakeThawd {
    vsock: String,
    /// The process that it reports as its VMM.
    pub vmm: i32,
    pub made: Mutex<Vec<CreatePodRequest>>,
    pub thawed: Mutex<Vec<ThawPodRequest>>,
    pub ended: Mutex<Vec<String>>,
    /// Whether ending a machine waits.
    pub holds_on: watch::Sender<bool>,
    /// Present shares, by name.
    pub shares: Mutex<BTreeMap<String, ShareSource>>,
    /// Present disks, by slot: major, minor, and whether it is read-only.
    pub disks: Mutex<BTreeMap<String, (u32, u32, bool)>>,
    /// The reason why its machine ended, once it has.
    pub machine: watch::Sender<Option<String>>,
    /// Whether it is of the release before rate limits.
    pub knows_no_limits: AtomicBool,
}

impl FakeThawd {
    pub fn new(vsock: String, vmm: i32) -> FakeThawd {
        FakeThawd {
            vsock,
            vmm,
            ..Default::default()
        }
    }
}

#[async_trait]
impl Pods for FakeThawd {
    async fn version(&self, _: &TtrpcContext, _: VersionRequest) -> Answer<VersionResponse> {
        Ok(VersionResponse {
            version: PODS.current,
            ..Default::default()
        })
    }

    async fn create(&self, _: &TtrpcContext, r: CreatePodRequest) -> Answer<CreatePodResponse> {
        let mut made = self.made.lock().unwrap();
        let limited = r.disk_rate.is_some() || r.net_out_rate.is_some() || r.net_in_rate.is_some();
        made.push(r);
        Ok(CreatePodResponse {
            rate_limited: limited && !self.knows_no_limits.load(Ordering::SeqCst),
            sandbox_id: format!("sandbox-{}", made.len()),
            vsock: self.vsock.clone(),
            vmm_pid: self.vmm,
            ..Default::default()
        })
    }

    async fn freeze(&self, _: &TtrpcContext, r: FreezePodRequest) -> Answer<Empty> {
        std::fs::create_dir(r.directory).unwrap();
        Ok(Empty::new())
    }

    async fn thaw(&self, context: &TtrpcContext, r: ThawPodRequest) -> Answer<CreatePodResponse> {
        let container = match r.snapshot.as_str() {
            "" if Path::new(&r.directory).is_dir() => MessageField::none(),
            "web-ready" => MessageField::some(ThawedContainer {
                id: "frozen".into(),
                image_digest: "sha256:ab".into(),
                args: vec!["serve".into()],
                memory_mib: 512,
                ..Default::default()
            }),
            // A thawd of an earlier release.
            "unknown" => MessageField::none(),
            _ => return refuse(Code::NOT_FOUND, "there is no snapshot"),
        };
        self.thawed.lock().unwrap().push(r);
        Ok(CreatePodResponse {
            container,
            ..self.create(context, CreatePodRequest::default()).await?
        })
    }

    async fn show(&self, _: &TtrpcContext, r: ShowImageRequest) -> Answer<ShowImageResponse> {
        match r.digest.as_str() {
            "sha256:gone" => refuse(Code::NOT_FOUND, "image sha256:gone is not in the store"),
            _ => Ok(ShowImageResponse {
                name: "1".into(),
                ..Default::default()
            }),
        }
    }

    async fn add_share(&self, _: &TtrpcContext, r: AddShareRequest) -> Answer<Empty> {
        let source = r.source.unwrap();
        if source.source.ends_with("/refused") {
            return refuse(Code::INTERNAL, "it is refused");
        }
        let before = self.shares.lock().unwrap().insert(r.name, source);
        assert!(before.is_none(), "a name is used once");
        Ok(Empty::new())
    }

    async fn remove_share(&self, _: &TtrpcContext, r: RemoveShareRequest) -> Answer<Empty> {
        assert!(self.shares.lock().unwrap().remove(&r.name).is_some());
        Ok(Empty::new())
    }

    async fn add_disk(&self, _: &TtrpcContext, r: AddDiskRequest) -> Answer<AddDiskResponse> {
        if r.major == 0 {
            return refuse(Code::INTERNAL, "it is refused");
        }
        let mut disks = self.disks.lock().unwrap();
        let name = (3..)
            .map(|slot: u8| slot.to_string())
            .find(|name| !disks.contains_key(name))
            .unwrap();
        disks.insert(name.clone(), (r.major, r.minor, r.read_only));
        Ok(AddDiskResponse {
            name,
            ..Default::default()
        })
    }

    async fn remove_disk(&self, _: &TtrpcContext, r: RemoveDiskRequest) -> Answer<Empty> {
        assert!(self.disks.lock().unwrap().remove(&r.name).is_some());
        Ok(Empty::new())
    }

    async fn wait(&self, _: &TtrpcContext, _: PodRequest) -> Answer<WaitPodResponse> {
        let mut machine = self.machine.subscribe();
        let reason = machine.wait_for(Option::is_some).await.unwrap().clone().unwrap();
        Ok(WaitPodResponse {
            reason,
            ..Default::default()
        })
    }

    async fn end(&self, _: &TtrpcContext, r: PodRequest) -> Answer<Empty> {
        let _ = self.holds_on.subscribe().wait_for(|holds| !holds).await;
        self.ended.lock().unwrap().push(r.sandbox_id);
        Ok(Empty::new())
    }
}
