//! A shim among fakes: a thawd whose microVMs are none, an agent whose processes are none, a containerd that hears events.
//!
//! A process `echo WORDS` writes them and ends; `missing` is not found; any other gives back what it is told, to the end of its
//! input, and ends by signals only.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use thaw_protocol::agent::Empty;
use thaw_protocol::agent::agent::{self, *};
use thaw_protocol::agent::agent_ttrpc::{AgentService, create_agent_service};
use thaw_protocol::agent::health::{CheckRequest, HealthCheckResponse};
use thaw_protocol::agent::health_ttrpc::{Health, create_health};
use thaw_protocol::shim::MessageField;
use thaw_protocol::shim::events::ForwardRequest;
use thaw_protocol::shim::events_ttrpc::{Events, create_events};
use thaw_protocol::shim::mount::Mount;
use thaw_protocol::shim::pods::*;
use thaw_protocol::shim::pods_ttrpc::{Pods, create_pods};
use thaw_protocol::shim::sandbox_ttrpc::SandboxClient;
use thaw_protocol::shim::task::{
    CreateTaskRequest, DeleteRequest, ExecProcessRequest, KillRequest, ShutdownRequest, StartRequest,
    StateRequest, StateResponse, WaitRequest,
};
use thaw_protocol::shim::task_events::*;
use thaw_protocol::shim::task_ttrpc::TaskClient;
use thaw_protocol::shim::{Any, Message};
use thaw_protocol::versions::PODS;
use thaw_shim::arguments::{Action, Arguments};
use thaw_shim::error::Result as ShimResult;
use thaw_shim::events::Publisher;
use thaw_shim::pod::Pod;
use thaw_shim::serve::serve;
use thaw_shim::thawd::Thawd;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Notify, mpsc, watch};
use ttrpc::r#async::transport::Listener;
use ttrpc::r#async::{Client, Server, TtrpcContext};
use ttrpc::context::Context;
use ttrpc::{Code, Error, get_status};

type Answer<T> = ttrpc::Result<T>;

fn refuse<T>(code: Code, what: &str) -> Answer<T> {
    Err(Error::RpcStatus(get_status(code, what)))
}

/// A process that is none.
struct Told {
    /// What it is told, and what it says of its own: its output ends with both.
    output: Option<mpsc::UnboundedSender<Vec<u8>>>,
    own: Option<mpsc::UnboundedSender<Vec<u8>>>,
    read: Arc<tokio::sync::Mutex<mpsc::UnboundedReceiver<Vec<u8>>>>,
    exit: watch::Sender<Option<i32>>,
    args: Vec<String>,
}

