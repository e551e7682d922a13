//! The pod's connection to the guest's agent, which the calls of all its containers share: sets time limits and
//! converts errors.
//!
//! A call that the guest answers promptly has a time limit, so that a hanging guest is detected. A call that
//! depends on the container's program or files has none.

use std::future::Future;
use std::path::Path;
use std::time::Duration;

pub use thaw_agent_client::{Output, ProcessId};

use thaw_agent_client::AgentClient;
use thaw_protocol::agent::agent::{
    CopyFileRequest, CreateContainerRequest, ExecProcessRequest, StatsContainerResponse, Storage,
};
use thaw_protocol::agent::{MessageField, oci};
use thaw_protocol::handshake::AGENT_PORT;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use ttrpc::Code;

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
/// The end of the message with which ttrpc refuses a call of a service that the agent lacks.
const NO_SERVICE: &str = "service does not exist";
/// Longest line with which the VMM answers a `CONNECT`, in bytes.
const MAX_ANSWER: usize = 32;

/// A connection to the agent. Clones share it.
#[derive(Clone, Debug)]
pub struct Agent(AgentClient);

impl Agent {
    /// Connects through the pod's vsock socket.
    pub async fn connect(vsock: &Path) -> Result<Agent> {
        let connected = tokio::time::timeout(CONNECT_LIMIT, connect_vsock(vsock)).await;
        let stream = connected
            .unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()))
            .with_context(|| format!("reach the guest's agent through {}", vsock.display()))?;
        Ok(Agent(AgentClient::over(stream)))
    }

    /// Whether the agent answers calls.
    pub async fn answers(&self) -> bool {
        let answered = with_limit(CALL_LIMIT, || "answer".into(), self.0.check()).await;
        matches!(answered, Ok(()) | Err(Error::Agent { .. }))
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
        self.0.create(&request).await.map_err(Error::from_agent)
    }

    /// As [`Agent::create`], but fails after `limit` if there is one. If the guest creates the container after the limit, it is removed.
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

    /// Mounts storages, and paths of the guest into a container that runs or is paused.
    pub async fn add_mounts(&self, container: &str, guest: Guest) -> Result<()> {
        let what = || format!("mount volumes into container {container}");
        let adding = self.0.add_mounts(container, guest.storages, guest.spec.Mounts);
        let added = with_limit(CHANGE_LIMIT, what, adding).await;
        added.map_err(|e| match e {
            Error::Agent {
                code: Code::INVALID_ARGUMENT,
                message,
            } if message.ends_with(NO_SERVICE) => Error::Unsupported(
                "the pod's volumes: the snapshot is of a release whose guests cannot mount into a container that runs; freeze it again, or \
                 leave the volumes out (a service account's token: automountServiceAccountToken: false)"
                    .into(),
            ),
            other => other,
        })
    }

    /// Mounts storages for the lifetime of the pod.
    pub async fn mount_pod_storages(&self, storages: Vec<Storage>) -> Result<()> {
        self.0.create_sandbox(storages).await.map_err(Error::from_agent)
    }

    /// Replaces the name servers of the guest, and so of a thawed container.
    pub async fn set_name_servers(&self, servers: Vec<String>) -> Result<()> {
        let what = || "set its name servers".into();
        with_limit(CALL_LIMIT, what, self.0.set_name_servers(servers)).await
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
        self.0.copy_file(&request).await.map_err(Error::from_agent)
    }

    /// Starts a container's program.
    pub async fn start(&self, container: &str) -> Result<()> {
        self.0.start(container).await.map_err(Error::from_agent)
    }

    /// Runs another process in a container.
    pub async fn exec(&self, process: &ProcessId, spec: oci::Process) -> Result<()> {
        let request = ExecProcessRequest {
            container_id: process.container.clone(),
            exec_id: process.exec.clone(),
            process: MessageField::some(spec),
            ..Default::default()
        };
        self.0.exec(&request).await.map_err(Error::from_agent)
    }

    /// Kills a container's processes and removes it, within `limit`.
    pub async fn remove(&self, container: &str, limit: Duration) -> Result<()> {
        let what = || format!("remove container {container}");
        with_limit(limit, what, self.0.remove(container)).await
    }

    /// Waits for a process to end. Returns its exit code, or 128 plus the number of the signal that ended it.
    pub async fn wait(&self, process: &ProcessId) -> Result<i32> {
        self.0.wait(process).await.map_err(Error::from_agent)
    }

    /// Sends a signal to a process, or with `all` to every process of its container. A hanging guest delivers
    /// it when it continues.
    pub async fn signal(&self, process: &ProcessId, signal: u32, all: bool) -> Result<()> {
        let what = || format!("send signal {signal} to process {}", process.exec);
        match all {
            true => with_limit(CALL_LIMIT, what, self.0.signal_all(&process.container, signal)).await,
            false => with_limit(CALL_LIMIT, what, self.0.signal(process, signal)).await,
        }
    }

    /// Pauses or resumes a container's processes.
    pub async fn pause(&self, container: &str, paused: bool) -> Result<()> {
        match paused {
            true => {
                let what = || format!("pause container {container}");
                with_limit(CHANGE_LIMIT, what, self.0.pause(container)).await
            }
            false => {
                let what = || format!("resume container {container}");
                with_limit(CHANGE_LIMIT, what, self.0.resume(container)).await
            }
        }
    }

    /// Changes a container's resource limits.
    pub async fn update(&self, container: &str, resources: oci::LinuxResources) -> Result<()> {
        let what = || format!("change the limits of container {container}");
        with_limit(CHANGE_LIMIT, what, self.0.update(container, resources)).await
    }

    /// Returns a container's resource usage.
    pub async fn stats(&self, container: &str) -> Result<StatsContainerResponse> {
        let what = || format!("report the resource usage of container {container}");
        with_limit(STATS_LIMIT, what, self.0.stats(container)).await
    }

    /// Writes all of `data` to a process's stdin.
    pub async fn write_stdin(&self, process: &ProcessId, data: &[u8]) -> Result<()> {
        self.0.write_stdin(process, data).await.map_err(Error::from_agent)
    }

    /// Closes a process's stdin.
    pub async fn close_stdin(&self, process: &ProcessId) -> Result<()> {
        self.0.close_stdin(process).await.map_err(Error::from_agent)
    }

    /// Returns the process's next output as soon as there is any, or `None` at the end of the stream and when
    /// the guest is gone.
    pub async fn read(&self, process: &ProcessId, output: Output) -> Option<Vec<u8>> {
        self.0.read(process, output).await
    }

    /// Sets the size of a process's terminal.
    pub async fn resize(&self, process: &ProcessId, rows: u32, columns: u32) -> Result<()> {
        let what = || format!("resize the terminal of process {}", process.exec);
        with_limit(CALL_LIMIT, what, self.0.resize(process, rows, columns)).await
    }

    /// Waits for the next OOM kill in a container, and returns the container's id.
    pub async fn out_of_memory(&self) -> Result<String> {
        self.0.out_of_memory().await.map_err(Error::from_agent)
    }
}

/// Fails with [`Error::Silent`] if there is no answer within `limit`.
async fn with_limit<T>(
    limit: Duration,
    what: impl FnOnce() -> String,
    answer: impl Future<Output = ttrpc::Result<T>>,
) -> Result<T> {
    match tokio::time::timeout(limit, answer).await {
        Ok(answer) => answer.map_err(Error::from_agent),
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
    // Read byte by byte, because the bytes after the line belong to the agent's protocol.
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
