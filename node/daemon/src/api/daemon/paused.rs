//! Sandboxes whose memory is released: they are frozen on disk, and have an entry here and no machine.
//!
//! Invariants: the entry stays in the table from the freeze to the resume, with the same turn, so that operations that wait for their turn
//! find what the one before them left. Files are removed only after the machine that continues them is in the table, or after the
//! sandbox was deleted and no resume of it is in progress.

use std::sync::Arc;

use thaw_failpoint::{Failpoint, reach};
use thaw_images::store::Lease;
use thaw_protocol::api::{Readiness, SandboxAction, SandboxEvent};
use thaw_sandbox::blocking::blocking;
use thaw_sandbox::container::ready;
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::snapshot::store::Viewer;
use thaw_sandbox::state::{Paused, Record, SandboxDirectory, TimeLimit};
use thaw_sandbox::{CopyPlace, Node, Tenants};
use tokio::sync::{Notify, watch};

use super::describe::{describe, describe_paused};
use super::turn::{Alone, Turn};
use super::{Body, Daemon, Described, no_such_sandbox};
use crate::api::factory::CopyTurn;
use crate::api::idempotency;
use crate::api::machine::Condition;
use crate::api::problem::Refusal;
use crate::api::scope::Wanted;

/// A sandbox whose memory is released.
#[derive(Debug)]
pub(super) struct PausedSandbox {
    pub files: Paused,
    pub time_limit: watch::Sender<TimeLimit>,
    /// It is being deleted: a resume in progress, which may wait long for a hook, ends.
    pub deleted: Notify,
    /// Its images stay in the store.
    _images: Vec<Lease>,
}

impl PausedSandbox {
    fn new(files: Paused, images: Vec<Lease>) -> PausedSandbox {
        PausedSandbox {
            _images: images,
            time_limit: watch::Sender::new(files.record().terms.time_limit()),
            deleted: Notify::new(),
            files,
        }
    }

    /// Records and sets how long it may stay.
    pub(super) async fn set_time_limit(&self, limit: TimeLimit) -> Result<(), Error> {
        let files = self.files.clone();
        blocking(move || files.note_time_limit(limit)).await?;
        self.time_limit.send_replace(limit);
        Ok(())
    }
}

impl Daemon {
    /// Pauses a sandbox and releases its memory: freezes it on disk, and ends its machine.
    ///
    /// # Errors
    /// [`ErrorKind::MemoryKept`], [`ErrorKind::Shared`]: it could not be thawed again. It runs on, as after any other error.
    pub async fn release_memory(self: &Arc<Daemon>, wanted: &Wanted) -> Result<(), Refusal> {
        self.factory()?;
        let turn = self.turn(wanted).await?;
        Ok(self.release_in(turn).await?)
    }

    /// The same in a turn.
    pub(super) async fn release_in(self: &Arc<Daemon>, turn: Turn) -> Result<(), Error> {
        let readiness = self.cache.get(&turn.id).and_then(|shown| shown.readiness);
        if readiness == Some(Readiness::Waiting) {
            let what = format!(
                "the memory of sandbox {} cannot be released: it is not ready yet",
                turn.id
            );
            return Err(Error::new(ErrorKind::MemoryKept, what));
        }
        let released = turn.machine.release_memory().await;
        let paused = match released {
            Ok(files) => Arc::new(self.paused(files).await),
            Err(e) => {
                self.show_condition(&turn).await;
                return Err(e);
            }
        };
        let shown = |described: &mut Described| {
            described.state = "paused".into();
            described.reason = None;
            described.memory_released = true;
            described.vmm_pid = None;
            described.vsock = String::new();
            described.event = Some(SandboxEvent::now(SandboxAction::Pause));
        };
        if !self.replace(&turn.id, Body::Paused(paused.clone()), shown) {
            // It was deleted meanwhile, or its machine ended.
            self.forget_paused(&paused.files).await;
            return Err(self.absent(&turn.id));
        }
        reach(Failpoint::PausedShown);
        let (machine, _alone) = turn.into_parts();
        machine.destroy().await;
        Ok(())
    }

