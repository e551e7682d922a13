//! How the API creates sandboxes, and what it creates them from.
//!
//! The handlers know only these traits and [`Machine`], so tests substitute fakes. Invariant: a creation that is dropped leaves nothing of
//! its sandbox.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use thaw_images::store::Lease;
use thaw_pools::process::ProcessRecord;
use thaw_pools::statistics::PoolStatistics;
use thaw_protocol::api::{
    Account, ChangeSnapshot, CreateSandbox, Image, ImageDetail, NodeCapacity, PullImage, PullSnapshot,
    PushSnapshot, PushedSnapshot, Quota, RateLimits, Snapshot, Template, TenantLimits, ThawSandbox,
    VerifiedSnapshot,
};
use thaw_sandbox::error::Error;
use thaw_sandbox::snapshot::Scratch;
use thaw_sandbox::snapshot::store::{Observer, Viewer};
use thaw_sandbox::state::{Behalf, Paused, Record, TimeLimit};
use thaw_sandbox::tenant::Tenant;
use thaw_sandbox::{CopyPlace, NetworkSource};

use super::machine::Machine;
use super::problem::Refusal;
use super::readiness::ReadinessWait;
use crate::metrics::{Families, Names};

mod catalog;
mod node;
mod quotas;
mod snapshots;

/// The images and templates of a node. Excludes those of tenants with a separate store.
#[async_trait]
pub trait Catalog: std::fmt::Debug + Send + Sync {
    /// The images that callers pulled. Excludes images assembled for snapshots.
    async fn images(&self) -> Result<Vec<Image>, Error>;
    /// An image by reference, digest or prefix of a digest.
    async fn image(&self, wanted: String) -> Result<ImageDetail, Error>;
    /// Pulls an image. Dropping the future stops the pull; the bytes fetched so far stay.
    async fn pull(&self, request: PullImage) -> Result<Image, Error>;
    async fn remove_image(&self, wanted: String) -> Result<(), Error>;
    async fn templates(&self) -> Result<Vec<Template>, Error>;
    /// Removes a template by its key or a prefix of it.
    async fn remove_template(&self, wanted: String) -> Result<(), Error>;
}

/// The stored snapshots of a node and of its tenants. A viewer gets only those that exist for it.
#[async_trait]
pub trait StoredSnapshots: std::fmt::Debug + Send + Sync {
    /// All, ordered by id.
    async fn snapshots(&self, viewer: Viewer) -> Result<Vec<Snapshot>, Error>;
    /// One by id, name, or the beginning of an id, as in all methods below.
    async fn snapshot(&self, wanted: String, viewer: Viewer) -> Result<Snapshot, Error>;
    async fn change_snapshot(
        &self,
        wanted: String,
        viewer: Viewer,
        change: ChangeSnapshot,
    ) -> Result<Snapshot, Error>;
    /// Compares every byte with the manifest.
    async fn verify_snapshot(&self, wanted: String, viewer: Viewer) -> Result<VerifiedSnapshot, Error>;
    /// Removes one on which no other lies and, unless `force`, from which no sandbox was thawed.
    async fn remove_snapshot(&self, wanted: String, viewer: Viewer, force: bool) -> Result<(), Error>;
    /// Pushes one to a registry. Dropping the future stops the push; blobs sent so far stay there.
    async fn push_snapshot(
        &self,
        wanted: String,
        viewer: Viewer,
        request: PushSnapshot,
    ) -> Result<PushedSnapshot, Error>;
    /// Pulls one from a registry into the store of the viewer's tenant. Dropping the future stops the pull and removes what it wrote.
    async fn pull_snapshot(&self, viewer: Viewer, request: PullSnapshot) -> Result<Snapshot, Error>;
    /// Removes those that the configuration does not keep.
    async fn retire_snapshots(&self);
    /// Tells this observer of each later change. The first observer stays.
    fn observe_snapshots(&self, observer: Arc<dyn Observer>);
}

/// The limits of tenants and of the node, and what they have.
#[async_trait]
pub trait Quotas: std::fmt::Debug + Send + Sync {
    /// Those of a tenant, or of the sandboxes without a tenant.
    async fn quota(&self, tenant: Option<Tenant>) -> Result<Quota, Error>;
    /// Those of all tenants that have something or have limits of their own, ordered by name.
    async fn quotas(&self) -> Result<Vec<Quota>, Error>;
    /// Sets the limits of a tenant, or returns to the configured ones.
    async fn set_limits(&self, tenant: Tenant, limits: Option<TenantLimits>) -> Result<(), Error>;
    /// What the machines of the node may have, and what they have.
    fn capacity(&self) -> NodeCapacity;
    /// Fails if so many clones of this sandbox would not be admitted now. A thaw of each may still fail.
    fn check_room(&self, original: &Record, count: u8) -> Result<(), Error>;
}

/// A directory for one snapshot. Dropping it removes the directory.
pub trait SnapshotPlace: std::fmt::Debug + Send + Sync {
    /// Where to write the snapshot. Nothing exists there yet.
    fn snapshot(&self) -> PathBuf;
}

impl SnapshotPlace for Scratch {
    fn snapshot(&self) -> PathBuf {
        self.snapshot()
    }
}