impl Told {
    fn new(args: Vec<String>) -> Told {
        let (output, read) = mpsc::unbounded_channel();
        Told {
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

/// An agent that is none.
#[derive(Default)]
pub struct FakeAgent {
    processes: Mutex<BTreeMap<(String, String), Told>>,
    /// Containers whose calls are not answered, until they are released.
    pub hung: Mutex<BTreeSet<String>>,
    released: Notify,
    /// Whether it says that it has sent a signal, and does not.
    pub lies: AtomicBool,
    /// Whether it knows no container that is to be removed.
    pub has_removed: AtomicBool,
    pub heard: Mutex<Vec<String>>,
    pub created: Mutex<Vec<CreateContainerRequest>>,
    /// Storages that live as long as the pod.
    pub kept: Mutex<Vec<Storage>>,
    ooms: Mutex<Option<mpsc::UnboundedSender<String>>>,
    oom: tokio::sync::Mutex<Option<mpsc::UnboundedReceiver<String>>>,
}

impl FakeAgent {
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

    /// Has a container's calls answered that hang.
    pub fn release(&self, container: &str) {
        self.hung.lock().unwrap().remove(container);
        self.released.notify_waiters();
    }

    fn with<T>(&self, container: &str, exec: &str, act: impl FnOnce(&mut Told) -> Answer<T>) -> Answer<T> {
        let mut processes = self.processes.lock().unwrap();
        match processes.get_mut(&(container.to_owned(), exec.to_owned())) {
            Some(told) => act(told),
            None => refuse(Code::INVALID_ARGUMENT, "there is no such process"),
        }
    }

    /// Kills a container's process for want of memory.
    pub fn run_out_of_memory(&self, container: &str) {
        self.say_out_of_memory(container);
        let _ = self.with(container, container, |told| {
            told.end(137);
            Ok(())
        });
    }

    /// Says that a container ran out of memory.
    pub fn say_out_of_memory(&self, container: &str) {
        let ooms = self.ooms.lock().unwrap();
        ooms.as_ref().unwrap().send(container.into()).unwrap();
    }

    /// It came with its machine: a container that runs.
    pub fn came_with(&self, container: &str) {
        let mut told = Told::new(vec!["cat".into()]);
        told.begin().unwrap();
        let key = (container.to_owned(), container.to_owned());
        self.processes.lock().unwrap().insert(key, told);
    }

    async fn read(&self, r: ReadStreamRequest) -> Answer<ReadStreamResponse> {
        let read = self.with(&r.container_id, &r.exec_id, |told| Ok(told.read.clone()))?;
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
        self.processes.lock().unwrap().insert(key, Told::new(args));
        self.created.lock().unwrap().push(r);
        Ok(Empty::new())
    }

    async fn start_container(&self, _: &TtrpcContext, r: StartContainerRequest) -> Answer<Empty> {
        self.hear("start", &r.container_id).await;
        self.with(&r.container_id, &r.container_id, Told::begin)
    }

    async fn exec_process(&self, _: &TtrpcContext, r: agent::ExecProcessRequest) -> Answer<Empty> {
        self.hear("exec", &r.container_id).await;
        let mut told = Told::new(r.process.Args.clone());
        let begun = told.begin();
        let key = (r.container_id, r.exec_id);
        match self.processes.lock().unwrap().insert(key, told) {
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
        self.with(&r.container_id, exec, |told| {
            told.end(128 + r.signal as i32);
            Ok(Empty::new())
        })
    }

    async fn wait_process(&self, _: &TtrpcContext, r: WaitProcessRequest) -> Answer<WaitProcessResponse> {
        let mut exit = self.with(&r.container_id, &r.exec_id, |told| Ok(told.exit.subscribe()))?;
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
        self.with(&r.container_id, &r.exec_id, |told| match &told.output {
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
        self.with(&r.container_id, &r.exec_id, |told| {
            told.output = None;
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

/// A thawd that is none.
#[derive(Default)]
pub struct FakeThawd {
    vsock: String,
    /// What stands for its VMMs.
    pub vmm: i32,
    pub made: Mutex<Vec<CreatePodRequest>>,
    pub thawed: Mutex<Vec<ThawPodRequest>>,
    pub ended: Mutex<Vec<String>>,
    /// Whether machines take their time to end.
    pub holds_on: watch::Sender<bool>,
    /// What of the host is shared now, by name.
    pub shares: Mutex<BTreeMap<String, ShareSource>>,
    /// Major and minor, and whether it is read-only, by slot.
    pub disks: Mutex<BTreeMap<String, (u32, u32, bool)>>,
    /// Why its machine ended, once it has.
    pub machine: watch::Sender<Option<String>>,
    /// It is of the release before rate limits.
    pub knows_no_limits: AtomicBool,
}

#[async_trait]
impl Pods for FakeThawd {
    async fn version(&self, _: &TtrpcContext, _: VersionRequest) -> Answer<VersionResponse> {
        Ok(VersionResponse {
            version: PODS.current,
            ..Default::default()
        })
    }

    async fn create(&self, _: &TtrpcContext, r: CreatePodRequest) -> Answer<CreatePodResponse> {
        let mut made = self.made.lock().unwrap();
        let limited = r.disk_rate.is_some() || r.net_out_rate.is_some() || r.net_in_rate.is_some();
        made.push(r);
        Ok(CreatePodResponse {
            rate_limited: limited && !self.knows_no_limits.load(Ordering::SeqCst),
            sandbox_id: format!("sandbox-{}", made.len()),
            vsock: self.vsock.clone(),
            vmm_pid: self.vmm,
            ..Default::default()
        })
    }

    async fn freeze(&self, _: &TtrpcContext, r: FreezePodRequest) -> Answer<Empty> {
        std::fs::create_dir(r.directory).unwrap();
        Ok(Empty::new())
    }

    async fn thaw(&self, context: &TtrpcContext, r: ThawPodRequest) -> Answer<CreatePodResponse> {
        if !Path::new(&r.directory).is_dir() {
            return refuse(Code::NOT_FOUND, "there is no snapshot");
        }
        self.thawed.lock().unwrap().push(r);
        self.create(context, CreatePodRequest::default()).await
    }

    async fn show(&self, _: &TtrpcContext, r: ShowImageRequest) -> Answer<ShowImageResponse> {
        match r.digest.as_str() {
            "sha256:gone" => refuse(Code::NOT_FOUND, "image sha256:gone is not in the store"),
            _ => Ok(ShowImageResponse {
                name: "1".into(),
                ..Default::default()
            }),
        }
    }

    async fn add_share(&self, _: &TtrpcContext, r: AddShareRequest) -> Answer<Empty> {
        let source = r.source.unwrap();
        if source.source.ends_with("/refused") {
            return refuse(Code::INTERNAL, "it is refused");
        }
        let before = self.shares.lock().unwrap().insert(r.name, source);
        assert!(before.is_none(), "a name is used once");
        Ok(Empty::new())
    }

    async fn remove_share(&self, _: &TtrpcContext, r: RemoveShareRequest) -> Answer<Empty> {
        assert!(self.shares.lock().unwrap().remove(&r.name).is_some());
        Ok(Empty::new())
    }

    async fn add_disk(&self, _: &TtrpcContext, r: AddDiskRequest) -> Answer<AddDiskResponse> {
        if r.major == 0 {
            return refuse(Code::INTERNAL, "it is refused");
        }
        let mut disks = self.disks.lock().unwrap();
        let name = (3..)
            .map(|slot: u8| slot.to_string())
            .find(|name| !disks.contains_key(name))
            .unwrap();
        disks.insert(name.clone(), (r.major, r.minor, r.read_only));
        Ok(AddDiskResponse {
            name,
            ..Default::default()
        })
    }

    async fn remove_disk(&self, _: &TtrpcContext, r: RemoveDiskRequest) -> Answer<Empty> {
        assert!(self.disks.lock().unwrap().remove(&r.name).is_some());
        Ok(Empty::new())
    }

    async fn wait(&self, _: &TtrpcContext, _: PodRequest) -> Answer<WaitPodResponse> {
        let mut machine = self.machine.subscribe();
        let reason = machine.wait_for(Option::is_some).await.unwrap().clone().unwrap();
        Ok(WaitPodResponse {
            reason,
            ..Default::default()
        })
    }

    async fn end(&self, _: &TtrpcContext, r: PodRequest) -> Answer<Empty> {
        let _ = self.holds_on.subscribe().wait_for(|holds| !holds).await;
        self.ended.lock().unwrap().push(r.sandbox_id);
        Ok(Empty::new())
    }
}

/// A containerd that hears events.
#[derive(Default)]
pub struct Heard(watch::Sender<Vec<String>>);

fn line(topic: &str, event: &[u8]) -> String {
    let name = topic.rsplit_once('/').unwrap().1;
    let named = |text: &dyn std::fmt::Display| format!("{name} {text}");
    match topic {
        "/tasks/exit" => {
            let exit = TaskExit::parse_from_bytes(event).unwrap();
            named(&format!("{} {}", exit.id, exit.exit_status))
        }
        "/tasks/exec-added" => named(&TaskExecAdded::parse_from_bytes(event).unwrap().exec_id),
        "/tasks/exec-started" => named(&TaskExecStarted::parse_from_bytes(event).unwrap().exec_id),
        // The container's id, or all there is, is the first field of all others.
        _ => named(&TaskOOM::parse_from_bytes(event).unwrap().container_id),
    }
}

#[async_trait]
impl Events for Heard {
    async fn forward(&self, _: &TtrpcContext, r: ForwardRequest) -> Answer<Empty> {
        let envelope = r.envelope;
        assert_eq!(envelope.namespace, "ns");
        self.0
            .send_modify(|heard| heard.push(line(&envelope.topic, &envelope.event.value)));
        Ok(Empty::new())
    }
}

/// A shim among fakes.
pub struct Rig {
    pub directory: tempfile::TempDir,
    pub client: TaskClient,
    pub sandbox: SandboxClient,
    pub agent: Arc<FakeAgent>,
    pub thawd: Arc<FakeThawd>,
    heard: Arc<Heard>,
    pub served: Mutex<Option<tokio::task::JoinHandle<ShimResult<()>>>>,
    servers: tokio::sync::Mutex<Vec<Server>>,
}

async fn server(path: &Path, services: std::collections::HashMap<String, ttrpc::r#async::Service>) -> Server {
    let listener = UnixListener::bind(path).unwrap();
    let mut server = Server::new()
        .add_listener(Listener::from(listener))
        .register_service(services);
    server.start().await.unwrap();
    server
}

/// Speaks the VMM's part, then leaves the connection to the agent.
async fn vsock(path: &Path, agent: Arc<FakeAgent>) -> Server {
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
        .register_service(create_health(agent));
    server.start().await.unwrap();
    server
}

impl Rig {
    /// What is asked how it does is heard as this container.
    pub const HEALTH: &'static str = "health";

    pub async fn new() -> Rig {
        Rig::with_vmm(0).await
    }

    /// With this process for its VMM.
    pub async fn with_vmm(vmm: i32) -> Rig {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let (ooms, oom) = mpsc::unbounded_channel();
        let agent = Arc::new(FakeAgent {
            ooms: Mutex::new(Some(ooms)),
            oom: tokio::sync::Mutex::new(Some(oom)),
            ..Default::default()
        });
        let thawd = Arc::new(FakeThawd {
            vsock: path("vsock").display().to_string(),
            vmm,
            ..Default::default()
        });
        let heard = Arc::new(Heard::default());
        let servers = vec![
            vsock(&path("vsock"), agent.clone()).await,
            server(&path("pods"), create_pods(thawd.clone())).await,
            server(&path("events"), create_events(heard.clone())).await,
        ];
        let publisher = Publisher::new("ns", path("events").display().to_string());
        let pod = Pod::new("ns", Thawd::at(&path("pods")), publisher);
        let listener = std::os::unix::net::UnixListener::bind(path("shim")).unwrap();
        let served = Mutex::new(Some(tokio::spawn(serve(listener, pod))));
        let client = Client::connect(&format!("unix://{}", path("shim").display()))
            .await
            .unwrap();
        Rig {
            client: TaskClient::new(client.clone()),
            sandbox: SandboxClient::new(client),
            agent,
            thawd,
            heard,
            served,
            directory,
            servers: tokio::sync::Mutex::new(servers),
        }
    }

    /// The guest's agent ends its connection.
    pub async fn lose_agent(&self) {
        let mut servers = self.servers.lock().await;
        // It would wait for those who wait for what never comes.
        let _ = tokio::time::timeout(Duration::from_millis(10), servers[0].disconnect()).await;
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// A task's request, its bundle written.
    pub fn request(&self, id: &str, args: &[&str], annotations: serde_json::Value) -> CreateTaskRequest {
        let config = serde_json::json!({
            "ociVersion": "1.0.2",
            "process": {"args": args, "cwd": "/", "user": {"uid": 0, "gid": 0}},
            "root": {"path": "rootfs"},
            "annotations": annotations,
            "linux": {"namespaces": [{"type": "pid"}, {"type": "ipc"}, {"type": "network"}]},
        });
        self.request_of(id, &config)
    }

    /// Of a specification.
    pub fn request_of(&self, id: &str, config: &serde_json::Value) -> CreateTaskRequest {
        let bundle = self.path(id);
        std::fs::create_dir_all(&bundle).unwrap();
        std::fs::write(bundle.join("config.json"), config.to_string()).unwrap();
        CreateTaskRequest {
            id: id.into(),
            bundle: bundle.display().to_string(),
            rootfs: vec![Mount {
                type_: "overlay".into(),
                source: "thaw:sha256:ab".into(),
                ..Default::default()
            }],
            ..Default::default()
        }
    }

    /// What containerd runs where a shim is gone.
    pub async fn clean(&self, id: &str) {
        let arguments = Arguments {
            action: Action::Delete,
            namespace: "ns".into(),
            id: id.into(),
            address: self.path("containerd").display().to_string(),
            bundle: self.path(id),
        };
        thaw_shim::delete::clean(&arguments, &Thawd::at(&self.path("pods"))).await;
    }

    pub async fn create(&self, request: CreateTaskRequest) -> Answer<u32> {
        Ok(self.client.create(Context::default(), &request).await?.pid)
    }

    /// A pod with the pause container and members.
    pub async fn pod(&self, members: &[&str]) {
        let pause = self.request(
            "pause",
            &["/pause"],
            serde_json::json!({"io.kubernetes.cri.container-type": "sandbox"}),
        );
        self.create(pause).await.unwrap();
        self.start("pause", "").await.unwrap();
        for id in members {
            self.create(self.request(id, &["cat"], member())).await.unwrap();
        }
    }

    pub async fn start(&self, id: &str, exec: &str) -> Answer<u32> {
        let request = StartRequest {
            id: id.into(),
            exec_id: exec.into(),
            ..Default::default()
        };
        Ok(self.client.start(Context::default(), &request).await?.pid)
    }

    pub async fn exec(&self, id: &str, exec: &str, args: &[&str]) -> Answer<()> {
        let request = ExecProcessRequest {
            id: id.into(),
            exec_id: exec.into(),
            spec: MessageField::some(Any {
                value: serde_json::json!({"args": args, "cwd": "/"})
                    .to_string()
                    .into_bytes(),
                ..Default::default()
            }),
            ..Default::default()
        };
        self.client.exec(Context::default(), &request).await.map(drop)
    }

    pub async fn kill(&self, id: &str, exec: &str, signal: i32) -> Answer<()> {
        let request = KillRequest {
            id: id.into(),
            exec_id: exec.into(),
            signal: signal as u32,
            ..Default::default()
        };
        self.client.kill(Context::default(), &request).await.map(drop)
    }

    pub async fn wait(&self, id: &str, exec: &str) -> Answer<u32> {
        let request = WaitRequest {
            id: id.into(),
            exec_id: exec.into(),
            ..Default::default()
        };
        Ok(self.client.wait(Context::default(), &request).await?.exit_status)
    }

    pub async fn delete(&self, id: &str, exec: &str) -> Answer<u32> {
        let request = DeleteRequest {
            id: id.into(),
            exec_id: exec.into(),
            ..Default::default()
        };
        Ok(self
            .client
            .delete(Context::default(), &request)
            .await?
            .exit_status)
    }

    pub async fn state(&self, id: &str, exec: &str) -> Answer<StateResponse> {
        let request = StateRequest {
            id: id.into(),
            exec_id: exec.into(),
            ..Default::default()
        };
        self.client.state(Context::default(), &request).await
    }

    pub async fn shutdown(&self, now: bool) {
        let request = ShutdownRequest {
            now,
            ..Default::default()
        };
        // Its answer may be cut off by the end.
        let _ = self.client.shutdown(Context::default(), &request).await;
    }

    /// Waits until the shim has ended by itself.
    pub async fn ended(&self) {
        let served = self.served.lock().unwrap().take().unwrap();
        served.await.unwrap().unwrap();
    }

    /// Whether it serves still.
    pub fn serves(&self) -> bool {
        self.served
            .lock()
            .unwrap()
            .as_ref()
            .is_some_and(|served| !served.is_finished())
    }

    /// Waits until containerd has heard so many events: all of them.
    pub async fn events(&self, count: usize) -> Vec<String> {
        let mut heard = self.heard.0.subscribe();
        heard
            .wait_for(|heard| heard.len() >= count)
            .await
            .unwrap()
            .clone()
    }
}

pub fn member() -> serde_json::Value {
    serde_json::json!({"io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.sandbox-id": "pause"})
}

/// The code of a refusal.
pub fn code<T: std::fmt::Debug>(answer: Answer<T>) -> Code {
    match answer.unwrap_err() {
        Error::RpcStatus(status) => status.code(),
        other => panic!("{other}"),
    }
}

pub fn fifo(path: &Path) -> String {
    assert!(
        std::process::Command::new("mkfifo")
            .arg(path)
            .status()
            .unwrap()
            .success()
    );
    path.display().to_string()
}
