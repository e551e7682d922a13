//! An agent without containers.
//!
//! A process `echo WORDS` writes them and ends; `missing` is not found; any other process returns its input as
//! output until the input ends, and only a signal ends it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use thaw_protocol::agent::Empty;
use thaw_protocol::agent::agent::*;
use thaw_protocol::agent::agent_ttrpc::{AgentService, create_agent_service};
use thaw_protocol::agent::health::{CheckRequest, HealthCheckResponse};
use thaw_protocol::agent::health_ttrpc::{Health, create_health};
use thaw_protocol::agent::mounts::{AddMountsRequest, AddMountsResponse};
use thaw_protocol::agent::mounts_ttrpc::{Mounts, create_mounts};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Notify, mpsc, watch};
use ttrpc::Code;
use ttrpc::r#async::transport::Listener;
use ttrpc::r#async::{Server, TtrpcContext};

use super::{Answer, Rig, refuse};

/// A process without a program.
struct FakeProcess {
    /// Its input, and its own output: the stream that is read ends when both have.
    output: Option<mpsc::UnboundedSender<Vec<u8>>>,
    own: Option<mpsc::UnboundedSender<Vec<u8>>>,
    read: Arc<tokio::sync::Mutex<mpsc::UnboundedReceiver<Vec<u8>>>>,
    exit: watch::Sender<Option<i32>>,
    args: Vec<String>,
}

impl FakeProcess {
    fn new(args: Vec<String>) -> FakeProcess {
        let (output, read) = mpsc::unbounded_channel();
        FakeProcess {
            own: Some(output.clone()),
            output: Some(output),
            read: Arc::new(read.into()),
            exit: watch::Sender::new(None),
            args,
        }
    }

    fn begin(&mut self) -> Answer<Empty> {
        match self.args[0].as_str() {
            "missing" => {
                self.end(1);
                return refuse(Code::NOT_FOUND, "exec: \"missing\": not found");
            }
            "echo" => {
                let line = format!("{}\n", self.args[1..].join(" "));
                self.own.as_ref().unwrap().send(line.into()).unwrap();
                self.end(0);
            }
            _ => self.own = None,
        }
        Ok(Empty::new())
    }

    fn end(&mut self, status: i32) {
        (self.output, self.own) = (None, None);
        self.exit.send_replace(Some(status));
    }
}

/// An agent without containers.
#[derive(Default)]
pub struct FakeAgent {
    processes: Mutex<BTreeMap<(String, String), FakeProcess>>,
    /// Containers whose calls are not answered until [`FakeAgent::release`].
    pub hung: Mutex<BTreeSet<String>>,
    released: Notify,
    /// Whether it reports signals as sent and ignores them.
    pub lies: AtomicBool,
    /// Whether removing a container fails because it is unknown.
    pub has_removed: AtomicBool,
    pub heard: Mutex<Vec<String>>,
    pub created: Mutex<Vec<CreateContainerRequest>>,
    /// What was mounted into running containers.
    pub added: Mutex<Vec<AddMountsRequest>>,
    /// The pod's storages.
    pub kept: Mutex<Vec<Storage>>,
    ooms: Mutex<Option<mpsc::UnboundedSender<String>>>,
    oom: tokio::sync::Mutex<Option<mpsc::UnboundedReceiver<String>>>,
}

impl FakeAgent {
    pub fn new() -> FakeAgent {
        let (ooms, oom) = mpsc::unbounded_channel();
        FakeAgent {
            ooms: Mutex::new(Some(ooms)),
            oom: tokio::sync::Mutex::new(Some(oom)),
            ..Default::default()
        }
    }

    async fn hear(&self, call: &str, container: &str) {
        self.heard.lock().unwrap().push(format!("{call} {container}"));
        loop {
            let released = self.released.notified();
            if !self.hung.lock().unwrap().contains(container) {
                return;
            }
            released.await;
        }
    }

    /// Answers the hanging calls of a container.
    pub fn release(&self, container: &str) {
        self.hung.lock().unwrap().remove(container);
        self.released.notify_waiters();
    }

    fn with<T>(
        &self,
        container: &str,
        exec: &str,
        act: impl FnOnce(&mut FakeProcess) -> Answer<T>,
    ) -> Answer<T> {
        let mut processes = self.processes.lock().unwrap();
        match processes.get_mut(&(container.to_owned(), exec.to_owned())) {
            Some(process) => act(process),
            None => refuse(Code::INVALID_ARGUMENT, "there is no such process"),
        }
    }

