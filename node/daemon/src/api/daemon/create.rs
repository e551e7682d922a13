//! Creating sandboxes, unless thawd is draining.
//!
//! Invariant: a drain returns only after every creation that began before it has put its sandbox into the table or has failed.

use std::sync::Arc;
use std::time::Instant;

use futures_util::future::BoxFuture;
use thaw_failpoint::{Failpoint, reach};
use thaw_protocol::api::{
    Account, CreateSandbox, CreatedSandbox, Drain, Sandbox as Described, SandboxAction, SandboxEvent,
    ThawSandbox,
};
use thaw_sandbox::snapshot::store::Viewer;
use thaw_sandbox::state::Behalf;
use tokio::sync::watch;

use super::Daemon;
use crate::api::factory::{CreatePod, NewSandbox, PodContainer, ThawPod};
use crate::api::machine::Condition;
use crate::api::problem::{ApiCode, Refusal};
use crate::metrics::How;

/// Whether sandboxes may be created, and how many are being created.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Creations {
    closed: bool,
    count: usize,
}

/// Counts a creation for as long as this is held.
pub(super) struct Creating<'a>(&'a watch::Sender<Creations>);

impl Drop for Creating<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|creations| creations.count -= 1);
    }
}

impl Daemon {
    /// Creates a sandbox from an image. Dropping the future removes everything made so far.
    pub async fn create(
        self: &Arc<Daemon>,
        request: CreateSandbox,
        behalf: Behalf,
    ) -> Result<CreatedSandbox, Refusal> {
        let factory = self.factory()?;
        self.run_creation(How::Create, factory.create(request, behalf))
            .await
    }

    /// Creates a pod's sandbox, without an image. Dropping the future removes everything made so far.
    pub async fn create_pod(self: &Arc<Daemon>, request: CreatePod) -> Result<CreatedSandbox, Refusal> {
        let factory = self.factory()?;
        self.run_creation(How::Create, factory.create_pod(request)).await
    }

    /// Thaws a pod's sandbox from a snapshot, and returns the container in it if that is known. Dropping the future removes everything made
    /// so far.
    pub async fn thaw_pod(
        self: &Arc<Daemon>,
        request: ThawPod,
    ) -> Result<(CreatedSandbox, Option<PodContainer>), Refusal> {
        let factory = self.factory()?;
        let mut container = None;
        let creation = async {
            let thawed = factory.thaw_pod(request).await?;
            container = thawed.container;
            Ok(thawed.sandbox)
        };
        let created = self.run_creation(How::Thaw, creation).await?;
        Ok((created, container))
    }

    /// Thaws a sandbox from a snapshot. Dropping the future removes everything made so far.
    pub async fn thaw(
        self: &Arc<Daemon>,
        request: ThawSandbox,
        behalf: Behalf,
        viewer: Viewer,
    ) -> Result<CreatedSandbox, Refusal> {
        let factory = self.factory()?;
        self.run_creation(How::Thaw, factory.thaw(request, behalf, viewer))
            .await
    }

    /// Awaits a creation and the readiness of its sandbox, puts the sandbox into the table, and counts the outcome.
    async fn run_creation(
        self: &Arc<Daemon>,
        how: How,
        creation: impl Future<Output = Result<NewSandbox, Refusal>>,
    ) -> Result<CreatedSandbox, Refusal> {
        // Held until the sandbox is in the table and ready, so that a drain waits for it.
        let _creating = self.begin(how)?;
        let began = Instant::now();
        let result = async {
            let mut new_sandbox = creation.await?;
            let (took, readiness_wait) = (began.elapsed(), new_sandbox.readiness_wait.take());
            let report = new_sandbox.machine.start_report();
            let shown = self.show(new_sandbox);
            self.report_later(how, report);
            match readiness_wait {
                None => Ok((took, shown)),
                // The start time excludes this wait: the container causes it.
                Some(readiness_wait) => Ok((took, self.until_ready(shown, readiness_wait).await?)),
            }
        };
        let (took, created) = result
            .await
            .inspect_err(|e: &Refusal| self.metrics.not_started(how, e.slug()))?;
        self.metrics.started(how, took, &created.account);
        Ok(created)
    }

    pub(super) fn begin(&self, how: How) -> Result<Creating<'_>, Refusal> {
        self.begin_creation()
            .inspect_err(|e| self.metrics.not_started(how, e.slug()))
    }

    /// Counts what only the machine knows of its start. A separate task asks it, so that the caller gets its answer first.
    fn report_later(self: &Arc<Daemon>, how: How, report: Option<BoxFuture<'static, Account>>) {
        let Some(report) = report else { return };
        let daemon = Arc::downgrade(self);
        tokio::spawn(async move {
            let account = report.await;
            if let Some(daemon) = daemon.upgrade() {
                daemon.metrics.reported(how, &account);
            }
        });
    }

    pub(super) async fn timed(
        self: &Arc<Daemon>,
        how: How,
        creation: impl Future<Output = Result<NewSandbox, Refusal>>,
    ) -> Result<NewSandbox, Refusal> {
        let began = Instant::now();
        let new_sandbox = creation
            .await
            .inspect_err(|e| self.metrics.not_started(how, e.slug()))?;
        self.metrics.started(how, began.elapsed(), &new_sandbox.account);
        self.report_later(how, new_sandbox.machine.start_report());
        Ok(new_sandbox)
    }

    pub(super) fn show(self: &Arc<Daemon>, new_sandbox: NewSandbox) -> CreatedSandbox {
        let shown = self.insert(
            new_sandbox.machine,
            Condition::Running,
            Some(SandboxEvent::now(SandboxAction::Create)),
        );
        reach(Failpoint::CreateShown);
        CreatedSandbox {
            sandbox: Described::clone(&shown),
            image_config: new_sandbox.image_config,
            account: new_sandbox.account,
        }
    }

    pub(super) fn begin_creation(&self) -> Result<Creating<'_>, Refusal> {
        let begun = self.creations.send_if_modified(|creations| {
            creations.count += usize::from(!creations.closed);
            !creations.closed
        });
        match begun {
            true => Ok(Creating(&self.creations)),
            false => Err(Refusal::new(ApiCode::Draining, "this thawd is being drained")),
        }
    }

    /// Refuses creations from now on.
    pub fn close(&self) {
        self.creations.send_modify(|creations| creations.closed = true);
    }

    /// Refuses creations, and waits until all begun creations are done or creations are allowed again.
    pub async fn drain(&self) -> Result<Drain, Refusal> {
        self.factory()?;
        self.close();
        let mut creations = self.creations.subscribe();
        // Cannot fail: this object holds the sender.
        let _ = creations.wait_for(|m| m.count == 0 || !m.closed).await;
        Ok(self.drained())
    }

    /// Allows creations again.
    pub fn undrain(&self) -> Result<Drain, Refusal> {
        self.factory()?;
        self.creations.send_modify(|creations| creations.closed = false);
        Ok(self.drained())
    }

    /// Whether creations are refused, and how many sandboxes there are. An answer also shows that no lock of this state is stuck.
    pub fn drained(&self) -> Drain {
        let creations = *self.creations.borrow();
        Drain {
            draining: creations.closed,
            making: creations.count,
            sandboxes: self.table().len(),
        }
    }
}
