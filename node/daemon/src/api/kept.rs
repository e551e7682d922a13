//! The trait of a container's processes that outlive who started them.

use async_trait::async_trait;
use thaw_protocol::agent::processes::{ProcessInfo, ProcessOutputRequest};
use thaw_sandbox::agent_client::{AgentClient, ProcessId};
use thaw_sandbox::error::{Error, ErrorKind};
use ttrpc::Code;

use super::problem::{ApiCode, Refusal};

/// Output of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Said {
    Wrote {
        offset: u64,
        is_stderr: bool,
        data: Vec<u8>,
    },
    Ended(i32),
}

/// The processes of a container that outlive who started them.
#[async_trait]
pub trait Processes: std::fmt::Debug + Send + Sync {
    async fn list(&self) -> Result<Vec<ProcessInfo>, Refusal>;
    /// Lets a process that was just started outlive its caller.
    async fn keep(&self, id: &str) -> Result<(), Refusal>;
    /// The output from an offset on. Waits for it.
    async fn output(&self, id: &str, offset: u64) -> Result<Said, Refusal>;
    /// Writes to its input; returns when the process's pipe or terminal has it.
    async fn write(&self, id: &str, data: &[u8]) -> Result<(), Refusal>;
    async fn close_stdin(&self, id: &str) -> Result<(), Refusal>;
    async fn signal(&self, id: &str, number: u8) -> Result<(), Refusal>;
    /// Changes the size of its terminal.
    async fn resize(&self, id: &str, rows: u16, columns: u16) -> Result<(), Refusal>;
}

/// The processes behind a guest's agent.
#[derive(Debug)]
pub struct GuestProcesses {
    pub agent: AgentClient,
    pub container: String,
}

impl GuestProcesses {
    fn id(&self, exec: &str) -> Result<ProcessId, Refusal> {
        check_id(&self.container, exec)?;
        Ok(ProcessId {
            container: self.container.clone(),
            exec: exec.into(),
        })
    }
}

/// To the agent, an empty id means every process, and the container's id its first.
fn check_id(container: &str, exec: &str) -> Result<(), Refusal> {
    match exec.is_empty() || exec == container {
        true => Err(Refusal::new(
            ApiCode::NoProcess,
            format!("there is no process {exec:?}"),
        )),
        false => Ok(()),
    }
}

#[async_trait]
impl Processes for GuestProcesses {
    async fn list(&self) -> Result<Vec<ProcessInfo>, Refusal> {
        self.agent.processes(&self.container).await.map_err(refusal)
    }

    async fn keep(&self, id: &str) -> Result<(), Refusal> {
        self.agent.keep(&self.id(id)?).await.map_err(refusal)
    }

    async fn output(&self, id: &str, offset: u64) -> Result<Said, Refusal> {
        let request = ProcessOutputRequest {
            container_id: self.container.clone(),
            exec_id: id.into(),
            offset,
            ..Default::default()
        };
        let answer = self.agent.output(&request).await.map_err(refusal)?;
        Ok(match answer.data.is_empty() {
            true => Said::Ended(answer.exit_code),
            false => Said::Wrote {
                // Never backwards, whatever the guest says.
                offset: answer.offset.max(offset),
                is_stderr: answer.is_stderr,
                data: answer.data,
            },
        })
    }

    async fn write(&self, id: &str, data: &[u8]) -> Result<(), Refusal> {
        self.agent.write_stdin(&self.id(id)?, data).await.map_err(refusal)
    }

    async fn close_stdin(&self, id: &str) -> Result<(), Refusal> {
        self.agent.close_stdin(&self.id(id)?).await.map_err(refusal)
    }

    async fn signal(&self, id: &str, number: u8) -> Result<(), Refusal> {
        self.agent
            .signal(&self.id(id)?, number.into())
            .await
            .map_err(refusal)
    }

    async fn resize(&self, id: &str, rows: u16, columns: u16) -> Result<(), Refusal> {
        let id = self.id(id)?;
        let resized = self.agent.resize(&id, rows.into(), columns.into()).await;
        resized.map_err(refusal)
    }
}

/// The agent's status code tells whether the caller or the guest is at fault.
fn refusal(error: ttrpc::Error) -> Refusal {
    let ttrpc::Error::RpcStatus(status) = &error else {
        let what = format!("the guest's agent does not answer: {error}");
        return Error::new(ErrorKind::AgentFailed, what).into();
    };
    match status.code() {
        Code::NOT_FOUND | Code::INVALID_ARGUMENT => Refusal::new(ApiCode::NoProcess, status.message()),
        Code::FAILED_PRECONDITION => Refusal::new(ApiCode::ProcessRefused, status.message()),
        _ => Error::new(ErrorKind::AgentFailed, status.message()).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_that_were_not_started_by_callers_have_no_id() {
        let is_one = |id: &str| check_id("container", id).is_ok();
        assert!(is_one("a1") && !is_one("") && !is_one("container"));
    }
}
