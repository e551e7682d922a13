//! Our end of the guest agent's API: ttrpc over one vsock connection.
//!
//! Calls have no deadline of their own unless said: `wait` lasts as long as its process. When the machine ends the
//! connection does, and every call with it.

use std::path::Path;
use std::time::Duration;

use thaw_protocol::agent::agent::{
    CloseStdinRequest, CreateContainerRequest, ExecProcessRequest, GetOOMEventRequest, ReadStreamRequest,
    SignalProcessRequest, StartContainerRequest, TtyWinResizeRequest, WaitProcessRequest, WriteStreamRequest,
};
use thaw_protocol::agent::agent_ttrpc::AgentServiceClient;
use thaw_protocol::agent::answers::Answers;
use thaw_protocol::agent::files::{ReadFileRequest, ReadFileResponse, WriteFileRequest};
use thaw_protocol::agent::files_ttrpc::FilesClient;
use thaw_protocol::agent::readiness::{ExpectReadyRequest, WaitReadyRequest, WaitReadyResponse};
use thaw_protocol::agent::readiness_ttrpc::ReadinessClient;
use thaw_protocol::handshake::AGENT_PORT;
use ttrpc::Code;
use ttrpc::context::Context;

use crate::error::{Error, ErrorKind};
use crate::handshake;

/// How long output may still come after the process has ended: something else may hold its streams open.
pub const OUTPUT_LINGERS: Duration = Duration::from_secs(2);
/// Bytes asked for at once.
const READ_SIZE: u32 = 64 * 1024;

/// Names one process: a container's own, whose `exec` is the container's id too, or one of its execs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessId {
    pub container: String,
    pub exec: String,
}

/// Which output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    Stdout,
    Stderr,
}

/// A connection to the agent. Clones share it.
#[derive(Clone)]
pub struct AgentClient {
    client: AgentServiceClient,
    files: FilesClient,
    readiness: ReadinessClient,
}

impl std::fmt::Debug for AgentClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AgentClient")
    }
}

impl AgentClient {
    /// Connects through the sandbox's vsock socket.
    pub async fn connect(vsock: &Path, limit: Duration) -> Result<AgentClient, Error> {
        let failed = |e: &dyn std::fmt::Display| {
            Error::new(
                ErrorKind::AgentFailed,
                format!("cannot reach the guest's agent: {e}"),
            )
        };
        let path = vsock.to_owned();
        let stream = tokio::task::spawn_blocking(move || handshake::connect(&path, AGENT_PORT, limit))
            .await
            .map_err(|e| failed(&e))?
            .map_err(|e| failed(&e))?;
        stream.set_nonblocking(true).map_err(|e| failed(&e))?;
        let stream = tokio::net::UnixStream::from_std(stream).map_err(|e| failed(&e))?;
        let socket = ttrpc::r#async::transport::Socket::new(Answers::over(stream));
        let client = ttrpc::r#async::Client::new(socket);
        Ok(AgentClient {
            files: FilesClient::new(client.clone()),
            readiness: ReadinessClient::new(client.clone()),
            client: AgentServiceClient::new(client),
        })
    }

    /// Mounts what the container needs and makes it ready to start.
    pub async fn create(&self, request: &CreateContainerRequest) -> Result<(), Error> {
        self.client
            .create_container(Context::default(), request)
            .await
            .map(drop)
            .map_err(start_failure)
    }

    /// Starts the container's own process.
    pub async fn start(&self, container: &str) -> Result<(), Error> {
        let request = StartContainerRequest {
            container_id: container.into(),
            ..Default::default()
        };
        self.client
            .start_container(Context::default(), &request)
            .await
            .map(drop)
            .map_err(start_failure)
    }

    /// Starts another process in a container.
    pub async fn exec(&self, request: &ExecProcessRequest) -> Result<(), Error> {
        self.client
            .exec_process(Context::default(), request)
            .await
            .map(drop)
            .map_err(start_failure)
    }

    /// Waits for a process's end: its exit code, or 128 and the signal's number.
    pub async fn wait(&self, process: &ProcessId) -> ttrpc::Result<i32> {
        let request = WaitProcessRequest {
            container_id: process.container.clone(),
            exec_id: process.exec.clone(),
            ..Default::default()
        };
        Ok(self
            .client
            .wait_process(Context::default(), &request)
            .await?
            .status)
    }

    /// Sends a signal.
    pub async fn signal(&self, process: &ProcessId, signal: u32) -> ttrpc::Result<()> {
        let request = SignalProcessRequest {
            container_id: process.container.clone(),
            exec_id: process.exec.clone(),
            signal,
            ..Default::default()
        };
        self.client
            .signal_process(Context::default(), &request)
            .await
            .map(drop)
    }

