//! thawd's end: sandboxes by id, made and deleted on request, adopted from the thawd before.
//!
//! No lock is held across a call to a guest, a VMM or a registry: the table of sandboxes is locked only to look up,
//! insert or take out.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::extract::{DefaultBodyLimit, Path as UrlPath, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use rustix::net::SocketType;
use thaw_pools::process::ProcessRecord;
use thaw_pools::vmm;
use thaw_protocol::api::{
    CreateSandbox, CreatedSandbox, ErrorBody, ErrorDetail, FreezeSandbox, FrozenSandbox, Health, MAX_BODY,
    ProcessIdentity, Sandbox as Described, ThawSandbox,
};
use thaw_protocol::control::MachineState;
use thaw_rootfs::progress::Silent;

use crate::exit::{ExitCode, Failure};
use crate::image::record::{Recorded, Recording};
use crate::images::Pull;
use crate::readiness;
use crate::sandbox::{FreezeOptions, NetworkMode, Node, RootServing, Sandbox, SandboxSpec, ThawSpec};
use crate::trace::Trace;

/// How long the last callers of an owner are waited for.
const OWNER_LINGERS: Duration = Duration::from_secs(2);

/// thawd: the node and its sandboxes.
#[derive(Debug)]
pub struct Daemon {
    node: Node,
    sandboxes: Mutex<BTreeMap<String, Arc<Sandbox>>>,
    /// It owns one sandbox and makes no other: a `thaw run` in its own process.
    single: bool,
}

impl Daemon {
    /// Takes over every sandbox an earlier thawd left running. One whose VMM no longer answers is removed.
    pub async fn start(node: Node) -> Arc<Daemon> {
        let daemon = Arc::new(Daemon {
            node,
            sandboxes: Mutex::default(),
            single: false,
        });
        for (record, directory) in daemon.node.run.adopt() {
            let id = record.id.clone();
            match Sandbox::adopt(&daemon.node, record, directory).await {
                Ok(sandbox) => {
                    tracing::info!(sandbox = id, "adopted");
                    daemon.insert(sandbox);
                }
                Err(e) => tracing::error!(sandbox = id, "removed: {e}"),
            }
        }
        daemon
    }

    /// What a process that owns one sandbox serves of the API.
    pub fn of_one(node: Node, sandbox: Arc<Sandbox>) -> Arc<Daemon> {
        let table = [(sandbox.record().id.clone(), sandbox)].into();
        Arc::new(Daemon {
            node,
            sandboxes: Mutex::new(table),
            single: true,
        })
    }

    fn may_make(&self) -> Result<(), Failure> {
        match self.single {
            true => Err(Failure::new(
                ExitCode::Runtime,
                "this process owns one sandbox and makes no other",
            )),
            false => Ok(()),
        }
    }

