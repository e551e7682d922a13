//! The [`Machine`] that is a sandbox of this node.

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use thaw_pools::share::Source;
use thaw_protocol::api::{
    Account, ContainerHealth, FreezeSandbox, FrozenSandbox, NetworkPolicy, OnExit, RateLimits, Readiness,
    SandboxFailure, SandboxNetwork, StopContainer, Usage,
};
use thaw_protocol::control::{DeviceId, MachineState};
use thaw_sandbox::agent_client;
use thaw_sandbox::blocking::blocking;
use thaw_sandbox::container::{self, Options, Running, ready, signals};
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::journal::Journal;
use thaw_sandbox::state::{Ending, HostDisk, Paused, Record, TimeLimit};
use thaw_sandbox::{FreezeOptions, Node, READY_LIMIT, Sandbox, usage};
use thaw_sys::lock::Lock;
use tokio::sync::watch;

use super::container_monitor::{ContainerLife, ContainerMonitor};
use super::files::{Files, GuestFiles};
use super::idempotency;
use super::kept::{GuestProcesses, Processes};
use super::machine::{Condition, Machine};
use super::problem::Refusal;
use super::process::{GuestProcess, Process};

mod stop;

/// A sandbox of this node.
#[derive(Debug)]
pub struct Microvm {
    node: Node,
    sandbox: Arc<Sandbox>,
    /// The monitor of its container, if the API started that.
    monitor: Mutex<Option<ContainerMonitor>>,
    readiness: Option<Readiness>,
}

impl Microvm {
    /// A sandbox that was just created, with the monitor of its container if the API started that.
    pub(super) fn created(
        node: Node,
        sandbox: Sandbox,
        monitor: Option<ContainerMonitor>,
        readiness: Option<Readiness>,
    ) -> Microvm {
        Microvm {
            node,
            sandbox: Arc::new(sandbox),
            monitor: Mutex::new(monitor),
            readiness,
        }
    }

    /// A sandbox of which the caller holds another reference. The caller removes it, and attaches to its container.
    pub fn new(node: Node, sandbox: Arc<Sandbox>) -> Microvm {
        Microvm {
            node,
            sandbox,
            monitor: Mutex::default(),
            readiness: None,
        }
    }

    /// A sandbox that an earlier thawd left running. Its container is monitored if that thawd did so.
    pub fn adopted(node: Node, sandbox: Sandbox) -> Microvm {
        let resumed = Journal::exists(&sandbox.directory()).then(|| ContainerMonitor::resume(&sandbox));
        let monitor = match resumed.transpose() {
            Ok(monitor) => monitor,
            Err(e) => {
                tracing::warn!(
                    sandbox = sandbox.record().id,
                    "adopted, but its output is not kept: {e}"
                );
                None
            }
        };
        Microvm {
            node,
            readiness: ready::noted(&sandbox.directory()),
            sandbox: Arc::new(sandbox),
            monitor: Mutex::new(monitor),
        }
    }

    /// Why it ended: as its VMM reported, or else `seen`.
    fn ended(&self, seen: String) -> String {
        self.sandbox.ended().unwrap_or(seen)
    }
}

/// Waits for an answer of the guest's agent, but not for ever.
async fn in_time<T>(answer: impl Future<Output = T>) -> Result<T, Error> {
    let late = |_| {
        let what = format!(
            "the guest's agent did not answer within {} s",
            READY_LIMIT.as_secs()
        );
        Error::new(ErrorKind::AgentFailed, what)
    };
    tokio::time::timeout(READY_LIMIT, answer).await.map_err(late)
}

#[async_trait]
impl Machine for Microvm {
    fn record(&self) -> &Record {
        self.sandbox.record()
    }

    fn vsock(&self) -> PathBuf {
        self.sandbox.vsock()
    }

