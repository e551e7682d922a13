//! The life of a sandbox: its timeout, and how it is paused and resumed.
//!
//! Invariant: a paused sandbox has no timeout, so that it stays until it is resumed or deleted. A sandbox that its timeout paused gets a
//! new one when it is resumed.

use std::sync::Arc;

use thaw_protocol::api::{ChangeSandbox, OnTimeout, Sandbox};
use thaw_sandbox::error::ErrorKind;

use super::failure::Failure;
use super::moment::now_s;
use super::service::{Service, is_paused};
use crate::api::problem::Refusal;
use crate::api::scope::Wanted;

/// How a new timeout relates to the one in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timing {
    /// It replaces it.
    Exact,
    /// It replaces it if it ends later.
    Extend,
}

impl Service {
    /// Sets when the sandbox's time is over, in seconds from now. 0 is the next second.
    ///
    /// # Errors
    /// It is paused.
    pub async fn set_timeout(&self, wanted: &Wanted, seconds: u32, timing: Timing) -> Result<(), Failure> {
        let sandbox = self.running(wanted)?;
        let ends_later = |end: u64| now_s().saturating_add(seconds.into()) > end;
        match timing == Timing::Exact || sandbox.ends_at.is_some_and(ends_later) {
            true => self.change_timeout(wanted, Some(seconds.max(1)), None).await,
            // A sandbox without a timeout has a longer one than any.
            false => Ok(()),
        }
    }

    /// Pauses a running sandbox, and releases its memory. One that could not be thawed again keeps its memory.
    ///
    /// # Errors
    /// It is paused already.
    pub async fn pause(&self, wanted: &Wanted) -> Result<(), Failure> {
        let sandbox = self.living(wanted)?;
        if is_paused(&sandbox) {
            return Err(Failure::Conflict(format!(
                "sandbox {} is paused already",
                sandbox.id
            )));
        }
        let (daemon, paused) = (self.daemon.clone(), wanted.clone());
        let pausing = async move {
            match daemon.release_memory(&paused).await {
                Err(e) if is_kept(&e) => Ok(daemon.pause(&paused).await?),
                done => done,
            }
        };
        self.daemon.finish(pausing).await?;
        self.change_timeout(wanted, None, None).await
    }

    /// Resumes a paused sandbox, which then has this timeout in seconds. `auto_pause` changes whether it is paused when that is over.
    ///
    /// # Errors
    /// It is running.
    pub async fn resume(
        &self,
        wanted: &Wanted,
        timeout: u32,
        auto_pause: Option<bool>,
    ) -> Result<Arc<Sandbox>, Failure> {
        let sandbox = self.living(wanted)?;
        if !is_paused(&sandbox) {
            return Err(Failure::Conflict(format!(
                "sandbox {} is running already",
                sandbox.id
            )));
        }
        // First, because a timeout that is over would end or pause it as soon as it runs.
        let on_timeout = auto_pause.map(|pauses| match pauses {
            true => OnTimeout::Pause,
            false => OnTimeout::Delete,
        });
        self.change_timeout(wanted, Some(timeout.max(1)), on_timeout)
            .await?;
        let (daemon, resumed) = (self.daemon.clone(), wanted.clone());
        let resuming = async move {
            let done = daemon.resume(&resumed).await;
            if done.as_ref().is_err_and(is_claimed) {
                // What is here is of no use.
                let _ = daemon.delete(&resumed).await;
            }
            done
        };
        self.daemon.finish(resuming).await?;
        self.living(wanted)
    }

    async fn change_timeout(
        &self,
        wanted: &Wanted,
        seconds: Option<u32>,
        on_timeout: Option<OnTimeout>,
    ) -> Result<(), Failure> {
        let change = ChangeSandbox {
            timeout_s: Some(seconds),
            on_timeout,
            ..ChangeSandbox::default()
        };
        let (daemon, wanted) = (self.daemon.clone(), wanted.clone());
        let changed = async move { daemon.set_timeout(&wanted, &change).await };
        self.daemon.finish(changed).await?;
        Ok(())
    }
}

/// Whether another node has resumed or deleted a paused sandbox.
pub fn is_claimed(refusal: &Refusal) -> bool {
    matches!(refusal, Refusal::Failure(e) if e.kind == ErrorKind::SandboxClaimed)
}

/// Whether the memory of a sandbox cannot be released.
fn is_kept(refusal: &Refusal) -> bool {
    matches!(refusal, Refusal::Failure(e) if matches!(e.kind, ErrorKind::MemoryKept | ErrorKind::Shared))
}
