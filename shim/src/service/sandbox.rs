//! containerd's sandbox service: forwards each call to the pod.

use async_trait::async_trait;
use thaw_protocol::shim::metrics::Metric;
use thaw_protocol::shim::platform::Platform;
use thaw_protocol::shim::sandbox::*;
use thaw_protocol::shim::sandbox_ttrpc::Sandbox as SandboxCalls;
use thaw_protocol::shim::{MessageField, Timestamp};
use ttrpc::r#async::TtrpcContext;

use super::{Answer, Service, run_to_completion};
use crate::process::Exit;

/// Go's name of this architecture.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

#[async_trait]
impl SandboxCalls for Service {
    async fn create_sandbox(
        &self,
        _: &TtrpcContext,
        r: CreateSandboxRequest,
    ) -> Answer<CreateSandboxResponse> {
        let pod = self.pod.clone();
        run_to_completion(async move { pod.create_sandbox(&r).await }).await?;
        Ok(CreateSandboxResponse::new())
    }

    async fn start_sandbox(&self, _: &TtrpcContext, r: StartSandboxRequest) -> Answer<StartSandboxResponse> {
        let sandbox = self.pod.sandbox(&r.sandbox_id)?;
        sandbox.life.begin()?;
        sandbox.life.started();
        Ok(StartSandboxResponse {
            pid: self.pod.pid(),
            created_at: MessageField::some(sandbox.created_at.clone()),
            spec: MessageField::some(sandbox.spec.clone()),
            ..Default::default()
        })
    }

    async fn platform(&self, _: &TtrpcContext, _: PlatformRequest) -> Answer<PlatformResponse> {
        Ok(PlatformResponse {
            platform: MessageField::some(Platform {
                os: "linux".into(),
                architecture: architecture().into(),
                ..Default::default()
            }),
            ..Default::default()
        })
    }

    async fn stop_sandbox(&self, _: &TtrpcContext, r: StopSandboxRequest) -> Answer<StopSandboxResponse> {
        let pod = self.pod.clone();
        run_to_completion(async move { pod.stop_sandbox(&r.sandbox_id, r.timeout_secs).await }).await?;
        Ok(StopSandboxResponse::new())
    }

    async fn wait_sandbox(&self, _: &TtrpcContext, r: WaitSandboxRequest) -> Answer<WaitSandboxResponse> {
        let exit = self.pod.sandbox(&r.sandbox_id)?.life.exit().await;
        Ok(WaitSandboxResponse {
            exit_status: exit.status,
            exited_at: MessageField::some(exit.at),
            ..Default::default()
        })
    }

    async fn sandbox_status(
        &self,
        _: &TtrpcContext,
        r: SandboxStatusRequest,
    ) -> Answer<SandboxStatusResponse> {
        let sandbox = self.pod.sandbox(&r.sandbox_id)?;
        let mut status = SandboxStatusResponse {
            sandbox_id: sandbox.id.clone(),
            pid: self.pod.pid(),
            state: sandbox.state().into(),
            created_at: MessageField::some(sandbox.created_at.clone()),
            exited_at: MessageField::from_option(sandbox.ended().map(|exit| exit.at)),
            ..Default::default()
        };
        if r.verbose {
            let machine = self.pod.machine()?.sandbox.clone();
            status.info.insert("thaw.sandbox".into(), machine);
        }
        Ok(status)
    }

    async fn ping_sandbox(&self, _: &TtrpcContext, r: PingRequest) -> Answer<PingResponse> {
        self.pod.sandbox(&r.sandbox_id)?;
        Ok(PingResponse::new())
    }

    /// Ends the shim and everything in it. containerd also calls this when a sandbox could not be created.
    async fn shutdown_sandbox(
        &self,
        _: &TtrpcContext,
        r: ShutdownSandboxRequest,
    ) -> Answer<ShutdownSandboxResponse> {
        let sandbox = self.pod.sandbox(&r.sandbox_id);
        let was_stopped = sandbox.is_ok_and(|sandbox| !sandbox.life.end(Exit::now(0)));
        if !was_stopped {
            self.pod.end_machine();
        }
        self.stop();
        Ok(ShutdownSandboxResponse::new())
    }

    async fn sandbox_metrics(
        &self,
        _: &TtrpcContext,
        r: SandboxMetricsRequest,
    ) -> Answer<SandboxMetricsResponse> {
        let sandbox = self.pod.sandbox(&r.sandbox_id)?;
        let data = crate::sandbox::metrics(self.pod.machine()?.vmm)?;
        Ok(SandboxMetricsResponse {
            metrics: MessageField::some(Metric {
                timestamp: MessageField::some(Timestamp::now()),
                id: sandbox.id.clone(),
                data: MessageField::some(data),
                ..Default::default()
            }),
            ..Default::default()
        })
    }
}
