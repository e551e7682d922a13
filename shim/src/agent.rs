//! The guest's agent: one ttrpc connection a pod, which its containers' calls share. A call that hangs holds nobody else's up:
//! nothing here is locked, and the connection carries as many as are asked. What a guest has to do at once has a limit, so one
//! that has fallen silent is found out; what depends on the container's own program or its files has none.

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

use crate::error::{Error, For, Result};
use crate::spec::{CopiedFile, Guest};

/// How long the guest may take to take a connection: it is ready before thawd says so.
const CONNECT_LIMIT: Duration = Duration::from_secs(60);
/// How long the guest may take for what it does at once.
pub const AT_ONCE_LIMIT: Duration = Duration::from_secs(30);
/// The same, of what a node asks of all its pods, one after another.
pub const STATS_LIMIT: Duration = Duration::from_secs(10);
/// The same, for what waits for a container's processes, or the memory they have.
pub const CHANGE_LIMIT: Duration = Duration::from_secs(60);
/// Bytes asked for at once.
const READ_SIZE: u32 = 64 * 1024;
/// Longest line the VMM answers a connection with.
const MOST_ANSWER: usize = 32;

/// Names one process of the guest: a container's own, whose `exec` is the container's id too, or one of its execs.
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
pub struct Agent(AgentServiceClient, HealthClient);

impl std::fmt::Debug for Agent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Agent")
    }
}

