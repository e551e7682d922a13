//! The API for containerd's shim ([`thaw_protocol::shim::pods`]): ttrpc on a unix socket of this user only. Each pod is a microVM.
//!
//! Invariant: a pod ends with its shim, whatever ends that. So all state of a pod is in its sandbox's record.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use thaw_pools::process::ProcessRecord;
use thaw_pools::share::Source;
use thaw_protocol::api::{self, CreatedSandbox, DEFAULT_DISK_MIB, FreezeSandbox, RateLimits};
use thaw_protocol::control::{DeviceId, HOST_DISKS};
use thaw_protocol::shim::pods::pod_network::Mode;
use thaw_protocol::shim::pods::*;
use thaw_protocol::shim::pods_ttrpc::{Pods as Service, create_pods};
use thaw_protocol::shim::{Empty, MessageField};
use thaw_protocol::versions::PODS;
use thaw_sandbox::blocking::blocking;
use thaw_sandbox::error::{Error, ErrorKind};
use thaw_sandbox::state::{HostDisk, PodNamespace};
use thaw_sandbox::unix_socket::bind;
use thaw_sandbox::{NetworkMode, NetworkSource};
use tokio::net::UnixListener;
use ttrpc::Code;
use ttrpc::r#async::transport::Listener;
use ttrpc::r#async::{Server, TtrpcContext};

use crate::api::daemon::Daemon;
use crate::api::factory::{CreatePod, PodSnapshot, ThawPod};
use crate::api::problem::Refusal;
use crate::api::scope::Wanted;
use crate::exit::line;

mod cgroup;

/// The size of a pod whose shim does not send one.
const DEFAULT_CPUS: u8 = 1;
const DEFAULT_MEMORY_MIB: u32 = 512;

/// The service before it serves.
pub struct Listening {
    listener: UnixListener,
    socket: PathBuf,
}

impl Listening {
    /// # Errors
    /// The socket cannot be bound, or another thawd serves there.
    pub fn open(socket: &Path) -> Result<Listening, Error> {
        Ok(Listening {
            listener: bind(socket)?,
            socket: socket.into(),
        })
    }

    /// Serves shims until `end`. Calls that wait for a pod's end fail then; shims repeat them to the next thawd.
    ///
    /// # Errors
    /// The server fails.
    pub async fn serve(self, daemon: Arc<Daemon>, end: impl Future<Output = ()>) -> Result<(), Error> {
        let broken = |e: ttrpc::Error| Error::new(ErrorKind::Runtime, format!("serving pods: {e}"));
        let mut server = Server::new()
            .add_listener(Listener::from(self.listener))
            .register_service(create_pods(Arc::new(Pods { daemon })));
        server.start().await.map_err(broken)?;
        tracing::info!(socket = %self.socket.display(), "serving containerd's shims");
        end.await;
        let _ = std::fs::remove_file(&self.socket);
        server.shutdown().await.map_err(broken)
    }
}

struct Pods {
    daemon: Arc<Daemon>,
}

type Answer<T> = ttrpc::Result<T>;

fn refused(mut failure: Error) -> ttrpc::Error {
    let code = match failure.kind {
        ErrorKind::SandboxNotFound | ErrorKind::ImageNotStored | ErrorKind::SnapshotNotFound => {
            Code::NOT_FOUND
        }
        ErrorKind::DiskFull => Code::RESOURCE_EXHAUSTED,
        _ => Code::INTERNAL,
    };
    failure.remedy = failure.remedy.or_else(|| remedy(failure.kind).map(str::to_owned));
    ttrpc::Error::RpcStatus(ttrpc::get_status(code, line(&failure)))
}

/// The remedy for a reader of a pod's events, who has neither `thaw`'s flags nor its terminal.
fn remedy(kind: ErrorKind) -> Option<&'static str> {
    match kind {
        ErrorKind::MemoryTooSmall => Some("raise the memory limits of the pod's containers"),
        ErrorKind::NetworkUnavailable => Some("run `thaw doctor` on the node"),
        ErrorKind::SandboxNotFound => Some("the pod has ended: make it anew"),
        ErrorKind::ImageNotStored => {
            Some("have it pulled through Thaw's snapshotter, or use another snapshotter")
        }
        ErrorKind::Shared => Some("a pod with volumes or a root of another snapshotter cannot be frozen"),
        ErrorKind::Runtime
        | ErrorKind::GuestNotReady
        | ErrorKind::HandshakeFailed
        | ErrorKind::VmmFailed
        | ErrorKind::GuestEnded
        | ErrorKind::AgentFailed
        | ErrorKind::ShareFailed => Some("the node's journal has more: journalctl -u thawd"),
        _ => None,
    }
}

fn not_made(refusal: Refusal) -> ttrpc::Error {
    tracing::warn!("a pod was not made: {refusal}");
    match refusal {
        Refusal::Failure(failure) => refused(failure),
        other => ttrpc::Error::RpcStatus(ttrpc::get_status(Code::INTERNAL, other.to_string())),
    }
}

