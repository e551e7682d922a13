//! Making sandboxes, for as long as that is not refused.
//!
//! Invariant: who drains the daemon returns once every sandbox that was begun before is in the table, or never will be.

use std::sync::Arc;
use std::time::Instant;

use thaw_failpoint::{Failpoint, reach};
use thaw_protocol::api::{CreateSandbox, CreatedSandbox, Drain, Sandbox as Described, ThawSandbox};
use thaw_sandbox::state::Behalf;
use tokio::sync::watch;

use super::Daemon;
use crate::api::machine::Condition;
use crate::api::maker::{CreatePod, Made, ThawPod};
use crate::api::problem::{ApiCode, Refusal};
use crate::metrics::How;

/// Whether sandboxes may be made, and how many are.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Makings {
    closed: bool,
    count: usize,
}

/// A sandbox is being made for as long as this is held.
pub(super) struct Making<'a>(&'a watch::Sender<Makings>);

impl Drop for Making<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|makings| makings.count -= 1);
    }
}

impl Daemon {
    /// Makes a sandbox of an image. Dropped, nothing is made.
    pub async fn create(
        self: &Arc<Daemon>,
        request: CreateSandbox,
        behalf: Behalf,
    ) -> Result<CreatedSandbox, Refusal> {
        let maker = self.maker()?;
        self.made(How::Create, maker.create(request, behalf)).await
    }

    /// Makes a sandbox without an image, for a pod. Dropped, nothing is made.
    pub async fn create_pod(self: &Arc<Daemon>, request: CreatePod) -> Result<CreatedSandbox, Refusal> {
        let maker = self.maker()?;
        self.made(How::Create, maker.create_pod(request)).await
    }

    /// Makes one of a snapshot of a pod's. Dropped, nothing is made.
    pub async fn thaw_pod(self: &Arc<Daemon>, request: ThawPod) -> Result<CreatedSandbox, Refusal> {
        let maker = self.maker()?;
        self.made(How::Thaw, maker.thaw_pod(request)).await
    }

    /// Makes a sandbox of a snapshot. Dropped, nothing is made.
    pub async fn thaw(
        self: &Arc<Daemon>,
        request: ThawSandbox,
        behalf: Behalf,
    ) -> Result<CreatedSandbox, Refusal> {
        let maker = self.maker()?;
        self.made(How::Thaw, maker.thaw(request, behalf)).await
    }

    async fn made(
        self: &Arc<Daemon>,
        how: How,
        making: impl Future<Output = Result<Made, Refusal>>,
    ) -> Result<CreatedSandbox, Refusal> {
        // Until it is in the table, and ready: who drains us counts it.
        let _making = self.begin(how)?;
        let began = Instant::now();
        let made = async {
            let mut made = making.await?;
            let (took, readying) = (began.elapsed(), made.readying.take());
            let shown = self.show(made);
            match readying {
                None => Ok((took, shown)),
                // Not in the time it took: that is the container's.
                Some(readying) => Ok((took, self.until_ready(shown, readying).await?)),
            }
        };
        let (took, created) = made
            .await
            .inspect_err(|e: &Refusal| self.metrics.not_started(how, e.slug()))?;
        self.metrics.started(how, took, &created.account);
        Ok(created)
    }

    pub(super) fn begin(&self, how: How) -> Result<Making<'_>, Refusal> {
        self.begin_making()
            .inspect_err(|e| self.metrics.not_started(how, e.slug()))
    }

    pub(super) async fn timed(
        &self,
        how: How,
        making: impl Future<Output = Result<Made, Refusal>>,
    ) -> Result<Made, Refusal> {
        let began = Instant::now();
        let made = making
            .await
            .inspect_err(|e| self.metrics.not_started(how, e.slug()))?;
        self.metrics.started(how, began.elapsed(), &made.account);
        Ok(made)
    }

    pub(super) fn show(self: &Arc<Daemon>, made: Made) -> CreatedSandbox {
        let shown = self.insert(made.machine, Condition::Running);
        reach(Failpoint::CreateShown);
        CreatedSandbox {
            sandbox: Described::clone(&shown),
            image_config: made.image_config,
            account: made.account,
        }
    }

    pub(super) fn begin_making(&self) -> Result<Making<'_>, Refusal> {
        let begun = self.makings.send_if_modified(|makings| {
            makings.count += usize::from(!makings.closed);
            !makings.closed
        });
        match begun {
            true => Ok(Making(&self.makings)),
            false => Err(Refusal::new(ApiCode::Draining, "this thawd is being drained")),
        }
    }

    /// Refuses to make any more from now on.
    pub fn close(&self) {
        self.makings.send_modify(|makings| makings.closed = true);
    }

    /// The same, and waits until none is being made; or until they may be made again.
    pub async fn drain(&self) -> Result<Drain, Refusal> {
        self.maker()?;
        self.close();
        let mut makings = self.makings.subscribe();
        // The sender is ours.
        let _ = makings.wait_for(|m| m.count == 0 || !m.closed).await;
        Ok(self.drained())
    }

    /// Makes them again.
    pub fn undrain(&self) -> Result<Drain, Refusal> {
        self.maker()?;
        self.makings.send_modify(|makings| makings.closed = false);
        Ok(self.drained())
    }

    /// Whether any are made, and how many there are. Who is answered knows that no lock here is held for ever.
    pub fn drained(&self) -> Drain {
        let makings = *self.makings.borrow();
        Drain {
            draining: makings.closed,
            making: makings.count,
            sandboxes: self.table().len(),
        }
    }
}
