//! The agent API over ttrpc: `grpc.AgentService` and `grpc.Health`, wire-compatible with Kata's agent, and
//! `thaw.Files`, `thaw.Hooks`, `thaw.Mounts`, `thaw.Processes` and `thaw.Readiness`. docs/agent-api.md lists the calls; unsupported ones return
//! UNIMPLEMENTED.
//!
//! Blocking work (mounts, forks, executing a program) runs on a worker thread and completes even if its caller
//! disconnects.

mod container_files;
mod containers;
mod etc;
mod files;
mod guest;
mod hooks;
mod kept_processes;
mod mounts;
mod network;
mod processes;
mod readiness;
mod volumes;

use std::sync::Arc;

use async_trait::async_trait;
use thaw_protocol::agent::agent::*;
use thaw_protocol::agent::agent_ttrpc::{AgentService, create_agent_service};
use thaw_protocol::agent::csi::VolumeStatsResponse;
use thaw_protocol::agent::files_ttrpc::create_files;
use thaw_protocol::agent::health::{
    CheckRequest, HealthCheckResponse, VersionCheckResponse, health_check_response,
};
use thaw_protocol::agent::health_ttrpc::{Health, create_health};
use thaw_protocol::agent::hooks_ttrpc::create_hooks;
use thaw_protocol::agent::mounts_ttrpc::create_mounts;
use thaw_protocol::agent::processes_ttrpc::create_processes;
use thaw_protocol::agent::readiness::{
    ExpectReadyRequest, ExpectReadyResponse, WaitReadyRequest, WaitReadyResponse,
};
use thaw_protocol::agent::readiness_ttrpc::{Readiness, create_readiness};
use thaw_protocol::agent::{Empty, types};
use ttrpc::Code;
use ttrpc::r#async::TtrpcContext;

use crate::error::{Error, Result};
use crate::info;
use crate::listener::Listener;
use crate::sandbox::Sandbox;

/// Version of the agent API: the Kata release with which it is wire-compatible.
pub const API_VERSION: &str = "3.15.0";

/// Serves forever. Returns why it stopped.
pub async fn serve(listener: Listener, sandbox: Arc<Sandbox>) -> Error {
    let api = Arc::new(Api {
        sandbox: sandbox.clone(),
    });
    let listener = match listener.into_ttrpc() {
        Ok(listener) => listener,
        Err(e) => return e,
    };
    let mut server = ttrpc::r#async::Server::new()
        .add_listener(listener)
        .register_service(create_agent_service(api.clone()))
        .register_service(create_health(api.clone()))
        .register_service(create_files(api.clone()))
        .register_service(create_hooks(api.clone()))
        .register_service(create_mounts(api.clone()))
        .register_service(create_processes(api.clone()))
        .register_service(create_readiness(api));
    if let Err(e) = server.start().await {
        return Error::State(format!("ttrpc: {e}"));
    }
    info!("serving the agent API");
    match sandbox.reaper.clone().run().await {
        Ok(()) => Error::State("the reaper stopped".into()),
        Err(e) => e,
    }
}

/// All services.
#[derive(Clone, Debug)]
pub struct Api {
    sandbox: Arc<Sandbox>,
}

type Answer<T> = ttrpc::Result<T>;

fn status(e: Error) -> ttrpc::Error {
    let code = match &e {
        Error::Invalid(_) => Code::INVALID_ARGUMENT,
        Error::State(_) => Code::FAILED_PRECONDITION,
        Error::Unsupported(_) => Code::UNIMPLEMENTED,
        Error::CommandNotFound(_) | Error::NoFile(_) => Code::NOT_FOUND,
        Error::CommandNotExecutable(_) => Code::PERMISSION_DENIED,
        Error::EndOfFile => Code::OUT_OF_RANGE,
        Error::System { source, .. } if source.raw_os_error() == Some(libc::ENOSPC) => {
            Code::RESOURCE_EXHAUSTED
        }
        Error::System { .. } => Code::INTERNAL,
    };
    ttrpc::Error::RpcStatus(ttrpc::get_status(code, e.to_string()))
}

fn empty(result: Result<()>) -> Answer<Empty> {
    result.map(|()| Empty::new()).map_err(status)
}

fn unimplemented<T>(why: &str) -> Answer<T> {
    Err(status(Error::Unsupported(why.into())))
}

/// The connection of a request. Each has its own allocation for what an accept hook attaches to it.
fn reader(context: &TtrpcContext) -> crate::stdio::Reader {
    context.connection_data.clone()
}

/// Runs blocking work on a worker thread, with access to the runtime.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(e) => Err(Error::State(format!("the agent's worker failed: {e}"))),
    }
}

#[async_trait]
impl Health for Api {
    async fn check(&self, _: &TtrpcContext, _: CheckRequest) -> Answer<HealthCheckResponse> {
        Ok(HealthCheckResponse {
            status: health_check_response::ServingStatus::SERVING.into(),
            ..Default::default()
        })
    }