fn invalid(what: String) -> ttrpc::Error {
    ttrpc::Error::RpcStatus(ttrpc::get_status(Code::INVALID_ARGUMENT, what))
}

/// A shim's request, validated.
async fn wanted(r: CreatePodRequest) -> Answer<CreatePod> {
    let network = network(&r.network).await?;
    let rate_limits = RateLimits {
        disk: rate(r.disk_rate.as_ref()),
        net_out: rate(r.net_out_rate.as_ref()),
        net_in: rate(r.net_in_rate.as_ref()),
    };
    rate_limits.check().map_err(invalid)?;
    let client = client(r.client_pid)?;
    Ok(CreatePod {
        hostname: (!r.hostname.is_empty()).then_some(r.hostname),
        network,
        cpus: match r.cpus {
            0 => DEFAULT_CPUS,
            cpus => u8::try_from(cpus).map_err(|_| invalid(format!("a guest cannot have {cpus} CPUs")))?,
        },
        memory_mib: match r.memory_mib {
            0 => DEFAULT_MEMORY_MIB,
            memory => memory,
        },
        disk_mib: match r.disk_mib {
            0 => DEFAULT_DISK_MIB,
            disk => disk,
        },
        labels: r.labels.into_iter().collect(),
        cgroup: cgroup::path(&r.cgroup).map_err(invalid)?,
        client,
        rate_limits,
    })
}

/// The network of a pod.
async fn network(asked: &PodNetwork) -> Answer<NetworkSource> {
    Ok(match asked.mode.enum_value() {
        Ok(Mode::NONE) => NetworkSource::Ours(NetworkMode::None),
        Ok(Mode::PRIVATE) => NetworkSource::Ours(NetworkMode::Private),
        Ok(Mode::NAMESPACE) => {
            let path = PathBuf::from(&asked.namespace);
            let found = blocking(move || PodNamespace::find(path)).await;
            NetworkSource::Pod(found.map_err(refused)?)
        }
        Err(number) => return Err(invalid(format!("network mode {number} is unknown"))),
    })
}

/// A rate limit, unless it is empty.
fn rate(limit: Option<&RateLimit>) -> Option<api::RateLimit> {
    let some = |number: u64| (number > 0).then_some(number);
    let limit = limit?;
    let limit = api::RateLimit {
        bytes_per_s: some(limit.bytes_per_s),
        once_bytes: some(limit.once_bytes),
        ops_per_s: some(limit.ops_per_s),
        once_ops: some(limit.once_ops),
        ..api::RateLimit::default()
    };
    (limit != api::RateLimit::default()).then_some(limit)
}

/// The shim's process, which must be running.
fn client(pid: i32) -> Answer<Option<ProcessRecord>> {
    match ProcessRecord::of(pid) {
        None => Err(invalid(format!("the shim, process {pid}, has ended"))),
        client => Ok(client),
    }
}

fn response(made: CreatedSandbox) -> CreatePodResponse {
    let made = made.sandbox;
    CreatePodResponse {
        sandbox_id: made.id,
        vsock: made.vsock,
        vmm_pid: made.vmm_pid.unwrap_or(0),
        rate_limited: !made.rate_limits.is_none(),
        ..Default::default()
    }
}

/// The name of a device in the guest's agent.
fn name_of(slot: DeviceId) -> String {
    (slot as u8).to_string()
}

/// How long each step of a pod's start took.
fn log_start(made: &CreatedSandbox) {
    let stages = made.account.stages.iter();
    let stages: Vec<String> = stages
        .map(|stage| format!("{} {} us", stage.name, stage.duration_ns / 1000))
        .collect();
    tracing::info!(
        sandbox = made.sandbox.id,
        template_hit = made.account.counts.get("template_hit") == Some(&1),
        "a pod was made: {}",
        stages.join(", ")
    );
}

#[async_trait]
impl Service for Pods {
    async fn version(&self, _: &TtrpcContext, r: VersionRequest) -> Answer<VersionResponse> {
        let version = PODS.agree(r.version).map_err(|e| {
            let what = format!("{e}; the shim is of release {}", r.release);
            ttrpc::Error::RpcStatus(ttrpc::get_status(Code::FAILED_PRECONDITION, what))
        })?;
        Ok(VersionResponse {
            version,
            release: env!("CARGO_PKG_VERSION").into(),
            ..Default::default()
        })
    }

    async fn create(&self, _: &TtrpcContext, r: CreatePodRequest) -> Answer<CreatePodResponse> {
        let wanted = wanted(r).await?;
        let made = self.daemon.create_pod(wanted).await.map_err(not_made)?;
        log_start(&made);
        Ok(response(made))
    }