/// A request for a pod's sandbox, from containerd's shim. The sandbox has no image and no container yet.
#[derive(Clone, Debug)]
pub struct CreatePod {
    pub hostname: Option<String>,
    pub network: NetworkSource,
    pub cpus: u8,
    pub memory_mib: u32,
    pub disk_mib: u32,
    pub labels: BTreeMap<String, String>,
    /// The cgroup for its VMM, below the roots of the host's cgroups.
    pub cgroup: Option<String>,
    /// The shim: the pod ends with it.
    pub client: Option<ProcessRecord>,
    pub rate_limits: RateLimits,
}

/// The snapshot that a pod is thawed from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodSnapshot {
    /// In this directory, of a microVM whose containers the shim knows.
    Directory(PathBuf),
    /// One that the node stores, by name or id, for pods of this namespace of Kubernetes. It has one container.
    Stored { wanted: String, namespace: String },
}

/// A pod that was thawed.
#[derive(Debug)]
pub struct ThawedPod {
    pub sandbox: NewSandbox,
    /// Of a stored snapshot: the container that goes on in it.
    pub container: Option<PodContainer>,
}

/// A container that goes on in a thawed pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodContainer {
    /// Its id in the guest.
    pub id: String,
    pub image_digest: String,
    /// Its program and its arguments.
    pub args: Vec<String>,
    pub terminal: bool,
    /// Memory of its microVM, MiB.
    pub memory_mib: u32,
}

/// A request to thaw a pod's sandbox from a snapshot.
#[derive(Clone, Debug)]
pub struct ThawPod {
    pub snapshot: PodSnapshot,
    /// `None`: as it was frozen, a network of thawd's own or none.
    pub network: Option<NetworkSource>,
    pub hostname: Option<String>,
    pub labels: BTreeMap<String, String>,
    /// See [`CreatePod`].
    pub cgroup: Option<String>,
    pub client: Option<ProcessRecord>,
}

/// Waits until nothing resumes or removes a paused sandbox, and keeps it so as long as its value lives.
pub type CopyTurn = BoxFuture<'static, Result<Box<dyn Send>, Error>>;

/// Creates sandboxes.
#[async_trait]
pub trait Factory: Catalog + StoredSnapshots + Quotas {
    /// A directory for a snapshot of this sandbox that only its clones need.
    async fn scratch(&self, original: &Record, signed: bool) -> Result<Box<dyn SnapshotPlace>, Refusal>;
    /// Creates a sandbox from an image, on behalf of a caller.
    async fn create(&self, request: CreateSandbox, behalf: Behalf) -> Result<NewSandbox, Refusal>;
    /// Thaws a sandbox from a snapshot, on behalf of a caller. The viewer finds a stored snapshot.
    async fn thaw(&self, request: ThawSandbox, behalf: Behalf, viewer: Viewer)
    -> Result<NewSandbox, Refusal>;
    /// Thaws a clone of this sandbox from a snapshot in a scratch directory, with the original's images.
    async fn thaw_clone(
        &self,
        original: &Record,
        request: ThawSandbox,
        behalf: Behalf,
    ) -> Result<NewSandbox, Refusal>;
    /// Pushes a copy of a sandbox whose memory is released, from which another node can take it over. The sandbox stays as it is while the
    /// value of `turn` lives.
    async fn copy_paused(&self, paused: &Paused, place: &CopyPlace, turn: CopyTurn) -> Result<(), Error>;
    /// Makes a paused sandbox of this node of a copy, if the viewer reaches it and no node has claimed it.
    async fn take_paused(&self, place: &CopyPlace, viewer: &Viewer) -> Result<Paused, Error>;
    /// Deletes the sandbox of a copy that the viewer reaches: this node claims it, and no node resumes it.
    async fn discard_copy(&self, place: &CopyPlace, viewer: &Viewer) -> Result<(), Error>;
    /// Thaws a sandbox whose memory is released, under its own identity. If there is a copy of it, this node claims it first. Its files stay.
    async fn thaw_paused(&self, paused: &Paused, limit: TimeLimit) -> Result<NewSandbox, Refusal>;
    /// Keeps its images in the store while the result is held.
    async fn lease_paused(&self, paused: &Paused) -> Vec<Lease>;
    /// Removes the files of a sandbox whose memory is released.
    async fn forget_paused(&self, paused: &Paused) -> Result<(), Error>;
    /// Creates a pod's sandbox, without an image.
    async fn create_pod(&self, request: CreatePod) -> Result<NewSandbox, Refusal>;
    /// Thaws a pod's sandbox from a snapshot.
    async fn thaw_pod(&self, request: ThawPod) -> Result<ThawedPod, Refusal>;
    /// Ends a sandbox that runs on this host without an owner because it could not be adopted. Returns whether there was one with this id.
    async fn end_unowned(&self, id: &str) -> bool;
    /// The statistics of its pools.
    fn pools(&self) -> Vec<PoolStatistics>;
    /// Adds its metrics; `endpoints` are the names of its registries.
    fn count(&self, endpoints: &Names, families: &mut Families);
}

/// A sandbox that was just created.
#[derive(Debug)]
pub struct NewSandbox {
    pub machine: Arc<dyn Machine>,
    /// The image's configuration, as JSON.
    pub image_config: String,
    pub account: Account,
    /// Set if its container must become ready before the caller gets an answer.
    pub readiness_wait: Option<ReadinessWait>,
}