    fn usage(&self) -> Usage {
        let (traffic, names) = (self.sandbox.traffic(), self.sandbox.name_statistics());
        Usage {
            names_resolved: names.map(|names| names.resolved),
            names_refused: names.map(|names| names.refused),
            addresses_withheld: names.map(|names| names.withheld),
            connections_refused: names.map(|names| names.connections_refused),
            received_bytes: traffic.map(|t| t.received_bytes),
            received_packets: traffic.map(|t| t.received_packets),
            sent_bytes: traffic.map(|t| t.sent_bytes),
            sent_packets: traffic.map(|t| t.sent_packets),
            fetched_bytes: self.sandbox.fetched(),
            ..usage(self.sandbox.record(), &self.node.cgroups)
        }
    }

    fn start_report(&self) -> Option<BoxFuture<'static, Account>> {
        let report = self.sandbox.start_report()?;
        Some(Box::pin(report))
    }

    fn readiness(&self) -> Option<Readiness> {
        self.readiness
    }

    fn note_answer(&self, answer: &[u8]) -> io::Result<()> {
        idempotency::note(&self.sandbox.directory(), answer)
    }

    async fn condition(&self) -> Condition {
        if let Some(reason) = self.sandbox.ended() {
            return Condition::Ended(reason);
        }
        match self.sandbox.machine().await {
            Ok(MachineState::Paused) => Condition::Paused,
            Ok(MachineState::Exited(_)) => Condition::Ended(self.ended("its machine has ended".into())),
            Err(e) => Condition::Ended(self.ended(e.what)),
            Ok(_) => Condition::Running,
        }
    }

    fn end(&self) -> BoxFuture<'static, String> {
        Box::pin(self.sandbox.wait_end())
    }

    fn volumes_lost(&self) -> BoxFuture<'static, String> {
        Box::pin(self.sandbox.volumes_lost())
    }

    async fn failure(&self) -> SandboxFailure {
        self.sandbox.failure().await
    }

    async fn pause(&self) -> Result<(), Error> {
        self.sandbox.pause().await
    }

    async fn resume(&self) -> Result<(), Error> {
        self.sandbox.resume().await
    }

    async fn release_memory(&self) -> Result<Paused, Error> {
        self.sandbox.release_memory(&self.node).await
    }

    async fn freeze(&self, request: FreezeSandbox) -> Result<FrozenSandbox, Error> {
        let options = FreezeOptions {
            delta: request.delta,
            stop: request.stop,
            sign: request.sign,
            require_hook: request.require_hook,
        };
        let frozen = match request.directory {
            Some(directory) => (self.sandbox.freeze(&self.node, &directory, options).await?, None),
            None => {
                // Held until the snapshot is stored and counts itself.
                let _place = self.sandbox.admit_snapshot(&self.node).await?;
                let (store, sandbox) = (self.node.stored.clone(), self.sandbox.clone());
                let begin = move || store.begin_for(sandbox.record(), request.name, request.labels);
                let making = blocking(begin).await?;
                let frozen = self.sandbox.freeze_stored(&self.node, making, options);
                let (frozen, stored) = frozen.await?;
                (frozen, Some(stored.object.id.clone()))
            }
        };
        let (frozen, snapshot) = frozen;
        Ok(FrozenSandbox {
            memory_bytes: frozen.memory_bytes,
            paused_ns: frozen.paused_ns,
            stopped_ns: frozen.stopped_ns,
            snapshot,
        })
    }

    async fn set_network_policy(&self, policy: NetworkPolicy) -> Result<SandboxNetwork, Error> {
        self.sandbox.set_network_policy(&self.node, policy).await
    }

    async fn set_rate_limits(&self, change: RateLimits) -> Result<RateLimits, Error> {
        self.sandbox.set_rate_limits(change).await
    }

    fn time_limit(&self) -> watch::Receiver<TimeLimit> {
        self.sandbox.time_limit()
    }

    async fn set_time_limit(&self, limit: TimeLimit) -> Result<(), Error> {
        self.sandbox.set_time_limit(limit).await
    }

    fn ending(&self) -> watch::Receiver<Ending> {
        self.sandbox.ending()
    }

    async fn set_on_exit(&self, on_exit: OnExit) -> Result<(), Error> {
        self.sandbox.set_on_exit(on_exit).await
    }

    fn monitor(&self) -> Result<(), Error> {
        // Locked meanwhile: two monitors would write to one journal.
        let mut monitor = self.monitor.locked();
        if monitor.is_none() {
            *monitor = Some(ContainerMonitor::resume(&self.sandbox)?);
        }
        Ok(())
    }

    fn journal(&self) -> Option<Arc<Journal>> {
        self.monitor.locked().as_ref().map(|a| a.journal.clone())
    }

    fn exit(&self) -> BoxFuture<'static, i32> {
        let exit = self.monitor.locked().as_ref().map(|a| a.exit.clone());
        Box::pin(async move {
            if let Some(mut exit) = exit
                && let Ok(status) = exit.wait_for(Option::is_some).await
                && let Some(status) = *status
            {
                return status;
            }
            std::future::pending().await
        })
    }

    fn life(&self) -> Option<watch::Receiver<ContainerLife>> {
        self.monitor.locked().as_ref().map(|monitor| monitor.life.clone())
    }

    fn health(&self) -> Option<watch::Receiver<Option<ContainerHealth>>> {
        self.monitor
            .locked()
            .as_ref()
            .map(|monitor| monitor.health.clone())
    }

    async fn stop(&self, how: StopContainer) -> Result<(), Error> {
        self.stop_container(how).await
    }

    async fn restart(&self, how: StopContainer) -> Result<(), Refusal> {
        self.restart_container(how).await
    }

    async fn show(&self, digest: &str) -> Result<String, Error> {
        self.sandbox.show(&self.node, digest).await
    }

    async fn add_share(&self, name: String, source: Source) -> Result<(), Error> {
        self.sandbox.add_share(name, source).await
    }

    async fn remove_share(&self, name: String) -> Result<(), Error> {
        self.sandbox.remove_share(name).await
    }

    async fn add_disk(&self, disk: HostDisk) -> Result<DeviceId, Error> {
        self.sandbox.add_disk(disk).await
    }

    async fn remove_disk(&self, slot: DeviceId) -> Result<(), Error> {
        self.sandbox.remove_disk(slot).await
    }

    async fn exec(&self, options: Options) -> Result<Arc<dyn Process>, Error> {
        let running = Running::read(&self.sandbox.directory())?;
        let agent = agent_client::connect(&self.sandbox.vsock(), READY_LIMIT).await?;
        let id = in_time(container::exec(&agent, &running, &options)).await??;
        Ok(Arc::new(GuestProcess { agent, id }))
    }

    async fn processes(&self) -> Result<Arc<dyn Processes>, Error> {
        let container = Running::read(&self.sandbox.directory())?.container_id;
        let agent = agent_client::connect(&self.sandbox.vsock(), READY_LIMIT).await?;
        Ok(Arc::new(GuestProcesses { agent, container }))
    }

    async fn signal(&self, number: u8) -> Result<(), Error> {
        let running = Running::read(&self.sandbox.directory())?;
        if [signals::KILL, running.life().stop_signal].contains(&number)
            && let Some(monitor) = &*self.monitor.locked()
        {
            monitor.end_policy();
        }
        self.send_signal(&running, number).await
    }

    async fn files(&self) -> Result<Arc<dyn Files>, Error> {
        let container = Running::read(&self.sandbox.directory())?.container_id;
        let agent = agent_client::connect(&self.sandbox.vsock(), READY_LIMIT).await?;
        Ok(Arc::new(GuestFiles { agent, container }))
    }

    fn kill(&self) {
        self.sandbox.kill();
    }

    async fn destroy(self: Arc<Self>) {
        let _awaited = self.node.pools.begin_awaited();
        let sandbox = self.sandbox.clone();
        drop(self);
        sandbox.destroy().await;
    }

    fn release(self: Arc<Self>) -> bool {
        let sandbox = Arc::into_inner(self).and_then(|microvm| Arc::into_inner(microvm.sandbox));
        sandbox.map(Sandbox::release).is_some()
    }
}