    /// Ends a container's process as the OOM killer does.
    pub fn run_out_of_memory(&self, container: &str) {
        self.say_out_of_memory(container);
        let _ = self.with(container, container, |process| {
            process.end(137);
            Ok(())
        });
    }

    /// Reports that a container ran out of memory.
    pub fn say_out_of_memory(&self, container: &str) {
        let ooms = self.ooms.lock().unwrap();
        ooms.as_ref().unwrap().send(container.into()).unwrap();
    }

    /// Adds a running container, as one that was restored with its machine.
    pub fn came_with(&self, container: &str) {
        let mut process = FakeProcess::new(vec!["cat".into()]);
        process.begin().unwrap();
        let key = (container.to_owned(), container.to_owned());
        self.processes.lock().unwrap().insert(key, process);
    }

    async fn read(&self, r: ReadStreamRequest) -> Answer<ReadStreamResponse> {
        let read = self.with(&r.container_id, &r.exec_id, |process| Ok(process.read.clone()))?;
        match read.lock().await.recv().await {
            Some(data) => Ok(ReadStreamResponse {
                data,
                ..Default::default()
            }),
            None => refuse(Code::OUT_OF_RANGE, "eof"),
        }
    }
}

#[async_trait]
impl AgentService for FakeAgent {
    async fn create_container(&self, _: &TtrpcContext, r: CreateContainerRequest) -> Answer<Empty> {
        self.hear("create", &r.container_id).await;
        let args = r.OCI.Process.Args.clone();
        let key = (r.container_id.clone(), r.exec_id.clone());
        self.processes.lock().unwrap().insert(key, FakeProcess::new(args));
        self.created.lock().unwrap().push(r);
        Ok(Empty::new())
    }

    async fn start_container(&self, _: &TtrpcContext, r: StartContainerRequest) -> Answer<Empty> {
        self.hear("start", &r.container_id).await;
        self.with(&r.container_id, &r.container_id, FakeProcess::begin)
    }

    async fn exec_process(&self, _: &TtrpcContext, r: ExecProcessRequest) -> Answer<Empty> {
        self.hear("exec", &r.container_id).await;
        let mut process = FakeProcess::new(r.process.Args.clone());
        let begun = process.begin();
        let key = (r.container_id, r.exec_id);
        match self.processes.lock().unwrap().insert(key, process) {
            None => begun,
            Some(_) => refuse(Code::FAILED_PRECONDITION, "that exec was there before"),
        }
    }

    async fn remove_container(&self, _: &TtrpcContext, r: RemoveContainerRequest) -> Answer<Empty> {
        self.hear("remove", &r.container_id).await;
        if self.has_removed.load(Ordering::Relaxed) {
            return refuse(Code::INVALID_ARGUMENT, "there is no such container");
        }
        let mut processes = self.processes.lock().unwrap();
        processes.retain(|(container, _), _| *container != r.container_id);
        Ok(Empty::new())
    }

    async fn signal_process(&self, _: &TtrpcContext, r: SignalProcessRequest) -> Answer<Empty> {
        self.hear("signal", &r.container_id).await;
        if self.lies.load(Ordering::Relaxed) {
            return Ok(Empty::new());
        }
        let exec = match r.exec_id.as_str() {
            "" => &r.container_id,
            exec => exec,
        };
        self.with(&r.container_id, exec, |process| {
            process.end(128 + r.signal as i32);
            Ok(Empty::new())
        })
    }

    async fn wait_process(&self, _: &TtrpcContext, r: WaitProcessRequest) -> Answer<WaitProcessResponse> {
        let mut exit = self.with(&r.container_id, &r.exec_id, |process| {
            Ok(process.exit.subscribe())
        })?;
        let status = exit.wait_for(Option::is_some).await.map(|status| *status);
        match status {
            Ok(Some(status)) => Ok(WaitProcessResponse {
                status,
                ..Default::default()
            }),
            _ => std::future::pending().await,
        }
    }

    async fn write_stdin(&self, _: &TtrpcContext, r: WriteStreamRequest) -> Answer<WriteStreamResponse> {
        let len = r.data.len() as u32;
        self.with(&r.container_id, &r.exec_id, |process| match &process.output {
            Some(output) => {
                let _ = output.send(r.data);
                Ok(())
            }
            None => refuse(Code::FAILED_PRECONDITION, "the process takes no more"),
        })?;
        Ok(WriteStreamResponse {
            len,
            ..Default::default()
        })
    }