    /// Thaws a sandbox whose memory is released, under its own identity. If this fails, it stays paused, and its description says why. The
    /// caller has its turn.
    pub(super) async fn thaw_paused(
        self: &Arc<Daemon>,
        id: &str,
        paused: &PausedSandbox,
    ) -> Result<(), Refusal> {
        let factory = self.factory()?;
        let _creating = self.begin_creation()?;
        let limit = paused.time_limit.borrow().renewed();
        let thawed = tokio::select! {
            thawed = factory.thaw_paused(&paused.files, limit) => thawed,
            // What was made so far is removed.
            () = paused.deleted.notified() => return Err(no_such_sandbox(id).into()),
        };
        let machine = match thawed {
            Ok(new) => new.machine,
            Err(refusal) => {
                let why = refusal.to_string();
                self.cache.update(id, |described| described.reason = Some(why));
                return Err(refusal);
            }
        };
        reach(Failpoint::PausedThawed);
        let resumed = Described {
            event: Some(SandboxEvent::now(SandboxAction::Unpause)),
            ..describe(machine.as_ref(), Condition::Running)
        };
        if !self.replace(id, Body::Machine(machine.clone()), |described| {
            *described = resumed
        }) {
            // It was deleted meanwhile. Whoever deletes it removes its files.
            machine.destroy().await;
            return Err(no_such_sandbox(id).into());
        }
        self.forget_paused(&paused.files).await;
        Ok(())
    }

    /// Pushes a copy of a sandbox whose memory is released, unless there is one. Returns false if the sandbox is not such a one, before or
    /// after the push.
    ///
    /// # Errors
    /// Those of the push; it was resumed or deleted during the push.
    pub async fn copy_paused(self: &Arc<Daemon>, id: &str, place: &CopyPlace) -> Result<bool, Refusal> {
        let Body::Paused(paused) = self.held(id)?.0 else {
            return Ok(false);
        };
        let files = paused.files.clone();
        let note = blocking(move || files.copied()).await?;
        if note.is_some_and(|note| note.is_complete) {
            return Ok(true);
        }
        let (daemon, wanted, of) = (self.clone(), Wanted::on_node(id), paused.clone());
        let turn: CopyTurn = Box::pin(async move {
            let alone = daemon.turn_of_paused(&wanted, &of).await?;
            Ok(Box::new(alone) as Box<dyn Send>)
        });
        self.factory()?.copy_paused(&paused.files, place, turn).await?;
        reach(Failpoint::CopyPushed);
        let Ok(_alone) = self.turn_of_paused(&Wanted::on_node(id), &paused).await else {
            return Ok(false);
        };
        let files = paused.files.clone();
        blocking(move || files.note_complete()).await?;
        Ok(true)
    }

    /// Waits until no other operation changes this paused sandbox.
    ///
    /// # Errors
    /// It was resumed or deleted.
    async fn turn_of_paused(&self, wanted: &Wanted, paused: &Arc<PausedSandbox>) -> Result<Alone, Error> {
        let (id, body, alone) = self.turn_of(wanted).await?;
        match body {
            Body::Paused(now) if Arc::ptr_eq(&now, paused) => Ok(alone),
            _ => Err(no_such_sandbox(&id)),
        }
    }

    /// Takes a paused sandbox over from a copy, unless it is here. It is then a paused sandbox of this node.
    ///
    /// # Errors
    /// [`ErrorKind::SandboxNotFound`]: there is no copy, or the viewer does not reach it. [`ErrorKind::SandboxClaimed`]: another node has it.
    pub async fn take_paused(
        self: &Arc<Daemon>,
        id: &str,
        place: &CopyPlace,
        viewer: &Viewer,
    ) -> Result<(), Refusal> {
        if self.cache.get(id).is_some() {
            return Ok(());
        }
        let _creating = self.begin_creation()?;
        let files = self.factory()?.take_paused(place, viewer).await?;
        let described = describe_paused(files.record(), ready::noted(files.directory()));
        let paused = self.paused(files).await;
        self.insert_body(Body::Paused(Arc::new(paused)), described);
        tracing::info!(sandbox = id, "was taken over from a copy, and is paused");
        Ok(())
    }

