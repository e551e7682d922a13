//! Freezes a machine that goes on: it is paused for a moment, and its memory is written while it runs.
//!
//! ```text
//! prepare_freeze (running) ──> pause ──> begin_freeze ──> resume ──> finish_freeze
//!                                             └── write_some, write_some, ... ──┘
//! ```
//!
//! Invariant: until the freeze has ended, in whatever way, devices discard no memory ([`Discards`]). When it has ended, nothing is
//! protected.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use thaw_protocol::control::{ControlError, ErrorCode, FreezeKind};

use super::freeze::{Saved, live_memory, refuse_devices_of_the_host, require_empty};
use super::refusal::{live_error, refused};
use super::{Machine, Outcome, Started, State, descriptors};
use crate::snapshot::live::{LiveFreeze, Source};
use crate::virtio::discards::Discards;

/// A freeze in progress.
pub(super) struct Freezing {
    step: Step,
    discards: Arc<Discards>,
}

enum Step {
    /// Memory is protected.
    Prepared(LiveFreeze),
    /// State is saved; memory is being written.
    Writing {
        memory: LiveFreeze,
        saved: Box<Saved>,
        file: File,
    },
    Done(Outcome<u64>),
}

impl Drop for Freezing {
    fn drop(&mut self) {
        // Protection first.
        self.step = Step::Done(Ok(0));
        self.discards.allow();
    }
}

impl Machine {
    /// Protects the memory of a running machine. `fds` are as `Command::PrepareFreeze` describes.
    pub fn prepare_freeze(&mut self, kind: FreezeKind, fds: Vec<OwnedFd>) -> Outcome<()> {
        let what = "prepare a freeze";
        self.refuse_exited(what)?;
        self.refuse_freezing(what)?;
        let State::Running(started) = &self.state else {
            return Err(self.wrong_state(what));
        };
        let [out, pagemap, device] =
            descriptors(fds, "the memory file, this process's pagemap, /dev/userfaultfd")?;
        let out = File::from(out);
        require_empty(&out, "memory")?;
        let Started { body, base, .. } = started;
        refuse_devices_of_the_host(body)?;
        let discards = body.bus.inventory.discards();
        // No request to plug is answered after this, so what is live now stays so.
        discards.hold();
        let source = Source {
            kind,
            memory: body.bus.inventory.memory().clone(),
            live: live_memory(body),
            base: base.as_ref().map(|base| base.map.clone()),
            out,
        };
        let memory = LiveFreeze::prepare(source, &pagemap.into(), device.as_fd(), &body.protector);
        let memory = memory.map_err(live_error).inspect_err(|_| discards.allow())?;
        self.freezing = Some(Freezing {
            step: Step::Prepared(memory),
            discards,
        });
        Ok(())
    }

    /// Saves the state of a paused machine whose freeze is prepared. `fds`: the state file.
    pub fn begin_freeze(&mut self, fds: Vec<OwnedFd>) -> Outcome<()> {
        let what = "begin a freeze";
        self.refuse_exited(what)?;
        let State::Paused(started) = &self.state else {
            return Err(self.wrong_state(what));
        };
        let [file] = descriptors(fds, "the state file")?.map(File::from);
        require_empty(&file, "state")?;
        let is_prepared = |freezing: &mut Freezing| matches!(freezing.step, Step::Prepared(_));
        // If anything fails from here on, the freeze has ended.
        let Some(mut freezing) = self.freezing.take_if(is_prepared) else {
            return Err(not_prepared());
        };
        let Step::Prepared(mut memory) = std::mem::replace(&mut freezing.step, Step::Done(Ok(0))) else {
            unreachable!("it is prepared");
        };
        let devices = started.body.bus.quiesce();
        let saved = Saved::of(started, &devices)?;
        memory.begin().map_err(live_error)?;
        drop(devices);
        freezing.step = Step::Writing {
            memory,
            saved: Box::new(saved),
            file,
        };
        self.freezing = Some(freezing);
        Ok(())
    }

    /// Whether [`Self::write_some`] has work to do.
    pub fn is_writing(&self) -> bool {
        let step = self.freezing.as_ref().map(|freezing| &freezing.step);
        matches!(step, Some(Step::Writing { .. }))
    }

    /// Writes a part of the memory of a freeze that has begun.
    pub fn write_some(&mut self) {
        let Some(Freezing { step, .. }) = &mut self.freezing else {
            return;
        };
        let Step::Writing { memory, .. } = step else {
            return;
        };
        let result = match memory.step() {
            Ok(None) => return,
            Ok(Some(frozen)) => Ok(frozen),
            Err(e) => Err(live_error(e)),
        };
        if let Step::Writing { saved, file, .. } = std::mem::replace(step, Step::Done(Ok(0))) {
            *step = Step::Done(result.and_then(|frozen| saved.write(frozen, &file)));
        }
    }

    /// Whether the guest, which writes protected memory, waits for [`Self::write_some`] when many pages are copied already. It must not while
    /// this thread waits for the guest or for a device.
    pub fn hurry(&self, is_hurried: bool) {
        if let Some(Freezing {
            step: Step::Writing { memory, .. },
            ..
        }) = &self.freezing
        {
            memory.hurry(is_hurried);
        }
    }

    /// The result of a freeze that has begun: bytes of memory data written. `None` if it is still being written.
    pub fn frozen(&mut self) -> Option<Outcome<u64>> {
        let result = match self.freezing.as_ref().map(|freezing| &freezing.step) {
            Some(Step::Writing { .. }) => return None,
            Some(Step::Prepared(_)) | None => return Some(Err(not_prepared())),
            Some(Step::Done(result)) => result.clone(),
        };
        self.freezing = None;
        Some(result)
    }

    /// Ends a freeze, in whatever step it is.
    pub fn cancel_freeze(&mut self) {
        self.freezing = None;
    }

    /// Fails if a freeze is in progress.
    pub(super) fn refuse_freezing(&self, what: &str) -> Outcome<()> {
        match &self.freezing {
            Some(_) => Err(refused(
                ErrorCode::WrongState,
                format!("cannot {what}: another freeze of this machine is in progress"),
            )),
            None => Ok(()),
        }
    }
}

fn not_prepared() -> ControlError {
    refused(
        ErrorCode::WrongState,
        "no freeze of this machine is prepared, or it was cancelled".into(),
    )
}
