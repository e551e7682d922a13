//! Client of the guest's agent: ttrpc over one vsock connection, which all calls share.
//!
//! Invariant: a call that hangs delays no other, because nothing here is locked and the connection carries any
//! number of calls. Calls have no time limit: [`AgentClient::wait`] lasts as long as its process. Callers set
//! limits and convert errors. When the machine ends, the connection does, and every call on it fails.

use thaw_protocol::agent::agent::{
    CloseStdinRequest, CopyFileRequest, CreateContainerRequest, CreateSandboxRequest, ExecProcessRequest,
    GetOOMEventRequest, PauseContainerRequest, ReadStreamRequest, RemoveContainerRequest,
    ResumeContainerRequest, SignalProcessRequest, StartContainerRequest, StatsContainerRequest,
    StatsContainerResponse, Storage, TtyWinResizeRequest, UpdateContainerRequest, WaitProcessRequest,
    WriteStreamRequest,
};
use thaw_protocol::agent::agent_ttrpc::AgentServiceClient;
use thaw_protocol::agent::answers::Answers;
use thaw_protocol::agent::files::{
    FileInfo, ListRequest, ListResponse, MakeDirectoryRequest, MoveRequest, NextEventsRequest,
    NextEventsResponse, NextPieceRequest, PackRequest, ReadFileRequest, ReadFileResponse, RemoveRequest,
    StatRequest, UnpackRequest, WatchRequest, WriteFileRequest,
};
use thaw_protocol::agent::files_ttrpc::FilesClient;
use thaw_protocol::agent::health::CheckRequest;
use thaw_protocol::agent::health_ttrpc::HealthClient;
use thaw_protocol::agent::hooks::{RunHookRequest, RunHookResponse};
use thaw_protocol::agent::hooks_ttrpc::HooksClient;
use thaw_protocol::agent::mounts::AddMountsRequest;
use thaw_protocol::agent::mounts_ttrpc::MountsClient;
use thaw_protocol::agent::processes::{
    KeepProcessRequest, ListProcessesRequest, ProcessInfo, ProcessOutputRequest, ProcessOutputResponse,
};
use thaw_protocol::agent::processes_ttrpc::ProcessesClient;
use thaw_protocol::agent::readiness::{ExpectReadyRequest, WaitReadyRequest, WaitReadyResponse};
use thaw_protocol::agent::readiness_ttrpc::ReadinessClient;
use thaw_protocol::agent::{MessageField, oci};
use tokio::net::UnixStream;
use ttrpc::Result;
use ttrpc::context::Context;

/// Bytes requested per read: as many as the agent returns at once. A read takes a round trip to the guest, whatever its size, so the rate of
/// output is this size by the time of a round trip.
pub const READ_SIZE: u32 = 256 * 1024;

/// Names one process of the guest: a container's init process, whose `exec` equals the container's id, or an
/// exec.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessId {
    pub container: String,
    pub exec: String,
}

/// An output stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    Stdout,
    Stderr,
}

/// A connection to the agent. Clones share it.
#[derive(Clone)]
pub struct AgentClient {
    agent: AgentServiceClient,
    files: FilesClient,
    health: HealthClient,
    hooks: HooksClient,
    mounts: MountsClient,
    processes: ProcessesClient,
    readiness: ReadinessClient,
}

impl std::fmt::Debug for AgentClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AgentClient")
    }
}

impl AgentClient {
    /// Uses a stream that is connected to the agent's port. Must be called within the runtime.
    pub fn over(stream: UnixStream) -> AgentClient {
        let socket = ttrpc::r#async::transport::Socket::new(Answers::over(stream));
        let client = ttrpc::r#async::Client::new(socket);
        AgentClient {
            agent: AgentServiceClient::new(client.clone()),
            files: FilesClient::new(client.clone()),
            health: HealthClient::new(client.clone()),
            hooks: HooksClient::new(client.clone()),
            mounts: MountsClient::new(client.clone()),
            processes: ProcessesClient::new(client.clone()),
            readiness: ReadinessClient::new(client),
        }
    }

    /// Asks whether the agent answers.
    pub async fn check(&self) -> Result<()> {
        let request = CheckRequest::default();
        self.health.check(Context::default(), &request).await.map(drop)
    }

    /// Mounts storages for the lifetime of the sandbox.
    pub async fn create_sandbox(&self, storages: Vec<Storage>) -> Result<()> {
        let request = CreateSandboxRequest {
            storages,
            ..Default::default()
        };
        self.agent
            .create_sandbox(Context::default(), &request)
            .await
            .map(drop)
    }

    /// Replaces the guest's name servers.
    pub async fn set_name_servers(&self, servers: Vec<String>) -> Result<()> {
        let request = CreateSandboxRequest {
            dns: servers,
            ..Default::default()
        };
        self.agent
            .create_sandbox(Context::default(), &request)
            .await
            .map(drop)
    }

