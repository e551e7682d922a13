//! Creating sandboxes, unless thawd is draining.
//!
//! Invariant: a drain returns once every creation that was begun before it has put its sandbox into the table, or has failed.

use std::sync::Arc;
use std::time::Instant;

use thaw_failpoint::{Failpoint, reach};
use thaw_protocol::api::{CreateSandbox, CreatedSandbox, Drain, Sandbox as Described, ThawSandbox};
use thaw_sandbox::state::Behalf;
use tokio::sync::watch;

use super::Daemon;
use crate::api::factory::{CreatePod, NewSandbox, ThawPod};
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
    /// Creates a sandbox from an image. If the future is dropped, nothing is left of it.
    pub async fn create(
        self: &Arc<Daemon>,
        request: CreateSandbox,
        behalf: Behalf,
    ) -> Result<CreatedSandbox, Refusal> {
        let factory = self.factory()?;
        self.made(How::Create, factory.create(request, behalf)).await
    }

    /// Creates a pod's sandbox, without an image. If the future is dropped, nothing is left of it.
    pub async fn create_pod(self: &Arc<Daemon>, request: CreatePod) -> Result<CreatedSandbox, Refusal> {
        let factory = self.factory()?;
        self.made(How::Create, factory.create_pod(request)).await
    }

    /// Thaws a pod's sandbox from a snapshot. If the future is dropped, nothing is left of it.
    pub async fn thaw_pod(self: &Arc<Daemon>, request: ThawPod) -> Result<CreatedSandbox, Refusal> {
        let factory = self.factory()?;
        self.made(How::Thaw, factory.thaw_pod(request)).await
    }

    /// Thaws a sandbox from a snapshot. If the future is dropped, nothing is left of it.
    pub async fn thaw(
        self: &Arc<Daemon>,
        request: ThawSandbox,
        behalf: Behalf,
    ) -> Result<CreatedSandbox, Refusal> {
        let factory = self.factory()?;
        self.made(How::Thaw, factory.thaw(request, behalf)).await
    }

    async fn made(
        self: &Arc<Daemon>,
        how: How,
        creation: impl Future<Output = Result<NewSandbox, Refusal>>,
    ) -> Result<CreatedSandbox, Refusal> {
        // Counted until it is in the table and ready, so that a drain waits for it.
        let _creating = self.begin(how)?;
        let began = Instant::now();
        let made = async {
            let mut made = creation.await?;
            let (took, readiness_wait) = (began.elapsed(), made.readiness_wait.take());
            let shown = self.show(made);
            match readiness_wait {
                None => Ok((took, shown)),
                // Not counted in the time of the start: the container takes this time.
                Some(readiness_wait) => Ok((took, self.until_ready(shown, readiness_wait).await?)),
            }
        };
        let (took, created) = made
            .await
            .inspect_err(|e: &Refusal| self.metrics.not_started(how, e.slug()))?;
        self.metrics.started(how, took, &created.account);
        Ok(created)
    }

    pub(super) fn begin(&self, how: How) -> Result<Creating<'_>, Refusal> {
        self.begin_creation()
            .inspect_err(|e| self.metrics.not_started(how, e.slug()))
    }

    pub(super) async fn timed(
        &self,
        how: How,
        creation: impl Future<Output = Result<NewSandbox, Refusal>>,
    ) -> Result<NewSandbox, Refusal> {
        let began = Instant::now();
        let made = creation
            .await
            .inspect_err(|e| self.metrics.not_started(how, e.slug()))?;
        self.metrics.started(how, began.elapsed(), &made.account);
        Ok(made)
    }

    pub(super) fn show(self: &Arc<Daemon>, made: NewSandbox) -> CreatedSandbox {
        let shown = self.insert(made.machine, Condition::Running);
        reach(Failpoint::CreateShown);
        CreatedSandbox {
            sandbox: Described::clone(&shown),
            image_config: made.image_config,
            account: made.account,
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

    /// Refuses creations, and waits until none is under way, or until creations are allowed again.
    pub async fn drain(&self) -> Result<Drain, Refusal> {
        self.factory()?;
        self.close();
        let mut creations = self.creations.subscribe();
        // The sender is ours.
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
