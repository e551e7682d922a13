//! Forks: all the requested clones of a running sandbox, or none.

use std::sync::Arc;
use std::time::{Instant, SystemTime};

use opentelemetry::trace::SpanContext;
use thaw_failpoint::{Failpoint, reach};
use thaw_protocol::api::{ForkSandbox, ForkedSandbox, FreezeSandbox, ThawSandbox};
use thaw_sandbox::error::Error;
use thaw_sandbox::state::{Asked, Behalf};
use thaw_sandbox::trace::Trace;

use super::Daemon;
use crate::api::problem::Refusal;
use crate::api::scope::Wanted;
use crate::metrics::How;
use crate::spans::{Creation, Sibling, Told};

impl Daemon {
    /// Makes all requested clones of a running sandbox, or none. If the future is dropped, no clone remains. `parent` is the caller's span.
    pub async fn fork(
        self: &Arc<Daemon>,
        wanted: Wanted,
        request: ForkSandbox,
        asked: Option<Asked>,
        parent: Option<SpanContext>,
    ) -> Result<ForkedSandbox, Refusal> {
        let (began, since) = (SystemTime::now(), Instant::now());
        let forked = self.forked(wanted, request, asked, since).await;
        self.send_spans(|| Creation {
            what: "fork",
            parent,
            began,
            took: since.elapsed(),
            outcome: match &forked {
                Ok((_, told)) => Ok(told.clone()),
                Err(refusal) => Err(refusal.slug()),
            },
        });
        forked.map(|(forked, _)| forked)
    }

    async fn forked(
        self: &Arc<Daemon>,
        wanted: Wanted,
        request: ForkSandbox,
        asked: Option<Asked>,
        since: Instant,
    ) -> Result<(ForkedSandbox, Told), Refusal> {
        let factory = self.factory()?;
        let _creating = self.begin(How::Thaw)?;
        // Clones get the original's tenant, whichever caller forks it.
        let original = self.record_of(&wanted)?;
        let behalf = Behalf {
            tenant: original.terms.tenant.clone(),
            asked,
            annotations: original.terms.annotations.clone(),
        };
        // Before the original is frozen for nothing.
        factory
            .check_room(&original, request.count)
            .inspect_err(|e| self.metrics.not_started(How::Thaw, e.kind.slug()))?;
        let trace = Trace::new();
        let place = factory.scratch(&original, request.sign.is_some()).await?;
        let freeze = FreezeSandbox {
            directory: Some(place.snapshot()),
            sign: request.sign,
            require_hook: request.require_hook,
            ..FreezeSandbox::default()
        };
        let daemon = self.clone();
        let freezing = async move { Ok::<_, Error>((daemon.freeze(&wanted, freeze).await?, place)) };
        let (frozen, place) = {
            let _stage = trace.stage("freeze");
            self.finish(freezing).await?
        };
        reach(Failpoint::ForkFrozen);
        let thaw = ThawSandbox {
            directory: Some(place.snapshot()),
            memory_mode: request.memory_mode,
            labels: request.labels,
            timeout_s: request.timeout_s,
            idle_timeout_s: request.idle_timeout_s,
            on_timeout: request.on_timeout,
            require_hook: request.require_hook,
            // The snapshot contains the original's policy. No ports are published, because a port of the host belongs to one sandbox only.
            ..ThawSandbox::default()
        };
        let clones = (0..request.count).map(|_| async {
            let began = since.elapsed();
            let creation = factory.thaw_clone(&original, thaw.clone(), behalf.clone());
            let made = self.timed(How::Thaw, creation).await?;
            Ok::<_, Refusal>((began, since.elapsed().saturating_sub(began), made))
        });
        let clones = futures_util::future::try_join_all(clones).await?;
        reach(Failpoint::ForkThawed);
        // The clones have opened all files of the snapshot.
        drop(tokio::task::spawn_blocking(move || drop(place)));
        let mut told = Told {
            id: None,
            account: trace.account(),
            clones: Vec::with_capacity(clones.len()),
        };
        let mut items = Vec::with_capacity(clones.len());
        for (began, took, made) in clones {
            let item = self.show(made);
            told.clones.push(Sibling {
                id: item.sandbox.id.clone(),
                began,
                took,
                account: item.account.clone(),
            });
            items.push(item);
        }
        Ok((ForkedSandbox { frozen, items }, told))
    }
}
