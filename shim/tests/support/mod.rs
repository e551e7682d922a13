//! A shim that is connected to fakes: a thawd without microVMs, an agent without containers, and a containerd
//! that records events.

#![allow(dead_code, reason = "each test uses a part of it")]

mod agent;
mod containerd;
mod thawd;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use thaw_protocol::shim::Any;
use thaw_protocol::shim::MessageField;
use thaw_protocol::shim::events_ttrpc::create_events;
use thaw_protocol::shim::mount::Mount;
use thaw_protocol::shim::pods_ttrpc::create_pods;
use thaw_protocol::shim::sandbox_ttrpc::SandboxClient;
use thaw_protocol::shim::task::{
    CreateTaskRequest, DeleteRequest, ExecProcessRequest, KillRequest, ShutdownRequest, StartRequest,
    StateRequest, StateResponse, WaitRequest,
};
use thaw_protocol::shim::task_ttrpc::TaskClient;
use thaw_shim::arguments::{Action, Arguments};
use thaw_shim::error::Result as ShimResult;
use thaw_shim::events::Publisher;
use thaw_shim::pod::Pod;
use thaw_shim::serve::serve;
use thaw_shim::thawd::Thawd;
use tokio::net::UnixListener;
use ttrpc::r#async::transport::Listener;
use ttrpc::r#async::{Client, Server};
use ttrpc::context::Context;
use ttrpc::{Code, Error, get_status};

pub use agent::FakeAgent;
use containerd::FakeContainerd;
pub use thawd::FakeThawd;

type Answer<T> = ttrpc::Result<T>;

fn refuse<T>(code: Code, what: &str) -> Answer<T> {
    Err(Error::RpcStatus(get_status(code, what)))
}

/// A shim that is connected to fakes.
pub struct Rig {
    pub directory: tempfile::TempDir,
    pub client: TaskClient,
    pub sandbox: SandboxClient,
    pub agent: Arc<FakeAgent>,
    pub thawd: Arc<FakeThawd>,
    pub containerd: Arc<FakeContainerd>,
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

impl Rig {
    /// Health checks are recorded as calls of this container.
    pub const HEALTH: &'static str = "health";

    pub async fn new() -> Rig {
        Rig::with_vmm(0).await
    }

    /// With this process as its VMM.
    pub async fn with_vmm(vmm: i32) -> Rig {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let agent = Arc::new(FakeAgent::new());
        let thawd = Arc::new(FakeThawd::new(path("vsock").display().to_string(), vmm));
        let containerd = Arc::new(FakeContainerd::default());
        let servers = vec![
            agent::serve(&path("vsock"), agent.clone()).await,
            server(&path("pods"), create_pods(thawd.clone())).await,
            server(&path("events"), create_events(containerd.clone())).await,
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
            containerd,
            served,
            directory,
            servers: tokio::sync::Mutex::new(servers),
        }
    }

    /// The guest's agent ends its connection.
    pub async fn lose_agent(&self) {
        let mut servers = self.servers.lock().await;
        // Some calls never return, and it would wait for them.
        let _ = tokio::time::timeout(Duration::from_millis(10), servers[0].disconnect()).await;
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Writes a task's bundle, and returns the request for it.
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

    /// As [`Rig::request`], of a specification.
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

    /// Runs the command that containerd runs when a shim is gone.
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
        // The shim may end before it answers.
        let _ = self.client.shutdown(Context::default(), &request).await;
    }

    /// Waits until the shim has ended by itself.
    pub async fn ended(&self) {
        let served = self.served.lock().unwrap().take().unwrap();
        served.await.unwrap().unwrap();
    }

    /// Whether it still serves.
    pub fn serves(&self) -> bool {
        self.served
            .lock()
            .unwrap()
            .as_ref()
            .is_some_and(|served| !served.is_finished())
    }

    /// Waits until containerd has received `count` events, and returns all of them.
    pub async fn events(&self, count: usize) -> Vec<String> {
        self.containerd.events(count).await
    }
}

pub fn member() -> serde_json::Value {
    serde_json::json!({"io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.sandbox-id": "pause"})
}

/// The code of an error.
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