    async fn version(&self, _: &TtrpcContext, _: CheckRequest) -> Answer<VersionCheckResponse> {
        Ok(VersionCheckResponse {
            grpc_version: API_VERSION.into(),
            agent_version: format!("thaw-agent {}", env!("CARGO_PKG_VERSION")),
            ..Default::default()
        })
    }
}

#[async_trait]
impl Readiness for Api {
    async fn expect(&self, _: &TtrpcContext, r: ExpectReadyRequest) -> Answer<ExpectReadyResponse> {
        readiness::expect(&self.sandbox, r).await.map_err(status)?;
        Ok(ExpectReadyResponse::default())
    }

    async fn wait(&self, _: &TtrpcContext, r: WaitReadyRequest) -> Answer<WaitReadyResponse> {
        readiness::wait(&self.sandbox, &r).await.map_err(status)
    }
}

#[async_trait]
impl AgentService for Api {
    async fn create_container(&self, _: &TtrpcContext, r: CreateContainerRequest) -> Answer<Empty> {
        empty(containers::create(&self.sandbox, r).await)
    }
    async fn start_container(&self, _: &TtrpcContext, r: StartContainerRequest) -> Answer<Empty> {
        empty(containers::start(&self.sandbox, &r.container_id).await)
    }
    async fn remove_container(&self, _: &TtrpcContext, r: RemoveContainerRequest) -> Answer<Empty> {
        empty(containers::remove(&self.sandbox, &r.container_id, r.timeout).await)
    }
    async fn update_container(&self, _: &TtrpcContext, r: UpdateContainerRequest) -> Answer<Empty> {
        empty(containers::update(&self.sandbox, &r))
    }
    async fn stats_container(
        &self,
        _: &TtrpcContext,
        r: StatsContainerRequest,
    ) -> Answer<StatsContainerResponse> {
        self.sandbox
            .container(&r.container_id)
            .map(|c| crate::stats::read(&c))
            .map_err(status)
    }
    async fn pause_container(&self, _: &TtrpcContext, r: PauseContainerRequest) -> Answer<Empty> {
        empty(containers::freeze(&self.sandbox, &r.container_id, true).await)
    }
    async fn resume_container(&self, _: &TtrpcContext, r: ResumeContainerRequest) -> Answer<Empty> {
        empty(containers::freeze(&self.sandbox, &r.container_id, false).await)
    }

    async fn exec_process(&self, _: &TtrpcContext, r: ExecProcessRequest) -> Answer<Empty> {
        empty(processes::exec(&self.sandbox, r).await)
    }
    async fn signal_process(&self, _: &TtrpcContext, r: SignalProcessRequest) -> Answer<Empty> {
        empty(processes::signal(&self.sandbox, &r))
    }
    async fn wait_process(&self, _: &TtrpcContext, r: WaitProcessRequest) -> Answer<WaitProcessResponse> {
        let status_code = processes::wait(&self.sandbox, &r).await.map_err(status)?;
        Ok(WaitProcessResponse {
            status: status_code,
            ..Default::default()
        })
    }
    async fn write_stdin(&self, _: &TtrpcContext, r: WriteStreamRequest) -> Answer<WriteStreamResponse> {
        let len = processes::write_stdin(&self.sandbox, &r).await.map_err(status)?;
        Ok(WriteStreamResponse {
            len,
            ..Default::default()
        })
    }
    async fn read_stdout(&self, c: &TtrpcContext, r: ReadStreamRequest) -> Answer<ReadStreamResponse> {
        let data = processes::read(&self.sandbox, &r, crate::stdio::Output::Stdout, &reader(c))
            .await
            .map_err(status)?;
        Ok(ReadStreamResponse {
            data,
            ..Default::default()
        })
    }
    async fn read_stderr(&self, c: &TtrpcContext, r: ReadStreamRequest) -> Answer<ReadStreamResponse> {
        let data = processes::read(&self.sandbox, &r, crate::stdio::Output::Stderr, &reader(c))
            .await
            .map_err(status)?;
        Ok(ReadStreamResponse {
            data,
            ..Default::default()
        })
    }
    async fn close_stdin(&self, _: &TtrpcContext, r: CloseStdinRequest) -> Answer<Empty> {
        empty(processes::close_stdin(&self.sandbox, &r))
    }
    async fn tty_win_resize(&self, _: &TtrpcContext, r: TtyWinResizeRequest) -> Answer<Empty> {
        empty(processes::resize(&self.sandbox, &r))
    }