    /// Deletes a paused sandbox of another node by its copy, unless it is here. Returns false if it is here.
    ///
    /// # Errors
    /// Those of [`Daemon::take_paused`].
    pub async fn discard_copy(&self, id: &str, place: &CopyPlace, viewer: &Viewer) -> Result<bool, Refusal> {
        if self.cache.get(id).is_some() {
            return Ok(false);
        }
        self.factory()?.discard_copy(place, viewer).await?;
        tracing::info!(sandbox = id, "was deleted: no node resumes it from its copy");
        Ok(true)
    }

    async fn paused(&self, files: Paused) -> PausedSandbox {
        let images = match &self.factory {
            Some(factory) => factory.lease_paused(&files).await,
            None => Vec::new(),
        };
        PausedSandbox::new(files, images)
    }

    /// Removes the files of a sandbox that is paused no more. A failure is logged: the next thawd removes what has no record.
    pub(super) async fn forget_paused(&self, files: &Paused) {
        let Some(factory) = &self.factory else { return };
        if let Err(e) = factory.forget_paused(files).await {
            tracing::error!(sandbox = files.record().id, "{e}");
        }
    }

    /// Lists the sandboxes that were paused under earlier thawds.
    pub(super) async fn list_paused(self: &Arc<Daemon>, node: &Node, paused: Vec<Paused>) {
        for files in paused {
            let record = files.record();
            let id = record.id.clone();
            if let Some(asked) = &record.terms.asked
                && let Some(answer) = idempotency::noted(files.directory())
            {
                self.answers
                    .restore(asked, answer, idempotency::when(record.created));
            }
            // If its machine was ended by something else before thawd could end it.
            let (run, ended) = (node.run.clone(), id.clone());
            let _ = blocking(move || Ok(run.forget_ended(&ended))).await;
            let readiness = ready::noted(files.directory());
            let described = describe_paused(record, readiness);
            let paused = self.paused(files).await;
            self.insert_body(Body::Paused(Arc::new(paused)), described);
            tracing::info!(sandbox = id, "is paused");
        }
    }
}

/// The paused sandboxes on disk, without what dead processes left of others.
pub(super) async fn on_disk(tenants: &Tenants) -> Vec<Paused> {
    let node = tenants.shared().clone();
    let read = blocking(move || {
        node.paused.sweep(node.templates.registry().stamps());
        let all = node.paused.list();
        node.paused.index_names(&all);
        let all = all.into_iter();
        Ok(all.map(|paused| node.count_paused(paused)).collect())
    });
    read.await.unwrap_or_default()
}

/// Of a sandbox that has files here and a machine, keeps the later of the two. Returns its directory if that is the machine.
pub(super) async fn keep_later(
    node: &Node,
    paused: &mut Vec<Paused>,
    record: &Record,
    mut directory: SandboxDirectory,
) -> Option<SandboxDirectory> {
    let Some(at) = paused.iter().position(|files| files.record().id == record.id) else {
        return Some(directory);
    };
    if paused[at].froze(record) {
        directory.keep();
        drop(directory);
        let (run, cgroups, id) = (node.run.clone(), node.cgroups.clone(), record.id.clone());
        let ended = blocking(move || Ok(run.end(&id, &cgroups))).await;
        tracing::info!(
            sandbox = record.id,
            ended = ended.unwrap_or(false),
            "its pause was completed"
        );
        return None;
    }
    let (files, stamps) = (paused.remove(at), node.templates.registry().stamps().clone());
    if let Err(e) = blocking(move || files.remove(&stamps)).await {
        tracing::error!(sandbox = record.id, "{e}");
    }
    Some(directory)
}

#[cfg(test)]
#[path = "paused_test.rs"]
mod tests;