    async fn close_stdin(&self, _: &TtrpcContext, r: CloseStdinRequest) -> Answer<Empty> {
        self.hear("close", &r.container_id).await;
        self.with(&r.container_id, &r.exec_id, |process| {
            process.output = None;
            Ok(Empty::new())
        })
    }

    async fn read_stdout(&self, _: &TtrpcContext, r: ReadStreamRequest) -> Answer<ReadStreamResponse> {
        self.read(r).await
    }

    async fn read_stderr(&self, _: &TtrpcContext, _: ReadStreamRequest) -> Answer<ReadStreamResponse> {
        refuse(Code::OUT_OF_RANGE, "eof")
    }

    async fn pause_container(&self, _: &TtrpcContext, r: PauseContainerRequest) -> Answer<Empty> {
        self.hear("pause", &r.container_id).await;
        self.with(&r.container_id, &r.container_id, |_| Ok(Empty::new()))
    }

    async fn resume_container(&self, _: &TtrpcContext, r: ResumeContainerRequest) -> Answer<Empty> {
        self.hear("resume", &r.container_id).await;
        Ok(Empty::new())
    }

    async fn stats_container(
        &self,
        _: &TtrpcContext,
        r: StatsContainerRequest,
    ) -> Answer<StatsContainerResponse> {
        self.hear("stats", &r.container_id).await;
        Ok(StatsContainerResponse::new())
    }

    async fn update_container(&self, _: &TtrpcContext, r: UpdateContainerRequest) -> Answer<Empty> {
        self.hear(&format!("update {}", r.resources.Memory.Limit), &r.container_id)
            .await;
        Ok(Empty::new())
    }

    async fn create_sandbox(&self, _: &TtrpcContext, r: CreateSandboxRequest) -> Answer<Empty> {
        self.kept.lock().unwrap().extend(r.storages);
        Ok(Empty::new())
    }

    async fn copy_file(&self, _: &TtrpcContext, r: CopyFileRequest) -> Answer<Empty> {
        self.hear("copy", &r.path).await;
        Ok(Empty::new())
    }

    async fn get_oom_event(&self, _: &TtrpcContext, _: GetOOMEventRequest) -> Answer<OOMEvent> {
        let mut oom = self.oom.lock().await;
        match oom.as_mut().unwrap().recv().await {
            Some(container_id) => Ok(OOMEvent {
                container_id,
                ..Default::default()
            }),
            None => std::future::pending().await,
        }
    }
}

#[async_trait]
impl Health for FakeAgent {
    async fn check(&self, _: &TtrpcContext, _: CheckRequest) -> Answer<HealthCheckResponse> {
        self.hear("check", Rig::HEALTH).await;
        Ok(HealthCheckResponse::new())
    }
}

#[async_trait]
impl Mounts for FakeAgent {
    async fn add(&self, _: &TtrpcContext, r: AddMountsRequest) -> Answer<AddMountsResponse> {
        self.hear("mount", &r.container_id).await;
        if r.mounts.iter().any(|mount| mount.destination == "/refused") {
            return refuse(Code::INTERNAL, "it is refused");
        }
        self.added.lock().unwrap().push(r);
        Ok(AddMountsResponse::new())
    }
}

/// Answers as the VMM does, then passes the connection to the agent.
pub async fn serve(path: &Path, agent: Arc<FakeAgent>) -> Server {
    let listener = UnixListener::bind(path).unwrap();
    let (accepted, connections) = mpsc::channel::<std::io::Result<UnixStream>>(8);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut line = Vec::new();
            while line.last() != Some(&b'\n') {
                line.push(stream.read_u8().await.unwrap());
            }
            assert_eq!(line, b"CONNECT 1024\n");
            stream.write_all(b"OK 5\n").await.unwrap();
            accepted.send(Ok(stream)).await.unwrap();
        }
    });
    let connections = futures_util::stream::unfold(connections, |mut connections| async move {
        Some((connections.recv().await?, connections))
    });
    let mut server = Server::new()
        .add_listener(Listener::new(connections))
        .register_service(create_agent_service(agent.clone()))
        .register_service(create_mounts(agent.clone()))
        .register_service(create_health(agent));
    server.start().await.unwrap();
    server
}
