//! What a container that its sandbox's owner monitors needs of its launch, and its end.

use std::time::Duration;

use thaw_protocol::api::{ChangeSandbox, OnExit};
use thaw_sandbox::agent_client::{AgentClient, ProcessId};
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::state::RunDirectory;

use super::{Keeping, Launched, OwnedBy};
use crate::image;

/// Delay before thawd is asked again for the end of a container, if it does not answer.
const OWNER_RETRY: Duration = Duration::from_secs(1);

impl Launched {
    /// Has thawd, which monitors the container, do at its end what this process would do, and no longer end the sandbox with this process.
    /// Returns false if this process stays: it owns the sandbox or is attached to the container, or this thawd cannot.
    pub(crate) async fn leave(&self) -> bool {
        let on_exit = match self.keeping {
            Keeping::Nothing => return false,
            Keeping::Output => OnExit::Delete,
            Keeping::End => OnExit::End,
        };
        let OwnedBy::Daemon(client) = &self.owner else {
            return false;
        };
        let change = ChangeSandbox {
            on_exit: Some(on_exit),
            ..ChangeSandbox::default()
        };
        match client.change(&self.id, &change).await {
            Ok(_) => true,
            Err(e) => {
                tracing::debug!("this process stays with sandbox {}: {e}", self.id);
                false
            }
        }
    }

    /// The configuration of its image as it was pulled, JSON, if the store has it.
    pub(crate) fn image_json(&self) -> Option<Vec<u8>> {
        let record = RunDirectory::open(&self.run).ok()?.find(&self.id).ok()?;
        let image = image::open()
            .ok()?
            .by_digest(record.image_digest.as_deref()?)
            .ok()??;
        image.config_json().ok()
    }

    /// Waits until the container, which its owner monitors, has ended and is not started again. Returns its exit status.
    ///
    /// # Errors
    /// [`ErrorKind::GuestEnded`] if the guest ends first; [`ErrorKind::MemoryReleased`] if thawd goes on with the sandbox alone.
    pub(crate) async fn container_end(&self, agent: &AgentClient, process: &ProcessId) -> Result<i32, Error> {
        let client = match &self.owner {
            OwnedBy::ThisProcess { service, .. } => return service.exit().await,
            OwnedBy::Daemon(client) => client,
        };
        loop {
            let ended = agent.wait(process).await;
            match (client.exit(&self.id).await, ended) {
                (Ok(status), _) => return Ok(status),
                (Err(e), _) if e.kind == ErrorKind::MemoryReleased => return Err(e),
                (Err(e), _) if [ErrorKind::GuestEnded, ErrorKind::SandboxNotFound].contains(&e.kind) => {
                    return Err(Error::new(
                        ErrorKind::GuestEnded,
                        format!("lost the guest: {}", e.what),
                    ));
                }
                // Without thawd nothing starts the program again.
                (Err(_), Ok(status)) if !self.restarts => return Ok(status),
                // Another thawd continues, if the guest is there.
                (Err(_), Ok(_) | Err(ttrpc::Error::RpcStatus(_))) => tokio::time::sleep(OWNER_RETRY).await,
                (Err(_), Err(e)) => {
                    return Err(Error::new(ErrorKind::GuestEnded, format!("lost the guest: {e}")));
                }
            }
        }
    }
}