impl Agent {
    /// Connects through the pod's vsock socket.
    pub async fn connect(vsock: &Path) -> Result<Agent> {
        let dialled = tokio::time::timeout(CONNECT_LIMIT, dial(vsock)).await;
        let stream = dialled
            .unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()))
            .for_(|| format!("reach the guest's agent through {}", vsock.display()))?;
        let socket = ttrpc::r#async::transport::Socket::new(Answers::over(stream));
        let client = ttrpc::r#async::Client::new(socket);
        Ok(Agent(
            AgentServiceClient::new(client.clone()),
            HealthClient::new(client),
        ))
    }

    /// Whether it answers anything at all.
    pub async fn answers(&self) -> bool {
        let request = CheckRequest::default();
        let answer = self.1.check(Context::default(), &request);
        let answered = within(AT_ONCE_LIMIT, || "answer".into(), answer).await;
        matches!(answered, Ok(_) | Err(Error::Agent { .. }))
    }

    /// Copies what the container needs, mounts and makes it.
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
        answered(self.0.create_container(Context::default(), &request).await).map(drop)
    }

    /// The same, within `limit` if there is one. What the guest makes later all the same is taken away again.
    pub async fn create_within(&self, limit: Option<Duration>, id: &str, guest: Guest) -> Result<()> {
        let Some(limit) = limit else {
            return self.create(id, guest).await;
        };
        let (agent, name) = (self.clone(), id.to_owned());
        let mut creating = tokio::spawn(async move { agent.create(&name, guest).await });
        match tokio::time::timeout(limit, &mut creating).await {
            Ok(Ok(created)) => created,
            Ok(Err(e)) => Err(Error::State(format!("the making of container {id} failed: {e}"))),
            Err(_) => {
                let (agent, name) = (self.clone(), id.to_owned());
                tokio::spawn(async move {
                    if let Ok(Ok(())) = creating.await {
                        // Else it goes with its machine.
                        let _ = agent.remove(&name, CHANGE_LIMIT).await;
                    }
                });
                Err(Error::State(format!(
                    "the guest did not make container {id} within {} s (create_container_timeout)",
                    limit.as_secs()
                )))
            }
        }
    }

    /// Mounts what lives as long as the pod.
    pub async fn keep(&self, storages: Vec<Storage>) -> Result<()> {
        let request = CreateSandboxRequest {
            storages,
            ..Default::default()
        };
        answered(self.0.create_sandbox(Context::default(), &request).await).map(drop)
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
        answered(self.0.copy_file(Context::default(), &request).await).map(drop)
    }

    /// Executes a container's program.
    pub async fn start(&self, container: &str) -> Result<()> {
        let request = StartContainerRequest {
            container_id: container.into(),
            ..Default::default()
        };
        answered(self.0.start_container(Context::default(), &request).await).map(drop)
    }

    /// Runs another process in a container.
    pub async fn exec(&self, process: &ProcessId, spec: oci::Process) -> Result<()> {
        let request = ExecProcessRequest {
            container_id: process.container.clone(),
            exec_id: process.exec.clone(),
            process: MessageField::some(spec),
            ..Default::default()
        };
        answered(self.0.exec_process(Context::default(), &request).await).map(drop)
    }

    /// Kills what is left of a container and takes it away, within `limit`.
    pub async fn remove(&self, container: &str, limit: Duration) -> Result<()> {
        let request = RemoveContainerRequest {
            container_id: container.into(),
            ..Default::default()
        };
        let removed = self.0.remove_container(Context::default(), &request);
        within(limit, || format!("remove container {container}"), removed)
            .await
            .map(drop)
    }

    /// Waits for a process's end: its exit code, or 128 and the signal's number.
    pub async fn wait(&self, process: &ProcessId) -> Result<i32> {
        let request = WaitProcessRequest {
            container_id: process.container.clone(),
            exec_id: process.exec.clone(),
            ..Default::default()
        };
        answered(self.0.wait_process(Context::default(), &request).await).map(|answer| answer.status)
    }

    /// Sends a signal to a process, or to every one of its container. A guest that is silent takes it when it goes on.
    pub async fn signal(&self, process: &ProcessId, signal: u32, all: bool) -> Result<()> {
        let request = SignalProcessRequest {
            container_id: process.container.clone(),
            exec_id: if all { String::new() } else { process.exec.clone() },
            signal,
            ..Default::default()
        };
        let what = || format!("send signal {signal} to process {}", process.exec);
        let sent = self.0.signal_process(Context::default(), &request);
        within(AT_ONCE_LIMIT, what, sent).await.map(drop)
    }

    /// Stops a container's processes, or lets them go on.
    pub async fn pause(&self, container: &str, paused: bool) -> Result<()> {
        let container_id = container.to_owned();
        match paused {
            true => {
                let request = PauseContainerRequest {
                    container_id,
                    ..Default::default()
                };
                let paused = self.0.pause_container(Context::default(), &request);
                within(CHANGE_LIMIT, || format!("pause container {container}"), paused).await
            }
            false => {
                let request = ResumeContainerRequest {
                    container_id,
                    ..Default::default()
                };
                let resumed = self.0.resume_container(Context::default(), &request);
                within(CHANGE_LIMIT, || format!("resume container {container}"), resumed).await
            }
        }
        .map(drop)
    }

    /// Changes a container's limits.
    pub async fn update(&self, container: &str, resources: oci::LinuxResources) -> Result<()> {
        let request = UpdateContainerRequest {
            container_id: container.into(),
            resources: MessageField::some(resources),
            ..Default::default()
        };
        let what = || format!("change the limits of container {container}");
        let updated = self.0.update_container(Context::default(), &request);
        within(CHANGE_LIMIT, what, updated).await.map(drop)
    }

    /// What a container uses.
    pub async fn stats(&self, container: &str) -> Result<StatsContainerResponse> {
        let request = StatsContainerRequest {
            container_id: container.into(),
            ..Default::default()
        };
        let what = || format!("tell what container {container} uses");
        let told = self.0.stats_container(Context::default(), &request);
        within(STATS_LIMIT, what, told).await
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
            let written = answered(self.0.write_stdin(Context::default(), &request).await)?.len as usize;
            if written == 0 {
                return Err(Error::State("the process takes no more input".into()));
            }
            data = data.get(written..).unwrap_or_default();
        }
        Ok(())
    }

    /// Ends a process's stdin.
    pub async fn close_stdin(&self, process: &ProcessId) -> Result<()> {
        let request = CloseStdinRequest {
            container_id: process.container.clone(),
            exec_id: process.exec.clone(),
            ..Default::default()
        };
        answered(self.0.close_stdin(Context::default(), &request).await).map(drop)
    }

    /// What a process wrote, as soon as there is any; `None` at the end, and when the guest is gone.
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
        // The API's end of a stream is an error.
        answer
            .ok()
            .map(|answer| answer.data)
            .filter(|data| !data.is_empty())
    }

    /// Tells a process's terminal its size.
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
        within(AT_ONCE_LIMIT, what, resized).await.map(drop)
    }

    /// Waits until the kernel has killed something of a container for want of memory: which container.
    pub async fn out_of_memory(&self) -> Result<String> {
        let request = GetOOMEventRequest::default();
        answered(self.0.get_oom_event(Context::default(), &request).await).map(|event| event.container_id)
    }
}

fn answered<T>(answer: ttrpc::Result<T>) -> Result<T> {
    answer.map_err(Error::of_agent)
}

/// The answer, if it comes within `limit`.
async fn within<T>(
    limit: Duration,
    what: impl FnOnce() -> String,
    answer: impl Future<Output = ttrpc::Result<T>>,
) -> Result<T> {
    match tokio::time::timeout(limit, answer).await {
        Ok(answer) => answered(answer),
        Err(_) => Err(Error::Silent { what: what(), limit }),
    }
}

/// The hybrid-vsock convention: `CONNECT <port>\n`, answered by `OK <host port>\n` once the guest has accepted.
async fn dial(vsock: &Path) -> std::io::Result<UnixStream> {
    let mut stream = UnixStream::connect(vsock).await?;
    stream
        .write_all(format!("CONNECT {AGENT_PORT}\n").as_bytes())
        .await?;
    let mut answer = Vec::new();
    // Byte by byte: what follows the line is the agent's.
    while answer.last() != Some(&b'\n') {
        if answer.len() == MOST_ANSWER {
            return Err(std::io::ErrorKind::InvalidData.into());
        }
        answer.push(stream.read_u8().await?);
    }
    match answer.starts_with(b"OK ") {
        true => Ok(stream),
        false => Err(std::io::ErrorKind::ConnectionRefused.into()),
    }
}