    async fn update_interface(
        &self,
        _: &TtrpcContext,
        r: UpdateInterfaceRequest,
    ) -> Answer<types::Interface> {
        network::update_interface(r.interface.into_option()).map_err(status)
    }
    async fn update_routes(&self, _: &TtrpcContext, r: UpdateRoutesRequest) -> Answer<Routes> {
        network::update_routes(&r.routes.unwrap_or_default().Routes).map_err(status)
    }
    async fn list_interfaces(&self, _: &TtrpcContext, _: ListInterfacesRequest) -> Answer<Interfaces> {
        network::list_interfaces().map_err(status)
    }
    async fn list_routes(&self, _: &TtrpcContext, _: ListRoutesRequest) -> Answer<Routes> {
        network::list_routes().map_err(status)
    }
    async fn add_arp_neighbors(&self, _: &TtrpcContext, r: AddARPNeighborsRequest) -> Answer<Empty> {
        empty(network::add_neighbours(
            &r.neighbors.unwrap_or_default().ARPNeighbors,
        ))
    }

    async fn create_sandbox(&self, _: &TtrpcContext, r: CreateSandboxRequest) -> Answer<Empty> {
        empty(guest::create_sandbox(&self.sandbox, r).await)
    }
    async fn destroy_sandbox(&self, _: &TtrpcContext, _: DestroySandboxRequest) -> Answer<Empty> {
        empty(guest::destroy_sandbox(&self.sandbox).await)
    }
    async fn online_cpu_mem(&self, _: &TtrpcContext, r: OnlineCPUMemRequest) -> Answer<Empty> {
        empty(guest::online(&r))
    }
    async fn reseed_random_dev(&self, _: &TtrpcContext, r: ReseedRandomDevRequest) -> Answer<Empty> {
        empty(crate::entropy::reseed(&r.data))
    }
    async fn get_guest_details(
        &self,
        _: &TtrpcContext,
        r: GuestDetailsRequest,
    ) -> Answer<GuestDetailsResponse> {
        Ok(guest::details(&r))
    }
    async fn set_guest_date_time(&self, _: &TtrpcContext, r: SetGuestDateTimeRequest) -> Answer<Empty> {
        empty(guest::set_date_time(&r))
    }
    async fn get_metrics(&self, _: &TtrpcContext, _: GetMetricsRequest) -> Answer<Metrics> {
        Ok(Metrics {
            metrics: guest::metrics(),
            ..Default::default()
        })
    }
    async fn copy_file(&self, _: &TtrpcContext, r: CopyFileRequest) -> Answer<Empty> {
        empty(blocking(move || files::copy(&r)).await)
    }
    async fn get_oom_event(&self, _: &TtrpcContext, _: GetOOMEventRequest) -> Answer<OOMEvent> {
        Ok(OOMEvent {
            container_id: self.sandbox.ooms.next().await,
            ..Default::default()
        })
    }
    async fn get_volume_stats(&self, _: &TtrpcContext, r: VolumeStatsRequest) -> Answer<VolumeStatsResponse> {
        volumes::stats(&r.volume_guest_path).map_err(status)
    }
    async fn update_ephemeral_mounts(
        &self,
        _: &TtrpcContext,
        r: UpdateEphemeralMountsRequest,
    ) -> Answer<Empty> {
        empty(volumes::update_ephemeral(&r.storages))
    }

    async fn remove_stale_virtiofs_share_mounts(
        &self,
        _: &TtrpcContext,
        _: RemoveStaleVirtiofsShareMountsRequest,
    ) -> Answer<Empty> {
        unimplemented("no share of this guest goes stale: image slots have stable inode numbers")
    }
    async fn get_ip_tables(&self, _: &TtrpcContext, _: GetIPTablesRequest) -> Answer<GetIPTablesResponse> {
        unimplemented("the guest image holds no iptables")
    }
    async fn set_ip_tables(&self, _: &TtrpcContext, _: SetIPTablesRequest) -> Answer<SetIPTablesResponse> {
        unimplemented("the guest image holds no iptables")
    }
    async fn mem_agent_memcg_set(&self, _: &TtrpcContext, _: MemAgentMemcgConfig) -> Answer<Empty> {
        unimplemented("memory is given back by the balloon's free page reporting, not by a memory agent")
    }
    async fn mem_agent_compact_set(&self, _: &TtrpcContext, _: MemAgentCompactConfig) -> Answer<Empty> {
        unimplemented("memory is given back by the balloon's free page reporting, not by a memory agent")
    }
    async fn mem_hotplug_by_probe(&self, _: &TtrpcContext, _: MemHotplugByProbeRequest) -> Answer<Empty> {
        unimplemented("memory is plugged by virtio-mem, which needs no probe")
    }
    async fn add_swap(&self, _: &TtrpcContext, _: AddSwapRequest) -> Answer<Empty> {
        unimplemented("swap devices are named by PCI path, and there is no PCI")
    }
    async fn resize_volume(&self, _: &TtrpcContext, _: ResizeVolumeRequest) -> Answer<Empty> {
        unimplemented("volumes have a fixed size")
    }
    async fn set_policy(&self, _: &TtrpcContext, _: SetPolicyRequest) -> Answer<Empty> {
        unimplemented("the host is trusted with this guest: there is no policy engine")
    }
}
