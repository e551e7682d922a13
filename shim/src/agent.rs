//! Client of the guest's agent: one ttrpc connection per pod, which the calls of all its containers share.
//!
//! Invariant: a call that hangs delays no other, because nothing here is locked and the connection carries
//! any number of calls. A call that the guest answers promptly has a time limit, so that a hanging guest is
//! detected. A call that depends on the container's program or files has none.

use std::future::Future;
use std::path::Path;
use std::time::Duration;

use thaw_protocol::agent::agent::*;
use thaw_protocol::agent::agent_ttrpc::AgentServiceClient;
use thaw_protocol::agent::answers::Answers;
use thaw_protocol::agent::health::CheckRequest;
use thaw_protocol::agent::health_ttrpc::HealthClient;
use thaw_protocol::agent::{MessageField, oci};
use thaw_protocol::handshake::AGENT_PORT;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use ttrpc::context::Context;

use crate::error::{Error, Result, WithContext};
use crate::spec::{CopiedFile, Guest};

/// Limit for the guest to accept a connection. thawd reports a pod only when its agent listens.
const CONNECT_LIMIT: Duration = Duration::from_secs(60);
/// Limit for calls that the guest answers promptly.
pub const CALL_LIMIT: Duration = Duration::from_secs(30);
/// Limit for calls that a node makes to all its pods, one after another.
pub const STATS_LIMIT: Duration = Duration::from_secs(10);
/// Limit for calls that wait for a container's processes or their memory.
pub const CHANGE_LIMIT: Duration = Duration::from_secs(60);
/// Bytes requested per read.
const READ_SIZE: u32 = 64 * 1024;
/// Longest line with which the VMM answers a `CONNECT`, in bytes.
const MAX_ANSWER: usize = 32;

/// Names one process of the guest: a container's init process, whose `exec` equals the container's id, or an
/// exec.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessId {
    pub container: String,
    pub exec: String,
}

/// Which output stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    Stdout,
    Stderr,
}

/// A connection to the agent. Clones share it.
#[derive(Clone)]
pub struct Agent(AgentServiceClient, HealthClient);

impl std::fmt::Debug for Agent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Agent")
    }
}