    /// Mounts storages, and binds paths of the guest into a container that runs.
    pub async fn add_mounts(
        &self,
        container: &str,
        storages: Vec<Storage>,
        mounts: Vec<oci::Mount>,
    ) -> Result<()> {
        let request = AddMountsRequest {
            container_id: container.into(),
            storages,
            mounts,
            ..Default::default()
        };
        self.mounts.add(Context::default(), &request).await.map(drop)
    }

    /// Copies a file, or a part of it, into the guest.
    pub async fn copy_file(&self, request: &CopyFileRequest) -> Result<()> {
        self.agent.copy_file(Context::default(), request).await.map(drop)
    }

    /// Mounts a container's storages and makes it ready to start.
    pub async fn create(&self, request: &CreateContainerRequest) -> Result<()> {
        self.agent
            .create_container(Context::default(), request)
            .await
            .map(drop)
    }

    /// Starts a container's program.
    pub async fn start(&self, container: &str) -> Result<()> {
        let request = StartContainerRequest {
            container_id: container.into(),
            ..Default::default()
        };
        self.agent
            .start_container(Context::default(), &request)
            .await
            .map(drop)
    }

    /// Runs another process in a container.
    pub async fn exec(&self, request: &ExecProcessRequest) -> Result<()> {
        self.agent
            .exec_process(Context::default(), request)
            .await
            .map(drop)
    }

    /// Kills a container's processes and removes it.
    pub async fn remove(&self, container: &str) -> Result<()> {
        let request = RemoveContainerRequest {
            container_id: container.into(),
            ..Default::default()
        };
        self.agent
            .remove_container(Context::default(), &request)
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
        let answer = self.agent.wait_process(Context::default(), &request).await?;
        Ok(answer.status)
    }

    /// Sends a signal to a process.
    pub async fn signal(&self, process: &ProcessId, signal: u32) -> Result<()> {
        self.send_signal(&process.container, &process.exec, signal).await
    }

    /// Sends a signal to every process of a container.
    pub async fn signal_all(&self, container: &str, signal: u32) -> Result<()> {
        self.send_signal(container, "", signal).await
    }

    async fn send_signal(&self, container: &str, exec: &str, signal: u32) -> Result<()> {
        let request = SignalProcessRequest {
            container_id: container.into(),
            exec_id: exec.into(),
            signal,
            ..Default::default()
        };
        self.agent
            .signal_process(Context::default(), &request)
            .await
            .map(drop)
    }

    /// Pauses a container's processes.
    pub async fn pause(&self, container: &str) -> Result<()> {
        let request = PauseContainerRequest {
            container_id: container.into(),
            ..Default::default()
        };
        self.agent
            .pause_container(Context::default(), &request)
            .await
            .map(drop)
    }

    /// Resumes a container's processes.
    pub async fn resume(&self, container: &str) -> Result<()> {
        let request = ResumeContainerRequest {
            container_id: container.into(),
            ..Default::default()
        };
        self.agent
            .resume_container(Context::default(), &request)
            .await
            .map(drop)
    }

    /// Changes a container's resource limits.
    pub async fn update(&self, container: &str, resources: oci::LinuxResources) -> Result<()> {
        let request = UpdateContainerRequest {
            container_id: container.into(),
            resources: MessageField::some(resources),
            ..Default::default()
        };
        self.agent
            .update_container(Context::default(), &request)
            .await
            .map(drop)
    }

    /// Returns a container's resource usage.
    pub async fn stats(&self, container: &str) -> Result<StatsContainerResponse> {
        let request = StatsContainerRequest {
            container_id: container.into(),
            ..Default::default()
        };
        self.agent.stats_container(Context::default(), &request).await
    }

    /// Waits for the next OOM kill in a container, and returns the container's id.
    pub async fn out_of_memory(&self) -> Result<String> {
        let request = GetOOMEventRequest::default();
        let event = self.agent.get_oom_event(Context::default(), &request).await?;
        Ok(event.container_id)
    }
}

