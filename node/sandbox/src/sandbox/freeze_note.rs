//! The note of a freeze in progress: that the sandbox is frozen, and where its snapshot is written.
//!
//! Invariant: the note is in the sandbox's directory from before its workloads are stopped until they run again, or until the
//! freeze that ends the sandbox is complete. A later owner that adopts the sandbox resumes it and removes the partial snapshot.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use thaw_failpoint::{Failpoint, reach};
use thaw_protocol::control::{Command, MachineState, Response};

use super::machine::unexpected_answer;
use super::{Node, READY_LIMIT};
use crate::control_client::ControlClient;
use crate::error::Error;
use crate::handshake;
use crate::snapshot::sweep_beside;
use crate::state::SandboxDirectory;

/// File in the sandbox's directory that names the snapshot being written.
const FREEZING: &str = "freezing";

/// The note that a sandbox is being frozen. Dropping it removes the note.
#[derive(Debug)]
pub(super) struct Freezing(PathBuf);

impl Freezing {
    /// Notes that the sandbox in `directory` is being frozen to `target`.
    pub(super) fn note(directory: &Path, target: &Path) -> Result<Freezing, Error> {
        let path = directory.join(FREEZING);
        let fail = |e: io::Error| Error::system(format!("cannot write {}", path.display()), &e);
        // Absolute: another process reads it.
        let target = std::path::absolute(target).map_err(fail)?;
        let text = serde_json::to_vec(&target).map_err(|e| fail(e.into()))?;
        fs::write(&path, text).map_err(fail)?;
        reach(Failpoint::FreezeNoted);
        Ok(Freezing(path))
    }

    /// The note of a sandbox whose owner died while freezing it, and the freeze's target, if that can be read.
    fn found(directory: &Path) -> Option<(Freezing, Option<PathBuf>)> {
        let path = directory.join(FREEZING);
        let text = fs::read(&path).ok()?;
        Some((Freezing(path), serde_json::from_slice(&text).ok()))
    }
}

impl Drop for Freezing {
    fn drop(&mut self) {
        if let Err(e) = fs::remove_file(&self.0) {
            tracing::warn!("cannot remove {}: {e}", self.0.display());
        }
        reach(Failpoint::FreezeForgotten);
    }
}

/// Resumes a sandbox whose owner died while freezing it. A step that cannot be undone is logged: the sandbox is adopted
/// anyway and can be ended.
pub(super) async fn undo(node: &Node, directory: &SandboxDirectory, control: &ControlClient) {
    let Some((freezing, target)) = Freezing::found(directory.path()) else {
        return;
    };
    if let Some(target) = target {
        sweep_beside(&target);
    }
    match go_on(node, directory, control).await {
        Ok(()) => tracing::info!(
            "{} goes on: its owner died freezing it",
            directory.path().display()
        ),
        Err(e) => tracing::error!("{} does not go on: {e}", directory.path().display()),
    }
    drop(freezing);
}

/// Lets a frozen sandbox run again, if it does not.
pub(super) async fn go_on(
    node: &Node,
    directory: &SandboxDirectory,
    control: &ControlClient,
) -> Result<(), Error> {
    match control.call(Command::Status, &[]).await? {
        Response::Status {
            state: MachineState::Paused,
            ..
        } => control.call(Command::Resume, &[]).await.map(drop)?,
        Response::Status { .. } => {}
        other => return Err(unexpected_answer(&other)),
    }
    if !node.has_agents() {
        return Ok(());
    }
    let vsock = directory.vsock_socket();
    crate::blocking::blocking(move || handshake::resume(&vsock, READY_LIMIT)).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_freeze_is_noted_until_it_is_over_and_found_if_it_never_was() {
        let directory = tempfile::tempdir().unwrap();
        assert!(Freezing::found(directory.path()).is_none());
        let freezing = Freezing::note(directory.path(), Path::new("/some/where")).unwrap();
        std::mem::forget(freezing);
        let (found, target) = Freezing::found(directory.path()).unwrap();
        assert_eq!(target.as_deref(), Some(Path::new("/some/where")));
        drop(found);
        fs::write(directory.path().join(FREEZING), b"{torn").unwrap();
        assert!(Freezing::found(directory.path()).unwrap().1.is_none());
        assert!(Freezing::found(directory.path()).is_none());
    }
}
