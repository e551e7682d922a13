//! The trait of a sandbox, as the API uses it.
//!
//! Invariant: a machine that is dropped without a release ends.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use thaw_pools::share::Source;
use thaw_protocol::api::{
    Account, ContainerHealth, FreezeSandbox, FrozenSandbox, NetworkPolicy, OnExit, RateLimits, Readiness,
    SandboxFailure, SandboxNetwork, StopContainer, Usage,
};
use thaw_protocol::control::DeviceId;
use thaw_sandbox::container::Options;
use thaw_sandbox::error::Error;
use thaw_sandbox::journal::Journal;
use thaw_sandbox::state::{Ending, HostDisk, Paused, Record, TimeLimit};
use tokio::sync::watch;

use super::container_monitor::ContainerLife;
use super::files::Files;
use super::kept::Processes;
use super::problem::Refusal;
use super::process::Process;

/// The condition of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Condition {
    Running,
    Paused,
    /// It has ended, and why.
    Ended(String),
}

/// A sandbox that this process owns.
#[async_trait]
pub trait Machine: std::fmt::Debug + Send + Sync {
    fn record(&self) -> &Record;
    /// Its vsock socket.
    fn vsock(&self) -> PathBuf;
    /// Its resource usage. Blocks while the kernel collects it.
    fn usage(&self) -> Usage;
    /// What only the machine knows of its start, if the creation has not waited for that. `None` after the first call. The future may outlive the
    /// machine.
    fn start_report(&self) -> Option<BoxFuture<'static, Account>> {
        None
    }
    /// The readiness of its container at its creation or adoption, if it has a probe.
    fn readiness(&self) -> Option<Readiness>;
    /// Keeps the answer to its creation with an idempotency key, for a later owner.
    fn note_answer(&self, answer: &[u8]) -> io::Result<()>;
    /// Asks its VMM.
    async fn condition(&self) -> Condition;
    /// Waits until it ends, and returns why it ended. The future may outlive the machine.
    fn end(&self) -> BoxFuture<'static, String>;
    /// Waits until its volumes are lost for good, and returns why; for ever if that does not happen.
    fn volumes_lost(&self) -> BoxFuture<'static, String> {
        Box::pin(std::future::pending())
    }
    /// After its end: why it ended, and its last output.
    async fn failure(&self) -> SandboxFailure;
    async fn pause(&self) -> Result<(), Error>;
    async fn resume(&self) -> Result<(), Error>;
    /// Freezes it among the node's paused sandboxes. It stays stopped then, for its owner to end; if this fails, it runs on.
    async fn release_memory(&self) -> Result<Paused, Error>;
    async fn freeze(&self, request: FreezeSandbox) -> Result<FrozenSandbox, Error>;
    /// Monitors the container that a caller started in it, from now on.
    fn monitor(&self) -> Result<(), Error>;
    /// What its container wrote, if thawd monitors it.
    fn journal(&self) -> Option<Arc<Journal>>;
    /// Waits until its container's process ends, and returns the exit status; for ever if thawd does not monitor it. The future may
    /// outlive the machine.
    fn exit(&self) -> BoxFuture<'static, i32>;
    /// What is shown of its container's life, if thawd monitors it.
    fn life(&self) -> Option<watch::Receiver<ContainerLife>>;
    /// The health of its container, if thawd monitors it.
    fn health(&self) -> Option<watch::Receiver<Option<ContainerHealth>>>;
    /// Stops the process of its container for good, and waits for its end.
    async fn stop(&self, how: StopContainer) -> Result<(), Error>;
    /// Stops the process of its container, starts its program again, and waits for that.
    async fn restart(&self, how: StopContainer) -> Result<(), Refusal>;
    /// Makes an image of the store visible to it, by the digest of its manifest, and returns its directory in the root device.
    async fn show(&self, digest: &str) -> Result<String, Error>;
    /// Shares files of this host with it under `name`, as its client sees them.
    async fn add_share(&self, name: String, source: Source) -> Result<(), Error>;
    /// Removes a share.
    async fn remove_share(&self, name: String) -> Result<(), Error>;
    /// Attaches a block device of this host, and returns its slot.
    async fn add_disk(&self, disk: HostDisk) -> Result<DeviceId, Error>;
    /// Detaches the block device of a slot.
    async fn remove_disk(&self, slot: DeviceId) -> Result<(), Error>;
    /// Starts a process in its container.
    async fn exec(&self, options: Options) -> Result<Arc<dyn Process>, Error>;
    /// The processes of its container that outlive their callers.
    async fn processes(&self) -> Result<Arc<dyn Processes>, Error>;
    /// Sends a signal to the process of its container.
    async fn signal(&self, number: u8) -> Result<(), Error>;
    /// The files of its container.
    async fn files(&self) -> Result<Arc<dyn Files>, Error>;
    /// Changes where it may connect to, and returns its network.
    async fn set_network_policy(&self, policy: NetworkPolicy) -> Result<SandboxNetwork, Error>;
    /// Changes its rate limits, and returns all of them.
    async fn set_rate_limits(&self, change: RateLimits) -> Result<RateLimits, Error>;
    /// How long it may run, and every later limit.
    fn time_limit(&self) -> watch::Receiver<TimeLimit>;
    /// Records and sets how long it may run.
    async fn set_time_limit(&self, limit: TimeLimit) -> Result<(), Error>;
    /// What ends it beside its machine and its time limit, and every later change.
    fn ending(&self) -> watch::Receiver<Ending>;
    /// Records and sets what happens when its container's process ends. It no longer ends with the process that it was made for.
    async fn set_on_exit(&self, on_exit: OnExit) -> Result<(), Error>;
    /// Ends it. Its owner removes it.
    fn kill(&self);
    /// Ends it and removes everything it has.
    async fn destroy(self: Arc<Self>);
    /// Releases it without ending it. Returns whether this was the last reference.
    fn release(self: Arc<Self>) -> bool;
}