impl Agent {
    /// Connects through the pod's vsock socket.
    pub async fn connect(vsock: &Path) -> Result<Agent> {
        let connected = tokio::time::timeout(CONNECT_LIMIT, connect_vsock(vsock)).await;
        let stream = connected
            .unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()))
            .with_context(|| format!("reach the guest's agent through {}", vsock.display()))?;
        let socket = ttrpc::r#async::transport::Socket::new(Answers::over(stream));
        let client = ttrpc::r#async::Client::new(socket);
        Ok(Agent(
            AgentServiceClient::new(client.clone()),
            HealthClient::new(client),
        ))
    }

    /// Whether the agent answers any call at all.
    pub async fn answers(&self) -> bool {
        let request = CheckRequest::default();
        let answer = self.1.check(Context::default(), &request);
        let answered = with_limit(CALL_LIMIT, || "answer".into(), answer).await;
        matches!(answered, Ok(_) | Err(Error::Agent { .. }))
    }

    /// Copies the container's files, mounts its storages and creates it.
    pub async fn create(&self, id: &str, guest: Guest) -> Result<()> {
        for file in guest.files {
            self.copy(file).await?;
        }
        let request = CreateContainerRequest {
            container_id: id.into(),
            exec_id: id.into(),
            storages: guest.storages,
            devices: guest.devices,
            OCI: MessageField::some(guest.spec),
            sandbox_pidns: guest.shares_pids,
            ..Default::default()
        };
        convert(self.0.create_container(Context::default(), &request).await).map(drop)
    }

    /// As [`Agent::create`], but fails after `limit` if there is one. If the guest creates the container
    /// later all the same, it is removed.
    pub async fn create_within(&self, limit: Option<Duration>, id: &str, guest: Guest) -> Result<()> {
        let Some(limit) = limit else {
            return self.create(id, guest).await;
        };
        let (agent, name) = (self.clone(), id.to_owned());
        let mut creating = tokio::spawn(async move { agent.create(&name, guest).await });
        match tokio::time::timeout(limit, &mut creating).await {
            Ok(Ok(created)) => created,
            Ok(Err(e)) => Err(Error::State(format!("creating container {id} failed: {e}"))),
            Err(_) => {
                let (agent, name) = (self.clone(), id.to_owned());
                tokio::spawn(async move {
                    if let Ok(Ok(())) = creating.await {
                        // If this fails, the container ends with its machine.
                        let _ = agent.remove(&name, CHANGE_LIMIT).await;
                    }
                });
                Err(Error::State(format!(
                    "the guest did not create container {id} within {} s (create_container_timeout)",
                    limit.as_secs()
                )))
            }
        }
    }

    /// Mounts storages for the lifetime of the pod.
    pub async fn mount_pod_storages(&self, storages: Vec<Storage>) -> Result<()> {
        let request = CreateSandboxRequest {
            storages,
            ..Default::default()
        };
        convert(self.0.create_sandbox(Context::default(), &request).await).map(drop)
    }

    async fn copy(&self, file: CopiedFile) -> Result<()> {
        let request = CopyFileRequest {
            path: file.path,
            file_size: i64::try_from(file.data.len()).unwrap_or(i64::MAX),
            file_mode: file.mode,
            dir_mode: 0o755,
            uid: file.uid as i32,
            gid: file.gid as i32,
            offset: 0,
            data: file.data,
            ..Default::default()
        };
        convert(self.0.copy_file(Context::default(), &request).await).map(drop)
    }

    /// Starts a container's program.
    pub async fn start(&self, container: &str) -> Result<()> {
        let request = StartContainerRequest {
            container_id: container.into(),
            ..Default::default()
        };
        convert(self.0.start_container(Context::default(), &request).await).map(drop)
    }

    /// Runs another process in a container.
    pub async fn exec(&self, process: &ProcessId, spec: oci::Process) -> Result<()> {
        let request = ExecProcessRequest {
            container_id: process.container.clone(),
            exec_id: process.exec.clone(),
            process: MessageField::some(spec),
            ..Default::default()
        };
        convert(self.0.exec_process(Context::default(), &request).await).map(drop)
    }

    /// Kills a container's processes and removes it, within `limit`.
    pub async fn remove(&self, container: &str, limit: Duration) -> Result<()> {
        let request = RemoveContainerRequest {
            container_id: container.into(),
            ..Default::default()
        };
        let removed = self.0.remove_container(Context::default(), &request);
        with_limit(limit, || format!("remove container {container}"), removed)
            .await
            .map(drop)
    }

    /// Waits for a process to end. Returns its exit code, or 128 plus the number of the signal that ended it.
    pub async fn wait(&self, process: &ProcessId) -> Result<i32> {
        let request = WaitProcessRequest {
            container_id: process.container.clone(),
            exec_id: process.exec.clone(),
            ..Default::default()
        };
        convert(self.0.wait_process(Context::default(), &request).await).map(|answer| answer.status)
    }

    /// Sends a signal to a process, or with `all` to every process of its container. A hanging guest delivers
    /// it when it continues.
    pub async fn signal(&self, process: &ProcessId, signal: u32, all: bool) -> Result<()> {
        let request = SignalProcessRequest {
            container_id: process.container.clone(),
            exec_id: if all { String::new() } else { process.exec.clone() },
            signal,
            ..Default::default()
        };
        let what = || format!("send signal {signal} to process {}", process.exec);
        let sent = self.0.signal_process(Context::default(), &request);
        with_limit(CALL_LIMIT, what, sent).await.map(drop)
    }

    /// Pauses or resumes a container's processes.
    pub async fn pause(&self, container: &str, paused: bool) -> Result<()> {
        let container_id = container.to_owned();
        match paused {
            true => {
                let request = PauseContainerRequest {
                    container_id,
                    ..Default::default()
                };
                let paused = self.0.pause_container(Context::default(), &request);
                with_limit(CHANGE_LIMIT, || format!("pause container {container}"), paused).await
            }
            false => {
                let request = ResumeContainerRequest {
                    container_id,
                    ..Default::default()
                };
                let resumed = self.0.resume_container(Context::default(), &request);
                with_limit(CHANGE_LIMIT, || format!("resume container {container}"), resumed).await
            }
        }
        .map(drop)
    }

    /// Changes a container's resource limits.
    pub async fn update(&self, container: &str, resources: oci::LinuxResources) -> Result<()> {
        let request = UpdateContainerRequest {
            container_id: container.into(),
            resources: MessageField::some(resources),
            ..Default::default()
        };
        let what = || format!("change the limits of container {container}");
        let updated = self.0.update_container(Context::default(), &request);
        with_limit(CHANGE_LIMIT, what, updated).await.map(drop)
    }

    /// Returns a container's resource usage.
    pub async fn stats(&self, container: &str) -> Result<StatsContainerResponse> {
        let request = StatsContainerRequest {
            container_id: container.into(),
            ..Default::default()
        };
        let what = || format!("report the resource usage of container {container}");
        let stats = self.0.stats_container(Context::default(), &request);
        with_limit(STATS_LIMIT, what, stats).await
    }

    /// Writes all of `data` to a process's stdin.
    pub async fn write_stdin(&self, process: &ProcessId, mut data: &[u8]) -> Result<()> {
        while !data.is_empty() {
            let request = WriteStreamRequest {
                container_id: process.container.clone(),
                exec_id: process.exec.clone(),
                data: data.to_vec(),
                ..Default::default()
            };
            let written = convert(self.0.write_stdin(Context::default(), &request).await)?.len as usize;
            if written == 0 {
                return Err(Error::State("the process takes no more input".into()));
            }
            data = data.get(written..).unwrap_or_default();
        }
        Ok(())
    }

    /// Closes a process's stdin.
    pub async fn close_stdin(&self, process: &ProcessId) -> Result<()> {
        let request = CloseStdinRequest {
            container_id: process.container.clone(),
            exec_id: process.exec.clone(),
            ..Default::default()
        };
        convert(self.0.close_stdin(Context::default(), &request).await).map(drop)
    }

    /// Returns the process's next output as soon as there is any, or `None` at the end of the stream and when
    /// the guest is gone.
    pub async fn read(&self, process: &ProcessId, output: Output) -> Option<Vec<u8>> {
        let request = ReadStreamRequest {
            container_id: process.container.clone(),
            exec_id: process.exec.clone(),
            len: READ_SIZE,
            ..Default::default()
        };
        let answer = match output {
            Output::Stdout => self.0.read_stdout(Context::default(), &request).await,
            Output::Stderr => self.0.read_stderr(Context::default(), &request).await,
        };
        // The agent reports the end of a stream as an error.
        answer
            .ok()
            .map(|answer| answer.data)
            .filter(|data| !data.is_empty())
    }

    /// Sets the size of a process's terminal.
    pub async fn resize(&self, process: &ProcessId, rows: u32, columns: u32) -> Result<()> {
        let request = TtyWinResizeRequest {
            container_id: process.container.clone(),
            exec_id: process.exec.clone(),
            row: rows,
            column: columns,
            ..Default::default()
        };
        let what = || format!("resize the terminal of process {}", process.exec);
        let resized = self.0.tty_win_resize(Context::default(), &request);
        with_limit(CALL_LIMIT, what, resized).await.map(drop)
    }

    /// Waits for the next OOM kill in a container, and returns the container's id.
    pub async fn out_of_memory(&self) -> Result<String> {
        let request = GetOOMEventRequest::default();
        convert(self.0.get_oom_event(Context::default(), &request).await).map(|event| event.container_id)
    }
}