/// A process's streams.
impl AgentClient {
    /// Writes all of `data` to a process's stdin.
    pub async fn write_stdin(&self, process: &ProcessId, mut data: &[u8]) -> Result<()> {
        while !data.is_empty() {
            let request = WriteStreamRequest {
                container_id: process.container.clone(),
                exec_id: process.exec.clone(),
                data: data.to_vec(),
                ..Default::default()
            };
            let written = self.agent.write_stdin(Context::default(), &request).await?.len as usize;
            if written == 0 {
                return Err(ttrpc::Error::Others("the agent takes no more input".into()));
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
        self.agent
            .close_stdin(Context::default(), &request)
            .await
            .map(drop)
    }

    /// Returns a process's next output as soon as there is any, or `None` at the end of the stream and when
    /// the guest is gone.
    pub async fn read(&self, process: &ProcessId, output: Output) -> Option<Vec<u8>> {
        let request = ReadStreamRequest {
            container_id: process.container.clone(),
            exec_id: process.exec.clone(),
            len: READ_SIZE,
            ..Default::default()
        };
        let answer = match output {
            Output::Stdout => self.agent.read_stdout(Context::default(), &request).await,
            Output::Stderr => self.agent.read_stderr(Context::default(), &request).await,
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
        self.agent
            .tty_win_resize(Context::default(), &request)
            .await
            .map(drop)
    }
}

/// Thaw's extensions of Kata's API: readiness probes, hooks, processes and files.
impl AgentClient {
    /// Watches what a container that is not started yet will listen on.
    pub async fn expect_ready(&self, request: &ExpectReadyRequest) -> Result<()> {
        self.readiness.expect(Context::default(), request).await.map(drop)
    }

    /// Waits until a started container is ready, has ended, or the request's time is over.
    pub async fn wait_ready(&self, request: &WaitReadyRequest) -> Result<WaitReadyResponse> {
        self.readiness.wait(Context::default(), request).await
    }

    /// Runs a hook in a started container, and returns how it ended.
    pub async fn run_hook(&self, request: &RunHookRequest) -> Result<RunHookResponse> {
        self.hooks.run(Context::default(), request).await
    }

    /// Lists the processes that were started in a container.
    pub async fn processes(&self, container: &str) -> Result<Vec<ProcessInfo>> {
        let request = ListProcessesRequest {
            container_id: container.into(),
            ..Default::default()
        };
        let answer = self.processes.list(Context::default(), &request).await?;
        Ok(answer.processes)
    }

    /// Has the agent read the output of a process from here on, and keep the end of it.
    pub async fn keep(&self, process: &ProcessId) -> Result<()> {
        let request = KeepProcessRequest {
            container_id: process.container.clone(),
            exec_id: process.exec.clone(),
            ..Default::default()
        };
        self.processes.keep(Context::default(), &request).await.map(drop)
    }

    /// The next output of a kept process.
    pub async fn output(&self, request: &ProcessOutputRequest) -> Result<ProcessOutputResponse> {
        self.processes.output(Context::default(), request).await
    }

    /// Reads a part of a container's file.
    pub async fn read_file(&self, request: &ReadFileRequest) -> Result<ReadFileResponse> {
        self.files.read(Context::default(), request).await
    }

    /// Writes a part of a container's file.
    pub async fn write_file(&self, request: &WriteFileRequest) -> Result<()> {
        self.files.write(Context::default(), request).await.map(drop)
    }

    /// Looks at a file of a container.
    pub async fn stat(&self, request: &StatRequest) -> Result<FileInfo> {
        let answer = self.files.stat(Context::default(), request).await?;
        Ok(answer.info.unwrap_or_default())
    }

    /// Lists a page of a directory of a container.
    pub async fn list(&self, request: &ListRequest) -> Result<ListResponse> {
        self.files.list(Context::default(), request).await
    }

    /// Makes a directory in a container.
    pub async fn make_directory(&self, request: &MakeDirectoryRequest) -> Result<()> {
        self.files
            .make_directory(Context::default(), request)
            .await
            .map(drop)
    }

    /// Renames a file or a directory of a container.
    pub async fn move_file(&self, request: &MoveRequest) -> Result<()> {
        self.files.rename(Context::default(), request).await.map(drop)
    }

    /// Removes a file or a directory of a container.
    pub async fn remove_file(&self, request: &RemoveRequest) -> Result<()> {
        self.files.remove(Context::default(), request).await.map(drop)
    }

    /// Begins to pack a file or directory of a container.
    pub async fn pack(&self, request: &PackRequest) -> Result<()> {
        self.files.pack(Context::default(), request).await.map(drop)
    }

    /// The next piece of what is packed; empty at the end.
    pub async fn next_piece(&self, transfer: &str) -> Result<Vec<u8>> {
        let request = NextPieceRequest {
            transfer: transfer.into(),
            ..Default::default()
        };
        let answer = self.files.next_piece(Context::default(), &request).await?;
        Ok(answer.data)
    }

    /// Sends a piece of an archive that is unpacked in a container.
    pub async fn unpack(&self, request: &UnpackRequest) -> Result<()> {
        self.files.unpack(Context::default(), request).await.map(drop)
    }

    /// Forgets a transfer of an archive, in either direction.
    pub async fn abandon_transfer(&self, transfer: &str) -> Result<()> {
        let request = NextPieceRequest {
            transfer: transfer.into(),
            abandon: true,
            ..Default::default()
        };
        self.files
            .next_piece(Context::default(), &request)
            .await
            .map(drop)
    }

    /// Begins to watch a directory of a container.
    pub async fn watch(&self, request: &WatchRequest) -> Result<()> {
        self.files.watch(Context::default(), request).await.map(drop)
    }

    /// The next events of a watch. Waits for them, at most 30 s.
    pub async fn next_events(&self, watch: &str) -> Result<NextEventsResponse> {
        let request = NextEventsRequest {
            watch: watch.into(),
            ..Default::default()
        };
        self.files.next_events(Context::default(), &request).await
    }

    /// Forgets a watch.
    pub async fn abandon_watch(&self, watch: &str) -> Result<()> {
        let request = NextEventsRequest {
            watch: watch.into(),
            abandon: true,
            ..Default::default()
        };
        self.files
            .next_events(Context::default(), &request)
            .await
            .map(drop)
    }
}