    async fn thaw(&self, _: &TtrpcContext, r: ThawPodRequest) -> Answer<CreatePodResponse> {
        let wanted = ThawPod {
            snapshot: match r.snapshot.is_empty() {
                true => PodSnapshot::Directory(r.directory.into()),
                false => PodSnapshot::Stored {
                    wanted: r.snapshot,
                    namespace: r.namespace,
                },
            },
            network: match r.network.as_ref() {
                Some(asked) => Some(network(asked).await?),
                None => None,
            },
            hostname: (!r.hostname.is_empty()).then_some(r.hostname),
            labels: r.labels.into_iter().collect(),
            cgroup: cgroup::path(&r.cgroup).map_err(invalid)?,
            client: client(r.client_pid)?,
        };
        let (made, container) = self.daemon.thaw_pod(wanted).await.map_err(not_made)?;
        let container = container.map(|container| ThawedContainer {
            id: container.id,
            image_digest: container.image_digest,
            args: container.args,
            terminal: container.terminal,
            memory_mib: container.memory_mib,
            ..Default::default()
        });
        Ok(CreatePodResponse {
            container: MessageField::from_option(container),
            ..response(made)
        })
    }

    async fn show(&self, _: &TtrpcContext, r: ShowImageRequest) -> Answer<ShowImageResponse> {
        let name = self
            .daemon
            .show_image(&pod(r.sandbox_id), &r.digest)
            .await
            .map_err(refused)?;
        Ok(ShowImageResponse {
            name,
            ..Default::default()
        })
    }

    async fn add_share(&self, _: &TtrpcContext, r: AddShareRequest) -> Answer<Empty> {
        let asked = r.source.unwrap_or_default();
        let source = Source::parse(&asked.type_, &asked.source, &asked.options);
        let source = source.map_err(|e| invalid(e.to_string()))?;
        let added = self.daemon.add_share(&pod(r.sandbox_id), r.name, source).await;
        added.map(|()| Empty::new()).map_err(refused)
    }

    async fn remove_share(&self, _: &TtrpcContext, r: RemoveShareRequest) -> Answer<Empty> {
        match self.daemon.remove_share(&pod(r.sandbox_id), r.name).await {
            // Its shares ended with its machine.
            Err(e) if e.kind == ErrorKind::SandboxNotFound => Ok(Empty::new()),
            done => done.map(|()| Empty::new()).map_err(refused),
        }
    }

    async fn add_disk(&self, _: &TtrpcContext, r: AddDiskRequest) -> Answer<AddDiskResponse> {
        let disk = HostDisk {
            major: r.major,
            minor: r.minor,
            read_only: r.read_only,
        };
        let slot = self
            .daemon
            .add_disk(&pod(r.sandbox_id), disk)
            .await
            .map_err(refused)?;
        Ok(AddDiskResponse {
            name: name_of(slot),
            ..Default::default()
        })
    }

    async fn remove_disk(&self, _: &TtrpcContext, r: RemoveDiskRequest) -> Answer<Empty> {
        let slot = HOST_DISKS.into_iter().find(|slot| name_of(*slot) == r.name);
        let slot = slot.ok_or_else(|| invalid(format!("{:?} is no slot of the host's disks", r.name)))?;
        match self.daemon.remove_disk(&pod(r.sandbox_id), slot).await {
            // It was detached with its machine.
            Err(e) if e.kind == ErrorKind::SandboxNotFound => Ok(Empty::new()),
            done => done.map(|()| Empty::new()).map_err(refused),
        }
    }

    async fn wait(&self, _: &TtrpcContext, r: PodRequest) -> Answer<WaitPodResponse> {
        let mut closing = self.daemon.closing();
        let pod = pod(r.sandbox_id);
        let ended = tokio::select! {
            _ = closing.wait_for(|closing| *closing) => None,
            ended = self.daemon.end_of(&pod) => Some(ended),
        };
        // At shutdown thawd says so first and then releases machines, which then seem to have ended.
        match ended {
            Some(ended) if !*closing.borrow() => Ok(WaitPodResponse {
                reason: ended.map_err(refused)?,
                ..Default::default()
            }),
            _ => {
                let status = ttrpc::get_status(Code::UNAVAILABLE, "this thawd ends; ask the next");
                Err(ttrpc::Error::RpcStatus(status))
            }
        }
    }

    async fn end(&self, _: &TtrpcContext, r: PodRequest) -> Answer<Empty> {
        match self.daemon.delete_unless_failed(&pod(r.sandbox_id)).await {
            Err(e) if e.kind == ErrorKind::SandboxNotFound => Ok(Empty::new()),
            done => done.map(|()| Empty::new()).map_err(refused),
        }
    }

    async fn freeze(&self, _: &TtrpcContext, r: FreezePodRequest) -> Answer<Empty> {
        let request = FreezeSandbox {
            directory: Some(r.directory.into()),
            ..FreezeSandbox::default()
        };
        let daemon = self.daemon.clone();
        let freezing = async move { daemon.freeze(&pod(r.sandbox_id), request).await };
        let frozen = self.daemon.finish(freezing).await.map_err(not_made)?;
        tracing::info!(bytes = frozen.memory_bytes, "a pod was frozen");
        Ok(Empty::new())
    }
}

/// A pod's sandbox. Pods have no tenant, because only root can connect here.
fn pod(id: String) -> Wanted {
    Wanted::on_node(id)
}

#[cfg(test)]
#[path = "pods_test.rs"]
mod tests;
