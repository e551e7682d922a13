//! What the API asks of a sandbox that was made.
//!
//! Invariant: one that is dropped unreleased ends.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use thaw_pools::share::Source;
use thaw_protocol::api::{
    FreezeSandbox, FrozenSandbox, NetworkPolicy, RateLimits, Readiness, SandboxFailure, SandboxNetwork, Usage,
};
use thaw_protocol::control::DeviceId;
use thaw_sandbox::container::Options;
use thaw_sandbox::error::Error;
use thaw_sandbox::journal::Journal;
use thaw_sandbox::state::{HostDisk, Record};

use super::files::Files;
use super::process::Process;

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
    /// Whether its container was ready when this was made or adopted, where somebody asked for that.
    fn readiness(&self) -> Option<Readiness>;
    /// Keeps the answer to who asked for it with a key, for a later owner.
    fn note_answer(&self, answer: &[u8]) -> io::Result<()>;
    /// Asks its VMM.
    async fn condition(&self) -> Condition;
    /// Waits for its end, and says why it ended. It may wait longer than the machine is held.
    fn end(&self) -> BoxFuture<'static, String>;
    /// Waits until its volumes are lost for good, and says why: for ever where that does not happen.
    fn volumes_lost(&self) -> BoxFuture<'static, String> {
        Box::pin(std::future::pending())
    }
    /// Why it ended, which it has, and what was last seen of it.
    async fn failure(&self) -> SandboxFailure;
    async fn pause(&self) -> Result<(), Error>;
    async fn resume(&self) -> Result<(), Error>;
    async fn freeze(&self, request: FreezeSandbox) -> Result<FrozenSandbox, Error>;
    /// What its container's process wrote, where thawd attends that.
    fn journal(&self) -> Option<Arc<Journal>>;
    /// Waits for the end of its container's process: what it ended with. It may wait longer than the machine is held, and does
    /// so for ever where nobody here attends that.
    fn exit(&self) -> BoxFuture<'static, i32>;
    /// Shows it an image of the store, by its manifest's digest; its directory in the root device.
    async fn show(&self, digest: &str) -> Result<String, Error>;
    /// Shares files of this host with it, by this name: those its client sees.
    async fn add_share(&self, name: String, source: Source) -> Result<(), Error>;
    /// Takes a share away.
    async fn remove_share(&self, name: String) -> Result<(), Error>;
    /// Gives it a block device of this host; the slot of its machine.
    async fn add_disk(&self, disk: HostDisk) -> Result<DeviceId, Error>;
    /// Takes it away.
    async fn remove_disk(&self, slot: DeviceId) -> Result<(), Error>;
    /// Starts a process in its container.
    async fn exec(&self, options: Options) -> Result<Arc<dyn Process>, Error>;
    /// The files of its container.
    async fn files(&self) -> Result<Arc<dyn Files>, Error>;
    /// Says where it may connect to, from now on: its network as it is then.
    async fn set_network_policy(&self, policy: NetworkPolicy) -> Result<SandboxNetwork, Error>;
    /// Says how much its disks and its network may do, from now on; what they may then.
    async fn set_rate_limits(&self, change: RateLimits) -> Result<RateLimits, Error>;
    /// Ends it; who holds it removes it.
    fn kill(&self);
    /// Ends it and removes all it has.
    async fn destroy(self: Arc<Self>);
    /// Lets go of it without ending it. Says whether nobody else held it.
    fn release(self: Arc<Self>) -> bool;
}
