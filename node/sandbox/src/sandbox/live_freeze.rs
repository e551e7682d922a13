//! The freeze of a sandbox that goes on: its VMM writes the memory while the guest runs.
//!
//! The VMM protects memory against writes first, so that the machine is paused only while its state is saved and its disk is copied. If the
//! kernel or the VMM lacks that, or the memory is served page by page, it is written while the machine is paused; the log says why.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use thaw_failpoint::{Failpoint, reach};
use thaw_protocol::control::{Command, ErrorCode, FreezeKind, Response};

use super::Sandbox;
use super::machine::unexpected_answer;
use super::userfaultfd;
use crate::control_client::{CallError, ControlClient};
use crate::error::Error;
use crate::snapshot::Draft;

/// How memory is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// While the machine is paused.
    Stopped(FreezeKind),
    /// While it runs. Its VMM is prepared.
    Running,
}

impl Sandbox {
    /// Prepares its VMM to write memory while the machine runs, if that is possible.
    pub(super) async fn prepare_freeze(
        &self,
        kind: FreezeKind,
        draft: &Draft,
        pagemap: &OwnedFd,
    ) -> Result<Way, Error> {
        let lacks = |why: &dyn std::fmt::Display| {
            let sandbox = &self.record().id;
            tracing::info!(sandbox, "it is paused while its memory is written: {why}");
            Ok(Way::Stopped(kind))
        };
        if self.resources.pages.is_some() {
            return lacks(&"its memory has a userfaultfd already, because it comes page by page");
        }
        let device = match userfaultfd::open() {
            Ok(device) => device,
            Err(e) => return lacks(&e),
        };
        let fds = [draft.memory().as_fd(), pagemap.as_fd(), device.as_fd()];
        match prepare(self.resources.control()?, kind, &fds).await? {
            None => Ok(Way::Running),
            Some(why) => lacks(&why),
        }
    }

    /// Waits until memory is written, or ends the freeze if `begun`, what had to be of one moment, has failed. Returns the bytes of memory
    /// too.
    pub(super) async fn finish_freeze<T>(&self, begun: Result<T, Error>) -> Result<(T, u64), Error> {
        let finished = match begun {
            Ok(begun) => self.await_memory().await.map(|bytes| (begun, bytes)),
            Err(e) => Err(e),
        };
        reach(Failpoint::FreezeMemoryWritten);
        if finished.is_err() {
            self.cancel_freeze().await;
        }
        finished
    }

    async fn await_memory(&self) -> Result<u64, Error> {
        memory_bytes(&self.resources.control()?.call(Command::FinishFreeze, &[]).await?)
    }

    /// A VMM that does not hear of it ends the freeze when the connection ends.
    async fn cancel_freeze(&self) {
        let cancelled = match self.resources.control() {
            Ok(control) => control
                .call(Command::CancelFreeze, &[])
                .await
                .map(drop)
                .map_err(Error::from),
            Err(e) => Err(e),
        };
        if let Err(e) = cancelled {
            tracing::warn!(sandbox = self.record().id, "a failed freeze is not ended: {e}");
        }
    }
}

/// Asks a VMM to prepare a freeze. Returns why that is not possible, or `None` if it is prepared.
async fn prepare(
    control: &ControlClient,
    kind: FreezeKind,
    fds: &[BorrowedFd<'_>],
) -> Result<Option<String>, Error> {
    match control.call(Command::PrepareFreeze { kind }, fds).await {
        Ok(_) => Ok(None),
        Err(CallError::Refused(e)) if e.code == ErrorCode::Unprotected => Ok(Some(e.to_string())),
        Err(e @ CallError::TooOld { .. }) => Ok(Some(e.to_string())),
        Err(e) => {
            // It may be prepared, or will be: then it would refuse every later freeze. Nobody waits for the answer.
            drop(control.request(Command::CancelFreeze, &[]).await);
            Err(e.into())
        }
    }
}

/// The bytes of memory that a VMM has written.
pub(super) fn memory_bytes(answer: &Response) -> Result<u64, Error> {
    match answer {
        Response::Frozen { memory_bytes } => Ok(*memory_bytes),
        other => Err(unexpected_answer(other)),
    }
}

#[cfg(test)]
#[path = "live_freeze_test.rs"]
mod tests;