    /// Writes all of `data` to a process's stdin.
    pub async fn write_stdin(&self, process: &ProcessId, mut data: Vec<u8>) -> ttrpc::Result<()> {
        while !data.is_empty() {
            let request = WriteStreamRequest {
                container_id: process.container.clone(),
                exec_id: process.exec.clone(),
                data: data.clone(),
                ..Default::default()
            };
            let written = self.client.write_stdin(Context::default(), &request).await?.len as usize;
            if written == 0 {
                return Err(ttrpc::Error::Others("the agent takes no more input".into()));
            }
            data.drain(..written.min(data.len()));
        }
        Ok(())
    }

    /// Ends a process's stdin.
    pub async fn close_stdin(&self, process: &ProcessId) -> ttrpc::Result<()> {
        let request = CloseStdinRequest {
            container_id: process.container.clone(),
            exec_id: process.exec.clone(),
            ..Default::default()
        };
        self.client
            .close_stdin(Context::default(), &request)
            .await
            .map(drop)
    }

    /// What a process wrote, as soon as there is any; `None` at the end.
    pub async fn read(&self, process: &ProcessId, output: Output) -> Option<Vec<u8>> {
        let request = ReadStreamRequest {
            container_id: process.container.clone(),
            exec_id: process.exec.clone(),
            len: READ_SIZE,
            ..Default::default()
        };
        let answer = match output {
            Output::Stdout => self.client.read_stdout(Context::default(), &request).await,
            Output::Stderr => self.client.read_stderr(Context::default(), &request).await,
        };
        match answer {
            Ok(answer) if !answer.data.is_empty() => Some(answer.data),
            Ok(_) => None,
            // The API's end of a stream is an error.
            Err(e) => {
                tracing::debug!("{output:?} ended: {e}");
                None
            }
        }
    }

    /// Tells a process's terminal its size.
    pub async fn resize(&self, process: &ProcessId, rows: u16, columns: u16) -> ttrpc::Result<()> {
        let request = TtyWinResizeRequest {
            container_id: process.container.clone(),
            exec_id: process.exec.clone(),
            row: rows.into(),
            column: columns.into(),
            ..Default::default()
        };
        self.client
            .tty_win_resize(Context::default(), &request)
            .await
            .map(drop)
    }

    /// Has it seen what a container that is not started yet listens on.
    pub async fn expect_ready(&self, request: &ExpectReadyRequest) -> ttrpc::Result<()> {
        self.readiness.expect(Context::default(), request).await.map(drop)
    }

    /// Waits for what becomes of a container that was started.
    pub async fn wait_ready(&self, request: &WaitReadyRequest) -> ttrpc::Result<WaitReadyResponse> {
        self.readiness.wait(Context::default(), request).await
    }

    /// Reads a piece of a container's file.
    pub async fn read_file(&self, request: &ReadFileRequest) -> ttrpc::Result<ReadFileResponse> {
        self.files.read(Context::default(), request).await
    }

    /// Writes a piece of one.
    pub async fn write_file(&self, request: &WriteFileRequest) -> ttrpc::Result<()> {
        self.files.write(Context::default(), request).await.map(drop)
    }

    /// Waits until the kernel has killed something of a container for want of memory: which container.
    pub async fn out_of_memory(&self) -> ttrpc::Result<String> {
        Ok(self
            .client
            .get_oom_event(Context::default(), &GetOOMEventRequest::default())
            .await?
            .container_id)
    }
}

/// The agent says by the status's code when it is the command that is at fault.
fn start_failure(error: ttrpc::Error) -> Error {
    let ttrpc::Error::RpcStatus(status) = &error else {
        return Error::new(
            ErrorKind::AgentFailed,
            format!("the guest's agent does not answer: {error}"),
        );
    };
    let message = status.message().to_owned();
    match status.code() {
        Code::NOT_FOUND => Error::new(ErrorKind::NotFound, message),
        Code::PERMISSION_DENIED => Error::new(ErrorKind::NotExecutable, message),
        Code::INVALID_ARGUMENT => Error::new(ErrorKind::AgentFailed, message)
            .remedy("correct it: a user or group is a number, or a name that the image has"),
        _ => Error::new(ErrorKind::AgentFailed, message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agents_codes_become_dockers() {
        let failure = |code: Code| {
            start_failure(ttrpc::Error::RpcStatus(ttrpc::get_status(
                code,
                "exec: \"x\": not found",
            )))
            .kind
        };
        assert_eq!(failure(Code::NOT_FOUND), ErrorKind::NotFound);
        assert_eq!(failure(Code::PERMISSION_DENIED), ErrorKind::NotExecutable);
        assert_eq!(failure(Code::INTERNAL), ErrorKind::AgentFailed);
        let unknown = ttrpc::get_status(
            Code::INVALID_ARGUMENT,
            "user \"x\": no matching entry in /etc/passwd",
        );
        let said = start_failure(ttrpc::Error::RpcStatus(unknown)).to_string();
        assert!(
            said.contains("user \"x\"") && said.contains("a name that the image has"),
            "{said}"
        );
        assert_eq!(
            start_failure(ttrpc::Error::LocalClosed).kind,
            ErrorKind::AgentFailed
        );
    }
}