    /// Lets go of every sandbox, so that they outlive us.
    pub fn release(&self) {
        for (id, sandbox) in std::mem::take(&mut *self.table()) {
            match Arc::try_unwrap(sandbox) {
                Ok(sandbox) => sandbox.release(),
                Err(_) => tracing::warn!(sandbox = id, "still in use while thawd ends"),
            }
        }
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Sandbox>>> {
        self.sandboxes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn insert(self: &Arc<Daemon>, sandbox: Sandbox) -> Arc<Sandbox> {
        let (id, client) = (sandbox.record().id.clone(), sandbox.record().client);
        let sandbox = Arc::new(sandbox);
        self.table().insert(id.clone(), sandbox.clone());
        if let Some(client) = client {
            tokio::spawn(delete_after(Arc::downgrade(self), id, client));
        }
        sandbox
    }

    fn find(&self, wanted: &str) -> Result<Arc<Sandbox>, Failure> {
        let table = self.table();
        let by_name = || {
            table
                .values()
                .find(|s| s.record().name.as_deref() == Some(wanted))
        };
        table.get(wanted).or_else(by_name).cloned().ok_or_else(|| {
            Failure::new(
                ExitCode::SandboxNotFound,
                format!("no running sandbox is {wanted}"),
            )
        })
    }

    async fn create(self: &Arc<Daemon>, request: CreateSandbox) -> Result<CreatedSandbox, Failure> {
        self.may_make()?;
        let (recording, record) = match request.record {
            true => Recording::start().map(|(recording, fd)| (Some(recording), Some(fd)))?,
            false => (None, None),
        };
        let spec = SandboxSpec {
            image: request.image,
            pull: parse::<Pull>("pull", &request.pull)?,
            plain_http: request.plain_http,
            vcpus: request.cpus,
            memory_mib: request.memory_mib,
            hostname: request.hostname,
            name: request.name,
            network: parse::<NetworkMode>("network", &request.network)?,
            command: request.command,
            tethered: false,
            client: request.client.map(process),
            cold: request.cold,
            memory_mode: request.memory_mode,
            root: parse::<RootServing>("root", &request.root)?,
            record,
            prefetch: request.prefetch,
        };
        let trace = Trace::new();
        let building = Arc::new(|step| tracing::info!("template: {step:?}"));
        let sandbox = Sandbox::create(&self.node, spec, &trace, Arc::new(Silent), building).await?;
        if let (Some(mut recording), Some(image)) = (recording, sandbox.image()) {
            recording.keep_journal(&self.node.images, image);
            let (images, image, file) = (self.node.images.clone(), image.clone(), request.record_to);
            tokio::spawn(async move { tell(recording.finish(&images, &image, file).await) });
        }
        sandbox.note_fetched(&trace, "the sandbox was there");
        sandbox.note_read_ahead(&trace);
        self.made(sandbox, &trace).await
    }

    async fn thaw(self: &Arc<Daemon>, request: ThawSandbox) -> Result<CreatedSandbox, Failure> {
        self.may_make()?;
        let spec = ThawSpec {
            directory: request.directory,
            hostname: request.hostname,
            name: request.name,
            tethered: false,
            client: request.client.map(process),
            memory_mode: request.memory_mode,
        };
        let trace = Trace::new();
        let sandbox = Sandbox::thaw(&self.node, spec, &trace).await?;
        self.made(sandbox, &trace).await
    }

    async fn made(self: &Arc<Daemon>, sandbox: Sandbox, trace: &Trace) -> Result<CreatedSandbox, Failure> {
        let image_config = serde_json::to_string(&sandbox.config)
            .map_err(|e| Failure::new(ExitCode::ImageMalformed, e.to_string()))?;
        let sandbox = self.insert(sandbox);
        Ok(CreatedSandbox {
            sandbox: describe(&sandbox).await,
            image_config,
            account: trace.account(),
        })
    }

    async fn delete(&self, wanted: &str) -> Result<(), Failure> {
        let sandbox = self.find(wanted)?;
        if self.single {
            // Its owner sees it end, and removes it.
            sandbox.kill();
            return Ok(());
        }
        self.table().remove(&sandbox.record().id);
        sandbox.destroy().await;
        Ok(())
    }

    async fn freeze(&self, wanted: &str, request: FreezeSandbox) -> Result<FrozenSandbox, Failure> {
        let options = FreezeOptions {
            delta: request.delta,
            stop: request.stop,
            sign: request.sign,
        };
        let frozen = self
            .find(wanted)?
            .freeze(&self.node, &request.directory, options)
            .await?;
        Ok(FrozenSandbox {
            memory_bytes: frozen.memory_bytes,
            paused_ns: frozen.paused_ns,
        })
    }
}

/// Nobody waits for a recording: what became of it is logged.
fn tell(recorded: Result<Option<Recorded>, Failure>) {
    match recorded {
        Ok(Some(recorded)) => tracing::info!("{recorded}"),
        Ok(None) => tracing::info!("nothing was recorded: the run read nothing"),
        Err(e) => tracing::warn!("the recording is lost: {e}"),
    }
}

fn process(identity: ProcessIdentity) -> ProcessRecord {
    ProcessRecord {
        pid: identity.pid,
        start_time: identity.start_time,
    }
}

/// Deletes a sandbox once the process it was made for has ended.
async fn delete_after(daemon: std::sync::Weak<Daemon>, id: String, client: ProcessRecord) {
    if let Some(pidfd) = client.open()
        && let Ok(pidfd) = readiness::register(pidfd, tokio::io::Interest::READABLE)
    {
        let _ = pidfd.readable().await;
    }
    if let Some(daemon) = daemon.upgrade()
        && daemon.delete(&id).await.is_ok()
    {
        tracing::info!(sandbox = id, "deleted: the process it was made for has ended");
    }
}

fn parse<T: clap::ValueEnum>(field: &str, value: &str) -> Result<T, Failure> {
    T::from_str(value, false).map_err(|_| Failure::new(ExitCode::Runtime, format!("bad {field}: {value:?}")))
}

async fn describe(sandbox: &Sandbox) -> Described {
    let record = sandbox.record();
    let reason = sandbox.ended();
    let state = match (&reason, sandbox.machine().await) {
        (Some(_), _) | (_, Err(_)) | (_, Ok(MachineState::Exited(_))) => "ended",
        (None, Ok(MachineState::Paused)) => "paused",
        (None, Ok(_)) => "running",
    };
    Described {
        id: record.id.clone(),
        name: record.name.clone(),
        image: record.image.clone(),
        command: record.command.clone(),
        created: record.created,
        cpus: record.vcpus,
        memory_mib: record.memory_mib,
        state: state.into(),
        reason,
        vsock: sandbox.vsock().display().to_string(),
        vmm_pid: record.vmm.map(|v| v.pid),
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        use ExitCode as E;
        let status = match self.code {
            E::SandboxNotFound | E::ImageNotFound | E::ImageNotStored => StatusCode::NOT_FOUND,
            E::NameInUse => StatusCode::CONFLICT,
            E::SnapshotNotFound => StatusCode::NOT_FOUND,
            E::BadReference | E::MemoryTooSmall | E::Runtime => StatusCode::BAD_REQUEST,
            E::DiskFull => StatusCode::INSUFFICIENT_STORAGE,
            E::RegistryUnreachable | E::RegistryDenied | E::RegistryRateLimited | E::RegistryFailed => {
                StatusCode::BAD_GATEWAY
            }
            E::DigestMismatch
            | E::LayerTruncated
            | E::UnknownMediaType
            | E::WrongArchitecture
            | E::UnsafePath
            | E::ImageMalformed
            | E::SnapshotDamaged
            | E::SnapshotIncompatible
            | E::SnapshotSignature => StatusCode::UNPROCESSABLE_ENTITY,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let detail = ErrorDetail {
            code: self.code.slug().into(),
            message: self.to_string(),
            context: self.context.clone(),
        };
        (status, Json(ErrorBody { error: detail })).into_response()
    }
}

/// The routes.
pub fn router(daemon: Arc<Daemon>) -> Router {
    Router::new()
        .route("/healthz", get(health))
        .route("/v1/sandboxes", get(list).post(create))
        .route("/v1/sandboxes/{id}", get(get_one).delete(delete))
        .route("/v1/sandboxes/{id}/pause", post(pause))
        .route("/v1/sandboxes/{id}/resume", post(resume))
        .route("/v1/sandboxes/{id}/freeze", post(freeze))
        .route("/v1/thaws", post(thaw))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(daemon)
}

async fn health() -> Json<Health> {
    Json(Health {
        version: env!("CARGO_PKG_VERSION").into(),
        pid: std::process::id(),
    })
}

type Body<T> = Result<Json<T>, axum::extract::rejection::JsonRejection>;

/// What a request's body says.
fn body<T>(request: Body<T>) -> Result<T, Failure> {
    let Json(request) = request.map_err(|e| Failure::new(ExitCode::Runtime, format!("bad request: {e}")))?;
    Ok(request)
}

/// On a task of its own: a caller that hangs up must not leave a sandbox half made or half frozen.
async fn whole<T: Send + 'static>(
    work: impl Future<Output = Result<T, Failure>> + Send + 'static,
) -> Result<T, Failure> {
    let done = tokio::spawn(work).await;
    done.map_err(|e| Failure::new(ExitCode::Runtime, e.to_string()))?
}

async fn create(
    State(daemon): State<Arc<Daemon>>,
    request: Body<CreateSandbox>,
) -> Result<(StatusCode, Json<CreatedSandbox>), Failure> {
    let request = body(request)?;
    let made = whole(async move { daemon.create(request).await }).await?;
    Ok((StatusCode::CREATED, Json(made)))
}

async fn thaw(
    State(daemon): State<Arc<Daemon>>,
    request: Body<ThawSandbox>,
) -> Result<(StatusCode, Json<CreatedSandbox>), Failure> {
    let request = body(request)?;
    let made = whole(async move { daemon.thaw(request).await }).await?;
    Ok((StatusCode::CREATED, Json(made)))
}

async fn pause(
    State(daemon): State<Arc<Daemon>>,
    UrlPath(id): UrlPath<String>,
) -> Result<StatusCode, Failure> {
    daemon.find(&id)?.pause().await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn resume(
    State(daemon): State<Arc<Daemon>>,
    UrlPath(id): UrlPath<String>,
) -> Result<StatusCode, Failure> {
    daemon.find(&id)?.resume().await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn freeze(
    State(daemon): State<Arc<Daemon>>,
    UrlPath(id): UrlPath<String>,
    request: Body<FreezeSandbox>,
) -> Result<Json<FrozenSandbox>, Failure> {
    let request = body(request)?;
    whole(async move { daemon.freeze(&id, request).await })
        .await
        .map(Json)
}

async fn list(State(daemon): State<Arc<Daemon>>) -> Json<Vec<Described>> {
    let sandboxes: Vec<_> = daemon.table().values().cloned().collect();
    let mut described = Vec::new();
    for sandbox in sandboxes {
        described.push(describe(&sandbox).await);
    }
    Json(described)
}

async fn get_one(
    State(daemon): State<Arc<Daemon>>,
    UrlPath(id): UrlPath<String>,
) -> Result<Json<Described>, Failure> {
    let sandbox = daemon.find(&id)?;
    Ok(Json(describe(&sandbox).await))
}

async fn delete(
    State(daemon): State<Arc<Daemon>>,
    UrlPath(id): UrlPath<String>,
) -> Result<StatusCode, Failure> {
    daemon.delete(&id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Serves until `end`. The socket is for this user alone; one a dead thawd left is replaced, a living one's is not.
pub async fn serve(
    daemon: Arc<Daemon>,
    socket: &Path,
    end: impl Future<Output = ()> + Send + 'static,
) -> Result<(), Failure> {
    let fail = |e: std::io::Error| Failure::system(format!("cannot listen at {}", socket.display()), &e);
    if vmm::connect(socket, SocketType::STREAM).is_ok() {
        let what = format!("another thawd serves {}", socket.display());
        return Err(Failure::new(ExitCode::Runtime, what).remedy("stop it first, or set THAW_RUN"));
    }
    let _ = std::fs::remove_file(socket);
    let listener = listen(socket)?;
    let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(socket, private).map_err(fail)?;
    let served = axum::serve(listener, router(daemon.clone()))
        .with_graceful_shutdown(end)
        .await;
    let _ = std::fs::remove_file(socket);
    daemon.release();
    served.map_err(fail)
}

fn listen(socket: &Path) -> Result<tokio::net::UnixListener, Failure> {
    let listener = std::os::unix::net::UnixListener::from(vmm::listen(socket, SocketType::STREAM)?);
    let listening = listener
        .set_nonblocking(true)
        .and_then(|()| tokio::net::UnixListener::from_std(listener));
    listening.map_err(|e| Failure::system(format!("cannot listen at {}", socket.display()), &e))
}

/// The API of one sandbox, for as long as its owner holds it.
#[derive(Debug)]
pub struct OwnerService {
    end: tokio::sync::oneshot::Sender<()>,
    served: tokio::task::JoinHandle<()>,
}

impl OwnerService {
    /// Serves `sandbox` at `owner.sock` in its directory, which is for this user alone. Within a tokio runtime.
    pub fn start(node: Node, sandbox: Arc<Sandbox>) -> Result<OwnerService, Failure> {
        let listener = listen(&crate::state::owner_socket(&sandbox.directory()))?;
        let routes = router(Daemon::of_one(node, sandbox));
        let (end, ended) = tokio::sync::oneshot::channel::<()>();
        let served = tokio::spawn(async move {
            let ended = async move { drop(ended.await) };
            let served = axum::serve(listener, routes).with_graceful_shutdown(ended).await;
            if let Err(e) = served {
                tracing::warn!("the sandbox's API ended: {e}");
            }
        });
        Ok(OwnerService { end, served })
    }

    /// Waits until nobody is being served any more: the sandbox's machine has ended, so nobody is for long.
    pub async fn stop(mut self) {
        let _ = self.end.send(());
        if tokio::time::timeout(OWNER_LINGERS, &mut self.served)
            .await
            .is_err()
        {
            self.served.abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::client::Client;
    use crate::paths::Paths;
    use thaw_protocol::api::ProcessIdentity;

    fn request(image: &str) -> CreateSandbox {
        CreateSandbox {
            image: image.into(),
            pull: "never".into(),
            plain_http: false,
            cpus: 1,
            memory_mib: 128,
            hostname: None,
            name: None,
            network: "none".into(),
            command: vec![],
            client: Some(ProcessIdentity {
                pid: 1,
                start_time: 1,
            }),
            cold: true,
            memory_mode: Default::default(),
            record: false,
            record_to: None,
            prefetch: true,
            root: "virtiofs".into(),
        }
    }

    #[tokio::test]
    async fn both_ends_agree_over_a_socket() {
        let root = tempfile::tempdir().unwrap();
        let path = |name: &str| root.path().join(name);
        let paths = Paths {
            data: path("d"),
            run: path("r"),
            kernel: path("k"),
            guest_image: path("g"),
        };
        let socket = paths.daemon_socket();
        let node = Node::open(paths).unwrap();
        let daemon = Daemon::start(node).await;
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let at = socket.clone();
        let server = tokio::spawn(async move {
            serve(daemon, &at, async {
                let _ = stopped.await;
            })
            .await
        });
        let client = loop {
            match Client::connect(&socket) {
                Some(client) => break client,
                None => tokio::task::yield_now().await,
            }
        };
        let health = client.health().await.unwrap();
        assert_eq!(
            (health.pid, health.version.as_str()),
            (std::process::id(), env!("CARGO_PKG_VERSION"))
        );
        assert!(client.list().await.unwrap().is_empty());
        assert_eq!(
            client.get("nobody").await.unwrap_err().code,
            ExitCode::SandboxNotFound
        );
        assert_eq!(
            client.delete("nobody").await.unwrap_err().code,
            ExitCode::SandboxNotFound
        );

        assert_eq!(
            client.pause("nobody").await.unwrap_err().code,
            ExitCode::SandboxNotFound
        );
        assert_eq!(
            client.resume("nobody").await.unwrap_err().code,
            ExitCode::SandboxNotFound
        );
        let freeze = FreezeSandbox {
            directory: path("s"),
            delta: false,
            stop: false,
            sign: None,
        };
        assert_eq!(
            client.freeze("nobody", &freeze).await.unwrap_err().code,
            ExitCode::SandboxNotFound
        );
        let nowhere = ThawSandbox {
            directory: path("s"),
            hostname: None,
            name: None,
            client: None,
            memory_mode: Default::default(),
        };
        assert_eq!(
            client.thaw(&nowhere).await.unwrap_err().code,
            ExitCode::SnapshotNotFound
        );

        let tiny = CreateSandbox {
            memory_mib: 1,
            ..request("x")
        };
        assert_eq!(
            client.create(&tiny).await.unwrap_err().code,
            ExitCode::MemoryTooSmall
        );
        let odd = CreateSandbox {
            pull: "perhaps".into(),
            ..request("x")
        };
        assert_eq!(client.create(&odd).await.unwrap_err().code, ExitCode::Runtime);
        stop.send(()).unwrap();
        server.await.unwrap().unwrap();
        assert!(!socket.exists());
        assert!(Client::connect(&socket).is_none());
    }
}
