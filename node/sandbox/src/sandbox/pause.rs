//! Pauses a sandbox: stops its vCPUs, and, if that is wanted, releases its memory.
//!
//! With its memory released, a sandbox is a snapshot and a record in the data directory ([`PausedSandboxes`](crate::state::PausedSandboxes)),
//! and its machine is ended. The snapshot has only what the sandbox has changed of the memory of its template or stored snapshot, if that is kept
//! while it lies on it ([`super::base`]). It is resumed by a thaw under its own identity. Invariant: it never stops being one of the two. The note of
//! the freeze is there until the record is, so that whoever finds the note alone lets the machine go on; whoever finds the record ends it.

use std::sync::Arc;

use thaw_images::store::Lease;
use thaw_protocol::control::{Command, MachineState, MemoryMode};

use super::freeze::Unrecorded;
use super::{FreezeOptions, Node, Sandbox, ThawSpec, freeze_note};
use crate::blocking::blocking;
use crate::error::{Error, ErrorKind};
use crate::state::{Paused, TimeLimit};
use crate::trace::Trace;

impl Sandbox {
    /// Pauses it: stops its vCPUs.
    pub async fn pause(&self) -> Result<(), Error> {
        let _one = self.freezing.lock().await;
        Ok(self
            .resources
            .control()?
            .call(Command::Pause, &[])
            .await
            .map(drop)?)
    }

    /// Resumes it: lets its vCPUs run again.
    pub async fn resume(&self) -> Result<(), Error> {
        let _one = self.freezing.lock().await;
        Ok(self
            .resources
            .control()?
            .call(Command::Resume, &[])
            .await
            .map(drop)?)
    }

    /// Freezes it among the node's paused sandboxes. Its machine stays stopped, for its owner to end. If this fails, it runs on.
    ///
    /// # Errors
    /// [`ErrorKind::MemoryKept`], [`ErrorKind::Shared`]: it cannot be thawed again. [`ErrorKind::TenantQuota`], [`ErrorKind::DiskBudget`], [`ErrorKind::DiskFull`].
    pub async fn release_memory(&self, node: &Node) -> Result<Paused, Error> {
        self.refuse_release(node).await?;
        let place = self.resources.place.as_ref();
        let place = place.map(|place| place.pause()).transpose()?.map(Arc::new);
        let (paused, id) = (node.paused.clone(), self.record().id.clone());
        let draft = blocking(move || paused.begin(&id)).await?;
        let options = FreezeOptions {
            stop: true,
            ..FreezeOptions::default()
        };
        let below = self.base_of_pause(node).await;
        if below.is_none() {
            tracing::info!(
                sandbox = self.record().id,
                "all of its memory is written: it cannot lie on a snapshot of this node"
            );
        }
        let frozen = self.freeze_over(node, &draft.snapshot(), options, below).await;
        let (made, _freezing) = match frozen {
            Ok(Unrecorded { freezing, .. }) => {
                let (record, directory) = (self.record_now(), self.directory());
                let made = blocking(move || draft.finish(record, &directory)).await;
                (made.map(|made| made.holding(place)), Some(freezing))
            }
            Err(e) => {
                let removed = blocking(move || {
                    drop(draft);
                    Ok(())
                });
                (removed.await.and(Err(e)), None)
            }
        };
        if made.is_err() {
            self.run_on(node).await;
        }
        made
    }

    /// Lets its machine run again after a failed freeze that has stopped it.
    pub(super) async fn run_on(&self, node: &Node) {
        let run_on = async {
            match self.machine().await? {
                MachineState::Paused => {
                    freeze_note::go_on(node, &self.resources.directory, self.resources.control()?).await
                }
                _ => Ok(()),
            }
        };
        if let Err(e) = run_on.await {
            tracing::error!(sandbox = self.record().id, "it does not go on: {e}");
        }
    }

    /// Fails if it could not be thawed again, or does not run.
    async fn refuse_release(&self, node: &Node) -> Result<(), Error> {
        let record = self.record();
        let refuse = |why: &str| {
            let what = format!("the memory of sandbox {} cannot be released: {why}", record.id);
            Err(Error::new(ErrorKind::MemoryKept, what))
        };
        if record.tethered || self.ending.borrow().client.is_some() {
            return refuse("the process that it was made for is attached to its container");
        }
        if self.origin.is_none() && record.provenance.is_none() {
            return refuse("it was booted with --cold");
        }
        if node.templates.registry().trusted().required() {
            return refuse("only signed snapshots are thawed here");
        }
        match self.machine().await? {
            MachineState::Running => Ok(()),
            MachineState::Paused => {
                refuse("it is paused already").map_err(|e| e.remedy("resume it first: thaw resume"))
            }
            _ => refuse("it does not run"),
        }
    }

    /// Thaws a sandbox whose memory was released, under its own identity and with this time limit. Its files stay.
    pub async fn thaw_paused(
        node: &Node,
        paused: &Paused,
        limit: TimeLimit,
        trace: &Trace,
    ) -> Result<Sandbox, Error> {
        let record = paused.record();
        let network = record.network.as_ref();
        let spec = ThawSpec {
            directory: paused.snapshot(),
            hostname: record.hostname.clone(),
            name: record.name.clone(),
            tethered: false,
            client: None,
            memory_mode: MemoryMode::default(),
            require_hook: false,
            network: None,
            // The snapshot has it.
            network_policy: None,
            publish: network
                .map(|network| network.published.clone())
                .unwrap_or_default(),
            terms: record.terms.clone().within(limit),
            remote: None,
            paused: Some(paused.clone()),
            is_pod: false,
        };
        Sandbox::thaw(node, spec, trace).await
    }
}

impl Node {
    /// Leases the images of a sandbox whose memory was released, so that they stay in the store. Those that cannot be leased are logged.
    /// Blocks.
    pub fn lease_paused(&self, paused: &Paused) -> Vec<Lease> {
        let record = paused.record();
        let told =
            |e: &dyn std::fmt::Display| tracing::warn!(sandbox = record.id, "an image is not leased: {e}");
        let Some(provenance) = &record.provenance else {
            return Vec::new();
        };
        let (images, lost) = provenance.images(self);
        if let Some(e) = lost {
            told(&e);
        }
        let leased = images.iter().map(|shown| shown.image.lease());
        leased
            .filter_map(|lease| lease.inspect_err(|e| told(e)).ok())
            .collect()
    }

    /// Removes the files of a sandbox whose memory was released. Blocks.
    pub fn forget_paused(&self, paused: &Paused) -> Result<(), Error> {
        paused.remove(self.templates.registry().stamps())
    }
}
