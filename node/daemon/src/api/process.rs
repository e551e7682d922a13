//! The trait of a process in a container.

use async_trait::async_trait;
use thaw_sandbox::agent_client::{AgentClient, Output, ProcessId};
use thaw_sandbox::error::{Error, ErrorKind};

/// A started process.
#[async_trait]
pub trait Process: std::fmt::Debug + Send + Sync {
    /// Its id in the guest.
    fn id(&self) -> String;
    /// The next output; `None` at the end.
    async fn read(&self, output: Output) -> Option<Vec<u8>>;
    /// Writes to its input; returns when everything is in the process's pipe or terminal.
    async fn write(&self, data: Vec<u8>) -> Result<(), Error>;
    /// Closes its input.
    async fn close_stdin(&self);
    async fn resize(&self, rows: u16, columns: u16);
    async fn signal(&self, number: u8);
    /// Its exit code, or 128 plus the signal's number.
    async fn wait(&self) -> Result<i32, Error>;
}

/// A process behind the guest's agent.
#[derive(Debug)]
pub struct GuestProcess {
    pub agent: AgentClient,
    pub id: ProcessId,
}

#[async_trait]
impl Process for GuestProcess {
    fn id(&self) -> String {
        self.id.exec.clone()
    }

    async fn read(&self, output: Output) -> Option<Vec<u8>> {
        self.agent.read(&self.id, output).await
    }

    async fn write(&self, data: Vec<u8>) -> Result<(), Error> {
        let written = self.agent.write_stdin(&self.id, &data).await;
        written.map_err(|e| Error::new(ErrorKind::AgentFailed, format!("cannot write to its input: {e}")))
    }

    async fn close_stdin(&self) {
        if let Err(e) = self.agent.close_stdin(&self.id).await {
            tracing::debug!("cannot close stdin: {e}");
        }
    }

    async fn resize(&self, rows: u16, columns: u16) {
        if let Err(e) = self.agent.resize(&self.id, rows.into(), columns.into()).await {
            tracing::debug!("cannot resize: {e}");
        }
    }

    async fn signal(&self, number: u8) {
        if let Err(e) = self.agent.signal(&self.id, number.into()).await {
            tracing::debug!("cannot send signal {number}: {e}");
        }
    }

    async fn wait(&self) -> Result<i32, Error> {
        let status = self.agent.wait(&self.id).await;
        status.map_err(|e| Error::new(ErrorKind::GuestEnded, format!("lost the guest: {e}")))
    }
}