fn convert<T>(answer: ttrpc::Result<T>) -> Result<T> {
    answer.map_err(Error::from_agent)
}

/// Fails with [`Error::Silent`] if there is no answer within `limit`.
async fn with_limit<T>(
    limit: Duration,
    what: impl FnOnce() -> String,
    answer: impl Future<Output = ttrpc::Result<T>>,
) -> Result<T> {
    match tokio::time::timeout(limit, answer).await {
        Ok(answer) => convert(answer),
        Err(_) => Err(Error::Silent { what: what(), limit }),
    }
}

/// Connects by the hybrid-vsock convention: sends `CONNECT <port>\n` and receives `OK <host port>\n` once the
/// guest has accepted.
async fn connect_vsock(vsock: &Path) -> std::io::Result<UnixStream> {
    let mut stream = UnixStream::connect(vsock).await?;
    stream
        .write_all(format!("CONNECT {AGENT_PORT}\n").as_bytes())
        .await?;
    let mut answer = Vec::new();
    // Read byte by byte: what follows the line belongs to the agent's protocol.
    while answer.last() != Some(&b'\n') {
        if answer.len() == MAX_ANSWER {
            return Err(std::io::ErrorKind::InvalidData.into());
        }
        answer.push(stream.read_u8().await?);
    }
    match answer.starts_with(b"OK ") {
        true => Ok(stream),
        false => Err(std::io::ErrorKind::ConnectionRefused.into()),
    }
}
